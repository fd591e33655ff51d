"""Counts the samples that are longer than a model's context without encoding all of many: those at equal distances,
which tell the share, and those with the most words, bytes and pictures, among which the longest are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.errors import UserError
from .conversations import TooLong
from .dataset import ConversationDataset

LOOKED_AT = 1000  # samples that are encoded at most
_COUNTED = 4096  # ids of a sample that are counted in any case; of one that has far more and beyond the limit no more


@dataclass(frozen=True)
class LongSamples:
    """Result of the count. `count` is an estimate if not all samples were encoded."""

    samples: int
    limit: int  # ids that there is room for
    count: int  # samples of more
    longest: int  # ids of the longest that was encoded
    is_exact: bool
    is_longest: bool  # of all samples
    first: int | None  # one of them

    def __str__(self) -> str:
        about = "" if self.is_exact else "about "
        least = "" if self.is_longest else "at least "
        return f"{about}{self.count:,} of {self.samples:,} (the longest has {least}{self.longest:,} ids)"


def count_long(dataset: ConversationDataset, limit: int, *, prompts: bool = False, flat: bool = False) -> LongSamples:
    """Samples of more than `limit` ids with all their pictures; with `prompts` each counts up to its last answer, as it
    is decoded, and with `flat` as a draft without a newline reads it: of a tiled picture the first tile.
    """
    images, clips, sizes = (dataset.column(name).astype(np.int64) for name in ("images", "clips", "sizes"))
    pictures = (images + clips) * dataset.image_reader(prompt=prompts).processor.num_image_tokens
    spread = range(0, len(dataset), max(1, -(-2 * len(dataset) // LOOKED_AT)))
    tops = [
        np.argsort(size + pictures, kind="stable")[-LOOKED_AT // 4 :].tolist() for size in (abs(dataset.lengths), sizes)
    ]
    lengths: dict[int, int] = {}
    whole = True  # all ids of each were counted
    for index in sorted({*spread, *tops[0], *tops[1]}):
        try:
            lengths[index] = dataset.num_ids(index, prompt=prompts, flat=flat, most=max(limit, _COUNTED))
        except TooLong as error:
            lengths[index], whole = error.at_least or 0, False
        except UserError:  # it is reported when the record is used
            lengths[index] = 0
    long = [index for index, count in lengths.items() if count > limit]
    share = sum(lengths[index] > limit for index in spread) / len(spread)
    is_exact = len(lengths) == len(dataset)
    return LongSamples(
        samples=len(dataset),
        limit=limit,
        count=len(long) if is_exact else max(len(long), round(share * len(dataset))),
        longest=max(lengths.values()),
        is_exact=is_exact,
        is_longest=is_exact and whole,
        first=next(iter(long), None),
    )
