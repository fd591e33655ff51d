"""A serving engine beside our own loop. Its pins differ from ours, so the two never share an interpreter: they meet in
a folder, with requests in a file and answers in a file.
"""
