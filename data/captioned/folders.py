"""Captioned pictures in folders: each beside its caption, or a folder for each class (ImageNet)."""

from __future__ import annotations

import functools
import heapq
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from ...core.errors import UserError
from .. import tars
from .items import (
    MAX_TEXT_BYTES,
    Captioned,
    Opener,
    Refused,
    Source,
    caption_text,
    existing_folder,
    file_bytes,
    json_file,
    opened,
)

NAMES_HELD = 65536  # of a folder at a time


class FolderSource(Source):
    """A folder of `name.jpg` (png, webp) beside `name.txt`, in the order of the names."""

    kind: Literal["folder"]
    # The folder; folders inside it are not looked into.
    folder: str

    def openers(self, start: int) -> Iterator[Opener]:
        """One for each picture, in the order of the names."""
        return itertools.islice(_pairs(existing_folder(self.folder)), start, None)


class ClassFolderSource(Source):
    """ImageNet's layout: one folder for each class; the caption is the class's name."""

    kind: Literal["classes"]
    # The folder of class folders (ImageNet: train).
    folder: str
    # JSON {"0": ["n01440764", "tench"], ...} of labels, folders and names; null: labels in the order of the folders.
    class_index: str | None = None
    # Read the first so many pictures of each class: items come class by class, and the first of all are of few
    # classes; null: all.
    max_per_class: int | None = Field(None, ge=1)

    def openers(self, start: int) -> Iterator[Opener]:
        """One for each picture, class by class in the order of the folders."""
        return itertools.islice(_labelled(_classes(self), self.max_per_class), start, None)


def _pairs(folder: Path) -> Iterator[Opener]:
    found = False
    for name in image_names(folder):
        found = True
        yield functools.partial(_open_pair, folder / name)
    if not found:
        raise UserError("no jpg, png or webp files", where=str(folder), cure="check `folder` of the data section")


def _open_pair(path: Path, number: int) -> Captioned | Refused:
    def content() -> tuple[bytes, str, None]:
        caption = file_bytes(path.with_suffix(".txt"), MAX_TEXT_BYTES, missing="no caption")
        return file_bytes(path, tars.MAX_BYTES), caption_text(caption), None

    return opened(number, path.stem, str(path), content)


def image_names(folder: Path, held: int = NAMES_HELD) -> Iterator[str]:
    """Names of a folder's pictures, sorted; the folder is looked through again for each `held` of them.

    Hidden files are not pictures: macOS leaves a `._name.jpg` beside each file that it unpacks.
    """
    endings, last = tuple("." + suffix for suffix in tars.IMAGE_SUFFIXES), ""
    while True:
        with os.scandir(folder) as entries:
            names = (e.name for e in entries if e.name > last and e.name.lower().endswith(endings))
            chunk = heapq.nsmallest(held, (name for name in names if not name.startswith(".")))
        if not chunk:
            return
        last = chunk[-1]
        yield from chunk
        chunk.clear()


def _classes(source: ClassFolderSource) -> list[tuple[Path, int, str]]:
    """(folder, label, name) of each class, in the order of the folders."""
    root = existing_folder(source.folder)
    folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not folders:
        raise UserError("no class folders", where=str(root), cure="check `folder` of the data section")
    if source.class_index is None:
        return [(folder, label, folder.name) for label, folder in enumerate(folders)]
    path = Path(source.class_index)
    labels = {}
    try:
        for label, (folder_name, name) in json_file(path).items():
            labels[folder_name] = int(label), name
    except (AttributeError, TypeError, ValueError) as error:
        cure = 'give {"0": ["n01440764", "tench"], ...}'
        raise UserError(f"not a class index: {error}", where=str(path), cure=cure) from error
    unknown = [folder.name for folder in folders if folder.name not in labels]
    if unknown:
        raise UserError(f"{len(unknown)} class folders without a label, first {unknown[0]!r}", where=str(path))
    return [(folder, *labels[folder.name]) for folder in folders]


def _labelled(classes: list[tuple[Path, int, str]], most: int | None) -> Iterator[Opener]:
    for folder, label, name in classes:
        for file in itertools.islice(image_names(folder), most):
            yield functools.partial(_open_labelled, folder / file, label, name)


def _open_labelled(path: Path, label: int, name: str, number: int) -> Captioned | Refused:
    key = f"{path.parent.name}/{path.stem}"
    return opened(number, key, str(path), lambda: (file_bytes(path, tars.MAX_BYTES), name, label))
