"""The image generators that a recipe can name, and one with all that decoding pictures needs.

What differs between families is in their sections: `models/targets/llamagen/section.py` and
`models/targets/anole/section.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import torch
from pydantic import Field
from torch import Tensor

from ...core.batch import ImageRequest
from ...core.errors import UserError
from ...core.import_paths import OrImported
from ...core.json_types import JsonMapping
from ..folders import CONFIG
from .base import DrawingTarget, TargetShape
from .drawing import Conditions, Folders, ImageTargetSection
from .load import TargetConfig
from .section import TargetSection
from .table import IMAGE_SECTIONS, IMAGE_TARGETS, LANGUAGE_TARGETS

# A recipe's `target` that draws.
ImageTargetConfig = Annotated[IMAGE_TARGETS, Field(discriminator="kind"), OrImported(ImageTargetSection)]
# A recipe's `target`.
AnyTarget = Annotated[
    LANGUAGE_TARGETS | IMAGE_TARGETS, Field(discriminator="kind"), OrImported(TargetSection, ImageTargetSection)
]


def language_section(target: AnyTarget) -> TargetConfig:
    """The section as it is, where only language models come."""
    return cast(TargetConfig, target)


def image_section(target: AnyTarget) -> ImageTargetConfig:
    """The section as it is, where only image generators come."""
    return cast(ImageTargetConfig, target)


@dataclass(frozen=True)
class Generator:
    """A frozen target with its two translators."""

    target: DrawingTarget
    condition: Conditions
    pictures: Callable[[Tensor], Tensor]  # codes [B,n] -> uint8 [B,3,S,S]
    codebook: Tensor  # [C,d] as stored: what codes are near one another by
    first_id: int = 0  # a token's id is its code plus this

    def request(self, caption: str, label: int | None, name: str) -> ImageRequest:
        """What the target is asked for: the condition made from the caption or the label, the caption, and `name`.

        Raises:
            UserError: the target is class-conditional, and the label is None or no class of it.
        """
        return ImageRequest(self.condition(caption, label), caption, name)


def mirrored_in(folder: Path, values: JsonMapping) -> tuple[str, TargetShape]:
    """Kind of published weights in a folder, and what heads mirror of them, by its `config.json` (`values`).

    Raises:
        UserError: no image generator says so, or keys are missing.
    """
    for kind, section in IMAGE_SECTIONS.items():
        shape = section.mirrored_in(folder, values)
        if shape is not None:
            return kind, shape
    raise UserError(
        f"model_type {values.get('model_type')!r} is no image generator's", where=str(folder / CONFIG),
        hint=f"give the weights of one of these kinds: {', '.join(IMAGE_SECTIONS)}",
    )  # fmt: skip


def load_generator(config: ImageTargetSection, folders: Folders, *, device: torch.device) -> Generator:
    """Everything that decoding pictures needs.

    Args:
        folders: thing (target, text, vq) -> folder of the stage that trained it; others come from the recipe.
    """
    target = config.load(folders, device=device)
    condition = config.conditions(folders, device=device)
    drawer = config.drawer(folders, device=device)
    return Generator(target, condition, drawer.pictures, drawer.codebook, drawer.first_id)
