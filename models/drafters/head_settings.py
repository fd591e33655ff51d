"""Settings that the hidden-state heads of language models share, and what they say of a head: layer, inputs, taps.

Numbers follow the published code where there is one. What is done with a head, by these, is in `head_config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from ...core.errors import Refused, UserError
from ...core.json_types import JsonObject
from ...core.states import Taps
from ..layer import LayerShape
from ..targets.base import Target, TargetShape
from ..targets.table import text_of
from .base import CountTokens, PublishedDrafter
from .draft_vocabulary import drafted_ids
from .head_inputs import Image, Reads, Visual
from .head_module import StateHead
from .head_objective import HeadObjective
from .mirrored import mirrored_layer

# EAGLE's, which MSD follows.
EAGLE_LOSS = HeadObjective(feature=1.0, token=0.1)


class HeadSettings(PublishedDrafter):
    """What all kinds have."""

    # mha gives each query head its own keys and values (ViSpec): 8 times the draft's cache on Qwen2.5-VL.
    kv_heads: Literal["target", "mha"] = "target"
    # Null: as the target's.
    qkv_bias: bool | None = None
    # Width of the MLP; null: the target's.
    intermediate_size: int | None = Field(None, ge=1, le=1 << 20)
    # Of its norms; null: the target's.
    norm_eps: float | None = Field(None, gt=0, le=1)
    # Base of the rotary positions; null: the target's.
    rope_theta: float | None = Field(None, ge=1, le=1e12)
    # A target's stretched rotation (YaRN, llama3, linear): target copies it, plain has its base alone, as most of the
    # published heads.
    rope: Literal["target", "plain"] = "target"
    # Positions of the inputs in decoding: compact counts what the drafter holds, flat counts the prompt's tokens, mrope
    # takes the target's own (M-RoPE targets alone). flat and mrope leave a gap where visual tokens are dropped.
    positions: Literal["compact", "flat", "mrope"] = "flat"
    # Share of samples in training whose text after the last image stands a random distance 0 to `gap` after the text
    # before it: the head then does not depend on the choice above.
    gap_share: float = Field(0.0, ge=0, le=1)
    # The largest distance of `gap_share`, in positions.
    gap: int = Field(32768, ge=1)
    # Share of the samples in training, drawn anew in each epoch, that hold no input at visual tokens, as in decoding
    # with `vata`; 1 trains for that window alone.
    blind_share: float = Field(0.0, ge=0, le=1)
    # Passes after the first that read the head's own outputs (multi-token prediction); 0: none.
    mtp_steps: int = Field(0, ge=0, le=64)
    # full: a pass sees its own keys alone. ttt: older inputs keep their true states, as they do in decoding (EAGLE-3).
    mtp_attention: Literal["full", "ttt"] = "full"
    # Which states a further pass replaces: after_text those after a text token, all every one but the first.
    replace: Literal["after_text", "all"] = "after_text"
    # The likeliest tokens, which an LM head of its own scores; null: the whole vocabulary.
    draft_vocab_size: int | None = Field(None, ge=1)
    # What is trained for; null: the kind's own loss.
    objective: HeadObjective | None = None

    decoding_settings: ClassVar[frozenset[str]] = frozenset({"positions"})
    beside_states: ClassVar[frozenset[str]] = PublishedDrafter.beside_states | {
        "kv_heads", "qkv_bias", "intermediate_size", "norm_eps", "rope_theta", "rope", "positions", "gap_share", "gap",
        "blind_share", "mtp_steps", "mtp_attention", "replace", "objective", "draft_vocab_size",
    }  # fmt: skip
    trains_on: ClassVar[str | None] = "states"
    takes_objective: ClassVar[bool] = True
    layout: ClassVar[Literal["eagle", "dflash", "medusa"] | None] = "eagle"
    own_loss: ClassVar[HeadObjective] = EAGLE_LOSS
    # Which class of serving engines runs it, if its settings allow it: EAGLE-1's or EAGLE-3's.
    is_eagle3: ClassVar[bool] = False
    # What enters as the embedding of a visual token; None: no input has one.
    embeds_images: ClassVar[Image | None] = None

    @property
    def terms(self) -> HeadObjective:
        """What is trained for: the section's objective, or the kind's own."""
        return self.objective or self.own_loss

    @property
    def parts(self) -> dict[str, bool]:
        return {"MTP": self.mtp_steps > 0, "IVSB": False, "VATA": self.visual(training=False) == "none"}

    # ---- what differs between the kinds
    def visual(self, *, training: bool) -> Visual:
        """What stands at a visual token."""
        raise NotImplementedError

    def reads(self, shape: TargetShape, *, training: bool) -> Reads:
        """Which of the target's layers it is fed."""
        raise NotImplementedError

    def module(self, layer: LayerShape, draft_ids: Tensor | None) -> StateHead:
        """A fresh head of this layer."""
        raise NotImplementedError

    def image_input(self, *, training: bool = True) -> Image | None:
        """What enters as the embedding of a visual token; None: no input has one."""
        return self.embeds_images if self.visual(training=training) != "none" else None

    @property
    def trained_visual_share(self) -> float:
        """Share of the visual tokens that training keeps."""
        return 1.0

    @property
    def held_visual_share(self) -> float:
        """Share of the visual tokens that decoding holds."""
        return 1.0

    def attention_layers(self, shape: TargetShape) -> tuple[int, ...]:
        """The layer whose attention says which visual tokens are held, where some are."""
        return ()

    def layer(self, shape: TargetShape) -> LayerShape:
        """The layer that mirrors one of the target's. Raises `UserError` as `mirrored_layer`."""
        return mirrored_layer(self, shape.text, input_norm=True)

    def check(self, shape: TargetShape) -> None:
        """Raise `UserError` for a target that `mirrored_layer` refuses."""
        self.layer(shape)
        if text_of(shape.text).scales_embeddings and self.image_input() == "projected" and not self.is_eagle3:
            raise UserError(
                f"drafter.image is projected, and the target ({shape.text.model_type}) multiplies rows of its table: "
                f"pictures would enter {shape.hidden_size**0.5:.0f} times as large as words, without a norm between",
                key="drafter.kind",
                hint="use eagle3, whose inputs are normed, or dflash; of eagle, set image: placeholder",
            )

    def check_settings(self, draws_images: bool) -> None:
        """Also refuse `blind_share` of a head that holds no visual input in training."""
        super().check_settings(draws_images)
        if self.blind_share and self.visual(training=True) == "none":
            problem = f"this {self.kind} head holds no visual input in training, so that every sample is blind"
            raise Refused("blind_share", problem, "leave it out")

    def taps_for(self, shape: TargetShape, *, training: bool) -> Taps:
        """Ask for the layers of `reads`; for the feature in training, and in decoding where no layers are joined."""
        reads = self.reads(shape, training=training)
        visual = {layer for layer in (reads.visual, reads.image) if layer is not None}
        if training:
            everywhere = self.visual(training=True) == "read"
            return Taps(reads.state, True, visual_layers=tuple(sorted(visual)), everywhere=everywhere)
        layers = tuple(sorted({*reads.state, *visual}))
        return Taps(layers, not reads.state, self.attention_layers(shape), self.attention_queries)

    @property
    def attention_queries(self) -> Literal["last", "text"]:
        """Whose attention says which visual tokens are held: the prompt's last token's, or all its text's."""
        return "last"

    def build(self, target: Target, *, count_tokens: CountTokens | None = None) -> StateHead:
        """An LM head of its own begins with the target's rows."""
        head = self.module(self.layer(target.shape), drafted_ids(self.draft_vocab_size, target, count_tokens))
        head.begin_as(target)
        return head

    def copy_of(self, module: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
        head = cast(StateHead, module)
        copy = self.module(head.shape, head.ids_on_host)
        copy.load_state_dict(state)
        return copy

    def empty(self, shape: TargetShape) -> nn.Module:
        with torch.device("meta"):
            ids = None if self.draft_vocab_size is None else torch.arange(self.draft_vocab_size)
            return self.module(self.layer(shape), ids)

    def written_settings(self) -> JsonObject:
        """Settings whose other value is another head; the manifest names them."""
        return {"kind": self.kind}
