"""Conversations from tar shards: of each key a json member with a LLaVA record, and its pictures and clips.

Where samples lie is noted once, and each is read by its offset, as `tars.py` reads tars: webdataset 1.0 itself can
only go through a tar from its beginning, and its decoder believes what it finds.
"""

from __future__ import annotations

import functools
import hashlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from ...core.errors import UserError
from ...core.fields import Place
from ...core.json_types import Json, listed, object_at, parse, value_at
from ...core.section import Section
from ..pictures.media_files import Embedded
from . import tars
from .record import Unreadable
from .records import Reader, RecordFile, duplicates, file_identity, indexed, open_index
from .scan import Entry

MAX_BYTES = 512 << 20  # of a picture or a clip
MAX_RECORD_BYTES = 16 << 20
_SUFFIXES = frozenset({"json", *tars.IMAGE_SUFFIXES, *tars.CLIP_SUFFIXES})
_NO_FILE_NAME = re.compile(r"[^\w.-]")
_NUMBERS = re.compile(r"(\d+)")
_REPEATED = "its key comes a second time: the members of one key must follow each other"


class TarRecords(Section):
    """Tar shards in webdataset's layout: KEY.json with KEY.jpg, or with KEY.0.jpg, KEY.1.jpg, KEY.mp4 ..."""

    kind: Literal["webdataset"]
    # Local tar files; braces and glob patterns are expanded: "shards/{000..999}.tar". All of them count as one set.
    path: Place | tuple[Place, ...]

    opens_fast: ClassVar[bool] = True  # opening reads no more than an index needs
    is_remote: ClassVar[bool] = False

    @property
    def source_name(self) -> str:
        """The last part of the first pattern; tars keep it when their folder moves."""
        return Path(self._patterns[0]).name

    @property
    def _patterns(self) -> tuple[str, ...]:
        return tuple(listed(self.path))

    def __str__(self) -> str:
        return ", ".join(self._patterns)

    def inside(self, folder: Path) -> TarRecords:
        """Return the section with relative paths starting at `folder`."""
        return self.model_copy(update={"path": tuple(str(folder / pattern) for pattern in self._patterns)})

    def is_present(self) -> bool:
        """Whether the pattern names tars that are there."""
        try:
            return bool(self._shards())
        except UserError:
            return False

    def identity(self) -> str:
        """Hash of all tars, as files are hashed."""
        if not self.is_present():
            return "absent"
        return hashlib.sha256("/".join(map(file_identity, self._shards())).encode()).hexdigest()

    def open(self, cache: Path) -> RecordFile:
        """Index the tars. Raises `UserError` where one is missing or damaged."""
        shards = self._shards()
        reader = TarReader(self.source_name, str(self), shards)
        stem = f"{_NO_FILE_NAME.sub('_', self.source_name)}-{self.identity()[:16]}"
        return open_index(reader, stem, cache, lambda: _index(reader))

    def _shards(self) -> list[Path]:
        return tars.expand_paths(list(self._patterns))


class TarReader(Reader):
    """Records of shards that are laid end to end: an offset is one of their bytes."""

    def __init__(self, name: str, label: str, shards: list[Path]):
        super().__init__(name, label, shards[0].parent)
        self.shards = shards
        sizes = [path.stat().st_size for path in shards]
        self.starts = np.cumsum([0, *sizes], dtype=np.int64)[:-1]  # [s] where each shard begins

    def file_of(self, offset: int) -> str:
        return str(self.shards[self._shard(offset)])

    def read(self, offset: int, size: int) -> Json:
        """The sample that begins there; of `size` 0 an item that is no sample."""
        if not size:
            return Unreadable("no sample")
        shard = self._shard(offset)
        path, start = self.shards[shard], offset - int(self.starts[shard])
        return next(_record(path, item) for item in _items(path, start) if isinstance(item, tars.TarSample))

    def _shard(self, offset: int) -> int:
        return int(np.searchsorted(self.starts, offset, side="right")) - 1


def _index(reader: TarReader) -> RecordFile:
    key_hashes: list[int] = []

    def entries() -> Iterator[Entry]:
        for path, start in zip(reader.shards, reader.starts.tolist(), strict=True):
            for item in _items(path, 0):
                if isinstance(item, tars.RefusedMember):
                    key_hashes.append(0)
                    yield start, 0, Unreadable(f"member {item.name!r}: {item.reason} ({item.detail})")
                else:
                    key_hashes.append(hash((start, item.key)))
                    text, record = item.members.get("json"), _record(path, item)
                    if str(value_at(record, "id")) == item.key:  # keys, and ids that are keys, begin anew in each tar
                        record["id"] = f"{start}/{record['id']}"
                    yield start + item.offset, text.size if text else 1, record

    index = indexed(reader, entries(), "pack a KEY.json with a LLaVA record for each sample")
    index.problems.update({int(number): _REPEATED for number, _ in duplicates(np.array(key_hashes))})
    return index


def _items(path: Path, start: int) -> Iterator[tars.TarSample | tars.RefusedMember]:
    """Samples, and members that were refused. Those of other suffixes are no part of a sample."""
    for item in tars.samples(path, start=start, suffixes=_SUFFIXES, max_bytes=MAX_BYTES, labelled=True):
        if isinstance(item, tars.TarSample) or item.reason != tars.UNKNOWN_SUFFIX:
            yield item


def _record(path: Path, sample: tars.TarSample) -> Json:
    """The record of the json member, with the sample's pictures and clips in place of their names."""
    text = sample.members.get("json")
    if text is None or text.size > MAX_RECORD_BYTES:
        members = ", ".join(sample.members)
        reason = "no json member" if text is None else f"a json member of {text.size} bytes"
        if text is None and any(suffix.endswith(".json") for suffix in sample.members):
            reason += f"; {tars.DOTTED}: write the names without others"
        return Unreadable(f"key {sample.key!r}: {reason} (members: {members})")
    try:
        fields = object_at(parse(tars.content(path, text.offset, text.size)))
    except ValueError as error:
        return Unreadable(f"key {sample.key!r}: bad json: {error}")
    if fields is None:
        return Unreadable(f"key {sample.key!r}: its json is not an object with conversations")
    record = {"id": sample.key, **fields}
    for field, suffixes in (("image", tars.IMAGE_SUFFIXES), ("video", tars.CLIP_SUFFIXES)):
        media = [m for s, m in sample.members.items() if s.rpartition(".")[2] in suffixes]
        if not media:
            continue  # the record may name files of a folder
        ordered = _ordered(record.get(field), media)
        if ordered is None:
            return Unreadable(f"key {sample.key!r}: {field} names another number than its {len(media)} members")
        record[field] = [
            Embedded(f"{path}, {m.name}", functools.partial(_stream, path, m.offset, m.size)) for m in ordered
        ]
    return record


def _ordered(named: Json, media: list[tars.Member]) -> list[tars.Member] | None:
    """The members in the order in which the record names them, else by their labels; None: it names more or less."""
    by_name = {member.name.rpartition("/")[2]: member for member in media}
    names = listed(named or None)
    lasts = [name.rpartition("/")[2] for name in names if isinstance(name, str)]
    if names and len(names) != len(media):
        return None
    if set(lasts) == by_name.keys():
        return [by_name[name] for name in lasts]
    return sorted(media, key=lambda member: [int(p) if p.isdecimal() else p for p in _NUMBERS.split(member.suffix)])


def _stream(path: Path, offset: int, size: int) -> io.BytesIO:
    return io.BytesIO(tars.content(path, offset, size))
