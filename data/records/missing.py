"""Looks for some of a data section's pictures before training starts, to report a wrong folder as one error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...core.errors import UserError
from ..pictures.media_files import BadMedia, is_there, located
from .record import paths
from .records import RecordFile

_LOOKED_AT = 64  # records with pictures whose files are looked for at the start, over all sources
_LEAST_LOOKED_AT = 4  # of each


@dataclass(frozen=True)
class Look:
    """Where the pictures and clips of some records should be.

    Args:
        records: the sources.
        places: [n,2] (source, record) of the records that are used.
        folders: source -> its folders of pictures and of clips.
        written: the folder that the data section names; None: none.
    """

    records: Sequence[RecordFile]
    places: np.ndarray
    folders: Callable[[int], tuple[Path, Path]]
    written: str | None
    allow_outside: bool

    def refuse_all_missing(self, named: np.ndarray) -> None:
        """Raise `UserError` where none of several pictures of a source is there, or may be read: a wrong folder or
        setting, and no bad record.

        Args:
            named: [m] places of records with pictures or clips.
        """
        sources = self.places[named, 0]
        each = max(_LEAST_LOOKED_AT, _LOOKED_AT // max(1, len(np.unique(sources))))
        for source in np.unique(sources).tolist():
            own = named[sources == source]
            looked = own[:: max(1, len(own) // each)].tolist()
            self._refuse_missing(self.records[source], looked, len(own))

    def _refuse_missing(self, source: RecordFile, looked: Sequence[int], count: int) -> None:
        """Look at the records `looked` of one source, which has `count` with pictures or clips."""
        of = f" of {source.name}" if len(self.records) > 1 else ""
        files: list[Path] = []
        outside: list[BadMedia] = []
        for index in looked:
            try:
                files += self._named_files(index)
            except BadMedia as error:
                outside.append(error)
        if len(outside) == len(looked) > 1:
            first = outside[0]
            raise UserError(f"no record of {len(looked)} that were looked at{of} names pictures inside the folder, the "
                            f"first: {first.problem}", where=first.where, hint=first.hint)  # fmt: skip
        missing = [path for path in files if not is_there(path)]
        if len(set(files)) > 1 and len(missing) == len(files):
            folder = self.written or str(source.folder)
            about = "" if len(looked) == count else f" that were looked at (of {count:,} records)"
            raise UserError(
                f"{len(missing)} of {len(files)} pictures{of}{about} missing in {folder}, first: {missing[0].name}",
                where=f"{source}, key images" if of else str(missing[0]),
                hint="check `images` (and `videos`) of the data section" + (
                    "; where files want folders of their own, write their paths from one that holds them all" if of
                    else ""
                ),
            )  # fmt: skip

    def _named_files(self, index: int) -> list[Path]:
        """Without what lies inside a table or a tar, which is in no folder. Raises `BadMedia` as `located` does."""
        file, number = self.places[index]
        images, videos = self.folders(int(file))
        record, outside = self.records[file].read(int(number)), self.allow_outside
        files = [located(images, name, allow_outside=outside) for name in paths(record, "image")]
        files += [located(videos, name, allow_outside=outside) for name in paths(record, "video")]
        return [file for file in files if isinstance(file, Path)]
