"""Drafters in the layouts of serving engines, and the reasons why some of them have none.

A drafter that an engine would load but run differently is refused. Its output would still be correct, but no drafted
token would be accepted and nothing would say why.
"""

from __future__ import annotations

from .export import V1_FAULT, Exported, export_drafter
from .rules import ENGINES, Engine, Prompts
from .target import export_target

__all__ = ["ENGINES", "V1_FAULT", "Engine", "Exported", "Prompts", "export_drafter", "export_target"]
