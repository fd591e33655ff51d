"""The types that all parts share: a batch of tokens and what a decoder is asked.

Letters: B rows, T tokens, I images, C channels, S side in pixels, D width, P positions held.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .pictures import IMAGE, TEXT, VIDEO, Picture  # noqa: F401 (modalities belong to the shared types)
from .states import OnDevice, TargetStates


@dataclass(frozen=True)
class Batch(OnDevice):
    """One micro-batch, right padded. Masks are True where the entry counts.

    A batch always carries at least one image so that every rank runs the vision tower in every step
    (ranks that differ in modality hang in ZeRO's collectives); `num_dummy_images` of them, the last
    ones, belong to no row and must enter the graph with weight zero.
    """

    ids: Tensor  # [B,T] int64; an image is a run of the image token's id, a clip one of the video token's
    attention_mask: Tensor  # [B,T] bool
    loss_mask: Tensor  # [B,T] bool: this token is supervised (as a label, before the shift)
    modality: Tensor  # [B,T] int8: TEXT, IMAGE or VIDEO
    positions: Tensor  # [1|3,B,T] int64
    pixels: Tensor | None  # [I,C,S,S] float32: tiles and frames of images and clips in row order, dummies last
    sample_ids: tuple[str, ...]  # B names of records, for error messages
    num_dummy_images: int = 0
    pictures: tuple[Picture, ...] = ()  # in row order; none given: each tile that is no dummy is a plain picture
    seeds: tuple[int, ...] = ()  # B: what a forward draws at random for a row comes from its seed
    numbers: tuple[int, ...] = ()  # of the rows' samples, for whoever keeps their states; a filler has none
    states: TargetStates | None = None  # the target's, where the data brings them: cached states, kept scores
    packed: bool = False  # models run all samples one after another in one row, without padding

    @property
    def num_supervised(self) -> int:
        """Number of supervised labels; the first position has nothing before it and is none."""
        return int(self.on_host("loss_mask")[:, 1:].sum())

    @property
    def predicting(self) -> Tensor:
        """[B,T] bool on the CPU: the next token is supervised."""
        return F.pad(self.on_host("loss_mask")[:, 1:], (0, 1))


@dataclass(frozen=True)
class CodeBatch(OnDevice):
    """A micro-batch of images as codes, with the condition of each.

    `uncond` says which rows lose their condition in this epoch (condition dropout); a row that is not `real` fills
    a rank's place and supervises nothing. What a forward draws at random for a row comes from that row's seed.
    """

    codes: Tensor  # [B,n] int64
    conditions: tuple[Tensor, ...]  # B: a label [], caption features [t,F] or text ids [t]
    uncond: Tensor  # [B] bool
    real: Tensor  # [B] bool
    sample_ids: tuple[str, ...]
    supervised_per_row: int
    seeds: tuple[int, ...] = ()  # B, of (seed, epoch, sample); none where nothing is drawn

    @property
    def num_supervised(self) -> int:
        """Number of supervised codes: those of real rows."""
        return int(self.real.sum()) * self.supervised_per_row


@dataclass(frozen=True)
class PictureBatch(OnDevice):
    """A micro-batch of pictures, for models that read pixels alone; a row that is not `real` supervises nothing."""

    pixels: Tensor  # [B,3,S,S] uint8
    labels: Tensor  # [B,L] int64, what is known of each picture
    real: Tensor  # [B] bool
    sample_ids: tuple[str, ...]

    @property
    def num_supervised(self) -> int:
        """Number of real rows: one supervised picture each."""
        return int(self.real.sum())


@dataclass(frozen=True)
class Request:
    """A prompt for the decoder to continue: rendered, with its runs of image and video tokens expanded."""

    ids: Tensor  # [T] int64
    modality: Tensor  # [T] int8
    pixels: Tensor | None  # [I,C,S,S] float32: tiles and frames, in prompt order
    name: str = ""
    pictures: tuple[Picture, ...] = ()  # in prompt order; none given: each tile is a plain picture
    # The same prompt in the drafter's own tiles, for a drafter with its own image processor. None: it shares the
    # target's tiles.
    drafter_view: Request | None = None
    # Each picture as stored in its file (RGB; the middle frame of a clip), for captioners. Empty if the caller did not
    # ask for them.
    originals: tuple[Any, ...] = ()

    def to(self, device: torch.device | str) -> Request:
        """The request on `device`; `drafter_view` stays where it is, since the drafter moves it."""
        pixels = None if self.pixels is None else self.pixels.to(device)
        return replace(self, ids=self.ids.to(device), modality=self.modality.to(device), pixels=pixels)


@dataclass(frozen=True)
class ImageRequest(OnDevice):
    """What an image generator is asked for.

    `condition` is the target family's own: a class label (int64, no dimension), text features [n,D] float32 without
    padding, or the ids [n] int64 of a text prompt without its special tokens.
    """

    condition: Tensor
    caption: str = ""
    name: str = ""


@dataclass(frozen=True)
class StepLoss:
    """Loss of one micro-batch on one rank.

    The loop divides the sum by the supervised tokens of the whole optimizer step: a mean for each micro-batch
    would give more weight to the tokens of small ones.
    """

    loss_sum: Tensor  # scalar float32, summed over supervised tokens
    num_tokens: Tensor  # scalar int64
    metrics: dict[str, Tensor] = field(default_factory=dict)  # further sums over supervised tokens
