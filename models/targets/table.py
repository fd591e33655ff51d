"""The target families: the unions of their sections that a recipe reads, and their records by model_type.

Families import what stands in `models/targets`, and this imports them: rooms import one way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from ..parts import Part
from ..training import ModelTraining
from .anole.section import AnoleTargetConfig, refuse_lumina
from .causal.section import CAUSAL, CausalTargetConfig
from .drawing import ImageTargetSection
from .family import Family, Text, tower_type
from .gemma.section import GemmaTargetConfig
from .internvl.section import InternVLTargetConfig
from .llamagen.section import LlamaGenTargetConfig
from .llava.section import LlavaTargetConfig
from .mistral.section import MistralTargetConfig
from .qwen.section import QwenTargetConfig
from .qwen35.section import Qwen35TargetConfig
from .section import TargetSection

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

LANGUAGE_TARGETS = (
    LlavaTargetConfig
    | QwenTargetConfig
    | Qwen35TargetConfig
    | InternVLTargetConfig
    | MistralTargetConfig
    | GemmaTargetConfig
    | CausalTargetConfig
)
IMAGE_TARGETS = LlamaGenTargetConfig | AnoleTargetConfig
ImageKind = Literal["llamagen", "anole"]
IMAGE_SECTIONS: Mapping[str, type[ImageTargetSection]] = {
    kind: section for section in IMAGE_TARGETS.__args__ for kind in get_args(section.model_fields["kind"].annotation)
}
# Kinds that somebody might name -> what raises why they are none.
REFUSED: Mapping[str, Callable[[], NoReturn]] = {"lumina-mgpt": refuse_lumina}
# (model_type, model_type of a tower that makes another family of it, else "") -> record.
FAMILIES: Mapping[tuple[str, str], Family] = {
    (name, family.tower): family for section in LANGUAGE_TARGETS.__args__ for name, family in section.families.items()
}
_TEXTS = {name: text for family in FAMILIES.values() for name, text in family.texts.items()}


def _outside() -> dict[tuple[str, str], Family]:
    """Return the records of all imported sections, as `FAMILIES`: a recipe's import path adds other packages'."""
    families: dict[tuple[str, str], Family] = {}
    sections = TargetSection.__subclasses__()
    for section in sections:
        for name, family in section.families.items():
            families.setdefault((name, family.tower), family)
        sections += section.__subclasses__()
    return families


def family_named(model_type: str, tower: str | None = None) -> Family:
    """The record of a model_type; of one that no family names, that of models of text."""
    for key in ((model_type, tower or ""), (model_type, "")):
        if record := FAMILIES.get(key) or _outside().get(key):
            return record
    return CAUSAL


def family_of(config: PreTrainedConfig) -> Family:
    """The record of a model's family by its config."""
    return family_named(config.model_type, tower_type(config))


def text_of(config: PreTrainedConfig) -> Text:
    """What heads take from the language model of a text config, beside the config."""
    name = config.model_type
    if name in _TEXTS:
        return _TEXTS[name]
    return next((family.texts[name] for family in _outside().values() if name in family.texts), Text())


def training_of(model: PreTrainedModel, trainable: Sequence[Part], **settings: Any) -> ModelTraining:
    """The training module of the model's family.

    Args:
        settings: as `ModelTraining` takes them.
    """
    return family_of(model.config).training(model, trainable, **settings)
