"""DSpark: DFlash's block with heads that read the token before each place (arXiv 2607.05147; deepseek-ai/DeepSpec).

To the scores of a place a Markov head adds a bias of low rank that the token before it decides: alone (vanilla),
through a gate of the backbone's output there (gated), or with a state that is carried along the block (rnn). Training
knows the true tokens; decoding runs the backbone once and then walks the places, each with its exact q. A confidence
head may read the same embedding. With rank 0 it is DFlash.
For Gemma 4 its layers can be Gemma's (DeepSpec's Gemma4DSparkModel), which vLLM serves beside that target.
Image generators (ours): the token before a place is its left neighbour along the raster row, and the code above it can
be read beside that. Biases of the rows with and without the condition are joined as their scores are.
Letters: R rows, F nodes, A blocks, K places, Q places of blocks, C states, D width, G key-value heads, E head width,
N rank, V vocabulary, V' the draft's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.errors import UserError
from ...core.json_types import JsonObject
from ..decoding.head_layer import GatedFeedForward, RMSNorm
from ..hub import kv_shapes
from ..layer import LayerShape
from ..losses import ChunkedHead, Divergence, FrozenHead
from ..targets.base import TargetShape
from ..targets.table import text_of
from .dflash import DflashConfig
from .dflash_module import Before, BlockAttention, BlockLayer, DflashHead, DflashShape, Reduce, Turn
from .dflash_settings import DflashConfidence, DflashLoss
from .draft_vocabulary import Scores

MarkovKind = Literal["vanilla", "gated", "rnn"]


class DsparkLoss(DflashLoss):
    # The distance to the target's distribution at each place; ce: to the answer's own tokens. Twice tvd is the L1
    # distance.
    token_divergence: Literal["ce"] | Divergence = "tvd"
    # Its weight: the code's 0.9 of the L1 distance.
    weight: float = Field(1.8, gt=0)
    # Weight of a cross-entropy with the answer's own tokens beside it.
    ce_weight: float = Field(0.1, ge=0)

    def shares(self) -> tuple[float, float]:
        """Return both weights."""
        return self.weight, self.ce_weight


class DsparkConfidence(DflashConfidence):
    detached: bool = False
    # Whether it also reads the Markov head's embedding of the token before each place.
    with_markov: bool = True


@dataclass(frozen=True)
class DsparkShape(DflashShape):
    """A block's shape with its Markov head's."""

    markov_rank: int = 0
    markov_head_type: MarkovKind = "vanilla"
    markov_above: bool = False
    confidence_head_with_markov: bool = False
    target_layers: bool = False

    def to_dict(self) -> JsonObject:
        return {**super().to_dict(), **self.of_kind, "sample_from_anchor": self.sample_from_anchor}


class MarkovHead(nn.Module):
    """The bias by the token before, and with `above` by the code above; parameter names are the published ones. It
    begins as no bias.
    """

    def __init__(self, kind: MarkovKind, rank: int, width: int, rows: int, draft_rows: int, *, above: bool = False):
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(rows, rank)
        self.markov_w2 = nn.Linear(rank, draft_rows, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)
        if kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)
        self.markov_above = nn.Embedding(rows, rank) if above else None
        if self.markov_above is not None:
            nn.init.normal_(self.markov_above.weight, std=rank**-0.5)

    def embedded(self, before: Before) -> Tensor:
        """[...] ids -> [...,N]; where no code is above, the token before stands alone."""
        embedding = self.markov_w1(before.tokens)
        if self.markov_above is None:
            return embedding
        assert before.above is not None, "a head that reads the code above is told which it is"
        return embedding + self.markov_above(before.above.clamp(min=0)) * (before.above >= 0)[..., None]

    def factor(self, embedded: Tensor, outputs: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What `markov_w2` makes the bias of [...,N], and the state that the next place reads, from the embedded token
        before [...,N], outputs [...,D] and the state [...,N] of the place before (None: the block's first place, or
        nothing is carried).
        """
        if self.kind == "vanilla":
            return embedded, None
        outputs = outputs.to(embedded.dtype)
        if self.kind == "gated":
            return self.gate_proj(torch.cat([outputs, embedded], dim=-1)).sigmoid() * embedded, None
        state = torch.zeros_like(embedded) if state is None else state
        gate, new, out = self.joint_proj(torch.cat([state, embedded, outputs], dim=-1)).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return out.tanh(), gate * state + (1 - gate) * new.tanh()

    def over_block(self, embedded: Tensor, outputs: Tensor) -> Tensor:
        """`factor` [...,K,N] at all places of blocks whose tokens are known."""
        if self.kind != "rnn":
            return self.factor(embedded, outputs, None)[0]
        factors, state = [], None
        for one, output in zip(embedded.unbind(-2), outputs.unbind(-2), strict=True):
            factor, state = self.factor(one, output, state)
            factors.append(factor)
        return torch.stack(factors, dim=-2)


class KeyedAttention(BlockAttention):
    """As Gemma 4's full layers attend: values are what keys are made of, normed without a weight, and scores of queries
    with keys are not divided.
    """

    def __init__(self, shape: LayerShape):
        super().__init__(shape)
        self.v_proj = None  # type: ignore[assignment]

    def forward(self, blocks: Tensor, context: Tensor, turn: Turn, attend: Any) -> Tensor:  # type: ignore[override]
        """Return [B,Q,D], as `BlockAttention.forward`; `attend` divides by the root of E."""
        normed = partial(F.rms_norm, normalized_shape=[self.head_dim], eps=self.shape.norm_eps)
        return super().forward(blocks, context, turn, lambda q, k, v: attend(q * self.head_dim**0.5, k, normed(v)))


class SandwichLayer(BlockLayer):
    """A block's layer that also norms what attention and feed-forward return, gated by a GELU."""

    def __init__(self, shape: LayerShape):
        super().__init__(shape)
        self.self_attn = KeyedAttention(shape)
        self.mlp = GatedFeedForward(shape, partial(F.gelu, approximate="tanh"))
        self.pre_feedforward_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_feedforward_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, blocks: Tensor, context: Tensor, turn: Turn, attend: object) -> Tensor:
        """Blocks [B,Q,D] -> [B,Q,D]; the rest as of `BlockAttention.forward`."""
        mixed = self.self_attn(self.input_layernorm(blocks), context, turn, attend)
        blocks = blocks + self.post_attention_layernorm(mixed)
        return blocks + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(blocks)))


class DsparkHead(DflashHead):
    """DFlash's draft with a Markov head."""

    shape: DsparkShape

    def __init__(self, shape: DsparkShape, draft_ids: Tensor | None = None):
        super().__init__(shape, draft_ids)
        layer, self.markov_head = shape.layer, None
        self.walks = shape.markov_rank > 0
        if self.walks:
            self.markov_head = MarkovHead(
                shape.markov_head_type, shape.markov_rank, layer.hidden_size, layer.vocab_size,
                layer.vocab_size if draft_ids is None else len(draft_ids), above=shape.markov_above,
            )  # fmt: skip

    def made_layer(self) -> nn.Module:
        return SandwichLayer(self.shape.layer) if self.shape.target_layers else super().made_layer()

    def blocks(self, first: Tensor, embedding: Tensor) -> Tensor:
        """Blocks [B,A*P,D]; Gemma's layers read rows of the table times the root of D, in the precision of weights."""
        blocks = super().blocks(first, embedding)
        return blocks * blocks.new_tensor(blocks.shape[-1] ** 0.5) if self.shape.target_layers else blocks

    @property
    def confidence_reads(self) -> int:
        """Return the rank, where the confidence head reads the embedding of the token before."""
        return self.shape.markov_rank if self.shape.confidence_head_with_markov else 0

    def for_loss(self, outputs: Tensor, before: Before) -> Tensor:
        """Return [B,A,K,D+N]: outputs, and what the bias is made of."""
        if self.markov_head is None:
            return outputs
        factor = self.markov_head.over_block(self.markov_head.embedded(before), outputs)
        return torch.cat([outputs, factor.to(outputs.dtype)], dim=-1)

    def lm_head_of(self, scores: Scores, chunk: int, dtype: torch.dtype) -> nn.Module:
        """Return an LM head that adds the bias to the scores."""
        added = None if self.markov_head is None else cast(nn.Parameter, self.markov_head.markov_w2.weight)
        if self.lm_head is None:
            return FrozenHead(scores, chunk, dtype, added)
        return ChunkedHead(self.lm_head, chunk, added)

    def confidence(self, outputs: Tensor, before: Before) -> Tensor:
        """Read the embedding of the token before as well, where `with_markov` says so."""
        if self.confidence_reads:
            assert self.markov_head is not None
            outputs = torch.cat([outputs, self.markov_head.embedded(before).to(outputs.dtype)], dim=-1)
        return super().confidence(outputs, before)

    def conditioned(
        self, scores: Tensor, outputs: Tensor, before: Before, state: Tensor | None, reduce: Reduce
    ) -> tuple[Tensor, Tensor | None]:
        """Scores with the bias."""
        assert self.markov_head is not None
        embedded = self.markov_head.embedded(before).expand(len(outputs), -1, -1)
        factor, state = self.markov_head.factor(embedded, outputs, state)
        return scores + reduce(self.vocabulary(self.markov_head.markov_w2(factor), elsewhere=0.0)), state


class DsparkConfig(DflashConfig):
    """A DSpark draft, for a language model or an image generator."""

    kind: Literal["dspark"]  # type: ignore[assignment]
    # Tokens of a block: with sample_from_anchor a pass drafts as many, else one less.
    block_size: int = Field(7, ge=2, le=64)
    # Whether the last committed token's own place drafts the first token; false: the first mask does, as in DFlash.
    sample_from_anchor: bool = True
    # Rank of the bias that the token before a place adds to its scores; 0: none, and the draft is DFlash's.
    markov_rank: int = Field(256, ge=0)
    # vanilla: the token before alone; gated: a gate of the output at the place; rnn: a state along the block.
    markov_head_type: MarkovKind = "vanilla"
    # Of image generators: whether it also reads the code above a place.
    markov_above: bool = False
    # Layers as the target's that see all positions, for vLLM's class (Gemma 4); false: Qwen3's, as published drafts.
    target_layers: bool = Field(False, exclude_if=lambda value: not value)
    # What is trained for.
    loss: DsparkLoss = DsparkLoss()
    # A trained head that predicts the probability that each drafted token is accepted; null: none.
    confidence: DsparkConfidence | None = None

    head_class: ClassVar[type[DflashHead]] = DsparkHead
    unread_for_images: ClassVar[frozenset[str]] = DflashConfig.unread_for_images | {"target_layers"}
    unread_for_language: ClassVar[frozenset[str]] = frozenset({"markov_above"})  # there are no rows

    @model_validator(mode="after")
    def _reads_a_head(self) -> Self:
        if not self.markov_rank and (self.markov_above or (self.confidence and self.confidence.with_markov)):
            raise ValueError("markov_rank is 0: markov_above and confidence.with_markov read a Markov head")
        if self.target_layers and self.rope == "plain":
            raise ValueError("target_layers: the rotation is the target's, as in vLLM's class: leave rope: plain out")
        return self

    def shape(self, target: TargetShape) -> DsparkShape:
        base = super().shape(target)
        if self.target_layers:
            base = replace(base, layer=self._full_layer(base.layer, target))
        made = DsparkShape(
            **vars(base) | {"sample_from_anchor": self.sample_from_anchor},
            markov_rank=self.markov_rank, markov_head_type=self.markov_head_type, markov_above=self.markov_above,
            confidence_head_with_markov=self.confidence is not None and self.confidence.with_markov,
            target_layers=self.target_layers,
        )  # fmt: skip
        if self.markov_above and target.grid < made.num_drafts:
            raise UserError(
                f"a pass drafts {made.num_drafts} codes and a row has {target.grid}: the code above would be a draft",
                key="drafter.markov_above", hint="leave it out, or make drafter.block_size smaller",
            )  # fmt: skip
        return made

    def _full_layer(self, layer: LayerShape, target: TargetShape) -> LayerShape:
        """The layer with heads and rotation of the target's layers that see all positions."""
        text = target.text
        if not text_of(text).dspark or "full_attention" not in text.layer_types:
            raise UserError(f"drafter.target_layers: no server has a class of DSpark in layers of a {text.model_type}",
                            key="drafter.target_layers", hint="leave it out")  # fmt: skip
        groups, width = kv_shapes(text)[text.layer_types.index("full_attention")]
        rope = text.rope_parameters["full_attention"]
        turned = {"rope_type": rope["rope_type"], "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0)}
        return replace(
            layer, own_head_dim=width, num_kv_heads=layer.num_heads if self.kv_heads == "mha" else groups,
            rope_theta=float(self.rope_theta or rope["rope_theta"]), rope_scaling=turned,
        )  # fmt: skip
