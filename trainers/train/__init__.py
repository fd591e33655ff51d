"""Training: on records, on codes, or on records with the target's states; the loop, DeepSpeed, checkpoints."""
