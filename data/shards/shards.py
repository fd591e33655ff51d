"""Our own shards of samples: tar files of `key.safetensors` and `key.json`, which `webdataset` reads too.

Each shard is written by one process, whole or not at all, and is the same byte for byte whoever writes it. Beside it
lies a json with its checksum, its counts and where its samples begin; when all shards are there, `manifest.json` binds
them to the identity (settings, data, model) that they were made from.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import xxhash
from torch import Tensor

from ...core import ranks
from ...core.checksums import sha256_of
from ...core.errors import UserError
from ...core.files import checked, parse_json, read_json, read_small, unwritable, write_whole
from ...core.json_types import JsonMapping, JsonObject
from ...core.words import counted
from .shard_files import (
    AGAIN,
    BAD_MEMBERS,
    FORMAT,
    Buffer,
    Shard,
    difference,
    dump,
    dump_summary,
    edited,
    pack,
    read_shard,
    tar_path,
    unpack,
)

_KEY = re.compile(r"[A-Za-z0-9_-]{1,80}")  # no dot: webdataset's keys end there; short enough for a plain ustar header
_SIDECAR = re.compile(r"shard-(\d{6,})\.json")
_OF_SHARD = re.compile(r"shard-\d{6,}\.(tar|json)")
IDENTITY, MANIFEST = "identity.json", "manifest.json"
END = bytes(2 * tarfile.BLOCKSIZE)
# What finished shards were made of stands in this file alone, until the manifest is written.
_ANEW = "nothing else says what these shards were made of: restart=STAGE writes them again (the old folder is kept)"


def is_of_shard(name: str) -> bool:
    """Whether a file of this name is a shard or the json beside it, whose checksums the manifest holds."""
    return _OF_SHARD.fullmatch(name) is not None


def claim(folder: Path, identity: JsonMapping) -> None:
    """Make `folder` the place of these shards; to be called by each process before its first shard.

    Args:
        identity: what the samples depend on, of JSON types; nothing that differs from rank to rank.

    Raises:
        UserError: the folder belongs to another identity (the message names the field), or to nobody known.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark, wanted = folder / IDENTITY, json.loads(json.dumps(identity))
    if not mark.is_file():
        if _indices(folder):
            raise UserError("shards without identity.json", where=str(folder), hint=_ANEW)
        write_whole(mark, dump(wanted))
    kept = {mark: read_json(mark, JsonObject, hint=_ANEW)}
    if (folder / MANIFEST).is_file():
        kept[folder / MANIFEST] = read_manifest(folder).identity
    for file, held in kept.items():
        if (other := difference(held, wanted)) is not None:
            problem = f"the shards in this folder were made with another {other[0]}: {other[1]!r}, now {other[2]!r}"
            raise UserError(problem, where=str(file), hint=f"give another folder; if the file is damaged, {_ANEW}")


def write_shard(
    folder: Path,
    index: int,
    samples: Iterable[tuple[str, dict[str, Tensor], JsonObject]],
    counts: Mapping[str, int],
) -> Shard:
    """Write shard `index` aside, then rename it; processes may write side by side, each its own indices.

    Args:
        samples: (key, tensors, everything else as JSON); keys are unique in the shard, of letters, digits, - and _.
        counts: reason -> refused items; read after the last sample, so that the samples' maker can count as it goes.
    """
    writer = ShardWriter(folder, index)
    try:
        for key, tensors, info in samples:
            writer.add(key, tensors, info)
    except BaseException:
        writer.abandon()
        raise
    return writer.close(counts)


class ShardWriter:
    """`write_shard` for samples that come one by one: what was not closed is no shard.

    Args:
        columns: names of whole numbers in each sample's info, which are then known without reading the tar.

    Raises:
        UserError: the disk is full; what this shard took of it is given back.
    """

    def __init__(self, folder: Path, index: int, *, columns: Sequence[str] = ()):
        self.folder, self.index = folder, index
        tar_path(folder, index).with_suffix(".json").unlink(missing_ok=True)
        self._columns: dict[str, list[int]] = {name: [] for name in columns}
        self._starts: list[int] = []
        self._checks: list[int] = []
        self._keys: set[str] = set()
        self._digest, self._size = hashlib.sha256(), 0
        self._aside = tar_path(folder, index).with_suffix(".tar.partial")
        self._file = open(self._aside, "wb")  # noqa: SIM115 (it stays open from sample to sample)

    def add(self, key: str, tensors: dict[str, Tensor], info: JsonObject) -> None:
        """Append one sample: its tensors as safetensors and `info` as JSON."""
        assert _KEY.fullmatch(key) and key not in self._keys, key
        self._keys.add(key)
        packed = pack(key, tensors, info)
        self._starts.append(self._size)
        self._checks.append(checksum(packed))
        for name, values in self._columns.items():
            values.append(int(info[name]))
        self._write(packed)

    def close(self, counts: Mapping[str, int]) -> Shard:
        """To the disk, under its name, with its json beside it; `counts` as of `write_shard`."""
        tar = tar_path(self.folder, self.index)
        self._write(END)
        with self._to_disk():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._aside, tar)
        summary = {
            "format": FORMAT,
            "sha256": self._digest.hexdigest(),
            "num_samples": len(self._starts),
            "bytes": self._size,
            "refused": dict(sorted(counts.items())),
            "starts": self._starts,
            "xxh3": self._checks,
        } | ({"columns": self._columns} if self._columns else {})
        write_whole(tar.with_suffix(".json"), dump_summary(summary))
        return read_shard(self.folder, self.index)

    def abandon(self) -> None:
        """Throw away what was written."""
        with suppress(OSError):  # what it still holds may not fit the disk
            self._file.close()
        self._aside.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        with self._to_disk():
            self._size += self._file.write(data)
        self._digest.update(data)

    @contextmanager
    def _to_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.abandon()
            raise unwritable(self._aside, error) from error


def finished(folder: Path, index: int) -> bool:
    """Whether shard `index` was written completely. A broken shard counts as missing and is rewritten with the same
    content.
    """
    try:
        return read_shard(folder, index).bytes == tar_path(folder, index).stat().st_size
    except (UserError, FileNotFoundError):
        return False


def unfinished(folder: Path, count: int, *, in_step: bool = False) -> list[int]:
    """This rank's shards, of `count`, that are not `finished`; the same on all ranks where they work in step."""
    left = [index for index in ranks.share(count, in_step=in_step) if not finished(folder, index)]
    return ranks.broadcast(left) if in_step else left


def finish(
    folder: Path,
    identity: JsonMapping,
    *,
    num_shards: int | None = None,
    measured: JsonMapping | None = None,
) -> None:
    """Write `manifest.json` over all shards; once, after every process has written its shards.

    Args:
        num_shards: how many there must be; None: up to the highest index that there is.
        measured: what was found out about the samples, for whoever reads the manifest; JSON types.

    Raises:
        UserError: a shard is missing, cut or one too many; the folder is another identity's.
    """
    claim(folder, identity)
    indices = _indices(folder)
    expected = range(max(indices, default=-1) + 1 if num_shards is None else num_shards)
    missing = [tar_path(folder, i).name for i in expected if not finished(folder, i)]
    if missing or not expected:
        problem = f"{len(missing)} of {len(expected)} shards are missing or cut, first {(missing or ['all'])[0]}"
        raise UserError(problem, where=str(folder), hint="run the stage again: it writes the missing shards only")
    if len(indices) > len(expected):
        problem = f"{tar_path(folder, max(indices)).name} is more than the {num_shards} shards expected"
        raise UserError(problem, where=str(folder), hint="delete the shards that do not belong here")
    shards = [read_shard(folder, index) for index in expected]
    manifest = {
        "format": FORMAT,
        "identity": identity,
        "num_samples": sum(shard.num_samples for shard in shards),
        "bytes": sum(shard.bytes for shard in shards),
        "refused": dict(sum((Counter(shard.refused) for shard in shards), Counter())),
        "shards": [asdict(shard) for shard in shards],
    } | ({} if measured is None else {"measured": dict(measured)})
    write_whole(folder / MANIFEST, dump(manifest))


class ShardReader:
    """Finished shards as one sequence: `reader[i]` is (key, tensors, info).

    No file stays open, so a reader may be forked, pickled and used by workers. It holds 16 bytes for each sample of
    the shards that it has read from.

    Raises:
        UserError: at once where the manifest or a shard is missing or cut, on reading where a sample was edited; the
            message names the file.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        manifest = read_manifest(folder)
        self.identity, self.refused, self.measured = manifest.identity, manifest.refused, manifest.measured
        self.shards = manifest.shards
        self._ends = np.cumsum([shard.num_samples for shard in self.shards], dtype=np.int64)
        self._index: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # shard -> starts [n+1] int64, xxh3 [n] uint64
        for shard in self.shards:
            check_size(self.folder, shard)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[str, dict[str, Tensor], JsonObject]:
        span = self.span(index)
        packed = span.read()
        span.check(packed)
        try:
            return unpack(packed)
        except BAD_MEMBERS as error:
            raise span.broken(error) from error

    def span(self, index: int) -> Span:
        """Where sample `index` lies, for readers that bring the memory it goes to."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        place = int(np.searchsorted(self._ends, index, side="right"))
        shard = self.shards[place]
        within = index - (int(self._ends[place]) - shard.num_samples)
        starts, checks = self._starts(shard)
        path = tar_path(self.folder, shard.index)
        return Span(path, within, int(starts[within]), int(starts[within + 1]), int(checks[within]))

    def column(self, name: str) -> np.ndarray:
        """[n] int64 of all samples; read from the json beside each shard."""
        summaries = (read_summary(self.folder, shard) for shard in self.shards)
        return np.concatenate([np.array(summary["columns"][name], dtype=np.int64) for summary in summaries])

    def verify(self) -> None:
        """Read all and compare the checksums. Raises `UserError` naming the first file that differs."""
        for shard in self.shards:
            check_size(self.folder, shard)
            self._starts(shard)
            path = tar_path(self.folder, shard.index)
            if sha256_of(path) != shard.sha256:
                raise edited(path, "its checksum is not the manifest's")

    def _starts(self, shard: Shard) -> tuple[np.ndarray, np.ndarray]:
        if shard.index not in self._index:
            summary = read_summary(self.folder, shard)
            starts = np.array([*summary["starts"], shard.bytes - len(END)], dtype=np.int64)
            self._index[shard.index] = starts, np.array(summary["xxh3"], dtype=np.uint64)
        return self._index[shard.index]


def check_size(folder: Path, shard: Shard) -> None:
    """Raises `UserError` where a shard is missing or cut."""
    path = tar_path(folder, shard.index)
    size = path.stat().st_size if path.is_file() else None
    if size != shard.bytes:
        problem = "missing shard" if size is None else f"shard of {size} bytes"
        raise UserError(f"{problem}, the manifest has one of {shard.bytes}", where=str(path), hint=AGAIN)


def read_summary(folder: Path, shard: Shard) -> JsonObject:
    """The json beside a shard. Raises `UserError` where it is not the one that the manifest was written over."""
    path = tar_path(folder, shard.index).with_suffix(".json")
    data = read_small(path, hint=AGAIN)
    if hashlib.sha256(data).hexdigest() != shard.sidecar_sha256:
        raise edited(path, "its checksum is not the manifest's")
    return parse_json(data, JsonObject, where=str(path), hint=AGAIN)


@dataclass(frozen=True)
class Span:
    """The bytes of one sample in its tar: two members."""

    path: Path
    number: int  # of the sample in its shard
    start: int
    stop: int
    xxh3: int

    def check(self, packed: Buffer) -> None:
        """Raises `UserError`, naming the file, where the bytes are not those that were written."""
        if checksum(packed) != self.xxh3:
            raise edited(self.path, f"sample {self.number} differs from what was written")

    def broken(self, error: Exception) -> UserError:
        """The error to raise where the bytes cannot be parsed."""
        return edited(self.path, f"sample {self.number} is not a safetensors and a json member: {error}")

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop` of the sample. Raises `UserError` where the file is gone or too short."""
        piece = bytearray((self.stop - self.start if stop is None else stop) - start)
        self.read_into(memoryview(piece), start)
        return bytes(piece)

    def read_into(self, memory: memoryview, skip: int = 0) -> None:
        """Fill `memory` with the sample's bytes after the first `skip`. Raises as `read`."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self.start + skip)
                done = 0
                while done < len(memory):
                    count = file.readinto(memory[done:])
                    if not count:
                        raise edited(self.path, f"it ends before byte {self.stop}")
                    done += count
        except FileNotFoundError as error:
            raise UserError("missing shard", where=str(self.path), hint=AGAIN) from error


def checksum(packed: Buffer) -> int:
    """XXH3, 64 bits: many times faster than a disk, where zlib's CRC-32 is about as fast as one."""
    digest = xxhash.xxh3_64()
    digest.update(packed)  # without Python's lock, unlike the constructor
    return digest.intdigest()


def _indices(folder: Path) -> list[int]:
    """Return the numbers of the shards whose JSON is there, sorted."""
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _SIDECAR.fullmatch(path.name)))


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` holds of finished shards."""

    format: int
    identity: JsonObject
    refused: dict[str, int]
    shards: list[Shard]
    measured: JsonObject = field(default_factory=dict)


def read_manifest(folder: Path) -> Manifest:
    """What binds finished shards together. Raises `UserError` where it is missing or damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        hint = "let the stage that writes the shards finish; it goes on where it stopped"
        raise UserError("no manifest.json: not a folder of finished shards", where=str(folder), hint=hint)
    written = read_json(path, JsonObject, hint=AGAIN)
    if written.get("format") != FORMAT:
        raise UserError(f"not a manifest of format {FORMAT}", where=str(path), hint="make the shards again")
    return checked(written, Manifest, where=str(path), hint=AGAIN)


def summary(folder: Path) -> str:
    """What a finished folder of shards holds, and what was refused and why."""
    reader = ShardReader(folder)
    refused = ", ".join(f"{count} {reason}" for reason, count in sorted(reader.refused.items())) or "none"
    size = sum(shard.bytes for shard in reader.shards) / 2**20
    held = f"{counted(len(reader), 'sample')} in {counted(len(reader.shards), 'shard')}"
    return f"{held}, {size:.1f} MiB; refused: {refused}"
