"""What the rest of draftsmith asks of LLaVAs."""

from __future__ import annotations

from ..family import Family, Pictures
from .decoder import LlavaDecoder
from .model import MODELS
from .training import LlavaTraining

# Engines cut the pictures of LLaVA-NeXT and OneVision into tiles by themselves, and hand no states to heads.
_ENGINES = {"llava": {"vllm": ("eagle", "eagle3", "dflash"), "sglang": ("eagle",)}}
# model_type -> record.
FAMILIES = {
    name: Family(
        name, model, LlavaTraining, LlavaDecoder, Pictures(), shares_pictures=True, engines=_ENGINES.get(name, {})
    )
    for name, model in MODELS.items()
}
