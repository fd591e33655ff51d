"""Drafters in the layouts of other tools, both ways: of serving engines, and of those who publish them.

A drafter that an engine would load but run differently is refused. Its output would still be correct, but no drafted
token would be accepted and nothing would say why. What a published drafter leaves unsaid is asked for.

Some layouts go one way. Only read: `lantern`, since no engine runs heads of image generators, and `gguf`, a file of a
language model, which transformers reads and we do not write. Only written: an MTP head, which is read in its target's
folder; drafts for our plugin's patches; and a ViSpec head as an EAGLE head for prompts of text, behind which its map
cannot be told apart any more.
"""
