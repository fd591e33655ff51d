"""Captioned pictures in tar shards as img2dataset writes them (LAION-COCO); nothing in them is run (see `tars.py`)."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from .. import tars
from .items import MAX_TEXT_BYTES, Opener, Refused, Source, Unusable, caption_text, not_empty, opened


class TarSource(Source):
    """Tar shards as img2dataset writes them: `key.jpg` with `key.txt` and `key.json`."""

    kind: Literal["webdataset"]
    # Local tar files; braces and glob patterns are expanded: shards/{00000..00041}.tar
    path: str | list[str]
    # Field of the json member that holds the caption; null: the txt member is the caption.
    caption_key: str | None = None

    def num_items(self) -> int:
        """All of them, by the tars' indices."""
        return sum(tars.tar_index(path).num_items for path in tars.expand_paths(self.path))

    def openers(self, start: int) -> Iterator[Opener]:
        """One for each item from `start` on; whole tars before it are passed over by their index."""
        return _openers(self, tars.expand_paths(self.path), start)


def _openers(source: TarSource, paths: list[Path], start: int) -> Iterator[Opener]:
    for path in paths:
        number = offset = 0
        if start:
            index = tars.tar_index(path)
            if start >= index.num_items:
                start -= index.num_items
                continue
            number, offset = index.before(start)
        for sample in itertools.islice(tars.samples(path, start=offset), start - number, None):
            yield functools.partial(_open_sample, source, path, sample)
        start = 0


def _open_sample(source: TarSource, path: Path, sample: tars.TarSample | tars.RefusedMember, number: int):
    if isinstance(sample, tars.RefusedMember):
        return Refused(number, sample.name, sample.reason, f"{path}, {sample.name!r}", sample.detail)
    return opened(number, sample.key, f"{path}, {sample.key!r}", lambda: _content(source, path, sample))


def _content(source: TarSource, path: Path, sample: tars.TarSample) -> tuple[bytes, str, None]:
    image = next((sample.members[s] for s in tars.IMAGE_SUFFIXES if s in sample.members), None)
    if image is None:
        raise Unusable("no image", f"members: {', '.join(sample.members)}")
    suffix = "txt" if source.caption_key is None else "json"
    text = sample.members.get(suffix)
    if text is None:
        raise Unusable("no caption", f"no {suffix} member")
    if text.size > MAX_TEXT_BYTES:
        raise Unusable("member too large", f"{text.size} bytes of text, more than {MAX_TEXT_BYTES}")
    data = tars.content(path, text.offset, text.size)
    caption = caption_text(data) if source.caption_key is None else _json_caption(data, source.caption_key)
    return tars.content(path, image.offset, image.size), caption, None


def _json_caption(data: bytes, key: str) -> str:
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Unusable("bad json", str(error)) from error
    caption = record.get(key) if isinstance(record, dict) else None
    if not isinstance(caption, str):
        raise Unusable("no caption", f"{key!r} is missing or not text")
    return not_empty(caption)
