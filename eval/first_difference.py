"""Where greedy decoding with a drafter leaves plain decoding: the gap of the target's scores there, a tie or a fault.

In bfloat16 a pass over one token and a pass over several round differently, so two tokens whose scores nearly tie may
change places. Plain decoding is repeated up to the first difference, and its own scores say how far apart the two were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.batch import ImageRequest, Request
from ..core.states import Taps
from ..models.decoding.tree import Tree
from ..models.decoding.warp import Distributions
from ..models.targets.base import Target
from .loop import Decoding, EmbeddedRequest, generate
from .rules import Greedy, Verified

# Largest gap of a tie, in units in the last place (ulps) of the larger score in the target's dtype. A score is a sum
# over the whole width after all layers, and each pass rounds it by a few ulps of its own.
TIE_ULPS = {torch.bfloat16: 8.0, torch.float16: 16.0, torch.float32: 64.0, torch.float64: 64.0}


@dataclass(frozen=True)
class Difference:
    """The first token that a method gives and plain decoding does not."""

    place: int  # token of the answer, from 0
    plain: int | None  # plain decoding's token; None: its answer ended before
    drafted: int | None
    gap: float | None  # plain decoding's score of its own token less that of the other; None: an answer was cut
    ulps: float | None  # the gap in units in the last place
    tie: bool


class _Watched(Greedy):
    """The greedy rule, which keeps the scores that it saw last."""

    scores: Tensor

    def __call__(self, tree: Tree, p: Tensor | Distributions, uniforms: Sequence[float] = ()) -> Verified:
        self.scores = Distributions.of(p).row(0)
        return super().__call__(tree, p, uniforms)


def first_difference(
    target: Target,
    request: Request | ImageRequest,
    plain: Sequence[int],
    drafted: Sequence[int],
    decoding: Decoding,
    embedded: EmbeddedRequest | None = None,
) -> Difference:
    """Compare two answers that are not equal.

    Args:
        decoding: of plain decoding, greedy.
    """
    place = next((n for n, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b), None)
    if place is None:  # one is the other's beginning: no rounding ends an answer without an end token
        place = min(len(plain), len(drafted))
        ours, its = (tokens[place] if place < len(tokens) else None for tokens in (plain, drafted))
        return Difference(place, ours, its, None, None, False)
    scores = _scores(target, request, place, decoding, embedded).float()
    top, other = float(scores[plain[place]]), float(scores[drafted[place]])
    dtype = target.embedding.dtype
    size = max(abs(top), abs(other), torch.finfo(dtype).tiny)
    ulps = (top - other) / (2.0 ** math.floor(math.log2(size)) * torch.finfo(dtype).eps)
    return Difference(place, plain[place], drafted[place], top - other, ulps, ulps <= TIE_ULPS[dtype])


def _scores(
    target: Target, request: Request | ImageRequest, place: int, decoding: Decoding, embedded: EmbeddedRequest | None
) -> Tensor:
    """[V] plain decoding's scores of token `place`."""
    if place == 0:
        with torch.inference_mode():
            return target.prefill(request, Taps(), capacity=2)[1].logits[-1]
    rule = _Watched()
    generate(target, None, request, replace(decoding, rule=rule, max_new_tokens=place + 1), embedded=embedded)
    return rule.scores
