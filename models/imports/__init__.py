"""Published drafters into ours: EAGLE, EAGLE-3, MSD, ViSpec, LANTERN and TABED, with what each leaves unsaid."""

from __future__ import annotations

from .dflash import import_dflash
from .heads import LANGUAGE_HEADS, ImportedHead, import_head
from .lantern import import_lantern
from .lvlm import import_lvlm

__all__ = ["LANGUAGE_HEADS", "ImportedHead", "import_dflash", "import_head", "import_lantern", "import_lvlm"]
