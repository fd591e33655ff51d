"""Drafters in the layouts of serving engines, and the reasons why some of them have none.

What an engine would load and run as something else is refused: its output would stay the target's, and nothing would
say why no drafted token stands.
"""

from __future__ import annotations

from .export import Exported, export_drafter
from .rules import ENGINES, Engine, Prompts

__all__ = ["ENGINES", "Engine", "Exported", "Prompts", "export_drafter"]
