"""Looks for some of a data section's pictures before training starts, to report a wrong folder as one error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..core.errors import UserError
from .media_files import BadMedia, is_there, located
from .record import paths
from .records import RecordFile

if TYPE_CHECKING:
    from .dataset import ConversationDataset

_LOOKED_AT = 64  # records with pictures whose files are looked for at the start, over all sources
_LEAST_LOOKED_AT = 4  # of each


def refuse_all_missing(dataset: ConversationDataset) -> None:
    """Raises `UserError` where of one source none of several pictures is there, or may be read: that is a wrong
    folder or setting, and no bad record.
    """
    named = np.flatnonzero((dataset.column("images") > 0) | (dataset.column("clips") > 0))
    sources = dataset.places[named, 0]
    each = max(_LEAST_LOOKED_AT, _LOOKED_AT // max(1, len(np.unique(sources))))
    for source in np.unique(sources).tolist():
        own = named[sources == source]
        looked = own[:: max(1, len(own) // each)].tolist()
        _refuse_missing(dataset, dataset.records[source], looked, len(own))


def _refuse_missing(dataset: ConversationDataset, source: RecordFile, looked: Sequence[int], count: int) -> None:
    """Of one source, `looked` of whose `count` records with pictures or clips are looked at."""
    of = f" of {source.name}" if len(dataset.records) > 1 else ""
    files: list[Path] = []
    outside: list[BadMedia] = []
    for index in looked:
        try:
            files += _named_files(dataset, index)
        except BadMedia as error:
            outside.append(error)
    if len(outside) == len(looked) > 1:
        first = outside[0]
        raise UserError(f"no record of {len(looked)} that were looked at{of} names pictures inside the folder, the "
                        f"first: {first.problem}", where=first.where, hint=first.hint)  # fmt: skip
    missing = [path for path in files if not is_there(path)]
    if len(set(files)) > 1 and len(missing) == len(files):
        folder = dataset.config.images or dataset.config.videos or str(source.folder)
        about = "" if len(looked) == count else f" that were looked at (of {count:,} records)"
        raise UserError(
            f"{len(missing)} of {len(files)} pictures{of}{about} missing in {folder}, first: {missing[0].name}",
            where=f"{source}, key images" if of else str(missing[0]),
            hint="check `images` (and `videos`) of the data section" + (
                "; where files want folders of their own, write their paths from one that holds them all" if of
                else ""
            ),
        )  # fmt: skip


def _named_files(dataset: ConversationDataset, index: int) -> list[Path]:
    """Without what lies inside a table or a tar, which is in no folder. Raises `BadMedia` as `located` does."""
    file, number = dataset.places[index]
    images, videos = dataset.folders(int(file))
    record, outside = dataset.records[file].read(int(number)), dataset.config.allow_outside
    files = [located(images, name, allow_outside=outside) for name in paths(record, "image")]
    files += [located(videos, name, allow_outside=outside) for name in paths(record, "video")]
    return [file for file in files if isinstance(file, Path)]
