"""Settings that the hidden-state heads of language models share, and what they say of a head: layer, inputs, taps.

Numbers follow the published code where there is one. What is done with a head, by these, is in `head_config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from ...core.errors import Refused, UserError
from ...core.json_types import JsonObject
from ...core.states import Taps
from ..hub import config_value, rope_of, usual_heads
from ..layer import STRETCHED, LayerShape, stretched
from ..targets.base import ShapeAlone, Target, TargetShape
from ..targets.table import text_of
from .base import HeadObjective, PublishedDrafter
from .draft_vocabulary import CountTokens, drafted_ids
from .head_module import StateHead

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# EAGLE's, which MSD follows.
EAGLE_LOSS = HeadObjective(feature=1.0, token=0.1)


# What a visual entry is to the layer: absent, a state that enters it directly, a run's few compressed vectors, an
# ordinary entry (embedding and true state), or one whose state half is a middle layer's.
Visual = Literal["none", "direct", "compressed", "read", "middle"]
# What takes an embedding's place at a visual token: its placeholder's own row, as vLLM embeds it, or the projected
# image, as SGLang does.
Image = Literal["placeholder", "projected"]


@dataclass(frozen=True)
class Reads:
    """Which of the target's layers hold what a head is fed. Layers count decoder layers passed, 0 is the embedding;
    EAGLE-3's published ids mean the same (the input of layer k is the state after k layers).
    """

    state: tuple[int, ...]  # joined as the state half; none: the feature
    visual: int | None  # what stands in visual entries, or what their vectors are made of; None: nothing
    image: int | None  # 0 where the projected image takes an embedding's place


class MirroringDrafter(PublishedDrafter):
    """Drafters whose layers mirror one of the target's; what is null is the target's."""

    # mha gives each query head its own keys and values (ViSpec): 8 times the draft's cache on Qwen2.5-VL.
    kv_heads: Literal["target", "mha"] = "target"
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

    def mirrored(
        self, text: PreTrainedConfig, *, input_norm: bool | None, qkv_bias: bool | None, like_llama: bool = False
    ) -> LayerShape:
        """The layer that mirrors one of the target's.

        Args:
            text: transformers' text config of the target.
            input_norm, qkv_bias: None: as the family.
            like_llama: without the biases and norms that only some families have, as servers know EAGLE-3; its
                attention reads embedding and state beside each other.

        Raises:
            UserError: `positions: mrope` for a target without M-RoPE, or a rotation that a layer does not know.
        """
        heads, rope, family = text.num_attention_heads, rope_of(text), text_of(text)
        scaling = stretched(rope) if self.rope == "target" else None
        if scaling is not None and scaling["rope_type"] not in STRETCHED:
            raise UserError(
                f"the target ({text.model_type}) stretches its positions by {scaling['rope_type']}, unknown to heads",
                hint="set drafter.rope: plain, for a head that turns by the base alone",
            )
        section: tuple[int, ...] = ()
        if self.positions == "mrope":
            section, problem = tuple(rope.get("mrope_section") or family.mrope_section), None
            if (share := rope.get("partial_rotary_factor", 1.0)) != 1.0:
                problem = (
                    f"turns {share:g} of each attention head: a head's layer turns all of it, and three positions "
                    "would be shared out otherwise"
                )
            elif not section:
                problem = "has no M-RoPE"
            if problem:
                raise UserError(
                    f"drafter.positions: mrope, and the target ({text.model_type}) {problem}",
                    key="drafter.positions", hint="use compact or flat",
                )  # fmt: skip
        theta: Any = self.rope_theta or rope.get("rope_theta") or config_value(text, "rope_theta", 10000.0)
        bias = not like_llama and (family.qkv_bias or bool(config_value(text, "attention_bias")))
        groups, head_dim = usual_heads(text)
        inner = self.intermediate_size or config_value(text, "intermediate_size")
        if inner is None:
            raise UserError(
                f"the target ({text.model_type}) has experts alone, and no MLP whose width a head could take",
                key="drafter.intermediate_size", hint="name a width, for example twice the target's hidden_size",
            )  # fmt: skip
        return LayerShape(
            vocab_size=text.vocab_size, hidden_size=text.hidden_size, num_heads=heads,
            num_kv_heads=heads if self.kv_heads == "mha" else groups,
            intermediate_size=inner,
            norm_eps=self.norm_eps or text.rms_norm_eps,
            rope_theta=float(theta),
            input_norm=family.norms_input if input_norm is None else input_norm,
            qkv_bias=bias if qkv_bias is None else qkv_bias,
            qk_rms_norm=family.norms_heads and not like_llama,
            own_head_dim=head_dim if head_dim * heads != text.hidden_size else None,
            attention_input=2 * text.hidden_size if like_llama else None,
            mrope_section=section, mrope_interleaved=bool(section) and family.mrope_interleaved,
            rope_scaling=scaling,
        )  # fmt: skip

    def empty(self, shape: TargetShape) -> nn.Module:
        with torch.device("meta"):
            return self.build(ShapeAlone(shape))  # type: ignore[arg-type]


class HeadSettings(MirroringDrafter):
    """Settings of all kinds of heads."""

    # Null: as the target's.
    qkv_bias: bool | None = None
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
    beside_states: ClassVar[frozenset[str]] = MirroringDrafter.beside_states | {
        "kv_heads", "qkv_bias", "intermediate_size", "norm_eps", "rope_theta", "rope", "positions", "gap_share", "gap",
        "blind_share", "mtp_steps", "mtp_attention", "replace", "objective", "draft_vocab_size",
    }  # fmt: skip
    trains_on: ClassVar[str | None] = "states"
    takes_objective: ClassVar[bool] = True
    layout: ClassVar[Literal["eagle", "dflash", "medusa"] | None] = "eagle"
    default_objective: ClassVar[HeadObjective] = EAGLE_LOSS
    # Which class of serving engines runs it, if its settings allow it: EAGLE-1's or EAGLE-3's.
    is_eagle3: ClassVar[bool] = False
    # What enters as the embedding of a visual token; None: no input has one.
    embeds_images: ClassVar[Image | None] = None

    @property
    def terms(self) -> HeadObjective:
        """The training objective: the section's, or the kind's default."""
        return self.objective or self.default_objective

    @property
    def parts(self) -> dict[str, bool]:
        return {"MTP": self.mtp_steps > 0, "IVSB": False, "VATA": self.visual(training=False) == "none"}

    # ---- what differs between the kinds
    def visual(self, *, training: bool) -> Visual:
        """The head's input at a visual token."""
        raise NotImplementedError

    def reads(self, shape: TargetShape, *, training: bool) -> Reads:
        """The target's layers that it reads."""
        raise NotImplementedError

    def module(self, layer: LayerShape, draft_ids: Tensor | None) -> StateHead:
        """A fresh head of this layer."""
        raise NotImplementedError

    def image_input(self, *, training: bool = True) -> Image | None:
        """The embedding at a visual token; None: no input has one."""
        return self.embeds_images if self.visual(training=training) != "none" else None

    def visual_fraction(self, *, training: bool) -> float:
        """Share of the visual tokens whose inputs it has."""
        return 1.0

    def layer(self, shape: TargetShape) -> LayerShape:
        return self.mirrored(shape.text, input_norm=True, qkv_bias=self.qkv_bias)

    def check(self, shape: TargetShape) -> None:
        self.layer(shape)
        if text_of(shape.text).scales_embeddings and self.image_input() == "projected" and not self.is_eagle3:
            raise UserError(
                f"drafter.image is projected, and the target ({shape.text.model_type}) multiplies rows of its table: "
                f"pictures would enter {shape.hidden_size**0.5:.0f} times as large as words, without a norm between",
                key="drafter.kind",
                hint="use eagle3, whose inputs are normed, or dflash; of eagle, set image: placeholder",
            )

    def check_settings(self, draws_images: bool) -> None:
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
        return Taps(tuple(sorted({*reads.state, *visual})), not reads.state)

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

    def written_settings(self) -> JsonObject:
        """Settings whose other value is another head; the manifest names them."""
        return {"kind": self.kind}
