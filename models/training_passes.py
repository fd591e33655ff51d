"""Attention of the training-time test (EAGLE-3): what an input of a later pass sees of all passes before it.

Input i of pass s stands after the true states of inputs up to i - s, and after its own drafts: input i - s + r of
pass r, for r = 1 to s. `TrainingPasses.attend` is that as one softmax. For long rows `fast/pass_attention.py` stands
in, since scores [M,N] of every pass would take most of a step's memory.
Letters: B rows, N inputs of the first pass, M of later ones (the last of the N), H heads, G key-value heads, R = H / G,
E head width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.states import uploaded
from . import fast
from .fast.pass_attention import LongPasses

# Inputs of a row, and scores [B,H,N,N] of a pass, up to which the readable form is as quick, and its memory is small.
SHORT, FEW_SCORES = 512, 1 << 24


class TrainingPasses:
    """Takes the place of one layer's cache: rotated keys and values of at most `count` passes, with gradients. In a
    packed row `segments` [B,N] int64 on the CPU say, in ascending order, which sample each input belongs to. Of the
    first `skipped` inputs of each row, which no later pass runs, the first pass makes the keys alone. Of true states an
    input sees the `window` last ones before its own drafts (speculators 0.9, models/eagle3/attention.py), None: all.
    """

    def __init__(self, count: int, segments: Tensor | None = None, skipped: int = 0, window: int | None = None):
        assert segments is None or segments.device.type == "cpu", "the host says where samples begin"
        self.count, self.segments, self.skipped, self.window = count, segments, skipped, window
        self.step = 0
        self.passes: list[tuple[Tensor, Tensor]] = []  # keys and values of each pass
        self.long: LongPasses | None = None
        self.shared: Any = None  # what a layer makes once for all passes

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with the queries [B,H,N,E] of the next pass, whose keys and values [B,G,N,E] are kept.

        Later passes run the last M inputs alone. Returns [B,H,M,E]: the first pass leaves out what is skipped, too.
        """
        step, self.step = self.step, self.step + 1
        sees_all = self.window is None or k.shape[2] <= self.window
        if step == 0:
            q = q[:, :, self.skipped :]
            rows, heads, length = q.shape[0], q.shape[1], k.shape[2]
            # The memory of a window's scores grows with the square of a row's length.
            if sees_all and fast.enabled() and (length > SHORT or rows * heads * length * length > FEW_SCORES):
                self.long = LongPasses(self.count, self.segments)
        if self.long is not None:
            return self.long.attend(q, k, v, step)
        self.passes.append((k, v))
        if step == 0 and sees_all and self.segments is None and not self.skipped:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self._attend_to_all(q, step)

    def _attend_to_all(self, q: Tensor, step: int) -> Tensor:
        """Attend with queries [B,H,M,E] of pass `step`, by one softmax over the keys of all passes, in float32."""
        wide = torch.promote_types(q.dtype, torch.float32)
        (true_k, true_v), *later = [(k.to(wide), v.to(wide)) for k, v in self.passes]
        total, count = true_k.shape[2], q.shape[2]
        queries = q.to(wide).unflatten(1, (true_k.shape[1], -1)) / math.sqrt(q.shape[-1])  # [B,G,R,M,E]
        places = torch.arange(total, device=q.device)
        last = places[total - count :, None] - step
        hidden = places > last  # [M,N]
        if self.window is not None:
            hidden = hidden | (places <= last - self.window)
        if self.segments is None:
            samples = torch.zeros(1, count, dtype=torch.int64, device=q.device)
        else:
            samples = uploaded(self.segments, q.device)
            hidden = (hidden | (samples[:, None] != samples[:, :, None]))[:, None, None]
        scores = [(queries @ true_k.unsqueeze(2).mT).masked_fill(hidden, -math.inf)]  # [B,G,R,M,N]
        values = []
        for number, (k, v) in enumerate(later, 1):  # an input sees one key of each later pass
            before = step - number
            score = (queries * _moved(k, before, 2).unsqueeze(2)).sum(-1, keepdim=True)  # [B,G,R,M,1]
            elsewhere = _moved(samples, before, 1, fill=-1) != samples
            scores.append(score.masked_fill(elsewhere[:, None, None, :, None], -math.inf))
            values.append(_moved(v, before, 2).unsqueeze(2))
        p = torch.cat(scores, dim=-1).softmax(-1)
        mixed = p[..., :total] @ true_v.unsqueeze(2)
        for number, value in enumerate(values, total):
            mixed = mixed + p[..., number, None] * value
        return mixed.flatten(1, 2).to(q)


def _moved(states: Tensor, count: int, dim: int, fill: float = 0.0) -> Tensor:
    """`states` moved by `count` inputs along `dim`: each input has those of the input so far before it, or `fill`."""
    length = states.shape[dim]
    empty = states.narrow(dim, 0, min(count, length))
    return torch.cat([torch.full_like(empty, fill), states.narrow(dim, 0, length - empty.shape[dim])], dim=dim)
