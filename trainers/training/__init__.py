"""What a `train` stage trains on: records, codes, or records with the target's states; each makes one `Training`."""
