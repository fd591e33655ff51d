"""Shards: safetensors files of many samples each, and the manifest that binds them together.

A shard holds one flat tensor for each name: the samples' tensors of that name, one after the other. Beside it stand
each sample's shape and checksum; names of that index begin with `index.`. `safetensors` reads all of it.
Each shard is written by one process, whole or not at all, and is the same byte for byte whoever writes it. When all
shards are there, `manifest.json` binds them to the identity (settings, data, model) that they were made from.
Letters: n samples of a shard.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...core import ranks
from ...core.errors import UserError, counted
from ...core.files import checked, parse_json, read_json, unwritable, write_whole
from ...core.json_types import JsonMapping, JsonObject, difference

FORMAT = 3  # of shards and manifest: count up when one changes
SAMPLE_BYTES = 512  # of a sample beside its tensors: its JSON, shapes and checksums, about
IDENTITY, MANIFEST = "identity.json", "manifest.json"
Sample = tuple[str, Mapping[str, Tensor], JsonObject]  # key, tensors, everything else as JSON

_SHARD = re.compile(r"shard-\d{6,}\.safetensors")
_INFO = "info"  # name of the tensor that holds a sample's key and JSON
_SHAPE, _XXH3, _COLUMN = "index.shape.", "index.xxh3.", "index.column."
_REFUSED = "refused"  # the only entry of a shard's metadata: safetensors writes several in any order


@dataclass(frozen=True)
class Shard:
    """What a manifest says of one shard."""

    index: int
    num_samples: int
    bytes: int
    refused: dict[str, int]  # reason -> items that were left out
    xxh3: str  # of its index, which holds the samples' own


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` holds of finished shards."""

    format: int
    identity: JsonObject
    refused: dict[str, int]
    shards: list[Shard]
    measured: JsonObject = field(default_factory=dict)


def shard_path(folder: Path, index: int) -> Path:
    """Path of shard number `index`."""
    return folder / f"shard-{index:06d}.safetensors"


def is_of_shard(name: str) -> bool:
    """Whether a file of this name is a shard, whose checksum the manifest holds."""
    return _SHARD.fullmatch(name) is not None


def again(folder: Path) -> str:
    """The hint that says how shards in a stage's folder are made again."""
    return f"restart={folder.parent.name} makes them again (the old folder is kept)"


def claim(folder: Path, identity: JsonMapping) -> None:
    """Make `folder` the place of these shards, before a process's first one. `identity`: what samples depend on, as
    JSON, the same on all ranks. Raises `UserError`: the folder is another identity's (names the field), or nobody's
    known.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark, wanted = folder / IDENTITY, json.loads(json.dumps(identity))
    if any(folder.glob("shard-*.tar")):
        raise UserError("shards of an earlier version of draftsmith", where=str(folder), hint=again(folder))
    if not mark.is_file():
        if any(folder.glob("shard-*.safetensors")):
            raise UserError("shards without identity.json", where=str(folder), hint=again(folder))
        write_whole(mark, _dump(wanted))
    claims = {mark: read_json(mark, JsonObject, hint=again(folder))}
    if (folder / MANIFEST).is_file():
        claims[folder / MANIFEST] = read_manifest(folder).identity
    for file, held in claims.items():
        if (other := difference(held, wanted)) is not None:
            problem = f"the shards in this folder were made with another {other[0]}: {other[1]!r}, now {other[2]!r}"
            raise UserError(problem, where=str(file), hint=f"give another folder; or {again(folder)}")


def write_shard(
    folder: Path, index: int, samples: Iterable[Sample], counts: Mapping[str, int], *, columns: Sequence[str] = ()
) -> Shard:
    """Write shard `index` aside, then rename it; processes may write side by side, each its own indices. Raises
    `UserError`: the disk is full.

    Args:
        samples: their keys are unique in the shard. All are held in memory. Tensors of one name have one type and
            number of dimensions (one at least); a sample may lack some.
        counts: reason -> refused items; read after the last sample, so that the samples' maker can count as it goes.
        columns: names of whole numbers in each sample's JSON, which are then known without reading the samples.
    """
    path = shard_path(folder, index)
    path.unlink(missing_ok=True)
    rows: list[dict[str, Tensor]] = []
    keys: set[str] = set()
    numbers: dict[str, list[int]] = {name: [] for name in columns}
    for key, tensors, info in samples:
        assert key not in keys, key
        keys.add(key)
        text = json.dumps([key, info], sort_keys=True, allow_nan=False, ensure_ascii=False).encode()
        row = {**tensors, _INFO: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
        rows.append({name: tensor.detach().cpu() for name, tensor in row.items()})
        for name, values in numbers.items():
            values.append(int(info[name]))
    content: dict[str, Tensor] = {}
    for name in sorted({name for row in rows for name in row}):
        content |= _joined(name, [row.pop(name, None) for row in rows])
    content |= {f"{_COLUMN}{name}": torch.tensor(values, dtype=torch.int64) for name, values in numbers.items()}
    aside = path.with_suffix(".safetensors.partial")
    try:
        refused = json.dumps(dict(sorted(counts.items())))
        safetensors.torch.save_file(content, aside, metadata={_REFUSED: refused})
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)
    except (OSError, SafetensorError) as error:
        aside.unlink(missing_ok=True)
        raise unwritable(path, error) from error
    return _Index.read(folder, index).shard


def _joined(name: str, tensors: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """The samples' tensors of one name as a shard holds them; None: a sample has none, and -1 is its shape."""
    present = [tensor for tensor in tensors if tensor is not None]
    first = present[0]
    alike = all(t.dtype == first.dtype and t.dim() == first.dim() for t in present)
    assert alike and first.dim() and not name.startswith("index."), name
    absent = [-1] * first.dim()
    shapes = [absent if tensor is None else list(tensor.shape) for tensor in tensors]
    sums = [0 if tensor is None else checksum(tensor) for tensor in tensors]
    return {
        name: torch.cat([tensor.flatten() for tensor in present]),
        f"{_SHAPE}{name}": torch.tensor(shapes, dtype=torch.int32),
        f"{_XXH3}{name}": torch.from_numpy(np.array(sums, dtype=np.uint64).view(np.int64)),
    }


def checksum(tensor: Tensor) -> int:
    """XXH3, 64 bits, of a tensor's bytes: many times faster than a disk."""
    digest = xxhash.xxh3_64()
    digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)  # without Python's lock
    return digest.intdigest()


def finished(folder: Path, index: int) -> bool:
    """Whether shard `index` was written. A broken one counts as missing and is written again, with the same content."""
    try:
        _Index.read(folder, index)
    except UserError:
        return False
    return True


def unfinished(folder: Path, count: int, *, in_step: bool = False) -> list[int]:
    """This rank's shards, of `count`, that are not `finished`; the same on all ranks where they work in step."""
    left = [index for index in ranks.share(count, in_step=in_step) if not finished(folder, index)]
    return ranks.broadcast(left) if in_step else left


def finish(folder: Path, identity: JsonMapping, *, num_shards: int, measured: JsonMapping | None = None) -> None:
    """Write `manifest.json` over all `num_shards` shards, once they are written, with what was measured of the samples.
    Raises `UserError`: one is missing or cut; the folder is another identity's.
    """
    claim(folder, identity)
    missing = [shard_path(folder, index).name for index in range(num_shards) if not finished(folder, index)]
    if missing:
        problem = f"{len(missing)} of {num_shards} shards are missing or cut, first {missing[0]}"
        raise UserError(problem, where=str(folder), hint="run the stage again: it writes the missing shards only")
    shards = [_Index.read(folder, index).shard for index in range(num_shards)]
    manifest = {
        "format": FORMAT,
        "identity": identity,
        "num_samples": sum(shard.num_samples for shard in shards),
        "bytes": sum(shard.bytes for shard in shards),
        "refused": dict(sum((Counter(shard.refused) for shard in shards), Counter())),
        "shards": [asdict(shard) for shard in shards],
    } | ({} if measured is None else {"measured": dict(measured)})
    write_whole(folder / MANIFEST, _dump(manifest))


def read_manifest(folder: Path) -> Manifest:
    """What binds finished shards together. Raises `UserError` where it is missing, damaged or of an earlier version."""
    path = folder / MANIFEST
    if not path.is_file():
        hint = "let the stage that writes the shards finish; it goes on where it stopped"
        raise UserError("no manifest.json: not a folder of finished shards", where=str(folder), hint=hint)
    written = read_json(path, JsonObject, hint=again(folder))
    if written.get("format") != FORMAT:
        problem = f"shards of format {written.get('format')}, and this version of draftsmith reads format {FORMAT}"
        raise UserError(problem, where=str(path), hint=again(folder))
    return checked(written, Manifest, where=str(path), hint=again(folder))


class ShardReader:
    """Finished shards as one sequence: `reader[i]` is (key, tensors, info).

    No file stays open, so a reader may be forked, pickled and used by workers. It holds the index of each shard that it
    has read from: about 20 bytes for each tensor of a sample. Raises `UserError`: at once where the manifest or a shard
    is missing or cut, on reading where a sample was edited; the message names the file.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        manifest = read_manifest(folder)
        self.identity, self.refused, self.shards = manifest.identity, manifest.refused, manifest.shards
        self._ends = np.cumsum([shard.num_samples for shard in self.shards], dtype=np.int64)
        self._indices: dict[int, _Index] = {}
        for shard in self.shards:
            path = shard_path(folder, shard.index)
            size = path.stat().st_size if path.is_file() else None
            if size != shard.bytes:
                what = "missing shard" if size is None else f"shard of {size} bytes"
                raise UserError(f"{what}, the manifest has one of {shard.bytes}", where=str(path), hint=again(folder))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[str, dict[str, Tensor], JsonObject]:
        tensors = self.tensors(index)
        key, info = json.loads(bytes(tensors.pop(_INFO).numpy()))
        return key, tensors, info

    def tensors(self, index: int, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The tensors of a sample, or those of these names. Raises `UserError` for one that was edited."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        place = int(np.searchsorted(self._ends, index, side="right"))
        shard = self.shards[place]
        return self._index(shard).tensors(index - (int(self._ends[place]) - shard.num_samples), names)

    def column(self, name: str) -> np.ndarray:
        """[n] int64 of all samples."""
        return np.concatenate([self._index(shard).columns[name] for shard in self.shards])

    def _index(self, shard: Shard) -> _Index:
        if shard.index not in self._indices:
            index = _Index.read(self.folder, shard.index)
            if index.shard != shard:
                raise _edited(index.path, "it is not the manifest's")
            self._indices[shard.index] = index
        return self._indices[shard.index]


@dataclass(frozen=True)
class _Index:
    """Where the samples of one shard lie in it."""

    path: Path
    shard: Shard
    shapes: dict[str, np.ndarray]  # name -> [n, dimensions]; -1: the sample has no such tensor
    ends: dict[str, np.ndarray]  # name -> [n] int64
    sums: dict[str, np.ndarray]  # name -> [n] uint64
    columns: dict[str, np.ndarray]  # name -> [n] int64

    @classmethod
    def read(cls, folder: Path, index: int) -> _Index:
        path = shard_path(folder, index)
        digest, parts = xxhash.xxh3_64(), {}
        with _opened(path) as file:
            refused = (file.metadata() or {}).get(_REFUSED, "")
            digest.update(refused.encode())
            for name in sorted(file.keys()):
                about = file.get_slice(name)
                digest.update(json.dumps([name, about.get_dtype(), about.get_shape()]).encode())
                if name.startswith("index."):
                    parts[name] = file.get_tensor(name).numpy().copy()
                    digest.update(parts[name])
        groups = {prefix: {name.removeprefix(prefix): part for name, part in parts.items() if name.startswith(prefix)}
                  for prefix in (_SHAPE, _XXH3, _COLUMN)}  # fmt: skip
        shapes = groups[_SHAPE]
        shard = Shard(
            index, len(shapes[_INFO]) if _INFO in shapes else 0, path.stat().st_size,
            parse_json(refused.encode(), dict[str, int], where=str(path), hint=again(folder)), digest.hexdigest(),
        )  # fmt: skip
        ends = {name: np.cumsum(np.maximum(shape, 0).prod(1, dtype=np.int64)) for name, shape in shapes.items()}
        sums = {name: part.view(np.uint64) for name, part in groups[_XXH3].items()}
        return cls(path, shard, shapes, ends, sums, groups[_COLUMN])

    def tensors(self, row: int, names: Iterable[str] | None) -> dict[str, Tensor]:
        """The tensors of sample number `row` of this shard."""
        result = {}
        with _opened(self.path) as file:
            for name in self.shapes if names is None else names:
                shape = self.shapes[name][row].tolist()
                if shape[0] < 0:
                    continue
                stop = int(self.ends[name][row])
                # A copy: the slice holds on to the whole file's memory, which a worker process would send.
                tensor = file.get_slice(name)[stop - int(np.prod(shape)) : stop].clone()
                if checksum(tensor) != self.sums[name][row]:
                    raise _edited(self.path, f"{name} of sample {row} differs from what was written")
                result[name] = tensor.view(shape)
        return result


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A shard as `safetensors` opens it. Raises `UserError` where it is missing or cannot be parsed."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except FileNotFoundError as error:
        raise UserError("missing shard", where=str(path), hint=again(path.parent)) from error
    except (SafetensorError, OSError, ValueError) as error:
        raise _edited(path, str(error)) from error


def _edited(path: Path, problem: str) -> UserError:
    return UserError(f"edited or damaged shard: {problem}", where=str(path), hint=again(path.parent))


def _dump(value: object) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def summary(folder: Path) -> str:
    """What a finished folder of shards holds, and what was refused and why."""
    reader = ShardReader(folder)
    refused = ", ".join(f"{count} {reason}" for reason, count in sorted(reader.refused.items())) or "none"
    size = sum(shard.bytes for shard in reader.shards) / 2**20
    held = f"{counted(len(reader), 'sample')} in {counted(len(reader.shards), 'shard')}"
    return f"{held}, {size:.1f} MiB; refused: {refused}"
