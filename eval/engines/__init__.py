"""A serving engine beside our own loop: programs that run in the engine's Python, and what they drafted compared.

The engine's pins differ from ours, so the two never share an interpreter. They meet in a folder: requests in a file,
answers in a file, no protocol of ours.
"""
