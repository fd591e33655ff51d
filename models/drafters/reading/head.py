"""The heads: one layer that predicts the target's next state, in EAGLE-1's form (fc joins embedding and state) or
EAGLE-3's (they stand beside each other in the attention's input).

Neither holds the target's embedding or LM head. Parameter names are those of the published checkpoints.
Letters: B rows, N slots, D width, S joined states, K places seen, P places of a picture, Q queries, V draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...decoding.cache import Cache
from ...llamagen.transformer import RMSNorm
from ..layer import DecoderLayer, GatedFeedForward, HeadAttention, LayerShape, Rotary


class ReadingHead(nn.Module):
    """Sparrow, MSD, ViSpec, HiViS and EAGLE; its output goes to the target's LM head as it is.

    Args:
        num_queries: of ViSpec's image adaptor; 0: there is none.
        num_steps: learned vectors of HiViS; 0: none.
    """

    def __init__(self, shape: LayerShape, *, fc_bias: bool = True, num_queries: int = 0, num_steps: int = 0):
        super().__init__()
        self.shape, self.num_queries, self.num_steps = shape, num_queries, num_steps
        width = shape.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=fc_bias)
        self.layers = nn.ModuleList([DecoderLayer(shape)])
        if num_queries:
            self.imadpt = ImageAdaptor(shape, num_queries)
            self.img_fc = nn.Linear(2 * width, width)
            with torch.no_grad():
                self.img_fc.weight.copy_(torch.eye(width, 2 * width))
                self.img_fc.bias.zero_()
        if num_steps:
            self.steps = nn.Embedding(num_steps, width)
            nn.init.zeros_(self.steps.weight)
        self.rotary = Rotary(shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def fuse(self, states: Tensor) -> Tensor:
        """True states [B,N,S*D] as the layer's state half [B,N,D]."""
        return states

    def forward(
        self,
        embeds: Tensor,
        states: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: Cache | Any | None = None,
        *,
        direct: tuple[Tensor, Tensor] | None = None,
        image: Tensor | None = None,
        depths: Tensor | None = None,
    ) -> Tensor:
        """Predicted states [B,N,D].

        Args:
            embeds: [B,N,D] of the tokens behind the states.
            states: [B,N,D], fused where they are true.
            positions: [B,N], [N] or [3,B,N] int64.
            mask: [N,K] or [B,N,K] bool; None: causal, with nothing before these slots.
            direct: which slots [B,N] take [B,N,D] in place of what fc makes.
            image: [B,N,D] global vectors (ViSpec), zeros before the first picture.
            depths: [N] or [B,N] int64, steps since the last true state (HiViS).
        """
        if self.num_queries:
            assert image is not None
            states = self.img_fc(torch.cat([states, image], dim=-1))
        inputs = self.fc(torch.cat([embeds, states], dim=-1))
        if self.num_steps:
            assert depths is not None
            inputs = inputs + self.steps(depths.clamp(max=self.num_steps - 1))
        if direct is not None:
            where, values = direct
            inputs = torch.where(where.unsqueeze(-1), values, inputs)
        return self.layers[0](inputs, self.rotary(positions), mask, cache)


class ImageAdaptor(nn.Module):
    """ViSpec's: learned queries attend over the embeddings of one picture, without positions."""

    def __init__(self, shape: LayerShape, num_queries: int):
        super().__init__()
        heads, width = shape.num_heads, shape.head_dim
        self.q = nn.Parameter(torch.randn(num_queries, heads, width) * width**-0.5)
        self.k_proj = nn.Linear(shape.hidden_size, heads * width, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.hidden_size, heads * width, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(heads * width, shape.hidden_size, bias=False)

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        """[pictures,P,D] with a mask [pictures,P] of their places -> [pictures,Q,D]."""
        heads, width = self.q.shape[1:]
        keys, values = (
            project(features).unflatten(-1, (heads, width)).transpose(1, 2) for project in (self.k_proj, self.v_proj)
        )
        queries = self.q.transpose(0, 1).expand(len(features), -1, -1, -1)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask[:, None, None])
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Eagle3Head(nn.Module):
    """EAGLE-3: its own final norm and LM head over a part of the vocabulary.

    Args:
        draft_ids: [V] int64 ascending, the target's ids of the draft's vocabulary.
    """

    num_queries = num_steps = 0

    def __init__(self, shape: LayerShape, draft_ids: Tensor):
        super().__init__()
        self.shape = shape
        width, device = shape.hidden_size, draft_ids.device
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.midlayer = JoinedLayer(shape)
        self.norm = RMSNorm(width, shape.norm_eps)
        self.lm_head = nn.Linear(width, len(draft_ids), bias=False)
        known = torch.zeros(shape.vocab_size, dtype=torch.bool, device=device)
        known[draft_ids] = True
        # Servers read an offset: the target's id is i + d2t[i].
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids), device=device))
        self.register_buffer("t2d", known)
        self.rotary = Rotary(shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def draft_ids(self) -> Tensor:
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fuse(self, states: Tensor) -> Tensor:
        """[B,N,3*D] -> [B,N,D]."""
        return self.fc(states)

    def forward(
        self,
        embeds: Tensor,
        states: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: Cache | Any | None = None,
        *,
        direct: tuple[Tensor, Tensor] | None = None,
        image: Tensor | None = None,
        depths: Tensor | None = None,
    ) -> Tensor:
        """As `ReadingHead.forward`; what comes out is not normed yet."""
        assert direct is None and image is None, "no slot of EAGLE-3 bypasses its input"
        return self.midlayer(embeds, states, self.rotary(positions), mask, cache)

    def vocabulary(self, scores: Tensor) -> Tensor:
        """[...,V] of `lm_head` -> [..., the target's vocabulary]: minus infinity for all other ids."""
        whole = scores.new_full((*scores.shape[:-1], self.shape.vocab_size), float("-inf"), dtype=torch.float32)
        whole[..., self.draft_ids] = scores.float()
        return whole


class JoinedLayer(nn.Module):
    """A decoder layer whose attention reads [norm(embedding); norm(state)] and whose residual is the state."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = HeadAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = GatedFeedForward(shape)

    def forward(self, embeds: Tensor, states: Tensor, rope: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        joined = torch.cat([self.input_layernorm(embeds), self.hidden_norm(states)], dim=-1)
        states = states + self.self_attn(joined, rope, mask, cache)
        return states + self.mlp(self.post_attention_layernorm(states))


AnyHead = ReadingHead | Eagle3Head
