"""Tar shards from untrusted sources: lists their members and offsets without running, unpacking or trusting anything.

webdataset unpickles `.pkl` and `.pyd` members by default and hands `pipe:` addresses to a shell. Here a path is a local
file, a member is bytes under a suffix of an allow-list, and everything else is refused with a reason that can be
counted. Format: POSIX ustar with pax or GNU long names; keys as webdataset forms them.
"""

from __future__ import annotations

import bisect
import functools
import io
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from ...core.errors import NotFound, UserError
from ...core.file_kinds import other_kind
from ...core.files import open_data
from ...core.json_types import listed
from ..pictures.picture_files import SUFFIXES as IMAGE_SUFFIXES
from .patterns import MOST_NAMES, braces, matched

CLIP_SUFFIXES = ("mp4", "m4v", "mov", "webm", "mkv", "avi")
SUFFIXES = frozenset({*IMAGE_SUFFIXES, "txt", "json"})
# Only where the caller asks.
SAFETENSORS = frozenset({"safetensors"})
CLIPS = frozenset(CLIP_SUFFIXES)
UNKNOWN_SUFFIX = "suffix not allowed"
DOTTED = "a key ends at the first dot of a member's name"  # webdataset's rule, which people who name files forget
MAX_BYTES = 64 << 20  # of a member
_MAX_HEADER = 1 << 20  # bytes of an extended header, which is read whole
_RECORD = re.compile(rb"(\d+) [^=]+=")  # the beginning of one in a pax header, as `tarfile` looks for it
_ADDRESS = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*:")


@dataclass(frozen=True)
class Member:
    """One file of a tar; `content(tar, offset, size)` reads it, at any time later too."""

    name: str
    key: str  # the name up to the first dot of its last part
    suffix: str  # what follows that dot, in lower case
    offset: int  # of the content's first byte in the tar
    size: int  # bytes
    header: int  # offset of its header, or of the extended ones before it


@dataclass(frozen=True)
class RefusedMember:
    """A member that is not read. `reason` is one of few, to be counted; `detail` is for the log."""

    name: str
    reason: str
    detail: str


@dataclass(frozen=True)
class TarSample:
    """Members with one key that follow each other, by suffix."""

    key: str
    members: dict[str, Member]
    offset: int  # of its first member's header: where a pass may begin with it


def expand_paths(path: str | list[str]) -> list[Path]:
    """Local tar files: names as listed, braces (`{00000..00041}`) in their order, glob patterns sorted. Raises
    `UserError`: an address (`pipe:`, `https:`, ...), a missing file, a pattern without a match, a file named twice.
    """
    paths: list[Path] = []
    for pattern in listed(path):
        if _ADDRESS.match(pattern):
            hint = "download the shards first and give their local paths; addresses are never opened or run"
            raise UserError("an address where local tar files are expected", where=repr(pattern), hint=hint)
        paths += [Path(matched(str(file), "path")) for file in braces(pattern, key="path")]
    if len(paths) > MOST_NAMES:
        raise UserError(f"more than {MOST_NAMES:,} tar files", key="path", hint="name fewer")
    known = set()
    for file in paths:
        if not file.is_file():
            raise NotFound("tar file not found", where=str(file), hint="check `path` of the data section")
        if file in known:
            raise UserError("tar file named twice", where=str(file), hint="name each file once in `path`")
        known.add(file)
    if not paths:
        raise UserError("no tar files", where="`path` of the data section", hint="name at least one tar file")
    return paths


def samples(
    path: Path,
    *,
    start: int = 0,
    suffixes: frozenset[str] = SUFFIXES,
    max_bytes: int = MAX_BYTES,
    labelled: bool = False,
) -> Iterator[TarSample | RefusedMember]:
    """Files of a tar grouped by key, and between them what was refused, each once, in a fixed order. No content is
    read; directories are passed over. Raises `UserError`: not a tar, compressed, damaged or truncated; the message
    names the file.

    Args:
        start: offset of the header to begin at, a `Member.header` or `TarSample.offset` of this tar.
        suffixes: which suffixes are let through, out of `SUFFIXES`, `CLIPS` and `SAFETENSORS`.
        max_bytes: members larger than that are refused.
        labelled: let a label stand before the suffix: key.0.jpg, key.left.jpg.
    """
    assert suffixes <= SUFFIXES | CLIPS | SAFETENSORS, suffixes
    sample: TarSample | None = None
    for info in _headers(path, start):
        if info.isdir():
            continue
        member = _judge(info, suffixes, max_bytes, labelled)
        if isinstance(member, RefusedMember):
            yield member
            continue
        if sample is None or member.key != sample.key:
            if sample is not None:
                yield sample
            sample = TarSample(member.key, {}, member.header)
        if member.suffix in sample.members:
            yield RefusedMember(member.name, "second member of one name", f"the sample has a {member.suffix} already")
        else:
            sample.members[member.suffix] = member
    if sample is not None:
        yield sample


def content(path: Path, offset: int, size: int) -> bytes:
    """The bytes [offset, offset + size) of a tar; the file is opened anew, which is safe in workers."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(size)
    except OSError as error:
        raise UserError(f"cannot read the tar: {error.strerror}", where=str(path), hint="check the file") from error
    if len(data) < size:
        raise _truncated(path, offset + size)
    return data


def unsafe_name(name: str) -> str | None:
    """What makes a name from a stranger unfit to be a path inside a folder, or None."""
    if not name or not name.isprintable():
        return "empty or with unprintable characters"
    if name.startswith("/") or "\\" in name or _ADDRESS.match(name):
        return "absolute, an address or with a backslash"
    return "leads out of its folder" if ".." in name.split("/") else None


def _judge(info: tarfile.TarInfo, suffixes: frozenset[str], max_bytes: int, labelled: bool) -> Member | RefusedMember:
    name = info.name.removeprefix("./")
    if not info.isreg():
        return RefusedMember(name, "not a plain file", f"type {info.type!r}, link to {info.linkname!r}")
    if problem := unsafe_name(name):
        return RefusedMember(name, "unsafe name", problem)
    folder, slash, last = name.rpartition("/")
    stem, _, suffix = last.partition(".")
    if not stem or (suffix.rpartition(".")[2] if labelled else suffix).lower() not in suffixes:
        detail = f"{suffix!r} is none of {', '.join(sorted(suffixes))}"
        if suffix.rpartition(".")[2].lower() in suffixes:
            detail += f"; {DOTTED}, here {stem!r}"
        return RefusedMember(name, UNKNOWN_SUFFIX, detail)
    if info.size > max_bytes:
        return RefusedMember(name, "member too large", f"{info.size} bytes, more than {max_bytes}")
    return Member(name, folder + slash + stem, suffix.lower(), info.offset_data, info.size, info.offset)


class _Headers(io.BufferedReader):
    """A tar as `tarfile` reads it: headers alone, an extended one whole, whose length a stranger wrote."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _MAX_HEADER:
            raise ValueError(f"extended header of {size} bytes")
        return super().read(size)


class _Info(tarfile.TarInfo):
    """A header; pax ones are checked, where `tarfile` ignores all from the first record on that it cannot read."""

    def _proc_pax(self, tar: Any) -> tarfile.TarInfo:
        data = tar.fileobj.read(self.size)
        tar.fileobj.seek(-self.size % tarfile.BLOCKSIZE, os.SEEK_CUR)
        if self.type == tarfile.XGLTYPE:  # passed over: a pass may begin behind it
            tar.offset = tar.fileobj.tell()
            return self.fromtarfile(tar)
        position = 0
        while position < len(data):  # "<length of the record> <keyword>=<value>\n"
            record = _RECORD.match(data, position)
            stop = position + int(record[1]) if record else 0
            if not record or record.end() >= stop or data[stop - 1 : stop] != b"\n":
                raise ValueError("pax record")
            position = stop
        tar.fileobj.seek(self.offset + tarfile.BLOCKSIZE)
        return super()._proc_pax(tar)  # type: ignore[misc]


def _headers(path: Path, start: int) -> Iterator[tarfile.TarInfo]:
    """Members with their long names and sizes. Unlike `tarfile`, a damaged header is never taken for the end."""
    raw: Any = open_data(path)
    with _Headers(raw.detach()) as file:
        end, offset = os.fstat(file.fileno()).st_size, file.seek(start)
        try:
            tar: Any = tarfile.TarFile(fileobj=file, tarinfo=_Info, encoding="utf-8", errors="backslashreplace")
            while (info := tar.next()) is not None:
                size = info.pax_headers.get("size", "0")
                if info.issparse() or info.size < 0 or not (size.isdecimal() and len(size) < 20):
                    raise _damaged(path, info.offset, f"a sparse member, or one of {info.size} ({size[:20]}) bytes")
                tar.members.clear()
                offset = tar.offset
                yield info
                if offset > end:
                    raise _truncated(path, offset)
        except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
            if offset or isinstance(error, ValueError):  # there is a header, and what it says is wrong
                raise _damaged(path, offset, str(error)) from error
            # Before the mark of a tar, which one that is cut has, too.
            kind, cure = other_kind(content(path, 0, min(257, end))) or (error, "")
            hint = cure if cure.startswith(("unpack", "fetch")) else "give plain .tar files"  # others are of records
            raise UserError(f"not a tar file: {kind}", where=str(path), hint=hint) from error
        offset = file.seek(tar.offset)
        block = file.read(tarfile.BLOCKSIZE)
        if len(block) < tarfile.BLOCKSIZE:
            raise _truncated(path, offset + tarfile.BLOCKSIZE)
        if any(block):
            raise _damaged(path, offset, "no header")


def _damaged(path: Path, offset: int, problem: str) -> UserError:
    return UserError(f"damaged tar: {problem}", where=f"{path}, byte {offset}", hint="fetch or pack the file again")


def _truncated(path: Path, needed: int) -> UserError:
    problem = f"truncated tar: it ends before byte {needed}"
    return UserError(problem, where=str(path), hint="fetch the file again, or pack it again from its samples")


EVERY = 256  # items between two places that are remembered of a tar


@dataclass(frozen=True)
class TarIndex:
    """Items as `samples` numbers them within the tar, refused ones included."""

    num_items: int
    places: tuple[tuple[int, int], ...]  # items that a pass may begin with, and the offsets of their first headers

    def before(self, number: int) -> tuple[int, int]:
        """The last remembered item up to `number`: its own number, and the offset to begin at."""
        return self.places[bisect.bisect_right(self.places, number, key=itemgetter(0)) - 1]


def tar_index(path: Path) -> TarIndex:
    """Return the index of the file as it is now. Raises as `samples`."""
    state = path.stat()
    return _scan(path, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=1 << 16)
def _scan(path: Path, size: int, mtime_ns: int) -> TarIndex:
    """A pass may begin at a sample's first member alone: nothing before it is open that later members belong to."""
    places = [(0, 0)]
    count = begun = 0  # items so far, and how many came before the sample that is being put together
    for item in samples(path):
        count += 1
        if isinstance(item, RefusedMember):
            continue
        if begun - places[-1][0] >= EVERY:
            places.append((begun, item.offset))
        begun = count  # a sample is given out when the first member of the next one is met
    return TarIndex(count, tuple(places))
