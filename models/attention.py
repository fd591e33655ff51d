"""Attention of targets, drafts and heads. It builds no mask where none is needed, and does not repeat grouped heads.

Torch's fast kernels take no mask or a causal one. An explicit mask is for trees and padding, and with one, a CUDA
kernel does not read grouped heads: transformers then copies all keys and values once for each query head. Here the
query heads of a group become further queries of their shared head, which changes no number.
Letters: B and R rows, H heads, G key-value heads, N queries, K keys, E head width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.errors import UserError
from ..core.states import uploaded

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GROUPED = "grouped_sdpa"


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float | None = None, dropout: float = 0.0
) -> Tensor:
    """[R,H,N,E] of queries [R,H,N,E] over keys and values [R,G,K,E]. `mask` is [N,K], [R,1,N,K] or [1,1,N,K], bool or
    additive; int64: `PackedRow.bounds`; None: a single query sees all, several are causal with nothing before them.
    """
    if mask is not None and mask.dtype == torch.int64:
        return attend_samples(q, k, v, mask.flatten().tolist(), scale=scale, dropout=dropout)
    groups = q.shape[1] // k.shape[1]
    are_few = q.shape[2] == 1 or (mask is not None and q.shape[2] < 32)  # more fill a block of the kernel's own
    if groups > 1 and are_few and q.device.type == "cpu" and q.element_size() == 2:
        # A CPU's kernel reads all keys for each query head, and converts 16-bit ones first: one query takes 4 to 12
        # times as long, a chain of 5 takes 1.4 to 1.9 times.
        return folded(q, k, v, mask, scale=scale, dropout=dropout)
    if mask is None:
        causal = q.shape[2] > 1
        assert not causal or q.shape[2] == k.shape[2], "a causal pass with a past needs its mask"
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, dropout_p=dropout, enable_gqa=groups > 1
        )
    if groups > 1 and q.device.type != "cpu":
        return folded(q, k, v, mask, scale=scale, dropout=dropout)
    # A CPU's kernel reads grouped heads beside a mask, too.
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, dropout_p=dropout, enable_gqa=groups > 1
    )


def attend_samples(
    q: Tensor, k: Tensor, v: Tensor, bounds: Sequence[int], *, scale: float | None = None, dropout: float = 0.0
) -> Tensor:
    """[1,H,N,E] as of `attend`, of samples one after the other in a row, each causal and without the others. `bounds`
    are where samples begin, and the last one's end.
    """
    sizes = [end - start for start, end in itertools.pairwise(bounds)]
    # Flash attention of torch reads 16 bits and narrow heads on an Ampere GPU or newer.
    fits = q.device.type == "cuda" and q.element_size() == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    if fits and torch.cuda.get_device_capability(q.device) >= (8, 0) and not dropout:
        starts = uploaded(torch.tensor(bounds, dtype=torch.int32), q.device)
        rows = (states.squeeze(0).transpose(0, 1) for states in (q, k, v))
        ends = starts, starts, max(sizes), max(sizes)
        # One launch of flash attention; its public name differs between the versions of torch that are allowed.
        mixed = torch.ops.aten._flash_attention_forward(*rows, *ends, 0.0, True, False, scale=scale)[0]
        return mixed.transpose(0, 1).unsqueeze(0)
    parts = zip(*(states.split(sizes, dim=2) for states in (q, k, v)), strict=True)
    return torch.cat([attend(one, k, v, None, scale=scale, dropout=dropout) for one, k, v in parts], dim=2)


def attend_all(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """[R,H,N,E] of queries [R,H,N,E] that all see all keys and values [R,G,K,E], or what `mask` [N,K] bool says."""
    if mask is not None:
        return attend(q, k, v, mask)
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def folded(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float | None = None, dropout: float = 0.0
) -> Tensor:
    """Attend as `attend`, with the H/G query heads of a group as H/G times as many queries of their key-value head;
    without a mask all see all keys.
    """
    count, groups, visible = q.shape[2], q.shape[1] // k.shape[1], mask
    if mask is not None:
        visible = mask if mask.dim() == 4 else mask[None, None]
        assert visible.shape[1] == 1, "one mask for all heads"
        visible = visible[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)  # [R,1,H/G*N,K]
    queries = q.unflatten(1, (-1, groups)).flatten(2, 3)  # [R,G,H/G*N,E]
    mixed = F.scaled_dot_product_attention(queries, k, v, attn_mask=visible, scale=scale, dropout_p=dropout)
    return mixed.unflatten(2, (groups, count)).flatten(1, 2)


def as_interface(attention: Callable[..., Tensor], *reads: str) -> Callable[..., tuple[Tensor, None]]:
    """`attention` (q, k, v, mask, *, scale, dropout) -> [R,H,N,E] as transformers calls it by name: a module before the
    tensors, [R,N,H,E] back, and no weights. `reads` are further keywords of transformers that it takes.
    """

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        dropout: float = 0.0, scaling: float | None = None, **more: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        read = {name: more[name] for name in reads}
        mixed = attention(query, key, value, attention_mask, scale=scaling, dropout=dropout, **read)
        return mixed.transpose(1, 2).contiguous(), None

    return forward


def check_takes_masks(config: PreTrainedConfig) -> None:
    """Raises `UserError` for a decoder whose attention does not read our masks of trees, padding and packed rows.

    transformers hands a mask [R,1,N,K] on as it is: flash attention reads it as a row of padding, so that nodes of a
    tree attend to each other, and flex attention wants another object.
    """
    name = config._attn_implementation
    if name not in ("sdpa", "eager", GROUPED):
        raise UserError(
            f"the model attends by {name}, which takes no mask of a tree: nodes would attend to each other",
            hint="load it with attn_implementation sdpa (torch's flash kernel where a pass needs no mask) or eager",
        )


def use_attend(config: Any) -> None:
    """Run a decoder of transformers over `attend`, where it would run sdpa."""
    run_over(config, GROUPED, attend)


def run_over(config: Any, name: str, attention: Callable[..., Tensor], *reads: str) -> None:
    """Run a decoder or tower of transformers over `attention`, under this name, where it would run sdpa; `reads` as of
    `as_interface`.
    """
    if config._attn_implementation == "sdpa":
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(name, as_interface(attention, *reads))
        AttentionMaskInterface.register(name, sdpa_mask)
        config._attn_implementation = name


def causal_among(visible: Tensor) -> Tensor:
    """[B,N,N] bool: each place sees those up to itself but padding, where `visible` [B,N] is False. Padding sees
    itself: no row of the attention is empty.
    """
    length = visible.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=visible.device).tril()
    return (causal & visible[:, None]) | torch.eye(length, dtype=torch.bool, device=visible.device)


def hidden_below(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask [...,N,K] as torch's kernels add it to scores: 0, or minus infinity where nothing is seen. With a
    boolean one, `scaled_dot_product_attention` makes these very numbers in each layer.
    """
    return torch.where(mask, 0.0, float("-inf")).to(dtype)


def behind_all(mask: Tensor, rows: int, total: int) -> Tensor:
    """[R,1,N,total] bool: `mask` [N,K] or [R,N,K] over the last K places; those before them are seen."""
    visible = mask if mask.dim() == 2 else mask.unsqueeze(1)
    full = torch.ones(rows, 1, visible.shape[-2], total, dtype=torch.bool, device=mask.device)
    full[..., total - mask.shape[-1] :] = visible
    return full


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as eager attention adds it to scores."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
