"""The synthetic dataset: small drawn scenes and what is true of them, in the real data's file formats."""
