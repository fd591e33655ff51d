"""The files of a folder of shards: their names, what is said of one shard, and a sample's two members in its tar.

Those are `key.safetensors` with the sample's tensors and `key.json` with all else.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

from ...core.errors import UserError
from ...core.files import parse_json, read_small
from ...core.json_types import Json, JsonMapping, JsonObject

FORMAT = 2  # of shards, their json and the manifest: count up when one changes
AGAIN = "delete the file and run the stage again: it writes the missing shard only"

Buffer = bytes | bytearray | memoryview

# What reading members that are no such two raises.
BAD_MEMBERS = (tarfile.HeaderError, SafetensorError, ValueError)

# safetensors' names of the types that states are kept in.
_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Shard:
    """What a manifest says of one shard."""

    index: int
    sha256: str  # of the tar
    num_samples: int
    bytes: int  # of the tar
    refused: dict[str, int]  # reason -> items that were left out
    sidecar_sha256: str  # of the json beside the tar


@dataclass(frozen=True)
class _Summary:
    """What the json beside a shard must hold; where each sample begins, and its checksum, are read with the samples."""

    sha256: str
    num_samples: int
    bytes: int
    refused: dict[str, int]


_OTHERS = {"format", "starts", "xxh3", "columns", "check"}


def tar_path(folder: Path, index: int) -> Path:
    """Path of shard number `index`."""
    return folder / f"shard-{index:06d}.tar"


def read_shard(folder: Path, index: int) -> Shard:
    """What the JSON file beside a shard says of it. Raises `UserError` where the file is missing or damaged."""
    path = tar_path(folder, index).with_suffix(".json")
    data = read_small(path, hint=AGAIN)
    summary = parse_json(data, _Summary, where=str(path), hint=AGAIN)
    written = json.loads(data)
    # Those of before have no checksum.
    check = written.pop("check", None) if "check" in written else _of_summary(written)
    known = written.keys() <= {*_OTHERS, *vars(summary)} and written.get("format") == FORMAT
    if not known or check != _of_summary(written):
        raise edited(path, "it is not as it was written")
    return Shard(index, **vars(summary), sidecar_sha256=hashlib.sha256(data).hexdigest())


def dump_summary(summary: JsonMapping) -> bytes:
    """The json beside a shard, with a checksum of itself: until there is a manifest, nothing else knows its values."""
    return json.dumps({**summary, "check": _of_summary(summary)}).encode()


def _of_summary(summary: JsonMapping) -> int:
    return xxhash.xxh3_64_intdigest(json.dumps(summary).encode())


def dump(value: object) -> bytes:
    """The value as JSON bytes; values that are not finite are refused."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def edited(path: Path, problem: str) -> UserError:
    """The error to raise where a shard is not as it was written."""
    return UserError(f"edited or damaged shard: {problem}", where=str(path), hint=AGAIN)


def difference(held: object, wanted: object, name: str = "") -> tuple[str, Json, Json] | None:
    """The first field in which two JSON values differ, dotted, with both values."""
    if not (isinstance(held, dict) and isinstance(wanted, dict)):
        return None if held == wanted else (name, held, wanted)
    for key in [*wanted, *(k for k in held if k not in wanted)]:
        if (found := difference(held.get(key), wanted.get(key), f"{name}.{key}" if name else key)) is not None:
            return found
    return None


def pack(key: str, tensors: dict[str, Tensor], info: JsonObject) -> bytes:
    """Two members as they stand in the tar. Tensors are copied, since safetensors refuses shared memory."""
    owned = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    text = json.dumps(info, sort_keys=True, allow_nan=False, ensure_ascii=False).encode()
    return _member(f"{key}.safetensors", safetensors.torch.save(owned)) + _member(f"{key}.json", text)


def unpack(packed: bytes) -> tuple[str, dict[str, Tensor], JsonObject]:
    """The inverse of `pack`, which does not trust its input: the folder may come from elsewhere."""
    key, (start, stop), info = _members(memoryview(packed))
    return key, safetensors.torch.load(packed[start:stop]), info


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies in a buffer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte
    stop: int

    def of(self, buffer: Tensor) -> Tensor:
        """The tensor in `buffer` [bytes] uint8, without a copy."""
        return buffer[self.start : self.stop].view(self.dtype).view(self.shape)


def places(packed: memoryview) -> tuple[dict[str, TensorPlace], JsonObject]:
    """Where the tensors of `pack`'s result lie in it, and its info: nothing large is copied.

    Raises:
        ValueError: it is no such result.
    """
    _, (start, stop), info = _members(packed)
    return _places(packed, start, stop), info


def tensor_places(head: Buffer) -> dict[str, TensorPlace]:
    """The same from the first bytes of `pack`'s result, which hold the tensors' names."""
    header = tarfile.TarInfo.frombuf(bytes(head[: tarfile.BLOCKSIZE]), "utf-8", "strict")
    return _places(memoryview(head), tarfile.BLOCKSIZE, tarfile.BLOCKSIZE + header.size)


def _places(packed: memoryview, start: int, stop: int) -> dict[str, TensorPlace]:
    """Return where each tensor of the safetensors member from `start` to `stop` lies, by name."""
    first = start + 8 + int.from_bytes(packed[start : start + 8], "little")
    if first > min(stop, len(packed)):
        raise ValueError("a header beyond the member's end")
    header = json.loads(bytes(packed[start + 8 : first]))
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = _DTYPES.get(entry["dtype"]), tuple(entry["shape"])
        begin, end = (first + offset for offset in entry["data_offsets"])
        if dtype is None:
            raise ValueError(f"{name} is of type {entry['dtype']}")
        if not first <= begin <= end <= stop or torch.Size(shape).numel() * dtype.itemsize != end - begin:
            raise ValueError(f"{name} does not fit its place")
        found[name] = TensorPlace(dtype, shape, begin, end)
    return found


def _member(name: str, data: bytes) -> bytes:
    """TarInfo's defaults are time 0, owner 0 and mode 0644: nothing of this machine or hour enters."""
    header = tarfile.TarInfo(name)
    header.size = len(data)
    return header.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)


def _members(packed: memoryview) -> tuple[str, tuple[int, int], JsonObject]:
    """Key, where the content of the safetensors member lies, and info."""
    names, contents, position = [], [], 0
    for _ in range(2):
        block = bytes(packed[position : position + tarfile.BLOCKSIZE])
        header = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        start = position + tarfile.BLOCKSIZE
        names.append(header.name)
        contents.append((start, start + header.size))
        position = start - (-header.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    key = names[0].removesuffix(".safetensors")
    if names != [f"{key}.safetensors", f"{key}.json"] or position != len(packed):
        raise ValueError(f"members {names}")
    return key, contents[0], json.loads(bytes(packed[slice(*contents[1])]))
