"""Identity of weights that a recipe names by path. It changes when the files change in place.

Reading tens of gigabytes at every start would take minutes. Files of up to 64 MiB count with every byte. Of larger ones
count the size, the header and the start, middle and end of every tensor: weights that were trained further, merged,
quantised or exchanged are told, a single flipped byte may not be. No time of a file counts.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from fnmatch import fnmatch
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import xxhash

from . import ranks
from .errors import UserError
from .results import BEGUN, DONE, LOADED, Stamp

WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt"}
# Of a stage's folder: they hold times.
_PASSED = {DONE, BEGUN, "report.json", "score.json"}
# Of .json files: what loaders of transformers and of this project open. A user's notes count for nothing.
_READ = ("*config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "chat_template*.json",
         "vocab*.json", "*.index.json", "draftsmith.json")  # fmt: skip
_WHOLE = 2**26  # bytes; larger files are sampled
_PIECE = 2**12  # bytes at each place that is looked at
_PIECES = 1024  # places in a large file that is no safetensors
_LONGEST_HEADER = 2**27  # bytes


def weights_identity(path: Path) -> str | None:
    """XXH3 (64 bits, hex) of a file of weights, or of a folder's weights, configs and tokenizer; None: neither is here.
    Files in folders inside count for nothing. Raises `UserError` where a file cannot be read.
    """
    try:
        if os.path.isfile(path):
            return _of_file(path) if path.suffix in WEIGHTS else None
        if not os.path.isdir(path):
            return None
        files = sorted(file for file in path.iterdir() if _is_read(file.name))
        listed = [(file.name, _of_file(file)) for file in files if file.is_file()]
    except OSError as error:
        hint = "fix its permissions or the disk, and run the same command again"
        where = str(error.filename or path)
        raise UserError(f"cannot be read: {error.strerror or error}", where=where, hint=hint) from error
    return xxhash.xxh3_64_hexdigest(json.dumps(listed).encode()) if listed else None


def _is_read(name: str) -> bool:
    if name.startswith(".") or name in _PASSED:
        return False
    suffix = Path(name).suffix
    return any(fnmatch(name, pattern) for pattern in _READ) if suffix == ".json" else suffix in LOADED | WEIGHTS


def _of_file(path: Path) -> str:
    about = os.stat(path)
    return _hash(str(path), (about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino))


@lru_cache(maxsize=2**14)
def _hash(path: str, stamp: Stamp) -> str:
    """Once in a process, as long as a file's size, times and inode stay."""
    size = stamp[0]
    digest = xxhash.xxh3_64(str(size).encode())
    with open(path, "rb", buffering=0) as file:
        if size <= _WHOLE:
            while piece := file.read(2**20):
                digest.update(piece)
            return digest.hexdigest()
        starts = _tensors(file, size, digest) if path.endswith(".safetensors") else None
        for start in starts or [i * (size - _PIECE) // (_PIECES - 1) for i in range(_PIECES)]:
            digest.update(os.pread(file.fileno(), _PIECE, start))
    return digest.hexdigest()


def _tensors(file: Any, size: int, digest: Any) -> list[int] | None:
    """Adds the header, and returns where each tensor's start, middle and end are looked at; None: it is damaged."""
    length = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
    if length > min(size, _LONGEST_HEADER):
        return None
    header = os.pread(file.fileno(), length, 8)
    digest.update(header)
    try:
        entries = json.loads(header)
        spans = sorted(entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__")
        places = [
            8 + length + place
            for start, stop in spans
            for place in (start, (start + stop) // 2, max(start, stop - _PIECE))
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return places if all(0 <= place <= size for place in places) else None


@cache
def _published(source: str, revision: str | None) -> set[str] | None:
    """The names of a Hub model's files, for which rank 0 asks once; None: nobody knows them."""
    from huggingface_hub import HfApi

    with suppress(Exception):  # its clients have their own; what loads the files says it
        if ranks.is_main():
            return {file.rfilename for file in HfApi().model_info(source, revision=revision, timeout=10).siblings or ()}
    return None


def file_names(source: str | Path, revision: str | None, fetched: str) -> set[str]:
    """The names of a model's files, in its folder or on the Hub; offline those that lie beside the `fetched` one."""
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        if (names := _published(str(source), revision)) is not None:
            return names
        try:
            cached = try_to_load_from_cache(str(source), fetched, revision=revision)
        except HFValidationError:  # no Hub id
            return set()
        if not isinstance(cached, str):
            return set()
        folder = Path(cached).parent
    return {path.name for path in folder.iterdir()}
