"""The target families: the unions of their sections that a recipe reads, and their records by model_type.

Families import what stands in `models/targets`, and this imports them: rooms import one way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, cast, get_args

from pydantic import Field

from ...core.errors import UserError
from ...core.import_paths import OrImported
from ...core.json_types import JsonMapping
from ..folders import CONFIG
from ..parts import Part
from ..training import ModelTraining
from .anole.section import AnoleTargetConfig, refuse_lumina
from .base import TargetShape
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
# A recipe's `target`: of the language tracks, one that draws, and any.
TargetConfig = Annotated[LANGUAGE_TARGETS, Field(discriminator="kind"), OrImported(TargetSection)]
ImageTargetConfig = Annotated[IMAGE_TARGETS, Field(discriminator="kind"), OrImported(ImageTargetSection)]
AnyTarget = Annotated[
    LANGUAGE_TARGETS | IMAGE_TARGETS, Field(discriminator="kind"), OrImported(TargetSection, ImageTargetSection)
]
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


def language_section(target: AnyTarget) -> TargetConfig:
    """The section as it is, where only language models come."""
    return cast(TargetConfig, target)


def image_section(target: AnyTarget) -> ImageTargetConfig:
    """The section as it is, where only image generators come."""
    return cast(ImageTargetConfig, target)


def mirrored_in(folder: Path, values: JsonMapping) -> tuple[str, TargetShape]:
    """Kind of published weights in a folder, and what heads mirror of them, by its `config.json` (`values`). Raises
    `UserError` where no image generator says so, or keys are missing.
    """
    for kind, section in IMAGE_SECTIONS.items():
        if (shape := section.mirrored_in(folder, values)) is not None:
            return kind, shape
    raise UserError(
        f"model_type {values.get('model_type')!r} is no image generator's", where=str(folder / CONFIG),
        hint=f"give the weights of one of these kinds: {', '.join(IMAGE_SECTIONS)}",
    )  # fmt: skip


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
    """Traits of the language model of a text config that heads mirror, beside the config."""
    name = config.model_type
    if name in _TEXTS:
        return _TEXTS[name]
    return next((family.texts[name] for family in _outside().values() if name in family.texts), Text())


def training_of(model: PreTrainedModel, trainable: Sequence[Part], **settings: Any) -> ModelTraining:
    """The training module of the model's family; `settings` as `ModelTraining` takes them."""
    return family_of(model.config).training(model, trainable, **settings)
