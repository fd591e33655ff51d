"""What the rest of draftsmith asks of LLaVAs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..family import Family, Pictures
from .decoder import LlavaDecoder
from .model import MODELS, model_class
from .training import LlavaTraining

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class LlavaFamily(Family):
    """Drafts among them may read a target's projected features."""

    def class_of(self, config: PreTrainedConfig) -> Any:
        return model_class(config)


# Engines cut the pictures of LLaVA-NeXT and OneVision into tiles by themselves, and hand no states to heads.
_ENGINES = {"llava": {"vllm": ("eagle", "eagle3", "dflash", "patched"), "sglang": ("eagle",)}}
# model_type -> record.
FAMILIES: dict[str, Family] = {
    name: LlavaFamily(
        name, model, LlavaTraining, LlavaDecoder, Pictures(), one_tile=name == "llava", shares_pictures=True,
        engines=_ENGINES.get(name, {}), is_compared=True,
    )
    for name, model in MODELS.items()
}  # fmt: skip
