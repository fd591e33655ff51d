"""The table of target families, and what is asked of any of them: weights, sizes, memory, a generator."""
