"""What target and EAGLE head give each cell of a finished picture, and numbers from the two.

Letters: n cells, M = n - 1 of them that are drafted (the prefill gives the first), N any number of cells, R rows,
V vocabulary, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....core.batch import CodeBatch
from ....core.states import Taps, TargetStates
from ....models.decoding.warp import Warp
from ....models.drafters.eagle_images import ImageEagleHead, causal_mask
from ....models.targets.base import DrawingTarget

AT_ONCE = 256  # cells whose scores are held in full before they are warped


@dataclass(frozen=True)
class Curves:
    """Guided and warped distributions at the cells of one picture. At temperature 0 they are those at temperature 1."""

    p: Tensor  # [n,V] float32, the target's
    q: Tensor  # [M,V] float32, the head's for the cells from the second on, from true features
    tokens: Tensor  # [n] int64, what was drawn

    @property
    def drafted(self) -> Tensor:
        """[M,V] the target's where the head has one too."""
        return self.p[1:]


@torch.no_grad()
def teacher_forced(target: DrawingTarget, head: ImageEagleHead, condition: Tensor, codes: Tensor, warp: Warp) -> Curves:
    """What decoding sees, had it drawn this picture: p before each token, q at the root of a cycle that starts there.

    Args:
        target: with `states`, `guided`, `guidance` and `device`.
        condition: an `ImageRequest`'s.
        codes: [n] int64, of the image tokenizer.
    """
    rows, count = target.guidance.num_rows, len(codes)
    batch = CodeBatch(
        codes=codes.expand(rows, -1),
        conditions=(condition,) * rows,
        uncond=torch.arange(rows) == 1,
        real=torch.ones(rows, dtype=torch.bool),
        sample_ids=("",) * rows,
        supervised_per_row=0,
    ).to(target.device)
    sequence = target.states(batch, Taps(feature=True))
    assert sequence.feature is not None and sequence.ids is not None
    last = sequence.ids.shape[1] - count - 1  # the prompt's last place, whose feature scores the first code
    p = _distributions(target, sequence.feature[:, last:-1], 0, warp)
    q = _distributions(target, _predicted(head, sequence)[:, last:], 1, warp)
    return Curves(p, q, sequence.ids[0, last + 1 :])


def _predicted(head: ImageEagleHead, sequence: TargetStates) -> Tensor:
    """[R,T-2,D] features of the places from the second on, but for the last, which nothing follows."""
    assert sequence.feature is not None and sequence.ids is not None
    assert sequence.mask is not None and sequence.positions is not None
    features, mask = sequence.feature[:, :-2], causal_mask(head, sequence.mask[:, :-2])
    predicted = head.predict(features.to(head.dtype), sequence.ids[:, 1:-1], sequence.positions[0, :, :-2], mask)
    return predicted.to(features.dtype)


def _distributions(target: DrawingTarget, feature: Tensor, first: int, warp: Warp) -> Tensor:
    """[R,N,D] -> [N,V]; the first of them scores image token number `first`."""
    probs = []
    for start in range(0, feature.shape[1], AT_ONCE):
        part = feature[:, start : start + AT_ONCE]
        probs.append(warp(target.guided(part, [first + start + place for place in range(part.shape[1])])))
    return torch.cat(probs)


def ranks(q: Tensor, tokens: Tensor) -> Tensor:
    """Place of each of `tokens` [N] in the order of q [N,V], from 1; V where q gives it nothing (never drafted)."""
    own = q.gather(-1, tokens[:, None])
    return ((q > own).sum(-1) + 1).where(own[:, 0] > 0, q.shape[-1])


def top_mass(p: Tensor, k: int) -> Tensor:
    """[N] probability of the k most likely tokens."""
    return p.topk(min(k, p.shape[-1]), dim=-1).values.sum(-1)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """[N] sum of min(p, q): how likely exact speculative sampling accepts one draft from q."""
    return torch.minimum(p, q).sum(-1)
