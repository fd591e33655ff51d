"""Drafters in the layouts of other tools, both ways: of serving engines, and of those who publish them.

A drafter that an engine would load but run differently is refused. Its output would still be correct, but no drafted
token would be accepted and nothing would say why. What a published drafter leaves unsaid is asked for.

Some layouts go one way. Only read: `lantern`, since no engine runs heads of image generators, and `gguf`, a file of a
language model, which transformers reads and we do not write. Only written: `mtp`, since a target with its head is read
where the target is; drafts for our plugin's patches; and a ViSpec head as an EAGLE head for prompts of text, behind
which its map cannot be told apart any more.
"""

from __future__ import annotations

from .export import V1_FAULT, Exported, export_drafter, read_export
from .expressible import ENGINES, Engine, Prompts
from .heads import LANGUAGE_HEADS, ImportedHead, import_head
from .target import export_target

__all__ = [
    "ENGINES", "LANGUAGE_HEADS", "V1_FAULT", "Engine", "Exported", "ImportedHead", "Prompts", "export_drafter",
    "export_target", "import_head", "read_export",
]  # fmt: skip
