"""From files to batches: records, conversations, images, order, collation, the synthetic shapes dataset."""
