"""Prompts of image generators: captions or classes from files, without pictures.

MS-COCO's caption JSON, PartiPrompts' TSV, text and JSON lines, our own shards and sources of captioned pictures.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from ...core.errors import UserError, encodable
from ...core.fields import Place, Seed
from ...core.files import LOG_BYTES, parse_json, read_text
from ...core.json_types import JsonObject, object_at, text_at
from ...core.section import Section
from .sources import CaptionedSource, CocoSource, TarSource, read, usable


@dataclass(frozen=True)
class ImagePrompt:
    """One request: a caption, and a class label where the data has one."""

    key: str
    caption: str
    label: int | None = None


class PromptSource(Section):
    """Prompts of one file.

    The kind follows the suffix: .json is MS-COCO's captions (2014 or 2017), .tsv PartiPrompts (column Prompt), .jsonl
    objects with `caption` (or `prompt`) and perhaps `label` and `id`, .txt a prompt on each line, .tar captioned
    pictures. `classes: N` asks for class labels 0 to N - 1 in turn.
    """

    path: Place | None = None
    # The stage whose folder contains the path (a synthetic dataset).
    from_stage: str | None = Field(None, alias="from")
    # Class-conditional models: labels in turn, as many as max_samples.
    classes: int | None = Field(None, ge=1, le=1 << 24)
    # MS-COCO: which of an image's captions.
    which: Literal["first", "longest", "all"] = "longest"
    # null: prompts in the order of the file. A number draws them in a random order, of this seed (ADT-Tree: 100 random
    # captions); not for a tar, whose pictures are compared in its order.
    shuffle: Seed | None = None
    max_samples: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_source(self) -> PromptSource:
        if (self.path is None) == (self.classes is None):
            raise ValueError("give path (captions) or classes (labels)")
        if self.classes is not None and self.max_samples is None:
            raise ValueError("classes needs max_samples: how many images")
        if self.classes is not None and self.from_stage is not None:
            raise ValueError("from is where the path lies, and classes have none")
        if self.shuffle is not None and (self.path is None or self.path.endswith(".tar")):
            raise ValueError("shuffle is for files of captions: classes come in turn, a tar's pictures in its order")
        return self

    def resolved(self, folder: Path | None) -> PromptSource:
        """Return the source with its path inside `folder`, that of the stage that made it; None: unchanged."""
        if folder is None or self.path is None:
            return self
        return self.model_copy(update={"path": str(folder / self.path), "from_stage": None})


def read_prompts(source: PromptSource) -> list[ImagePrompt]:
    """All prompts of a source. Raises `UserError` where the file is missing, of no known kind, or has no prompt."""
    if source.classes is not None:
        count = source.max_samples or 0
        return [ImagePrompt(f"class-{i % source.classes}-{i}", "", i % source.classes) for i in range(count)]
    path = Path(str(source.path))
    if not path.is_file():
        raise UserError("no such file of prompts", where=str(path), hint="check the prompts' path")
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise UserError(
            f"prompts in a {path.suffix or 'nameless'} file", where=str(path), hint=f"use one of {', '.join(_READERS)}"
        )
    if source.shuffle is None:
        prompts = list(itertools.islice(reader(path, source), source.max_samples))
    else:
        prompts = list(reader(path, source))
        random.Random(source.shuffle).shuffle(prompts)
        prompts = prompts[: source.max_samples]
    if not prompts:
        raise UserError("no prompt in the file", where=str(path), hint="give a file with prompts")
    return prompts


def _lines(path: Path, source: PromptSource) -> Iterator[ImagePrompt]:
    for number, line in _filled(path):
        yield ImagePrompt(f"line-{number}", line.strip())


def _json_lines(path: Path, source: PromptSource) -> Iterator[ImagePrompt]:
    for number, line in _filled(path):
        where = f"{path}, line {number + 1}"
        record = object_at(parse_json(line.encode(), object, where=where, hint="fix the line")) or {}
        if (prompt := _prompt_of(record)) is None:
            problem = "not an object with a caption or prompt (whole text) or a label (a number from 0)"
            raise UserError(problem, where=where, hint="fix the line")
        yield ImagePrompt(str(record.get("id", f"line-{number}")), *prompt)


def _prompt_of(record: JsonObject) -> tuple[str, int | None] | None:
    """Caption and label, or None where they are missing or of another type."""
    caption, label = text_at(record.get("caption") or record.get("prompt") or ""), record.get("label")
    if caption is None or not (label is None or (type(label) is int and label >= 0)):
        return None
    if encodable(caption) != caption:  # half a character
        return None
    return (caption.strip(), label) if caption.strip() or label is not None else None


def _parti(path: Path, source: PromptSource) -> Iterator[ImagePrompt]:
    """Read PartiPrompts.tsv as published, which is without quoting: quotation marks belong to their prompt."""
    rows = _filled(path)
    columns = next(rows, (0, ""))[1].split("\t")
    if "Prompt" not in columns:
        raise UserError("no column Prompt", where=str(path), hint="use PartiPrompts.tsv as published")
    for number, row in rows:
        cell = dict(zip(columns, row.split("\t"), strict=False)).get("Prompt", "").strip()
        if not cell:
            raise UserError("a row without a prompt", where=f"{path}, line {number + 1}", hint="fix the row")
        yield ImagePrompt(f"parti-{number - 1}", cell)


def _filled(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that hold something, with their numbers from 0."""
    text = read_text(path, hint="save the file as UTF-8", max_bytes=LOG_BYTES)
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")  # as any system ends them
    return ((number, line) for number, line in enumerate(lines) if line.strip())


def _captions(path: Path, source: PromptSource) -> Iterator[ImagePrompt]:
    captioned: CaptionedSource = TarSource(kind="webdataset", path=str(path))
    if path.suffix == ".json":
        captioned = CocoSource(kind="coco", annotations=str(path), which=source.which)
    return (ImagePrompt(item.key, item.caption, item.label) for item in usable(read(captioned)))


_READERS = {".json": _captions, ".jsonl": _json_lines, ".tsv": _parti, ".txt": _lines, ".tar": _captions}
