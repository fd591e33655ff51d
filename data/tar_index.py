"""Where the samples of a tar begin, so that a pass that starts in its middle does not read every header before that.

A tar has no table of contents: without this, each of many passes (one for every shard that `encode` writes) would parse
it from the beginning. It is scanned once; a few places of it are remembered, fewer than its samples.
"""

from __future__ import annotations

import bisect
import functools
from array import array
from dataclasses import dataclass
from pathlib import Path

from . import tars

MOST_PLACES = 64  # remembered of a tar: about a kilobyte
NEAREST = 16  # items between two of them at least; doubled whenever there would be more than MOST_PLACES


@dataclass(frozen=True)
class TarIndex:
    """Items as `tars.samples` numbers them within the tar, refused ones included."""

    num_items: int
    numbers: array[int]  # of the items that a pass may begin with, from 0 on
    offsets: array[int]  # of the first header of each of them, in bytes

    def before(self, number: int) -> tuple[int, int]:
        """The last remembered item up to `number`: its own number, and the offset to begin at."""
        place = bisect.bisect_right(self.numbers, number) - 1
        return self.numbers[place], self.offsets[place]


def tar_index(path: Path) -> TarIndex:
    """Of the file as it is now. Raises as `tars.members`."""
    state = path.stat()
    return _scan(path, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=1 << 16)
def _scan(path: Path, size: int, mtime_ns: int) -> TarIndex:
    """A pass may begin at a sample's first member alone: nothing before it is open that later members belong to."""
    numbers, offsets, apart = array("Q", [0]), array("Q", [0]), NEAREST
    count = begun = 0  # items so far, and how many came before the sample that is being put together
    for item in tars.samples(path):
        count += 1
        if isinstance(item, tars.RefusedMember):
            continue
        if begun - numbers[-1] >= apart:
            numbers.append(begun)
            offsets.append(item.offset)
        if len(numbers) > MOST_PLACES:
            numbers, offsets, apart = numbers[::2], offsets[::2], 2 * apart
        begun = count  # a sample is given out when the first member of the next one is met
    return TarIndex(count, numbers, offsets)
