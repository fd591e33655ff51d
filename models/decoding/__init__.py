"""Tensors of one decoding cycle: trees, caches, rows and the warping of distributions."""
