"""The section of every image generator: one class a family, so that stages need not tell them apart.

Folders are those of the stages that trained a thing (target, text, vq), by its name; others come from the recipe.
Letters: B pictures, n codes of each, S side in pixels, t tokens of a caption, F width of its features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ...core.batch import ImageRequest
from ...core.errors import UserError
from ...core.fields import Place, Revision
from ...core.import_paths import Kinded
from ...core.json_types import JsonMapping, JsonObject
from ...core.section import Section
from ..decoding.rows import Guidance
from .base import TargetShape
from .guided import GuidedTarget

Folders = Mapping[str, Path]
Conditions = Callable[[str, int | None], Tensor]  # caption, label -> what the target is asked by


class PerceptualConfig(Section):
    """The network that an image tokenizer's reconstructions are compared by, beside pixel by pixel."""

    # Folder of EfficientNet-Lite0, as `draftsmith fetch lite0` writes it.
    path: Place
    # Of a Hub id.
    revision: Revision | None = None
    # Of the distance, beside the errors of pixels; LlamaGen weighs LPIPS as much as its squared error.
    weight: float = Field(1.0, gt=0)


@dataclass(frozen=True)
class Drawer:
    """Turns codes into pictures."""

    pictures: Callable[[Tensor], Tensor]  # codes [B,n] -> uint8 [B,3,S,S], on the CPU
    codebook: Tensor  # [C,d] as stored: what codes are near one another by
    first_id: int = 0  # a token's id is its code plus this


@dataclass(frozen=True, kw_only=True)
class Generator(Drawer):
    """A frozen target with its two translators: all that decoding pictures needs."""

    target: GuidedTarget
    condition: Conditions

    def request(self, caption: str, label: int | None, name: str) -> ImageRequest:
        """A picture's request. Raises `UserError` where the target is asked by class, and has none of this label."""
        return ImageRequest(self.condition(caption, label), caption, name)


TEXT_ENCODER = "text_encoder"  # folder beside the weights of a target that was trained with its own
COUNTED_IDS = 400  # of an inline text encoder, where its parameters are counted without its tokenizer


class ImageTargetSection(Kinded):
    """A family of image generators; `models/targets/table.py` has their union."""

    draws_images: ClassVar[Literal[True]] = True
    reads_text_alone: ClassVar[bool] = False
    tensor_parallel_size: ClassVar[Literal[1]] = 1  # each rank holds the whole
    halves: ClassVar[None] = None
    is_trained_here: ClassVar[bool] = False  # transformer and image tokenizer; published ones are not
    adt_preset: ClassVar[str]  # the evaluation's preset that has ADT-Tree's trees for this family
    adt_bound: ClassVar[tuple[int, float]]  # k and delta of LANTERN beside them
    adt_widths: ClassVar[JsonObject]  # step and range of the widths of ADT-Tree's trees (its section V-A)
    # Whether kind and path say a published model's shape, so that a head's manifest names them.
    is_named_by_path: ClassVar[bool] = True

    @classmethod
    def mirrored_in(cls, folder: Path, values: JsonMapping) -> TargetShape | None:
        """The shape of published weights, by the folder's `config.json`; None: another family's."""
        raise NotImplementedError

    @classmethod
    def named_shape(cls, section: JsonObject) -> JsonObject:
        """The shape in a manifest's section, as keys of the model's config. Raises `ValidationError`."""
        return {}

    def provides(self) -> set[str]:
        """Things that need no stage: they come from outside."""
        raise NotImplementedError

    @property
    def num_codes(self) -> int:
        """Tokens of an image."""
        return self.mirrored().grid ** 2

    @property
    def codebook_size(self) -> int:
        """Codes that a token of an image may be."""
        raise NotImplementedError

    @property
    def prompt_places(self) -> int:
        """Places before the first code: exact, or of a long caption."""
        raise NotImplementedError

    @property
    def guidance(self) -> Guidance:
        """The rule that combines the scores of both rows."""
        raise NotImplementedError

    def model_config_of(self) -> Any:
        """The transformer's config, without a network."""
        raise NotImplementedError

    def mirrored(self) -> TargetShape:
        """The shape that heads mirror, without weights."""
        raise NotImplementedError

    def count(self) -> dict[str, int]:
        """Parameters of each part that the section describes, without weights."""
        raise NotImplementedError

    def load(self, folders: Folders, *, device: torch.device) -> GuidedTarget:
        """The frozen target alone: what a head needs while it trains."""
        raise NotImplementedError

    def conditions(self, folders: Folders, *, device: torch.device) -> Conditions:
        """The function that makes conditions: a label [], features [t,F] or text ids [t]."""
        raise NotImplementedError

    def sample_condition(self, words: object = None) -> Callable[[Any], Tensor]:
        """What a sample of shards (its `tensors` and `info`) was asked for by, as `conditions` would make it; `words`
        is the tokenizer of captions, where a text encoder is trained along.
        """
        raise NotImplementedError

    @property
    def trains_text_encoder(self) -> bool:
        """Whether captions are read by an encoder that is trained with the transformer."""
        return False

    def training(
        self, part: str, folder: Path | None, *, seed: int, words: Any, perceptual: PerceptualConfig | None = None,
        code_dropout: float = 0.0, **revival: Any,
    ) -> nn.Module:  # fmt: skip
        """The training forward of a part (target, vq), from a stage's folder or new; its `save(folder)` writes it. The
        perceptual loss and the revival of dead codes are an image tokenizer's, `code_dropout` is the transformer's.
        """
        raise NotImplementedError

    def drawer(self, folders: Folders, *, device: torch.device) -> Drawer:
        """The decoder of its codes."""
        raise NotImplementedError

    def generator(self, folders: Folders, *, device: torch.device) -> Generator:
        """Everything that decoding pictures needs: what stages trained is in `folders`, the recipe has the rest."""
        target, condition = self.load(folders, device=device), self.conditions(folders, device=device)
        return Generator(**vars(self.drawer(folders, device=device)), target=target, condition=condition)

    def picture_encoder(self, folders: Folders, *, device: torch.device) -> Callable[[Tensor], Tensor]:
        """uint8 [B,3,S,S] -> codes [B,n] int64 on the CPU."""
        raise NotImplementedError

    def caption_encoder(
        self, folders: Folders, *, device: torch.device
    ) -> Callable[[Sequence[str]], list[Tensor]] | None:
        """Captions to features [t,F]; None where the target reads none."""
        return None

    def check_labels(self, prompts: Iterable[tuple[str, int | None]]) -> None:
        """Raises `UserError` where the target is asked by class and has none of these labels (beside captions), or is
        asked by text and a caption is empty.
        """
        for caption, label in prompts:
            if not caption.strip():
                raise UserError(f"a prompt without a caption (label {label}), and the target is asked by text",
                                hint="give prompts with captions: `path`, and no `classes`")  # fmt: skip

    def placed(self, parts: Mapping[str, Path]) -> Any:
        """The section with a reader's places in it. Raises `UserError` where a part lies nowhere."""
        raise NotImplementedError
