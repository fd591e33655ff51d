"""Attributes that only some drafters and targets have, with defaults for the others.

None of it is part of the `Drafter` protocol: the decoding loop and reports ask here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..fast.cuda_graphs import Graphs

# A drafter's own way to draw children: as `Draw.choose` in `eval/policies/base.py`.
Choose = Callable[[Tensor, int, torch.Generator | None], Tensor]


def members_in(drafter: object) -> Sequence[object]:
    """The drafters that an ensemble mixes, and the modes of a draft LVLM; () of others."""
    return getattr(drafter, "members", ())


def may_pass(drafter: object) -> bool:
    """Whether it may have nothing to say in a cycle, as drafters that look tokens up."""
    return getattr(drafter, "may_pass", False)


def choice_of(drafter: object) -> Choose | None:
    """Its own way to draw children; None: it has none."""
    return getattr(drafter, "choose", None)


def pruning_seconds(drafter: object) -> float:
    """Seconds that the choice of a prompt's visual tokens took; 0 where none are chosen."""
    return getattr(drafter, "pruning_s", 0.0)


def captioning_seconds(drafter: object) -> float:
    """Seconds in which captions of the prompt's pictures were written, for it or for what it is an ensemble of."""
    return getattr(drafter, "captioning_s", 0.0) + sum(map(captioning_seconds, members_in(drafter)))


def visual_counts(drafter: object) -> dict[str, int]:
    """`num_held` and `num_kept`, visual tokens of the prompt that it has, where it counts them."""
    counts = {name: getattr(drafter, name, None) for name in ("num_held", "num_kept")}
    return {name: int(count) for name, count in counts.items() if count is not None}


def head_in(drafter: object) -> Any:
    """The head whose passes it runs; None: it has none."""
    return getattr(drafter, "head", None)


def capture_seconds(part: object) -> float:
    """Seconds that captures took for a target, or for a drafter with all that it is an ensemble of."""
    return sum(graphs.seconds for graphs in _graphs_in(part))


def num_replayed(part: object) -> int:
    """Passes that graphs ran for a target, or for a drafter with all that it is an ensemble of."""
    return sum(graphs.num_replayed for graphs in _graphs_in(part))


def _graphs_in(part: object) -> Iterator[Graphs]:
    if (graphs := getattr(part, "graphs", None)) is not None:
        yield graphs
    for member in members_in(part):
        yield from _graphs_in(member)


@contextmanager
def eager(drafter: Any) -> Iterator[None]:
    """Without its CUDA graphs meanwhile: a replay calls nothing that can be observed, and its inputs are padded."""
    if (graphs := getattr(drafter, "graphs", None)) is not None:
        drafter.graphs = None
    try:
        yield
    finally:
        if graphs is not None:
            drafter.graphs = graphs
