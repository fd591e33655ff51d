"""Settings of a DFlash draft, and what they say of it: sizes, layers of the target, what it sees. See `dflash.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator

from ...core.errors import Refused, UserError
from ...core.section import Section
from ...core.states import Taps
from ..losses import Divergence
from ..targets.base import TargetShape
from .dflash_module import DflashShape, even_taps
from .head_settings import MirroringDrafter


def check_mask(mask_token_id: int | None, target: TargetShape) -> None:
    """Raises `UserError` for a mask's id beyond the target's."""
    if mask_token_id is not None and mask_token_id >= target.vocab_size:
        raise UserError(
            f"the mask's id is {mask_token_id}, and the target has {target.vocab_size}",
            key="drafter.mask_token_id", hint="name an id that no text has, or null for a trained vector",
        )  # fmt: skip


class DflashLoss(Section):
    # ce: against the answer's own tokens, as published (the target writes them); others: against the target's
    # distribution at each place.
    token_divergence: Literal["ce"] | Divergence = "ce"
    # Mask k counts exp(-(k - 1) / gamma): an early miss throws away all that stands after it. Null: the paper's, 4 for
    # blocks of up to 8 tokens, 5 for up to 10, 7 above.
    gamma: float | None = Field(None, gt=0)
    # D-PACE (arXiv 2605.18810) in place of gamma: a mask counts as many tokens as are expected to be accepted from it
    # on, by the draft's own probabilities, which this number smooths (the paper's 0.5; 1: none of them is read). For ce
    # alone. A confidence head and a selector keep gamma's weights. Null: off.
    dpace: float | None = Field(None, gt=0, le=1, exclude_if=lambda value: value is None)
    # Most blocks of a sample, drawn anew in each epoch; a shorter answer has one after each of its tokens.
    num_anchors: int = Field(512, ge=1)
    # Places whose vocabulary is projected at once.
    chunk: int = Field(512, ge=1)

    @model_validator(mode="after")
    def _one_weight(self) -> Self:
        if self.dpace is not None and self.gamma is not None:
            raise ValueError("dpace takes the place of gamma: give one of the two")
        if self.dpace is not None and self.token_divergence != "ce":
            problem = f"dpace weighs a cross-entropy, and token_divergence is {self.token_divergence}"
            raise ValueError(f"{problem}: set it to ce, or leave dpace out")
        return self

    def weights(self, block_size: int, count: int | None = None) -> list[float]:
        """Return weights, which sum to 1, of the `count` places of a block that answer (None: all but the first)."""
        gamma = self.gamma or (4.0 if block_size <= 8 else 5.0 if block_size <= 10 else 7.0)
        values = torch.exp(-torch.arange(count or block_size - 1, dtype=torch.float64) / gamma)
        return (values / values.sum()).tolist()

    def shares(self) -> tuple[float, float]:
        """Weights of the comparison, and of a cross-entropy with the answer's own tokens beside it."""
        return 1.0, 0.0


class DflashConfidence(Section):
    """Trains a confidence head beside the draft."""

    # Weight of its binary cross-entropy in the loss, relative to the draft's own (DSpark: 1).
    weight: float = Field(1.0, gt=0)
    # Whether its gradient ends at the head, so that the draft learns what it would learn without one. False lets the
    # draft's layers learn from it as well.
    detached: bool = True


class DflashSettings(MirroringDrafter):
    """A DFlash draft, for a language model or an image generator. What is null mirrors the target."""

    kind: Literal["dflash"]
    # Tokens of a block with the last committed one: a pass drafts one less. Longer pays where long runs are accepted.
    block_size: int = Field(16, ge=2, le=64)
    # Layers of the draft.
    num_layers: int = Field(5, ge=1, le=32)
    # Layers of the target whose states are joined, in decoder layers passed; null: as many as the draft has, evenly.
    taps: tuple[int, ...] | None = Field(None, min_length=1)
    # The target's id whose embedding is used for masks; it must not occur in text. Null: a trained vector.
    mask_token_id: int | None = Field(None, ge=0)
    # Number of states up to its position that a token attends to beside its block, at least a block's; null: all.
    sliding_window: int | None = Field(None, ge=1)
    # Whether a place of a block sees the block up to itself alone, as what speculators trains by default; false: all of
    # it, as published drafts.
    causal: bool = False
    # Number of most frequent tokens that the draft's own LM head scores; null: the target's LM head scores all tokens.
    draft_vocab_size: int | None = Field(None, ge=1)
    # read: the draft attends to states of visual tokens as to all others; none: it does not (a text-only window).
    visual_slots: Literal["none", "read"] = "read"
    # Text-only window in decoding, independent of training.
    vata: bool = False
    # Share of the samples in training, drawn anew in each epoch, whose visual states are hidden, as under `vata`.
    blind_share: float = Field(0.0, ge=0, le=1)
    # Positions: flat counts the prompt's tokens, compact those whose states are seen. Served drafts have flat ones.
    positions: Literal["compact", "flat"] = "flat"  # type: ignore[assignment]
    # What is trained for.
    loss: DflashLoss = DflashLoss()
    # A trained head that predicts the probability that each drafted token is accepted (DSpark); null: none.
    confidence: DflashConfidence | None = None
    # A block ends before the first token whose probability to be accepted, with all before it, is below this. Higher
    # values verify fewer tokens in vain, and accept fewer tokens. Null: whole blocks.
    cut_below: float | None = Field(None, gt=0, lt=1)

    layout: ClassVar[Literal["eagle", "dflash", "medusa"] | None] = "dflash"
    decoding_settings: ClassVar[frozenset[str]] = frozenset({"positions", "vata", "cut_below"})
    beside_states: ClassVar[frozenset[str]] = MirroringDrafter.beside_states | {
        "block_size", "mask_token_id", "sliding_window", "causal", "draft_vocab_size", "vata", "blind_share",
        "positions", "kv_heads", "intermediate_size", "norm_eps", "rope_theta", "rope", "loss", "confidence",
        "cut_below",
    }  # fmt: skip
    for_images: ClassVar[bool] = True
    least_supervised: ClassVar[int] = 2
    unread_for_images: ClassVar[frozenset[str]] = frozenset({
        "sliding_window", "causal", "draft_vocab_size", "visual_slots", "vata", "blind_share", "positions",
        "rope_theta", "rope", "confidence", "cut_below",
    })  # fmt: skip
    trains_on: ClassVar[str | None] = "states"

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.taps is not None and list(self.taps) != sorted(set(self.taps)):
            raise ValueError("taps are layers in ascending order, each once")
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise ValueError(f"sliding_window is {self.sliding_window}, shorter than a block of {self.block_size}")
        if self.cut_below is not None and self.confidence is None:
            raise ValueError("cut_below reads a confidence head, and this draft has none (confidence: {})")
        return self

    def visual(self, *, training: bool) -> Literal["none", "read"]:
        return "none" if self.vata and not training else self.visual_slots

    def shape(self, target: TargetShape) -> DflashShape:
        """Return the draft's sizes. Raises `UserError` for layers that the target has not, or its rotation."""
        taps = self.taps or even_taps(target.num_layers, self.num_layers)
        if not 0 < taps[0] <= taps[-1] <= target.num_layers or len({*taps}) < len(taps):
            raise UserError(
                f"DFlash joins the states after different layers, and {list(taps)} of a target of {target.num_layers} "
                "are not",
                key="drafter.taps", hint="name them: drafter.taps: [1, 2, 3]",
            )  # fmt: skip
        check_mask(self.mask_token_id, target)
        if target.draws_images:
            mirrored = target.layer
            assert mirrored is not None
            # The generator's sizes and rotation, with Qwen3's norms as every DFlash draft has them. A state stands at
            # its own place, one after where an EAGLE head's input stands.
            layer = replace(
                mirrored, input_norm=True, qk_norm=False, qk_rms_norm=True, mask_padding=True,
                zeros_before=mirrored.zeros_before + (mirrored.rope == "grid"),
                num_kv_heads=mirrored.num_heads if self.kv_heads == "mha" else mirrored.num_kv_heads,
                norm_eps=self.norm_eps or mirrored.norm_eps,
                intermediate_size=self.intermediate_size or mirrored.intermediate_size,
            )  # fmt: skip
        else:
            # Published drafts have Qwen3's layer for every target: no biases.
            layer = replace(self.mirrored(target.text, input_norm=True, qkv_bias=False), qk_rms_norm=True)
        return DflashShape(
            layer, self.num_layers, taps, self.block_size, self.mask_token_id, self.sliding_window,
            self.confidence is not None, causal=self.causal,
        )  # fmt: skip

    def check(self, shape: TargetShape) -> None:
        self.shape(shape)

    def check_settings(self, draws_images: bool) -> None:
        super().check_settings(draws_images)
        if draws_images and self.mask_token_id is not None:
            raise Refused("mask_token_id", "every id of an image generator is a code", "leave it out: a trained vector")
        if self.blind_share and self.visual_slots == "none":
            problem = "this dflash draft sees no visual state in training, so that every sample is blind"
            raise Refused("blind_share", problem, "leave it out")

    def taps_for(self, shape: TargetShape, *, training: bool) -> Taps:
        return Taps(self.shape(shape).taps, feature=training, everywhere=training)
