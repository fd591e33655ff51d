"""Attention of training-time test (EAGLE-3): the first pass's keys densely, one key of its own for each later pass.

Input i of pass s stands behind true states up to input i - s, and behind its own drafts: input i - s + r of pass r, for
r = 1 to s. The true states' keys are plainly causal once queries are moved by s; each other pass adds one score for
each query, merged by log-sum-exp. Nothing of size [N,N] is kept, and memory grows linearly with passes.
Letters: B rows, N inputs, M = N - s, H heads, G key-value heads, R = H / G, E head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .causal_attention import Kernel, attend, attend_backward, kernel_of

_NEVER = 1e30  # a log-sum-exp beside which every probability is zero


class TrainingPasses:
    """Takes the place of one layer's cache: rotated keys and values [B,G,N,E] of all passes, with gradients.

    Args:
        segments: [B,N] int64, the sample that each input of a packed row belongs to, in ascending order; None: a row
            is one sample, padded on the right.
    """

    def __init__(self, segments: Tensor | None = None):
        self.segments = segments
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What the queries [B,H,N,E] of the next pass see, [B,H,N,E]; its keys and values [B,G,N,E] are kept."""
        self.keys.append(k)
        self.values.append(v)
        if len(self.keys) == 1 and self.segments is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return _Attention.apply(q, self.segments, *self.keys, *self.values)


class _Attention(torch.autograd.Function):
    """Queries, segments, then the keys and the values of every pass. Saves them as they are, without moved copies."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, segments: Tensor | None, *held: Tensor) -> Tensor:
        keys, values = held[: len(held) // 2], held[len(held) // 2 :]
        true, lse, ctx.kernel, rest = _true_states(q, keys[0], values[0], len(keys) - 1, segments)
        drafts = _Drafts(q, keys, segments)
        scores = drafts.scores()
        whole = torch.stack([lse, *scores]).logsumexp(0)
        out = true * (lse - whole).exp()[..., None]
        drafts.add(out, [(score - whole).exp() for score in scores], values)
        out = out.to(q)
        ctx.num_held = len(held)
        ctx.save_for_backward(q, segments, out, whole, *held, *rest)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        q, segments, out, whole, *saved = ctx.saved_tensors
        held, rest = saved[: ctx.num_held], tuple(saved[ctx.num_held :])
        keys, values = held[: len(held) // 2], held[len(held) // 2 :]
        step = len(keys) - 1
        if gradient.stride(-1) != 1:  # an expanded one, which kernels refuse
            gradient = gradient.contiguous()
        true = _true_gradients(gradient, q, keys[0], values[0], out, whole, step, segments, ctx.kernel, rest)
        along = (gradient.to(whole) * out.to(whole)).sum(-1)
        dq, dk, dv = _Drafts(q, keys, segments).gradients(gradient, whole, along, values)
        return (dq + true[0]).to(q), None, true[1], *dk, true[2], *dv


def _true_states(
    q: Tensor, k: Tensor, v: Tensor, step: int, segments: Tensor | None
) -> tuple[Tensor, Tensor, Kernel | None, tuple[Tensor | None, ...]]:
    """Attention to the first pass's keys alone [B,H,N,E], its log-sum-exp [B,H,N], the kernel and what it left.

    The first `step` inputs of a sample see none of them: zeros, and minus infinity.
    """
    if step >= q.shape[2]:
        wide = torch.promote_types(q.dtype, torch.float32)
        return torch.zeros_like(q), q.new_full(q.shape[:3], -math.inf, dtype=wide), None, ()
    past, (mask, none) = _past(q, k, v, step), _masks(segments, step)
    kernel = kernel_of(*past, masked=mask is not None)
    out, lse, rest = attend(*past, mask, kernel)
    if none is not None:
        lse = lse.masked_fill(none[:, None], -math.inf)
    return F.pad(out, (0, 0, step, 0)), F.pad(lse, (step, 0), value=-math.inf), kernel, rest


def _true_gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, whole: Tensor, step: int, segments: Tensor | None,
    kernel: Kernel | None, rest: tuple[Tensor | None, ...],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries [B,H,N,E] and of the first pass's keys and values [B,G,N,E], through these keys."""
    if kernel is None:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    past, (mask, none) = _past(q, k, v, step), _masks(segments, step)
    gradient, out, whole = gradient[:, :, step:].to(q), out[:, :, step:], whole[:, :, step:]
    if none is not None:
        gradient = gradient.masked_fill(none[:, None, :, None], 0)
        whole = whole.masked_fill(none[:, None], _NEVER)
    dq, dk, dv = attend_backward(gradient, *past, out, whole, mask, kernel, rest)
    return F.pad(dq, (0, 0, step, 0)), F.pad(dk, (0, 0, 0, step)), F.pad(dv, (0, 0, 0, step))


def _past(q: Tensor, k: Tensor, v: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries that some key of the first pass is for, moved to the last one of them: plainly causal, M inputs each."""
    count = q.shape[2] - step
    return q[:, :, step:], k[:, :, :count], v[:, :, :count]


def _masks(segments: Tensor | None, step: int) -> tuple[Tensor | None, Tensor | None]:
    """Keys of the same sample [B,M,M] and queries without any [B,M], which get their own so that no row is empty."""
    if segments is None:
        return None, None
    count = segments.shape[1] - step
    same = (segments[:, step:, None] == segments[:, None, :count]).tril()
    none = ~same.any(-1)
    return same | torch.diag_embed(none), none


class _Drafts:
    """The keys of later passes: input i of the last one stands behind input i - behind of pass r, behind = s - r."""

    def __init__(self, q: Tensor, keys: Sequence[Tensor], segments: Tensor | None):
        self.keys, self.segments, self.step = keys, segments, len(keys) - 1
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.q = self._grouped(q)
        self.scale = 1 / math.sqrt(q.shape[-1])

    def _grouped(self, states: Tensor) -> Tensor:
        """[B,H,N,...] -> [B,G,R,N,...]."""
        return states.unflatten(1, (self.keys[0].shape[1], -1))

    def _pairs(self, number: int) -> tuple[slice, slice]:
        """Inputs of the last pass, and those of pass `number` whose keys are theirs."""
        count = self.q.shape[3]
        behind = min(self.step - number, count)
        return slice(behind, None), slice(count - behind)

    def _score(self, number: int) -> Tensor:
        """[B,G,R,N - behind], minus infinity where the key is another sample's."""
        mine, its = self._pairs(number)
        score = (self.q[..., mine, :].to(self.wide) * self.keys[number][:, :, None, its]).sum(-1) * self.scale
        if self.segments is not None:
            other = self.segments[:, mine] != self.segments[:, its]
            score = score.masked_fill(other[:, None, None], -math.inf)
        return score

    def scores(self) -> list[Tensor]:
        """[B,H,N] of each later pass, minus infinity for inputs without a key there."""
        scores = []
        for number in range(1, self.step + 1):
            score = self._score(number)
            scores.append(F.pad(score, (self.q.shape[3] - score.shape[3], 0), value=-math.inf).flatten(1, 2))
        return scores

    def add(self, out: Tensor, weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Add the values by their weights [B,H,N] of each later pass to `out` [B,H,N,E], in place."""
        grouped = self._grouped(out)
        for number, weight in enumerate(weights, 1):
            mine, its = self._pairs(number)
            grouped[..., mine, :] += self._grouped(weight)[..., mine, None] * values[number][:, :, None, its]

    def gradients(
        self, gradient: Tensor, whole: Tensor, along: Tensor, values: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Gradients of queries [B,H,N,E], and of keys and values [B,G,N,E] of each later pass, through these keys.

        Args:
            whole: [B,H,N] merged log-sum-exp.
            along: [B,H,N] product of the output and its gradient.
        """
        gradient, whole, along = self._grouped(gradient).to(self.wide), self._grouped(whole), self._grouped(along)
        dq = torch.zeros_like(gradient)
        dk, dv = [], []
        for number in range(1, self.step + 1):
            mine, its = self._pairs(number)
            key, value = self.keys[number][:, :, None, its], values[number][:, :, None, its]
            p = (self._score(number) - whole[..., mine]).exp()
            inner = gradient[..., mine, :]
            ds = (p * ((inner * value).sum(-1) - along[..., mine]) * self.scale)[..., None]
            dq[..., mine, :] += ds * key
            behind = (0, 0, 0, self.q.shape[3] - p.shape[3])
            dk.append(F.pad((ds * self.q[..., mine, :]).sum(2), behind).to(key))
            dv.append(F.pad((p[..., None] * inner).sum(2), behind).to(value))
        return dq.flatten(1, 2), dk, dv
