"""Attention of training-time test (EAGLE-3): the first pass's keys densely, one key of its own for each later pass.

Input i of pass s stands after true states up to input i - s, and after its own drafts: input i - s + r of pass r, for
r = 1 to s. The true states' keys are plainly causal once queries are moved by s; each other pass adds one score for
each query, merged by log-sum-exp. Nothing of size [N,N] is kept, and memory grows linearly with passes.
Letters: B rows, N inputs of the first pass, M of later ones (the last of the N), P later passes, L = M + P - 1,
H heads, G key-value heads, R = H / G, E head width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..core.states import uploaded
from .causal_attention import Kernel, attend, attend_backward, kernel_of

# Numbers that an elementwise product of several passes' keys may have: what does not fit a cache takes longer at once
# than pass by pass, and what does takes fewer calls.
_AT_ONCE = 1 << 19


class TrainingPasses:
    """Takes the place of one layer's cache: rotated keys and values of all passes, with gradients.

    Args:
        count: passes that are run at most.
        segments: [B,N] int64 on the CPU, the sample that each input of a packed row belongs to, in ascending order;
            None: a row is one sample, padded on the right.
    """

    def __init__(self, count: int, segments: Tensor | None = None):
        assert segments is None or segments.device.type == "cpu", "the host says where samples begin"
        self.count, self.segments = count, segments
        self.step = 0
        self.keys: _Keys | None = None
        self._shared: dict[Hashable, Tensor] = {}
        # Stand for the keys and values so far in the graph: their gradients are summed along the passes.
        self._links: tuple[Tensor, Tensor | None] | None = None

    def shared(self, name: Hashable, count: int, make: Callable[[], Tensor]) -> Tensor:
        """[B,N,...] that all passes read: made in the first one, and of it the last `count` inputs."""
        if name not in self._shared:
            self._shared[name] = make()
        elif self._shared[name].shape[1] != count:
            self._shared[name] = self._shared[name][:, -count:]
        return self._shared[name]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What the queries [B,H,N,E] of the next pass see, [B,H,N,E]; its keys and values [B,G,N,E] are kept.

        Later passes may run the last M inputs alone; all of them are then as many.
        """
        step, self.step = self.step, self.step + 1
        if step == 0:
            true = torch.stack([k, v])
            self.keys, self._links = _Keys(true.detach(), self.count - 1, self.segments), (true, None)
            if self.segments is None:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        assert self.keys is not None and self._links is not None
        out, *links = _Attention.apply(q, *((k, v) if step else (None, None)), *self._links, self.keys, step)
        self._links = (links[0], links[1])
        return out


class _Keys:
    """Keys and values of all passes.

    Those of later passes lie side by side such that what an input sees of all of them stands in one column: input i of
    pass r (from 1) in column P - r + i.
    """

    def __init__(self, true: Tensor, later: int, segments: Tensor | None):
        self.true, self.later = true, later  # true: [2,B,G,N,E]
        self.segments = None if segments is None else uploaded(segments, true.device)
        # Row, first input and the one behind the last of each sample of packed rows.
        self.samples: list[tuple[int, int, int]] = []
        for row, numbers in enumerate(() if segments is None else segments):
            ends = torch.unique_consecutive(numbers, return_counts=True)[1].cumsum(0).tolist()
            self.samples += zip([row] * len(ends), [0, *ends[:-1]], ends, strict=True)
        self.wide = torch.promote_types(true.dtype, torch.float32)
        self.held = true.new_zeros(0)  # [2,P,B,G,L,E] from the first later pass on
        self._hidden = true.new_zeros(0)

    def columns(self, step: int, count: int) -> slice:
        """Where the `count` inputs of pass `step`, and all that they see of later passes, stand."""
        return slice(self.later - step, self.later - step + count)

    def put(self, k: Tensor, v: Tensor, step: int) -> None:
        """Keep keys and values [B,G,M,E] of a later pass."""
        rows, heads, count, width = k.shape
        if step == 1:
            self.held = k.new_zeros(2, self.later, rows, heads, count + self.later - 1, width)
            segments = k.new_zeros(1, count, dtype=torch.int64) if self.segments is None else self.segments
            before = F.pad(segments, (self.later - 1, 0), value=-1).unfold(1, count, 1)  # [B,P,M], the farthest first
            self._hidden = (before != segments[:, None]).transpose(0, 1)
        for held, new in zip(self.held, (k, v), strict=True):
            held[step - 1, :, :, self.columns(step, count)] = new

    def hidden(self, step: int) -> Tensor:
        """[step,B,1,1,M] bool: keys of later passes that are another sample's or do not exist."""
        return self._hidden[self.later - step :, :, None, None]

    def parts(self, q: Tensor, step: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Numbers of later passes up to `step` with their keys and values [S,B,G,1,M,E], a few passes at a time."""
        each = max(1, _AT_ONCE // max(1, q.numel()))
        for start in range(0, step, each):
            part = slice(start, min(start + each, step))
            k, v = self.held[:, part, :, :, None, self.columns(step, q.shape[-2])]
            yield part, k, v

    def scores(self, q: Tensor, step: int) -> Tensor:
        """[step,B,G,R,M] of queries [B,G,R,M,E], minus infinity where `hidden`."""
        scores = torch.cat([(q * k).sum(-1) for _, k, _ in self.parts(q, step)])
        return scores.mul_(1 / math.sqrt(q.shape[-1])).masked_fill_(self.hidden(step), -math.inf)


class _Attention(torch.autograd.Function):
    """Queries, keys and values of a pass, and the links; returns what they see, and links after this pass.

    Each pass adds what it gives to gradients of earlier keys to those that later passes have summed.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor | None, v: Tensor | None, link: Tensor, later: Tensor | None, keys: _Keys,
        step: int,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.keys, ctx.step = keys, step
        true = _True(q, keys, step)
        outs, lses, ctx.kernels, rests = true.attend()
        if k is None or v is None:
            out, whole = outs[0].to(q), lses[0]
        else:
            keys.put(k, v, step)
            grouped = _grouped(q, keys).to(keys.wide)
            scores = keys.scores(grouped, step).flatten(2, 3)
            every = torch.cat([torch.stack(lses), scores]) if lses else scores
            whole = every.logsumexp(0)
            weights = (every - whole).exp_().unsqueeze(-1)
            late = _grouped(weights[len(lses) :], keys, 2)
            terms = [*map(torch.mul, outs, weights)]
            terms += [(late[part] * v).sum(0).flatten(1, 2) for part, _, v in keys.parts(grouped, step)]
            out = functools.reduce(torch.add, terms).to(q)
        ctx.counts = [len(rest) for rest in rests]
        ctx.save_for_backward(q, out, whole, *(tensor for rest in rests for tensor in rest))
        empty = torch.empty((), dtype=keys.wide, device=q.device)
        return out, empty.expand(keys.true.shape), empty.expand(keys.held.shape) if step else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, d_true: Tensor | None, d_held: Tensor | None) -> Any:  # type: ignore[override]
        keys, step = ctx.keys, ctx.step
        q, out, whole, *saved = ctx.saved_tensors
        gradient = torch.zeros_like(out) if gradient is None else gradient
        if gradient.stride(-1) != 1:  # an expanded one, which kernels refuse
            gradient = gradient.contiguous()
        # Nobody else holds what a later pass returned here: it is added to in place.
        d_true = torch.zeros_like(keys.true, dtype=keys.wide) if d_true is None else d_true
        rests = [tuple(saved.pop(0) for _ in range(count)) for count in ctx.counts]
        dq = _True(q, keys, step).gradients(gradient, out, whole, ctx.kernels, rests, d_true)
        if not step:
            return dq.to(q), None, None, d_true, None, None, None
        d_held = torch.zeros_like(keys.held, dtype=keys.wide) if d_held is None else d_held
        grouped, wide = _grouped(q, keys).to(keys.wide), _grouped(gradient, keys).to(keys.wide)
        along = (wide * _grouped(out, keys)).sum(-1)
        p = (keys.scores(grouped, step) - _grouped(whole, keys)).exp_()
        columns = keys.columns(step, q.shape[2])
        dq = _grouped(dq, keys)
        for part, k, v in keys.parts(grouped, step):
            ds = (((wide * v).sum(-1) - along) * p[part]).mul_(1 / math.sqrt(q.shape[-1])).unsqueeze(-1)
            dq = dq + (ds * k).sum(0)
            d_held[0, part, :, :, columns] += (ds * grouped).sum(3)
            d_held[1, part, :, :, columns] += (p[part].unsqueeze(-1) * wide).sum(3)
        own = d_held[:, step - 1, :, :, columns].to(keys.true)
        return dq.flatten(1, 2).to(q), own[0], own[1], d_true, d_held if step > 1 else None, None, None


def _grouped(states: Tensor, keys: _Keys, dim: int = 1) -> Tensor:
    """[...,H,...] -> [...,G,R,...] of heads in dimension `dim`."""
    return states.unflatten(dim, (keys.true.shape[2], -1))


class _Piece(NamedTuple):
    """Queries that attend to some of the true states' keys, as a kernel knows without a mask."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool


class _True:
    """Attention of a pass to the true states' keys alone, in pieces.

    Queries of a pass that runs all inputs are moved by its number: the first ones see no true state. After N - M
    inputs that later passes leave out, all queries see the first of them, and the rest is causal. In a packed row each
    sample is a piece of its own: a mask over all of its inputs would be [N,N], and most of it hidden.
    """

    def __init__(self, q: Tensor, keys: _Keys, step: int):
        self.q, self.keys, count = q, keys, q.shape[2]
        self.moved = max(0, step - (keys.true.shape[3] - count))
        self.packed = bool(keys.samples)
        if self.packed:
            assert count == keys.true.shape[3], "packed rows run all of their inputs"
            self.pieces = [
                _Piece(slice(row, row + 1), slice(start + step, end), slice(start, end - step), True)
                for row, start, end in keys.samples
                if end - start > step
            ]
            return
        before, rows, queries = keys.true.shape[3] - count - step, slice(None), slice(self.moved, None)
        self.pieces = []
        if before > 0:
            self.pieces.append(_Piece(rows, queries, slice(0, before), False))
        if self.moved < count:
            self.pieces.append(_Piece(rows, queries, slice(max(0, before), before + count), True))

    def attend(self) -> tuple[list[Tensor], list[Tensor], list[Kernel], list[tuple[Tensor | None, ...]]]:
        """Outputs [B,H,M,E] and log-sum-exps [B,H,M] of disjoint keys; of each piece the kernel and what it left.

        Queries that see no key have zeros, and minus infinity.
        """
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        kernels: list[Kernel] = []
        rests: list[tuple[Tensor | None, ...]] = []
        for piece in self.pieces:
            q, (k, v) = self.q[piece.rows, :, piece.queries], self.keys.true[:, piece.rows, :, piece.keys]
            kernel = kernel_of(q, k, v)
            out, lse, rest = attend(q, k, v, kernel, causal=piece.causal)
            outs.append(out)
            lses.append(lse)
            kernels.append(kernel)
            rests.append(rest)
        if self.packed:
            whole = self.q.new_zeros(self.q.shape)
            sums = self.q.new_full(self.q.shape[:3], -math.inf, dtype=self.keys.wide)
            for piece, out, lse in zip(self.pieces, outs, lses, strict=True):
                whole[piece.rows, :, piece.queries], sums[piece.rows, :, piece.queries] = out, lse
            outs, lses = [whole], [sums]
        elif self.moved:
            outs = [F.pad(out, (0, 0, self.moved, 0)) for out in outs]
            lses = [F.pad(lse, (self.moved, 0), value=-math.inf) for lse in lses]
        return outs, lses, kernels, rests

    def gradients(
        self, gradient: Tensor, out: Tensor, whole: Tensor, kernels: list[Kernel],
        rests: list[tuple[Tensor | None, ...]], d_true: Tensor,
    ) -> Tensor:  # fmt: skip
        """Gradients of queries [B,H,M,E]; those of true keys and values are added to `d_true` [2,B,G,N,E].

        Args:
            gradient: [B,H,M,E] of the merged output `out`; `whole` is the merged log-sum-exp.
        """
        gradient, total = gradient.to(self.q), None
        if self.packed or not self.pieces:
            total = torch.zeros_like(self.q)
        for piece, kernel, rest in zip(self.pieces, kernels, rests, strict=True):
            at = piece.rows, slice(None), piece.queries
            k, v = self.keys.true[:, piece.rows, :, piece.keys]
            dq, dk, dv = attend_backward(
                gradient[at], self.q[at], k, v, out[at], whole[at], kernel, rest, causal=piece.causal
            )
            d_true[0, piece.rows, :, piece.keys] += dk
            d_true[1, piece.rows, :, piece.keys] += dv
            if self.packed and total is not None:
                total[at] = dq
            else:
                total = dq if total is None else total + dq
        assert total is not None
        return F.pad(total, (0, 0, self.moved, 0)) if self.moved and not self.packed and self.pieces else total
