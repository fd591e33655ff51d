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
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ..core.errors import UserError

FORMAT = 1  # of shards, their json and the manifest: count up when one changes
_KEY = re.compile(r"[A-Za-z0-9_-]{1,80}")  # no dot: webdataset's keys end there; short enough for a plain ustar header
_SIDECAR = re.compile(r"shard-(\d{6,})\.json")
_END = bytes(2 * tarfile.BLOCKSIZE)
_AGAIN = "delete the file and run the stage again: it writes the missing shard only"


@dataclass(frozen=True)
class Shard:
    """What a manifest says of one shard."""

    index: int
    sha256: str  # of the tar
    num_samples: int
    bytes: int  # of the tar
    refused: dict[str, int]  # reason -> items that were left out
    sidecar_sha256: str  # of the json beside the tar


def tar_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:06d}.tar"


def claim(folder: Path, identity: Mapping[str, Any]) -> None:
    """Make `folder` the place of these shards; to be called by each process before its first shard.

    Args:
        identity: what the samples depend on, of JSON types; nothing that differs from rank to rank.

    Raises:
        UserError: the folder belongs to another identity (the message names the field), or to nobody known.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark, wanted = folder / "identity.json", json.loads(json.dumps(identity))
    if not mark.is_file():
        if _indices(folder):
            raise UserError("shards without identity.json", where=str(folder), cure="give an empty folder")
        _write_whole(mark, _dump(wanted))
    kept = [_read_json(mark)]
    if (folder / "manifest.json").is_file():
        kept.append(_manifest(folder)["identity"])
    for held in kept:
        if (field := _difference(held, wanted)) is not None:
            problem = f"the shards in this folder were made with another {field[0]}: {field[1]!r}, now {field[2]!r}"
            raise UserError(problem, where=str(folder), cure="give another folder, or delete this one")


def write_shard(
    folder: Path,
    index: int,
    samples: Iterable[tuple[str, dict[str, Tensor], dict[str, Any]]],
    counts: Mapping[str, int],
) -> Shard:
    """Write shard `index` aside, then rename it; processes may write side by side, each its own indices.

    Args:
        samples: (key, tensors, everything else as JSON); keys are unique in the shard, of letters, digits, - and _.
        counts: reason -> refused items; read after the last sample, so that the samples' maker can count as it goes.
    """
    tar, sidecar = tar_path(folder, index), tar_path(folder, index).with_suffix(".json")
    sidecar.unlink(missing_ok=True)
    starts: list[int] = []
    checks: list[int] = []
    keys: set[str] = set()
    digest, size = hashlib.sha256(), 0
    aside = tar.with_name(tar.name + ".partial")
    with open(aside, "wb") as file:
        for key, tensors, info in samples:
            assert _KEY.fullmatch(key) and key not in keys, key
            keys.add(key)
            packed = _pack(key, tensors, info)
            starts.append(size)
            checks.append(zlib.crc32(packed))
            size += file.write(packed)
            digest.update(packed)
        size += file.write(_END)
        digest.update(_END)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, tar)
    summary = {
        "format": FORMAT,
        "sha256": digest.hexdigest(),
        "num_samples": len(starts),
        "bytes": size,
        "refused": dict(sorted(counts.items())),
        "starts": starts,
        "crc32": checks,
    }
    _write_whole(sidecar, json.dumps(summary).encode())
    return _shard(folder, index)


def finished(folder: Path, index: int) -> bool:
    """Whether shard `index` was written whole. What is broken counts as not written: it is made again, the same."""
    try:
        return _shard(folder, index).bytes == tar_path(folder, index).stat().st_size
    except (UserError, FileNotFoundError):
        return False


def finish(folder: Path, identity: Mapping[str, Any], *, num_shards: int | None = None) -> None:
    """Write `manifest.json` over all shards; once, after every process wrote its own.

    Args:
        num_shards: how many there must be; None: up to the highest index that there is.

    Raises:
        UserError: a shard is missing, cut or one too many; the folder is another identity's.
    """
    claim(folder, identity)
    found = _indices(folder)
    expected = range(max(found, default=-1) + 1 if num_shards is None else num_shards)
    missing = [tar_path(folder, i).name for i in expected if not finished(folder, i)]
    if missing or not expected:
        problem = f"{len(missing)} of {len(expected)} shards are missing or cut, first {(missing or ['all'])[0]}"
        raise UserError(problem, where=str(folder), cure="run the stage again: it writes the missing shards only")
    if len(found) > len(expected):
        problem = f"{tar_path(folder, max(found)).name} is more than the {num_shards} shards expected"
        raise UserError(problem, where=str(folder), cure="delete the shards that do not belong here")
    shards = [_shard(folder, index) for index in expected]
    manifest = {
        "format": FORMAT,
        "identity": identity,
        "num_samples": sum(shard.num_samples for shard in shards),
        "bytes": sum(shard.bytes for shard in shards),
        "refused": dict(sum((Counter(shard.refused) for shard in shards), Counter())),
        "shards": [asdict(shard) for shard in shards],
    }
    _write_whole(folder / "manifest.json", _dump(manifest))


class ShardReader:
    """Finished shards as one sequence: `reader[i]` is (key, tensors, info).

    No file stays open, so a reader may be forked, pickled and used by workers. It holds 12 bytes for each sample of
    the shards that it has read from.

    Raises:
        UserError: at once where the manifest or a shard is missing or cut, on reading where a sample was edited; the
            message names the file.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        manifest = _manifest(folder)
        try:
            self.identity: dict[str, Any] = manifest["identity"]
            self.refused: dict[str, int] = manifest["refused"]
            self.shards = [Shard(**entry) for entry in manifest["shards"]]
        except (KeyError, TypeError) as error:
            raise _edited(folder / "manifest.json", repr(error)) from error
        self._ends = np.cumsum([shard.num_samples for shard in self.shards], dtype=np.int64)
        self._index: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # shard -> starts [n+1] int64, crc32 [n] uint32
        for shard in self.shards:
            self._check_size(shard)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        place = int(np.searchsorted(self._ends, index, side="right"))
        shard = self.shards[place]
        within = index - (int(self._ends[place]) - shard.num_samples)
        starts, checks = self._starts(shard)
        path = tar_path(self.folder, shard.index)
        packed = _read_span(path, int(starts[within]), int(starts[within + 1]))
        if zlib.crc32(packed) != int(checks[within]):
            raise _edited(path, f"sample {within} differs from what was written")
        try:
            return _unpack(packed)
        except (tarfile.HeaderError, SafetensorError, ValueError) as error:
            raise _edited(path, f"sample {within} is not a safetensors and a json member: {error}") from error

    def verify(self) -> None:
        """Read all and compare the checksums. Raises `UserError` naming the first file that differs."""
        for shard in self.shards:
            self._check_size(shard)
            self._starts(shard)
            path = tar_path(self.folder, shard.index)
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                    raise _edited(path, "its checksum is not the manifest's")

    def _check_size(self, shard: Shard) -> None:
        path = tar_path(self.folder, shard.index)
        size = path.stat().st_size if path.is_file() else None
        if size != shard.bytes:
            found = "missing shard" if size is None else f"shard of {size} bytes"
            raise UserError(f"{found}, the manifest has one of {shard.bytes}", where=str(path), cure=_AGAIN)

    def _starts(self, shard: Shard) -> tuple[np.ndarray, np.ndarray]:
        if shard.index not in self._index:
            path = tar_path(self.folder, shard.index).with_suffix(".json")
            if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != shard.sidecar_sha256:
                raise _edited(path, "missing, or its checksum is not the manifest's")
            summary = _read_json(path)
            starts = np.array([*summary["starts"], shard.bytes - len(_END)], dtype=np.int64)
            self._index[shard.index] = starts, np.array(summary["crc32"], dtype=np.uint32)
        return self._index[shard.index]


def _pack(key: str, tensors: dict[str, Tensor], info: dict[str, Any]) -> bytes:
    """Two members as they stand in the tar. Tensors are copied, since safetensors refuses shared memory."""
    owned = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    text = json.dumps(info, sort_keys=True, allow_nan=False, ensure_ascii=False).encode()
    return _member(f"{key}.safetensors", safetensors.torch.save(owned)) + _member(f"{key}.json", text)


def _member(name: str, data: bytes) -> bytes:
    """TarInfo's defaults are time 0, owner 0 and mode 0644: nothing of this machine or hour enters."""
    header = tarfile.TarInfo(name)
    header.size = len(data)
    return header.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)


def _unpack(packed: bytes) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """The inverse of `_pack`, which does not trust its input: the folder may come from elsewhere."""
    names, contents, position = [], [], 0
    for _ in range(2):
        header = tarfile.TarInfo.frombuf(packed[position : position + tarfile.BLOCKSIZE], "utf-8", "strict")
        start = position + tarfile.BLOCKSIZE
        names.append(header.name)
        contents.append(packed[start : start + header.size])
        position = start - (-header.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    key = names[0].removesuffix(".safetensors")
    if names != [f"{key}.safetensors", f"{key}.json"] or position != len(packed):
        raise ValueError(f"members {names}")
    return key, safetensors.torch.load(contents[0]), json.loads(contents[1])


def _read_span(path: Path, start: int, stop: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read(stop - start)
    except FileNotFoundError as error:
        raise UserError("missing shard", where=str(path), cure=_AGAIN) from error
    if len(data) < stop - start:
        raise _edited(path, f"it ends before byte {stop}")
    return data


def _shard(folder: Path, index: int) -> Shard:
    path = tar_path(folder, index).with_suffix(".json")
    summary = _read_json(path)
    try:
        fields = {name: summary[name] for name in ("sha256", "num_samples", "bytes", "refused")}
    except (KeyError, TypeError) as error:
        raise _edited(path, f"no {error}") from error
    return Shard(index, **fields, sidecar_sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def _indices(folder: Path) -> list[int]:
    """Of the shards whose json is there, sorted."""
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _SIDECAR.fullmatch(path.name)))


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    if not path.is_file():
        cure = "let the stage that writes the shards finish; it goes on where it stopped"
        raise UserError("no manifest.json: not a folder of finished shards", where=str(folder), cure=cure)
    manifest = _read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"not a manifest of format {FORMAT}", where=str(path), cure="make the shards again")
    return manifest


def _difference(kept: Any, wanted: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first field that differs, dotted, with both values."""
    if isinstance(kept, dict) and isinstance(wanted, dict):
        for key in [*wanted, *(k for k in kept if k not in wanted)]:
            found = _difference(kept.get(key), wanted.get(key), f"{name}.{key}" if name else key)
            if found is not None:
                return found
        return None
    return None if kept == wanted else (name, kept, wanted)


def _dump(value: Any) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError("missing file", where=str(path), cure=_AGAIN) from error
    except (ValueError, RecursionError) as error:
        raise _edited(path, f"not valid JSON: {error}") from error


def _write_whole(path: Path, data: bytes) -> None:
    """Aside, to the disk, renamed: a reader or a crash never meets half a file. Ranks may write the same at once."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with open(aside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _edited(path: Path, problem: str) -> UserError:
    return UserError(f"edited or damaged shard: {problem}", where=str(path), cure=_AGAIN)
