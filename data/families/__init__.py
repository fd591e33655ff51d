"""The families' picture sides: one file a family, and one table of them."""
