"""Causal attention that also returns the log-sum-exp of its scores, with the backward pass apart from the forward.

What is merged with other keys afterwards needs both: the log-sum-exp to merge, and a backward pass that takes the
*merged* output and log-sum-exp, as ring attention does. `F.scaled_dot_product_attention` gives neither, so this calls
the kernels that it would choose itself. Letters: B rows, N places, H heads, G key-value heads, E head width.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

Kernel = Literal["cpu", "flash", "efficient", "plain"]

_CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def kernel_of(q: Tensor, k: Tensor, v: Tensor) -> Kernel:
    """The kernel for queries [B,H,N,E] and keys and values [B,G,N,E].

    "plain" is matrix products; it keeps [B,H,N,N] scores for as long as one call lasts.
    """
    if q.device.type in ("cpu", "meta") and q.dtype in _CPU_DTYPES:  # on meta a step's memory is counted
        return "cpu"
    if q.device.type == "cuda":
        grouped = q.shape[1] != k.shape[1]
        # The public function pads other widths before it chooses flash attention.
        if q.shape[-1] % 8 == 0 and can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, True, grouped)):
            return "flash"
        whole_k, whole_v = _repeated(k, q), _repeated(v, q)
        if can_use_efficient_attention(SDPAParams(q, whole_k, whole_v, None, 0.0, True, False)):
            return "efficient"
    return "plain"


def attend(
    q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, *, causal: bool = True
) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Output [B,H,N,E], log-sum-exp [B,H,N] in at least float32, and what `attend_backward` needs beside them. Queries
    see all keys [B,G,K,E] where it is not `causal`.
    """
    aten = torch.ops.aten
    if kernel == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, lse, ()
    if kernel == "flash":
        answer = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        out, lse, starts_q, starts_k, _, _, seed, offset, _ = answer
        return out, lse, (starts_q, starts_k, seed, offset)
    if kernel == "efficient":
        out, lse, *rest = aten._scaled_dot_product_efficient_attention(
            q, _repeated(k, q), _repeated(v, q), None, True, 0.0, causal
        )
        return out, lse.narrow(-1, 0, q.shape[2]), tuple(rest)  # padded to a multiple of 32
    scores = _scores(q, k, causal)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(q) @ _repeated(v, q), lse, ()


def attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kernel: Kernel,
    rest: tuple[Tensor | None, ...], *, causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values from that of the output [B,H,N,E]: the part of these keys where `out` and
    `lse` belong to more keys.
    """
    aten = torch.ops.aten
    if kernel == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse.contiguous(), 0.0, causal
        )
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, lse.contiguous(), *rest[:2], q.shape[2], k.shape[2], 0.0, causal, *rest[2:]
        )
    if kernel == "efficient":
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32)).contiguous()
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            gradient, q, _repeated(k, q), _repeated(v, q), None, out, padded, *rest, 0.0,
            [True, True, True, False], causal,
        )  # fmt: skip
        return dq, _shared(dk, k), _shared(dv, v)
    p = (_scores(q, k, causal) - lse[..., None]).exp()
    along = gradient.to(p) @ _repeated(v, q).to(p).transpose(-1, -2)
    scale = 1 / math.sqrt(q.shape[-1])
    ds = p * (along - (gradient.to(p) * out.to(p)).sum(-1, keepdim=True)) * scale
    dk, dv = ds.transpose(-1, -2) @ q.to(p), p.transpose(-1, -2) @ gradient.to(p)
    return (ds @ _repeated(k, q).to(p)).to(q), _shared(dk, k), _shared(dv, v)


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """[B,H,N,K] in at least float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ _repeated(k, q).transpose(-1, -2)).to(wide) / math.sqrt(q.shape[-1])
    if not causal:
        return scores
    return scores.masked_fill(~scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)


def _repeated(k: Tensor, q: Tensor) -> Tensor:
    """Keys or values [B,G,N,E] for every query head: [B,H,N,E]."""
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def _shared(gradient: Tensor, k: Tensor) -> Tensor:
    """The gradient [B,H,N,E] of repeated heads, of the G heads that were repeated."""
    return gradient.unflatten(1, (k.shape[1], -1)).sum(2).to(k)
