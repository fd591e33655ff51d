"""DFlash's module: a few layers that fill a block of masks in one pass (Chen et al. 2026, arXiv 2602.06036).

Keys and values of each layer come from the target's states of all committed tokens (several layers joined by `fc` and
normed) and from the block itself; queries come from the block alone, and all of it sees all of it. The module holds
neither the target's embedding nor, with its whole vocabulary, its LM head. Parameter names are the published ones.
Letters: B rows, C committed states, Q places of blocks, J joined states, D width, H heads, G key-value heads, E head
width, K places of a block that answer, V vocabulary, V' the draft's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.json_types import JsonObject
from ..decoding.head_layer import GatedFeedForward, HeadAttention, RMSNorm, Rotary, turning
from ..layer import LayerShape
from .draft_vocabulary import DraftVocabulary

# (layer's number, queries [B,H,Q,E], keys and values [B,G,C+Q,E] of states and blocks) -> [B,H,Q,E]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Turn = Callable[[Tensor], Tensor]
Reduce = Callable[[Tensor], Tensor]  # guidance over what the rows add to scores


class Before(NamedTuple):
    """The tokens before places: [...] ids each."""

    tokens: Tensor  # int64, the token before each
    above: Tensor | None = None  # int64, the code above it in a picture, -1 where none is; None: not read

    def at(self, index: tuple[Tensor, ...]) -> Before:
        """The same of some places."""
        return Before(self.tokens[index], None if self.above is None else self.above[index])


@dataclass(frozen=True)
class DflashShape:
    """The sizes of the weights and of a block."""

    layer: LayerShape
    num_layers: int
    # Layers of the target whose states are joined, in decoder layers passed.
    taps: tuple[int, ...]
    # Tokens of a block: the last committed one, and K masks.
    block_size: int
    # The target's id whose embedding stands for a mask; None: a vector that is trained.
    mask_token_id: int | None
    # Committed states before a place, itself included, that it sees; None: all.
    sliding_window: int | None = None
    # Whether a confidence head stands beside the draft.
    confidence: bool = False
    # Whether the last committed token's own place drafts the first token (DSpark), and not the first mask.
    sample_from_anchor: bool = False
    # Whether a place of a block sees the block up to itself alone, and not all of it.
    causal: bool = False

    @property
    def of_kind(self) -> JsonObject:
        """Fields that a derived kind adds to these."""
        of_all = {one.name for one in fields(DflashShape)}
        return {name: value for name, value in vars(self).items() if name not in of_all}

    @property
    def first(self) -> int:
        """The first place of a block that answers."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_drafts(self) -> int:
        """Tokens that one pass drafts, K."""
        return self.block_size - self.first

    def to_dict(self) -> JsonObject:
        """Return the shape as `config.json` holds it. Taps are counted as the published files count them, one less."""
        taps = [tap - 1 for tap in self.taps]
        return {
            **self.layer.to_dict(),
            "num_hidden_layers": self.num_layers,
            "block_size": self.block_size,
            "sliding_window": self.sliding_window,
            **({"is_causal": True} if self.causal else {}),
            "dflash_config": {"mask_token_id": self.mask_token_id, "target_layer_ids": taps},
        }


class BlockAttention(HeadAttention):
    """Attention of a block over the target's states and itself."""

    def forward(  # type: ignore[override]
        self, blocks: Tensor, context: Tensor, turn: Turn, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Blocks [B,Q,D] -> [B,Q,D].

        Args:
            context: [B,C,D], joined and normed states.
            turn: rotates heads [B,n,H,E] at the last n places of context and blocks.
            attend: queries [B,H,Q,E], keys and values [B,G,C+Q,E] -> [B,H,Q,E].
        """
        shape, read = self.shape, torch.cat([context, blocks], dim=1)
        q = self.q_norm(self.q_proj(blocks).unflatten(-1, (shape.num_heads, shape.head_dim)))
        keys = self.k_proj(read).unflatten(-1, (shape.num_kv_heads, shape.head_dim))
        v = keys if self.v_proj is None else self.v_proj(read).unflatten(-1, (shape.num_kv_heads, shape.head_dim))
        q, k = turn(q), turn(self.k_norm(keys))
        mixed = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class BlockLayer(nn.Module):
    """Attention over states and block, and a gated feed-forward, each with a residual. States are no residual."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        self.self_attn = BlockAttention(shape)
        self.mlp = GatedFeedForward(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, blocks: Tensor, context: Tensor, turn: Turn, attend: object) -> Tensor:
        """Blocks [B,Q,D] -> [B,Q,D]; the rest as of `BlockAttention.forward`."""
        blocks = blocks + self.self_attn(self.input_layernorm(blocks), context, turn, attend)
        return blocks + self.mlp(self.post_attention_layernorm(blocks))


class ConfidenceHead(nn.Module):
    """How likely the target accepts what is drafted at a place, given that it accepted all before, after DSpark's
    (arXiv 2607.05147); parameter names are the published ones.
    """

    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, outputs: Tensor) -> Tensor:
        """The draft's outputs [...,D] -> logits [...] float32."""
        return self.proj(outputs)[..., 0].float()


class DflashHead(DraftVocabulary):
    """The draft. Its own LM head scores `draft_ids`, [V'] int64 ascending; None: the target's LM head scores all."""

    walks = False  # whether a place reads the token before it (`conditioned`)
    num_candidates = 0  # how many of a place's likeliest tokens a selector chooses from; 0: there is none

    def __init__(self, shape: DflashShape, draft_ids: Tensor | None = None):
        super().__init__()
        self.shape, layer = shape, shape.layer
        width = layer.hidden_size
        self.fc = nn.Linear(len(shape.taps) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, layer.norm_eps)
        self.layers = nn.ModuleList(self.made_layer() for _ in range(shape.num_layers))
        self.norm = RMSNorm(width, layer.norm_eps)
        self.mask_embedding = nn.Parameter(torch.zeros(width)) if shape.mask_token_id is None else None
        self.score_ids(width, layer.vocab_size, draft_ids)
        self.rotary = Rotary(layer)
        # Last, so that the weights before it are drawn alike with and without it.
        self.confidence_head = ConfidenceHead(width + self.confidence_reads) if shape.confidence else None

    @property
    def confidence_reads(self) -> int:
        """Width of what the confidence head reads beside the outputs."""
        return 0

    def made_layer(self) -> nn.Module:
        """One of its layers."""
        return BlockLayer(self.shape.layer)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def context(self, states: Tensor) -> Tensor:
        """True states [B,C,J*D] -> what every layer makes keys and values of, [B,C,D]."""
        return self.hidden_norm(self.fc(states.to(self.dtype)))

    def blocks(self, first: Tensor, embedding: Tensor) -> Tensor:
        """Last committed tokens [B,A] of A blocks of P places -> [B,A*P,D]: each token's row of the target's embedding
        [V,D], and masks.
        """
        known = F.embedding(first, embedding).to(self.dtype)[:, :, None]
        mask = self.mask_embedding if self.mask_embedding is not None else embedding[self.shape.mask_token_id]
        masks = mask.to(self.dtype).expand(*first.shape, self.shape.block_size - 1, -1)
        return torch.cat([known, masks], dim=2).flatten(1, 2)

    def forward(self, blocks: Tensor, context: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Blocks [B,Q,D] beside context [B,C,D], at positions [B,C+Q] -> [B,Q,D] after the final norm."""
        turn = turning(self.shape.layer, self.rotary(positions))
        for number, layer in enumerate(self.layers):
            # Bound now: a later layer has another number.
            blocks = layer(blocks, context, turn, lambda q, k, v, number=number: attend(number, q, k, v))
        return self.norm(blocks)

    def for_loss(self, outputs: Tensor, before: Before) -> Tensor:
        """Outputs [B,A,K,D] of blocks, with what the LM head under a loss reads beside them given the true tokens."""
        return outputs

    def conditioned(
        self, scores: Tensor, outputs: Tensor, before: Before, state: Tensor | None, reduce: Reduce
    ) -> tuple[Tensor, Tensor | None]:
        """Scores [F,V] of nodes given what stands before them, and what their children carry on [R,F,N]; of a draft
        that `walks`.

        Args:
            scores: [F,V] without it.
            outputs: [R,F,D] of the backbone at each node's place.
            state: [R,F,N] that each node's parent carried on; None: a block begins, or nothing is carried.
            reduce: [R,F,...] of the rows -> [F,...] as guidance joins them.
        """
        raise NotImplementedError(type(self).__name__)

    def confidence(self, outputs: Tensor, before: Before) -> Tensor:
        """Logits [...] float32 of acceptance of what stands at places with outputs [...,D]."""
        assert self.confidence_head is not None
        return self.confidence_head(outputs)


def even_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers of a target of `num_layers`, evenly from the second to the last but two, as published drafts
    have them (five of 36: 2, 10, 18, 26 and 34 layers passed); a single one lies in the middle.
    """
    if count == 1:
        return (num_layers // 2 + 1,)
    first, last = 2, num_layers - 2
    return tuple(round(first + step * (last - first) / (count - 1)) for step in range(count))


def within_grid(positions: Tensor, layer: LayerShape) -> Tensor:
    """Positions that have a rotation: what a block says of places far behind the last cell is never drawn."""
    return positions.clamp(max=layer.zeros_before + layer.grid**2) if layer.rope == "grid" else positions
