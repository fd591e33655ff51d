"""Language models of text alone."""
