"""What we train: one file per method holds its config, its loss and its proposal."""
