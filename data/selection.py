"""The records that a data section reads: which files, which of their records, and what of them cannot be used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from .mixture import expand
from .records import RecordFile, open_records


class Selection:
    """Indexed files and the records of each that take part; nothing of a record is held but numbers.

    Args:
        names: data files, brace patterns and mixtures.
        cache: folder for indices.
        seed: of the draws of `random:` in mixtures.

    Raises:
        UserError: a file that is missing or no list of records, or a mixture that cannot be read.
    """

    def __init__(self, names: Sequence[str | Path], *, cache: Path, seed: int):
        self.shares = expand(names)
        opened = {path: open_records(path, cache) for path in dict.fromkeys(share.path for share in self.shares)}
        self.files: list[RecordFile] = [opened[share.path] for share in self.shares]
        self._picked = [s.pick(len(f), seed=seed) for s, f in zip(self.shares, self.files, strict=True)]

    def problems(self) -> Iterator[tuple[RecordFile, int, str]]:
        """(file, record, what is wrong with it) of those that take part."""
        for file, picked in zip(self.files, self._picked, strict=True):
            bad = np.array(list(file.problems), dtype=np.int64)
            for index in bad[np.isin(bad, picked)].tolist():
                yield file, index, file.problems[index]

    def places(self) -> np.ndarray:
        """[n,2] int32 (file, record) of those that take part and can be used, file by file."""
        found = []
        for number, (file, picked) in enumerate(zip(self.files, self._picked, strict=True)):
            good = picked[~np.isin(picked, np.array(list(file.problems), dtype=np.int64))] if file.problems else picked
            found.append(np.stack([np.full_like(good, number), good], axis=1).astype(np.int32))
        return np.concatenate(found)

    def column(self, name: str, places: np.ndarray) -> np.ndarray:
        """[n] a column of the files' indices (lengths, sizes, images, clips) at `places` [n,2], which go by file."""
        starts = np.searchsorted(places[:, 0], np.arange(len(self.files) + 1))
        parts = [
            file.columns[name][places[start:stop, 1]]
            for file, start, stop in zip(self.files, starts[:-1], starts[1:], strict=True)
        ]
        return np.concatenate(parts)

    def summary(self) -> str:
        """How much of which files, in a line for a mixture and in none for whole files."""
        partial = sum(share.strategy != "all" for share in self.shares)
        if len(self.shares) == 1 and not partial:
            return ""
        kept, there = sum(map(len, self._picked)), sum(len(file) for file in self.files)
        empty = [share.path.name for share, picked in zip(self.shares, self._picked, strict=True) if not len(picked)]
        line = f"{len(self.shares)} data files, of {partial} a part: {kept:,} of {there:,} records"
        return line + (f"; nothing of {', '.join(empty)}" if empty else "")


def fewest_ids(words: np.ndarray, images: np.ndarray, *, tokens_per_image: int) -> np.ndarray:
    """[n] int64 ids that samples have at least, whatever the tokenizer: no word has less than one; clips not counted.

    Args:
        words: of the text, without its marks.
    """
    return words.astype(np.int64) + images.astype(np.int64) * tokens_per_image
