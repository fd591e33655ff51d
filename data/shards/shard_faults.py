"""Finds shards that changed after they were written, and removes them so that their stage writes only these again.

A stage that runs again writes every shard whose tar or json is missing, and none besides.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from ...core.errors import UserError
from ...core.files import write_whole
from ...core.results import Fault
from .shard_files import Shard, dump, tar_path
from .shards import END, IDENTITY, MANIFEST, check_size, checksum, is_of_shard, read_manifest, read_summary

_THREADS = 4  # that read shards


def lost(folder: Path) -> list[Fault]:
    """What is missing or cut, found by names and sizes. Nothing is read but the manifest.

    Empty where every shard is gone: somebody needed the room, and a stage that reads them will have them made again.
    """
    if not any(folder.glob("shard-*.tar")):
        return []
    return _without_reading(folder)


def broken(folder: Path, *, read_bytes: int) -> list[Fault]:
    """What is missing, cut or changed.

    Args:
        read_bytes: shards of up to so many bytes in all are read; of more, the json beside each alone, since whoever
            reads a sample compares its checksum anyway.
    """
    found = _without_reading(folder)
    if any(fault.name == MANIFEST for fault in found):
        return found  # nothing tells what the shards should be
    shards = read_manifest(folder).shards
    read = sum(shard.bytes for shard in shards) <= read_bytes
    names = {fault.name for fault in found}
    whole = [shard for shard in shards if not names & {tar_path(folder, shard.index).name, _json(folder, shard).name}]
    with ThreadPoolExecutor(_THREADS) as threads:
        return found + [f for f in threads.map(lambda shard: _changed(folder, shard, read=read), whole) if f]


def drop(folder: Path, faults: Sequence[Fault]) -> None:
    """Delete what is broken, with its other half: the stage that runs again then writes it.

    Raises:
        UserError: nothing is left that tells what the shards are of.
    """
    names = {fault.name for fault in faults}
    if IDENTITY in names:
        if MANIFEST in names:
            raise UserError(
                f"{IDENTITY} and {MANIFEST} are both missing or damaged: nothing else says what the shards hold",
                where=str(folder), hint="put one of them back, or restart=STAGE makes all shards again",
            )  # fmt: skip
        write_whole(folder / IDENTITY, dump(read_manifest(folder).identity))
    for name in names - {IDENTITY}:
        for end in (".tar", ".json") if is_of_shard(name) else (".json",):
            (folder / name).with_suffix(end).unlink(missing_ok=True)


def _without_reading(folder: Path) -> list[Fault]:
    found = [Fault(IDENTITY, "is missing")] if not (folder / IDENTITY).is_file() else []
    try:
        shards = read_manifest(folder).shards
    except UserError as error:
        return [*found, Fault(MANIFEST, f"is missing or damaged ({error.problem})")]
    for shard in shards:
        try:
            check_size(folder, shard)
        except UserError as error:
            found.append(Fault(tar_path(folder, shard.index).name, f"is missing or cut ({error.problem})"))
        if not _json(folder, shard).is_file():
            found.append(Fault(_json(folder, shard).name, "is missing"))
    return found


def _changed(folder: Path, shard: Shard, *, read: bool) -> Fault | None:
    tar = tar_path(folder, shard.index)
    try:
        summary = read_summary(folder, shard)
    except UserError as error:
        return Fault(_json(folder, shard).name, error.problem)
    about = tar.stat()
    stamp = (about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino)
    if read and not _as_written(tar, tuple(summary["starts"]), tuple(summary["xxh3"]), *stamp):
        return Fault(tar.name, "was changed after it was written: a checksum differs")
    return None


@lru_cache(maxsize=256)
def _as_written(tar: Path, starts: tuple[int, ...], checks: tuple[int, ...], size: int, *stamp: int) -> bool:
    """Whether all samples have their checksums. Remembered by size, times and inode."""
    ends = (*starts[1:], size - len(END))
    with open(tar, "rb") as file:
        same = all(
            checksum(file.read(stop - start)) == check
            for start, stop, check in itertools.zip_longest(starts, ends, checks)
        )
        return same and file.read() == END


def _json(folder: Path, shard: Shard) -> Path:
    return tar_path(folder, shard.index).with_suffix(".json")
