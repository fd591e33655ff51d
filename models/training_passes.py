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
from collections.abc import Iterator
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
# Entries of a mask [M,N] up to which a CPU takes less time for one kernel with it than for two without.
_MASKED = 1 << 18


class TrainingPasses:
    """Takes the place of one layer's cache: rotated keys and values of all passes, with gradients.

    Args:
        count: passes that are run at most.
        segments: [B,N] int64 on the CPU, the sample that each input of a packed row belongs to, in ascending order;
            None: a row is one sample, padded on the right.
        skipped: first inputs of each row whose keys alone `layer` makes, in the first pass.
    """

    def __init__(self, count: int, segments: Tensor | None = None, skipped: int = 0):
        assert segments is None or segments.device.type == "cpu", "the host says where samples begin"
        self.count, self.segments, self.skipped = count, segments, skipped
        self.step = 0
        self.keys: _Keys | None = None
        # Stand for the keys and values so far in the graph: their gradients are summed along the passes.
        self._links: tuple[Tensor, Tensor | None] | None = None
        self._layer: tuple[_Layer, Tensor] | None = None  # what `layer` keeps, and its link to the pass before

    def layer(self, layer: Any, embeds: Tensor, states: Tensor, rope: Tensor | None) -> Tensor:
        """States [B,M,D] after the next pass of an EAGLE-3 layer, of all inputs but the `skipped`; later passes, which
        run these alone, read `states` and nothing else.

        Args:
            layer: a `JoinedLayer`.
            rope: [B,N,E/2,2] of its positions.
        """
        step, self.step = self.step, self.step + 1
        if self._layer is None:
            assert rope is not None
            attention, mlp, width = layer.self_attn, layer.mlp, states.shape[-1]
            parts = attention.q_proj, attention.k_proj, attention.v_proj
            joined = torch.cat([part.weight for part in parts])  # [(H+2G)*E,2*D]
            bias = torch.cat([part.bias for part in parts]) if parts[0].bias is not None else None
            # The embedding is the same in all passes, so its half of the products is made once.
            half = F.linear(layer.input_layernorm(embeds), joined[:, :width], bias)
            weights = (
                layer.hidden_norm.weight, joined[:, width:], attention.o_proj.weight,
                layer.post_attention_layernorm.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight,
            )  # fmt: skip
            kept = _Layer(attention, half.detach(), rope, weights, self.count - 1, self.segments)
            out, link = _LayerPass.apply(kept, step, self.skipped, states, half, *weights)
        else:
            kept, link = self._layer
            out, link = _LayerPass.apply(kept, step, 0, states, link)
        self._layer = kept, link
        return out

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
        self._mask: Tensor | None = None

    def mask(self, count: int) -> Tensor:
        """[M,N] additive: what the last `count` inputs see of true keys in a first pass; pass s: all columns but s."""
        if self._mask is None or len(self._mask) != count:
            whole = self.true.new_full((count, self.true.shape[3]), -math.inf)
            self._mask = whole.triu_(self.true.shape[3] - count + 1)
        return self._mask

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
        if k is not None and v is not None:
            keys.put(k, v, step)
        out, whole, ctx.kernels, rests = _seen(keys, q, step)
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
        if step and d_held is None:
            d_held = torch.zeros_like(keys.held, dtype=keys.wide)
        rests = [tuple(saved.pop(0) for _ in range(count)) for count in ctx.counts]
        dq = _seen_backward(keys, gradient, q, out, whole, ctx.kernels, rests, step, d_true, d_held)
        if d_held is None:
            return dq, None, None, d_true, None, None, None
        own = d_held[:, step - 1, :, :, keys.columns(step, q.shape[2])].to(keys.true)
        return dq, own[0], own[1], d_true, d_held if step > 1 else None, None, None


def _seen(keys: _Keys, q: Tensor, step: int) -> tuple[Tensor, Tensor, list[Kernel], list[tuple[Tensor | None, ...]]]:
    """What the queries [B,H,M,E] of a pass see [B,H,M,E], the log-sum-exp of their scores [B,H,M], and what
    `_True.attend` left.
    """
    outs, lses, kernels, rests = _True(q, keys, step).attend()
    if not step and len(outs) == 1:
        return outs[0].to(q), lses[0], kernels, rests
    grouped, scores = _grouped(q, keys).to(keys.wide), [lse.unsqueeze(0) for lse in lses]
    if step:
        scores.append(keys.scores(grouped, step).flatten(2, 3))
    every = torch.cat(scores)
    logs = every.log_softmax(0)
    whole, weights = every[-1] - logs[-1], logs.exp_().unsqueeze(-1)  # an input's own key is the last, never hidden
    late = _grouped(weights[len(lses) :], keys, 2)
    terms = [(late[part] * v).sum(0).flatten(1, 2) for part, _, v in keys.parts(grouped, step)]
    terms += map(torch.mul, outs, weights)
    return functools.reduce(torch.add, terms).to(q), whole, kernels, rests


def _seen_backward(
    keys: _Keys, gradient: Tensor, q: Tensor, out: Tensor, whole: Tensor, kernels: list[Kernel],
    rests: list[tuple[Tensor | None, ...]], step: int, d_true: Tensor, d_held: Tensor | None,
) -> Tensor:  # fmt: skip
    """The gradient of the queries, from that of `out` [B,H,M,E]; those of keys and values are added to `d_true`
    [2,B,G,N,E] and `d_held` [2,P,B,G,L,E].
    """
    dq = _True(q, keys, step).gradients(gradient, out, whole, kernels, rests, d_true)
    if d_held is None:
        return dq.to(q)
    grouped, wide = _grouped(q, keys).to(keys.wide), _grouped(gradient, keys).to(keys.wide)
    along = (wide * _grouped(out, keys)).sum(-1)
    p = (keys.scores(grouped, step) - _grouped(whole, keys)).exp_()
    columns, scale = keys.columns(step, q.shape[2]), 1 / math.sqrt(q.shape[-1])
    dq = _grouped(dq, keys)
    for part, k, v in keys.parts(grouped, step):
        ds = ((wide * v).sum(-1).sub_(along)).mul_(p[part]).mul_(scale).unsqueeze(-1)
        dq = dq + (ds * k).sum(0)
        for held, weights, states in ((d_held[0], ds, grouped), (d_held[1], p[part].unsqueeze(-1), wide)):
            if weights.shape[3] == 1:  # no sum over the query heads of a group
                held[part, :, :, columns].addcmul_(weights.squeeze(3), states.squeeze(2))
            else:
                held[part, :, :, columns] += (weights * states).sum(3)
    return dq.flatten(1, 2).to(q)


class _Layer:
    """What the passes of an EAGLE-3 layer share, and their weights' gradients while they are summed."""

    def __init__(
        self, attention: Any, half: Tensor, rope: Tensor, weights: tuple[Tensor, ...], later: int,
        segments: Tensor | None,
    ):  # fmt: skip
        shape = attention.shape
        assert shape.rope == "half" and not (shape.qk_norm or shape.qk_rms_norm), "EAGLE-3's layer is Llama's"
        self.half, self.weights, self.later, self.segments = half, weights, later, segments
        self.num_heads, self.head_dim, self.eps = shape.num_heads, attention.head_dim, shape.norm_eps
        self.turned = shape.num_heads + shape.num_kv_heads
        cos, sin = rope.unsqueeze(-3).unbind(-1)
        self.cos, self.sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)  # [B,N,1,E]
        self.keys: _Keys | None = None
        self.sums: dict[int, Tensor] = {}
        self.d_half = self.d_true = self.d_held = half.new_zeros(0)

    def add(self, number: int, gradient: Tensor, inputs: Tensor) -> None:
        """Add to the gradient of a linear layer's weight [O,I] that of its outputs [S,O] at `inputs` [S,I]."""
        if number in self.sums:
            self.sums[number].addmm_(gradient.T, inputs)
        else:
            self.sums[number] = gradient.T @ inputs

    def normed(self, number: int, states: Tensor) -> tuple[Tensor, Tensor]:
        """States [S,D] normed as by `RMSNorm`, and what each was multiplied by [S,1]."""
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(states) * self.weights[number], scale

    def normed_backward(self, number: int, gradient: Tensor, states: Tensor, scale: Tensor) -> Tensor:
        """The gradient of `states` [S,D], from that of what `normed` returned; its weight's is added."""
        unit, weight, wide = states * scale, self.weights[number].to(scale), gradient.to(scale)
        along = wide * unit
        part = along.sum(0)
        self.sums[number] = part if number not in self.sums else self.sums[number].add_(part)
        mean = (along @ weight).unsqueeze(-1)
        return torch.addcmul(wide * weight, unit, mean, value=-1 / len(weight)).mul_(scale).to(states)


class _LayerPass(torch.autograd.Function):
    """A pass of an EAGLE-3 layer, with its backward pass written out: in small models most of a step is calls, and
    autograd makes three times as many. Its weights' gradients are summed over passes, and returned by the first one,
    whose backward pass comes last.
    """

    @staticmethod
    def forward(
        ctx: Any, layer: _Layer, step: int, skipped: int, states: Tensor, link: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        (_, qkv, out, _, gate, up, down), (rows, count, _) = layer.weights, states.shape
        x = states.flatten(0, 1)
        normed, scale = layer.normed(0, x)
        read = torch.addmm(layer.half[:, -count:].flatten(0, 1), normed, qkv.T).view(rows, count, -1, layer.head_dim)
        cos, sin = layer.cos[:, -count:], layer.sin[:, -count:]
        qk = read[:, :, : layer.turned].to(cos)
        qk = torch.addcmul(qk * cos, qk.roll(layer.head_dim // 2, -1), sin).to(read).transpose(1, 2)
        q, k, v = (
            qk[:, : layer.num_heads, skipped:],
            qk[:, layer.num_heads :],
            read[:, :, layer.turned :].transpose(1, 2),
        )
        if layer.keys is None:
            layer.keys = _Keys(torch.stack([k, v]), layer.later, layer.segments)
        else:
            layer.keys.put(k, v, step)
        seen, whole, ctx.kernels, rests = _seen(layer.keys, q, step)
        mixed = seen.transpose(1, 2).flatten(2).flatten(0, 1)
        y = torch.addmm(states[:, skipped:].flatten(0, 1), mixed, out.T)
        inner, inner_scale = layer.normed(3, y)
        opening, lifted = inner @ gate.T, inner @ up.T
        opened = F.silu(opening)
        product = opened * lifted
        ctx.layer, ctx.step, ctx.skipped, ctx.counts = layer, step, skipped, [len(rest) for rest in rests]
        ctx.save_for_backward(
            x, scale, normed, q, seen, whole, mixed, y, inner, inner_scale, opening, opened, lifted, product,
            *(tensor for rest in rests for tensor in rest),
        )  # fmt: skip
        return torch.addmm(y, product, down.T).view(rows, count - skipped, -1), states.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> Any:  # type: ignore[override]
        layer, step, skipped = ctx.layer, ctx.step, ctx.skipped
        x, scale, normed, q, seen, whole, mixed, y, inner, inner_scale, opening, opened, lifted, product, *saved = (
            ctx.saved_tensors
        )
        keys, (_, qkv, out, _, gate, up, down) = layer.keys, layer.weights
        rows, _, count, _ = q.shape
        g = torch.zeros_like(y) if gradient is None else gradient.flatten(0, 1)
        layer.add(6, g, product)
        d_product = g @ down
        d_lifted = d_product * opened
        d_opening = torch.ops.aten.silu_backward(d_product.mul_(lifted), opening)
        layer.add(4, d_opening, inner)
        layer.add(5, d_lifted, inner)
        g = layer.normed_backward(3, (d_opening @ gate).addmm_(d_lifted, up), y, inner_scale).add_(g)
        layer.add(2, g, mixed)
        d_seen = (g @ out).view(rows, count, layer.num_heads, -1).transpose(1, 2)
        if not layer.d_true.numel():
            layer.d_true = torch.zeros_like(keys.true, dtype=keys.wide)
            layer.d_held = torch.zeros_like(keys.held, dtype=keys.wide)
            layer.d_half = torch.zeros_like(layer.half)
        rests = [tuple(saved.pop(0) for _ in range(number)) for number in ctx.counts]
        dq = _seen_backward(
            keys, d_seen, q, seen, whole, ctx.kernels, rests, step, layer.d_true, layer.d_held if step else None
        )
        dk, dv = layer.d_held[:, step - 1, :, :, keys.columns(step, count)] if step else layer.d_true
        if skipped:  # which have keys alone
            dq, g = F.pad(dq, (0, 0, skipped, 0)), F.pad(g.view(rows, count, -1), (0, 0, skipped, 0)).flatten(0, 1)
            count += skipped
        cos, sin = layer.cos[:, -count:], layer.sin[:, -count:]
        qk = torch.cat([dq.to(cos), dk.to(cos)], dim=1).transpose(1, 2)
        qk = torch.addcmul(qk * cos, qk.roll(layer.head_dim // 2, -1), sin, value=-1)
        read = torch.cat([qk.to(x), dv.transpose(1, 2).to(x)], dim=2).flatten(2)
        layer.d_half[:, -count:] += read
        read = read.flatten(0, 1)
        layer.add(1, read, normed)
        g = layer.normed_backward(0, read @ qkv, x, scale).add_(g).view(rows, count, -1)
        if step:
            return None, None, None, g, None
        sums, layer.sums = layer.sums, {}
        return None, None, None, g, layer.d_half, *(sums[n].to(weight) for n, weight in enumerate(layer.weights))


def _grouped(states: Tensor, keys: _Keys, dim: int = 1) -> Tensor:
    """[...,H,...] -> [...,G,R,...] of heads in dimension `dim`."""
    return states.unflatten(dim, (keys.true.shape[2], -1))


class _Piece(NamedTuple):
    """Queries that attend to some of the true states' keys, as a kernel knows without a mask."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool
    mask: Tensor | None = None  # [queries,keys] additive


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
        if before > 0 and q.device.type == "cpu" and count * keys.true.shape[3] <= _MASKED:
            self.pieces.append(_Piece(rows, queries, slice(0, before + count), False, keys.mask(count)[:, step:]))
            return
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
            out, lse, rest = attend(q, k, v, kernel, causal=piece.causal, mask=piece.mask)
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
                gradient[at], self.q[at], k, v, out[at], whole[at], kernel, rest, causal=piece.causal, mask=piece.mask
            )
            d_true[0, piece.rows, :, piece.keys] += dk
            d_true[1, piece.rows, :, piece.keys] += dv
            if self.packed and total is not None:
                total[at] = dq
            else:
                total = dq if total is None else total + dq
        assert total is not None
        return F.pad(total, (0, 0, self.moved, 0)) if self.moved and not self.packed and self.pieces else total
