"""`TrainingPasses.attend` for long rows: nothing of size [N,N] is kept, and memory grows linearly with passes.

The true states' keys are plainly causal once the queries of pass s are moved by s, so a fused kernel attends to them;
each later pass adds one score for each query, merged by log-sum-exp. The backward pass is written out for that.
Letters: B rows, N inputs of the first pass, M of later ones (the last of the N), P later passes, L = M + P - 1,
H heads, G key-value heads, R = H / G, E head width.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn import functional as F

from ...core.states import uploaded

Kernel = Literal["cpu", "flash", "efficient", "plain"]
Ran = tuple[Kernel, int]  # a kernel, and how many tensors it left for its backward pass


class LongPasses:
    """Keys and values of all passes, with gradients; the arguments are those of `TrainingPasses`."""

    def __init__(self, count: int, segments: Tensor | None = None):
        self.count, self.segments = count, segments
        self.keys: Keys | None = None
        # Stand for the keys and values so far in the graph: their gradients are summed along the passes.
        self._links: tuple[Tensor, Tensor | None] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: int) -> Tensor:
        """Attend as `TrainingPasses.attend` does in pass `step`, with queries [B,H,M,E]."""
        if step == 0:
            true = torch.stack([k, v])
            self.keys, self._links = Keys(true.detach(), self.count - 1, self.segments), (true, None)
            if self.segments is None and q.shape[2] == k.shape[2]:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        assert self.keys is not None and self._links is not None
        out, *links = _Attention.apply(q, *((k, v) if step else (None, None)), *self._links, self.keys, step)
        self._links = (links[0], links[1])
        return out


class _Attention(torch.autograd.Function):
    """Queries, keys and values of a pass, and the links; returns what they see, and links after this pass.

    Each pass adds what it gives to gradients of earlier keys to those that later passes have summed.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor | None, v: Tensor | None, link: Tensor, later: Tensor | None, keys: Keys,
        step: int,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.keys, ctx.step = keys, step
        if k is not None and v is not None:
            keys.put(k, v, step)
        out, whole, ctx.kernels, rests = keys.attend(q, step)
        ctx.save_for_backward(q, out, whole, *rests)
        empty = torch.empty((), dtype=keys.wide, device=q.device)
        return out, empty.expand(keys.true.shape), empty.expand(keys.held.shape) if step else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, d_true: Tensor | None, d_held: Tensor | None) -> Any:  # type: ignore[override]
        keys, step = ctx.keys, ctx.step
        q, out, whole, *rests = ctx.saved_tensors
        # Nobody else holds what a later pass returned here: it is added to in place.
        d_true = torch.zeros_like(keys.true, dtype=keys.wide) if d_true is None else d_true
        if step and d_held is None:
            d_held = torch.zeros_like(keys.held, dtype=keys.wide)
        gradient = torch.zeros_like(out) if gradient is None else gradient
        dq = keys.attend_backward(gradient, q, out, whole, ctx.kernels, rests, step, d_true, d_held)
        if d_held is None:
            return dq, None, None, d_true, None, None, None
        dk, dv = keys.of_pass(d_held, step, q.shape[2]).to(keys.true)
        return dq, dk, dv, d_true, d_held if step > 1 else None, None, None


class _Piece(NamedTuple):
    """Queries that attend to some of the true states' keys, as a kernel knows."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool


class Keys:
    """Keys and values of all passes, attention to them, and its backward pass.

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

    def of_pass(self, held: Tensor, step: int, count: int) -> Tensor:
        """[2,B,G,M,E] of `held` that are those of pass `step` itself."""
        return held[:, step - 1, :, :, self.columns(step, count)]

    def put(self, k: Tensor, v: Tensor, step: int) -> None:
        """Keep keys and values [B,G,M,E] of a later pass."""
        rows, heads, count, width = k.shape
        if step == 1:
            self.held = k.new_zeros(2, self.later, rows, heads, count + self.later - 1, width)
            segments = k.new_zeros(1, count, dtype=torch.int64) if self.segments is None else self.segments
            before = F.pad(segments, (self.later - 1, 0), value=-1).unfold(1, count, 1)  # [B,P,M], the farthest first
            self._hidden = (before != segments[:, None]).transpose(0, 1)
        torch.stack([k, v], out=self.of_pass(self.held, step, count))

    def _later(self, which: int, step: int, count: int) -> Tensor:
        """[step,B,G,1,M,E]: what each of M inputs sees of later passes up to `step`: keys (0) or values (1)."""
        return self.held[which, :step, :, :, None, self.columns(step, count)]

    def _products(self, which: int, states: Tensor, step: int) -> Tensor:
        """[step,B,G,R,M] of states [B,G,R,M,E] with the keys or values of later passes."""
        return torch.stack([(states * part).sum(-1) for part in self._later(which, step, states.shape[-2])])

    def _add_mixed(self, into: Tensor, which: int, weights: Tensor, step: int) -> None:
        """Add to `into` [B,G,R,M,E] keys or values of later passes, by weights [step,B,G,R,M]."""
        for weight, part in zip(weights.unsqueeze(-1), self._later(which, step, into.shape[-2]), strict=True):
            into.addcmul_(weight, part)

    def _scores(self, q: Tensor, step: int) -> Tensor:
        """[step,B,G,R,M] of queries [B,G,R,M,E], minus infinity for another sample's keys and those before a row."""
        hidden = self._hidden[self.later - step :, :, None, None]
        return self._products(0, q, step).mul_(1 / math.sqrt(q.shape[-1])).masked_fill_(hidden, -math.inf)

    def grouped(self, states: Tensor, dim: int = 1) -> Tensor:
        """[...,H,...] -> [...,G,R,...] of heads in dimension `dim`, in at least float32."""
        heads, groups = states.shape[dim], self.true.shape[2]
        return (states.unsqueeze(dim + 1) if heads == groups else states.unflatten(dim, (groups, -1))).to(self.wide)

    def attend(self, q: Tensor, step: int) -> tuple[Tensor, Tensor, list[Ran], list[Tensor | None]]:
        """What the queries [B,H,M,E] of a pass see [B,H,M,E], and for the backward pass the log-sum-exp of their scores
        [B,H,M], kernels, and what those left.
        """
        grouped = self.grouped(q)
        outs, lses, kernels, rests = self._attend_true(q, step)
        if not step and len(outs) == 1:
            return outs[0].to(q), lses[0], kernels, rests
        scores = [lse.unsqueeze(0) for lse in lses]
        if step:
            scores.append(self._scores(grouped, step).flatten(2, 3))
        every = torch.cat(scores)
        logs = every.log_softmax(0)
        whole, weights = every[-1] - logs[-1], logs.exp_()  # an input's own key is the last, never hidden
        mixed = torch.zeros_like(grouped)
        for out, weight in zip(outs, weights.unsqueeze(-1), strict=False):
            mixed.addcmul_(self.grouped(out), self.grouped(weight))
        if step:
            self._add_mixed(mixed, 1, self.grouped(weights[len(lses) :], 2), step)
        return mixed.flatten(1, 2).to(q), whole, kernels, rests

    def attend_backward(
        self, gradient: Tensor, q: Tensor, out: Tensor, whole: Tensor, kernels: list[Ran],
        rests: list[Tensor | None], step: int, d_true: Tensor, d_held: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The gradient of the queries, from that of what they see, `out`; those of keys and values are added to
        `d_true` [2,B,G,N,E] and, of later passes, `d_held` [2,P,B,G,L,E].
        """
        if gradient.stride(-1) != 1:  # an expanded one, which kernels refuse
            gradient = gradient.contiguous()
        grouped, wide, scale = self.grouped(q), self.grouped(gradient), 1 / math.sqrt(q.shape[-1])
        if step:
            late = self._products(1, wide, step)
        dq = self.grouped(self._attend_true_backward(gradient.to(q), q, out, whole, kernels, rests, step, d_true))
        if step and d_held is not None:
            p = (self._scores(grouped, step) - self.grouped(whole)).exp_()
            ds = late.sub_((wide * self.grouped(out)).sum(-1)).mul_(p).mul_(scale)
            self._add_mixed(dq, 0, ds, step)
            for into, weights, states in zip(d_held.unbind(0), (ds, p), (grouped, wide), strict=True):
                for weight, part in zip(weights.unsqueeze(-1), into[:step], strict=True):
                    part[:, :, self.columns(step, q.shape[2])] += (weight * states).sum(2)
        return dq.flatten(1, 2).to(q)

    def _pieces(self, step: int, count: int) -> list[_Piece]:
        """Queries of a pass and what they see of the true states' keys, in pieces that kernels know.

        Queries of a pass that runs all inputs are moved by its number: the first ones see no true state. After N - M
        inputs that are left out, all queries see the first of them, and the rest is causal. In a packed row each sample
        is a piece of its own: a mask over all of its inputs would be [N,N], and most of it hidden.
        """
        if self.samples:
            assert count == self.true.shape[3], "packed rows run all of their inputs"
            return [
                _Piece(slice(row, row + 1), slice(start + step, end), slice(start, end - step), True)
                for row, start, end in self.samples
                if end - start > step
            ]
        before, rows = self.true.shape[3] - count - step, slice(None)
        moved = max(0, -before)
        if moved >= count:
            return []
        last = _Piece(rows, slice(moved, None), slice(max(0, before), before + count), True)
        if before <= 0:
            return [last]
        return [_Piece(rows, slice(None), slice(0, before), False), last]

    def _attend_true(self, q: Tensor, step: int) -> tuple[list[Tensor], list[Tensor], list[Ran], list[Tensor | None]]:
        """Outputs [B,H,M,E] and log-sum-exps [B,H,M] of disjoint true keys; of each piece the kernel and what it left.

        Queries that see no key have zeros, and minus infinity.
        """
        outs, lses, kernels, rests = list[Tensor](), list[Tensor](), list[Ran](), list[Tensor | None]()
        pieces = self._pieces(step, q.shape[2])
        for piece in pieces:
            read, at = q[piece.rows, :, piece.queries], (piece.rows, slice(None), piece.keys)
            k, v = self.true[0][at], self.true[1][at]
            kernel = kernel_of(read, k, v)
            out, lse, rest = attend(read, k, v, kernel, causal=piece.causal)
            outs.append(out)
            lses.append(lse)
            kernels.append((kernel, len(rest)))
            rests += rest
        if self.samples:
            whole, sums = q.new_zeros(q.shape), q.new_full(q.shape[:3], -math.inf, dtype=self.wide)
            for piece, out, lse in zip(pieces, outs, lses, strict=True):
                whole[piece.rows, :, piece.queries], sums[piece.rows, :, piece.queries] = out, lse
            return [whole], [sums], kernels, rests
        if pieces and (moved := pieces[0].queries.start):
            outs = [F.pad(out, (0, 0, moved, 0)) for out in outs]
            lses = [F.pad(lse, (moved, 0), value=-math.inf) for lse in lses]
        return outs, lses, kernels, rests

    def _attend_true_backward(
        self, gradient: Tensor, q: Tensor, out: Tensor, whole: Tensor, kernels: list[Ran],
        rests: list[Tensor | None], step: int, d_true: Tensor,
    ) -> Tensor:  # fmt: skip
        """Gradients of queries [B,H,M,E], of the true keys alone; those of keys and values are added to `d_true`.
        Output and log-sum-exp (`whole`) are the merged ones.
        """
        total, left = None, iter(rests)
        for piece, (kernel, count) in zip(self._pieces(step, q.shape[2]), kernels, strict=True):
            at, keys = (piece.rows, slice(None), piece.queries), (piece.rows, slice(None), piece.keys)
            dq, dk, dv = attend_backward(
                gradient[at], q[at], self.true[0][keys], self.true[1][keys], out[at], whole[at], kernel,
                tuple(itertools.islice(left, count)), causal=piece.causal,
            )  # fmt: skip
            d_true[0][keys] += dk
            d_true[1][keys] += dv
            if self.samples or piece.queries.start:
                total = torch.zeros_like(q) if total is None else total
                total[at] = dq
            else:
                total = dq if total is None else total + dq
        return torch.zeros_like(q) if total is None else total


# Causal attention that also returns the log-sum-exp of its scores, with the backward pass apart from the forward. What
# is merged with other keys afterwards needs both: the log-sum-exp to merge, and a backward pass that takes the *merged*
# output and log-sum-exp, as ring attention does. `F.scaled_dot_product_attention` gives neither, so this calls the
# kernels that it would choose itself.
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
        padded = F.pad(lse, (0, -lse.shape[-1] % 32)).contiguous()
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
