"""What an exported `config.json` says to our plugin of vLLM (serving/draftsmith-vllm): one section, `draftsmith`.

The plugin has its own environment and imports nothing of ours; its `section.py` reads what is written here.
"""

from __future__ import annotations

from typing import Any

PACKAGE = "draftsmith-vllm"
MODULE = "draftsmith_vllm"
INSTALL = f"needs our plugin in vLLM's environment: pip install ./serving/{PACKAGE} (in a checkout of draftsmith)"
SECTION = "draftsmith"
_FORMAT = 1
_CLASSES = {"msd": "EagleDraftsmithMsd", "lvlm": "EagleDraftsmithLvlm"}


def served_by_plugin(values: dict[str, Any], drafter: str, **more: Any) -> dict[str, Any]:
    """A config with the plugin's class in `architectures`, and its section.

    Args:
        drafter: msd or lvlm.
    """
    about = {"format": _FORMAT, "drafter": drafter, **more}
    return values | {"architectures": [_CLASSES[drafter]], SECTION: about}
