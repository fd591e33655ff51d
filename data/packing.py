"""Which samples of an optimizer step share a row, on which rank: a pure function of their lengths.

A step has the samples that it has without packing, so learning rates, epochs and resuming are the same. Rows hold
different numbers of samples and about as many tokens each, the same number of rows on every rank, so that nothing is
padded and no rank waits long. Longest first to the row with the fewest tokens (Graham's LPT, 1969).
"""

from __future__ import annotations

import heapq

import numpy as np
from pydantic import Field

from ..core.errors import UserError
from ..core.section import Section


class PackingConfig(Section):
    """Several samples one after another in a row, each attending to itself alone."""

    # Tokens of a row, which is one forward on one rank: as many as fit in memory, and at least the longest sample's.
    max_tokens: int = Field(ge=8)


def packed_rows(lengths: np.ndarray, max_tokens: int, num_ranks: int) -> list[list[np.ndarray]]:
    """Micro-batch, rank -> which of the samples are in that row; a row of too few samples for all ranks is empty.

    Args:
        lengths: [n] tokens, none above `max_tokens`.
    """
    assert lengths.max() <= max_tokens, f"a sample of {lengths.max()} tokens for rows of {max_tokens}"
    count = -(-int(lengths.sum()) // (max_tokens * num_ranks))
    while True:
        rows = _balanced(lengths, count * num_ranks)
        if max(tokens for tokens, _ in rows) <= max_tokens:
            break
        count += 1
    # Rows of like length are computed at the same time; every other time in turn, so that ranks' sums are alike.
    rows.sort(key=lambda row: -row[0])
    micro = [rows[start : start + num_ranks] for start in range(0, len(rows), num_ranks)]
    micro = [part[::-1] if number % 2 else part for number, part in enumerate(micro)]
    return [[np.array(sorted(places), dtype=np.int64) for _, places in part] for part in micro]


def _balanced(lengths: np.ndarray, count: int) -> list[tuple[int, list[int]]]:
    """Tokens and samples of `count` rows, longest sample first to the row with the fewest tokens."""
    heap = [(0, number) for number in range(count)]
    rows: list[list[int]] = [[] for _ in range(count)]
    for place in np.argsort(-lengths, kind="stable").tolist():
        tokens, number = heap[0]
        rows[number].append(place)
        heapq.heapreplace(heap, (tokens + int(lengths[place]), number))
    return [(tokens, rows[number]) for tokens, number in heap]


def check_lengths(lengths: np.ndarray, max_tokens: int, key: str) -> None:
    """Raises `UserError` for a sample that fits no row."""
    longest = int(np.abs(lengths).max(initial=0))
    if longest > max_tokens:
        raise UserError(
            f"a sample has {longest} tokens, and a row {max_tokens}", key=key,
            hint=f"set packing.max_tokens to {longest} or more, or data.max_length to {max_tokens} or less",
        )  # fmt: skip
