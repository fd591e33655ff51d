"""The section `draftsmith` of an exported `config.json`, which our plugin of vLLM reads (serving/draftsmith-vllm).

The plugin has its own environment and imports nothing of ours; its `section.py` reads what is written here.
"""

from __future__ import annotations

from typing import Any

from ...core.json_types import JsonObject

PACKAGE = "draftsmith-vllm"
MODULE = "draftsmith_vllm"
INSTALL = f"needs our plugin in vLLM's environment: pip install ./serving/{PACKAGE} (in a checkout of draftsmith)"
SECTION = "draftsmith"
_FORMAT = 1
_CLASSES = {
    "msd": "EagleDraftsmithMsd",
    "middle": "Eagle3DraftsmithMiddle",
    "lvlm": "EagleDraftsmithLvlm",
    "window": "EagleDraftsmithWindow",
    "vispec": "EagleDraftsmithVispec",
    "lvlm-m": "DraftsmithLvlmMForCausalLM",
    "lvlm-t": "DraftsmithLvlmTForCausalLM",
}
# Drafters for whom the plugin patches vLLM, which its user asks for by a variable.
_PATCHED = ("lvlm-m", "lvlm-t", "window", "vispec")
# Of these, those whose caches hold fewer inputs than the target's.
_DROP = ("lvlm-t", "window", "vispec")
PATCHES = "DRAFTSMITH_VLLM_PATCHES"
NEEDS = f"it needs patches of vLLM 0.32 (runner V1), which {PATCHES}=1 switches on: without it vLLM refuses the folder"


def plugins_name(config: Any) -> str | None:
    """The plugin's name of a head that it runs on pictures; None: it has no class for it. `config`: of a drafter that
    reads states.
    """
    if config.kind == "vispec":
        return "vispec"
    held = config.visual(training=False)
    if config.kind == "sparrow" and config.ivsb and held == "direct":
        return "middle"
    if config.kind in ("sparrow", "msd", "hivis", "eagle") and held == "none":
        return "window"
    return "msd" if config.kind == "msd" and held == "direct" else None


def served_by_plugin(values: JsonObject, drafter: str, **more: object) -> JsonObject:
    """A config with the plugin's class in `architectures`, and its section. `drafter`: a key of `_CLASSES`; its
    section's other keys are `more`.
    """
    about = {"format": _FORMAT, "drafter": drafter, **more}
    return values | {"architectures": [_CLASSES[drafter]], SECTION: about}


def is_patched(values: JsonObject) -> bool:
    """Whether the plugin patches vLLM for what this config describes."""
    return (values.get(SECTION) or {}).get("drafter") in _PATCHED


def drops_inputs(values: JsonObject) -> bool:
    """Whether it leaves pictures out of its cache, so that prefixes of the target's are not its own."""
    return (values.get(SECTION) or {}).get("drafter") in _DROP
