"""Folders inside a stage's, by which later stages find what it left there."""

DATASET_FOLDER = "world"  # the synthetic dataset
TOKENIZER = "tokenizer"  # of its captions
CODES = "shards"  # encoded pictures
STATES = "states"  # the target's hidden states
