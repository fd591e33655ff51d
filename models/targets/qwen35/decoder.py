"""The cached forward over Qwen3.5: three of every four layers are recurrent (gated DeltaNet), one is attention.

transformers' own cache keeps one state for each recurrent layer, so it cannot forget a rejected token or run a tree.
Here these layers run over `RecurrentLayer`, with transformers' weights and modules. Letters: R rows, N new positions,
H value heads, K key and E value width, D channels of the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....core.errors import UserError
from ....core.positions import Resume
from ...decoding.cache import Cache
from ...decoding.decoder import DecoderStates, PromptRows
from ...hub import RECURS, recurrent_layers
from ..qwen.model import QwenDecoder
from .delta_rule import Step


class HybridDecoder(QwenDecoder):
    """A Qwen3.5 in eval mode, dense or a mixture of experts."""

    def __init__(self, model: nn.Module, *, num_token_ids: int, resume: Resume = "max_plus_one"):
        super().__init__(model, num_token_ids=num_token_ids, resume=resume)
        config = self.language_model.config
        self.recurs = recurrent_layers(config)
        self._window: int = config.linear_conv_kernel_dim - 1
        for layer in self.language_model.layers:
            if (module := getattr(layer, "linear_attn", None)) is not None:
                # Over a `HybridCache` it runs as `_forward` has it; over others, and without one, as transformers has.
                # accelerate puts its hook around what it finds as `_old_forward`.
                name = "_old_forward" if hasattr(module, "_hf_hook") else "forward"
                setattr(module, name, MethodType(_forward, module))

    def new_cache(self, capacity: int) -> Cache:
        from .recurrent import HybridCache

        return HybridCache(self.recurs, capacity, self._window)

    def run(
        self, prompts: PromptRows, cache: Cache, *, attention: Sequence[int] = (), **settings: Any
    ) -> DecoderStates:
        """Run prompts as every decoder does. Raises `UserError` where attention is wanted of a layer that has none."""
        from .recurrent import HybridCache

        assert isinstance(cache, HybridCache) and prompts.row is None, "samples in one row would share a state"
        if recurring := [layer for layer in attention if self.recurs[layer]]:
            raise UserError(
                f"attention of layer {recurring[0]} is wanted, which recurs and has none",
                hint=f"name layers that attend: {[n for n, recurs in enumerate(self.recurs) if not recurs]}",
            )
        with cache.running_prompt(prompts.mask):
            return super().run(prompts, cache, attention=attention, **settings)

    def _mask_of_layers(self, full: Tensor | None) -> object:
        # Each kind of layer reads its own; given so, transformers makes none itself.
        return {"full_attention": full, RECURS: full}


def _forward(
    self: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **more: Any
) -> Tensor:
    """Return what transformers' forward of a gated DeltaNet does, over our cache; [R,N,width] in and out."""
    from .recurrent import HybridCache, RecurrentLayer

    if not isinstance(cache_params, HybridCache):
        return type(self).forward(self, hidden_states, cache_params, attention_mask, **more)
    layer: RecurrentLayer = cache_params.layers[self.layer_idx]
    rows, count, _ = hidden_states.shape
    if (real := cache_params.real(layer.length, count)) is not None:
        hidden_states = hidden_states * real.to(hidden_states)
    ancestors = cache_params.ancestors(layer, attention_mask, count, hidden_states.device)
    mixed = layer.convolve(self.in_proj_qkv(hidden_states), self.conv1d.weight[:, 0], ancestors)
    mixed = F.silu(mixed.to(hidden_states.dtype))
    heads = mixed.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
    wide = torch.promote_types(torch.float32, mixed.dtype)
    q, k = (part.unflatten(-1, (-1, self.head_k_dim)).transpose(1, 2).to(wide) for part in heads[:2])
    v = heads[2].unflatten(-1, (-1, self.head_v_dim)).transpose(1, 2).to(wide)
    groups = self.num_v_heads // self.num_k_heads
    if groups > 1:
        q, k = (part.repeat_interleave(groups, dim=1) for part in (q, k))
    decay = -self.A_log.to(wide).exp() * F.softplus(self.in_proj_a(hidden_states).to(wide) + self.dt_bias)
    beta = self.in_proj_b(hidden_states).sigmoid().to(wide)
    step = Step(_unit(q) * self.head_k_dim**-0.5, _unit(k), v, decay.transpose(1, 2), beta.transpose(1, 2))  # [R,H,N,.]
    outputs = layer.recur(step, ancestors).transpose(1, 2).to(mixed.dtype)  # [R,N,H,E]
    gate = self.in_proj_z(hidden_states).reshape(-1, self.head_v_dim)
    normed = self.norm(outputs.reshape(-1, self.head_v_dim), gate)
    return self.out_proj(normed.view(rows, count, -1))


def _unit(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)
