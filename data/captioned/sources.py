"""Where captioned pictures come from: tar shards (LAION-COCO), folders, a folder for each class (ImageNet), MS-COCO.

Nothing in a tar is run or unpacked (see `tars.py`).
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from ...core.errors import UserError
from ...core.fields import Place
from ...core.json_types import text_at
from ..records import tars
from .items import (
    MAX_TEXT_BYTES,
    Captioned,
    Opener,
    Refused,
    Source,
    Unusable,
    caption_text,
    existing_folder,
    file_bytes,
    json_file,
    not_empty,
    opened,
)


class TarSource(Source):
    """Tar shards as img2dataset writes them: `key.jpg` with `key.txt` and `key.json`."""

    kind: Literal["webdataset"]
    # Local tar files; braces and glob patterns are expanded: shards/{00000..00041}.tar
    path: Place | list[Place]
    # Field of the json member that holds the caption; null: the txt member is the caption.
    caption_key: str | None = None

    def num_items(self) -> int:
        """All of them, by the tars' indices."""
        return sum(tars.tar_index(path).num_items for path in tars.expand_paths(self.path))

    def openers(self, start: int) -> Iterator[Opener]:
        """One for each item from `start` on; whole tars before it are passed over by their index."""
        return self._openers(tars.expand_paths(self.path), start)

    def _openers(self, paths: list[Path], start: int) -> Iterator[Opener]:
        for path in paths:
            number = offset = 0
            if start:
                index = tars.tar_index(path)
                if start >= index.num_items:
                    start -= index.num_items
                    continue
                number, offset = index.before(start)
            for sample in itertools.islice(tars.samples(path, start=offset), start - number, None):
                yield functools.partial(_open_sample, self, path, sample)
            start = 0


def _open_sample(source: TarSource, path: Path, sample: tars.TarSample | tars.RefusedMember, number: int):
    if isinstance(sample, tars.RefusedMember):
        return Refused(number, sample.name, sample.reason, f"{path}, {sample.name!r}", sample.detail)
    return opened(number, sample.key, f"{path}, {sample.key!r}", lambda: _tar_content(source, path, sample))


def _tar_content(source: TarSource, path: Path, sample: tars.TarSample) -> tuple[bytes, str, None]:
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
        caption = text_at(json.loads(data), key)
    except (ValueError, RecursionError) as error:
        raise Unusable("bad json", str(error)) from error
    if caption is None:
        raise Unusable("no caption", f"{key!r} is missing or not text")
    return not_empty(caption)


class FolderSource(Source):
    """A folder of `name.jpg` (png, webp, gif, bmp, tiff, ppm) beside `name.txt`, in the order of the names. Files of
    other endings are refused and counted.
    """

    kind: Literal["folder"]
    # The folder; folders inside it are not looked into, and .txt and .json files are no pictures.
    folder: Place

    def openers(self, start: int) -> Iterator[Opener]:
        """One for each picture, in the order of the names."""
        folder = existing_folder(self.folder)
        names = file_names(folder)
        if not any(map(is_picture, names)):
            problem = f"no pictures ({', '.join(tars.IMAGE_SUFFIXES)})"
            raise UserError(problem, where=str(folder), hint="check `folder` of the data section")
        paths = (folder / name for name in names[start:])
        return (functools.partial(_open_file, p, p.stem, functools.partial(_text_beside, p), None) for p in paths)


class ClassFolderSource(Source):
    """ImageNet's layout: one folder for each class; the caption is the class's name."""

    kind: Literal["classes"]
    # The folder of class folders (ImageNet: train).
    folder: Place
    # JSON {"0": ["n01440764", "tench"], ...} of labels, folders and names; null: labels in the order of the folders.
    class_index: Place | None = None
    # Read only this number of pictures of each class: items come class by class, so a limit on all of them would leave
    # few classes; null: all.
    max_per_class: int | None = Field(None, ge=1)

    def openers(self, start: int) -> Iterator[Opener]:
        """One for each picture, class by class in the order of the folders."""
        return itertools.islice(self._all(_classes(self)), start, None)

    def _all(self, classes: list[tuple[Path, int, str]]) -> Iterator[Opener]:
        for folder, label, name in classes:
            pictures = 0
            for file in file_names(folder):
                if pictures == self.max_per_class:
                    break
                pictures += is_picture(file)
                path, caption = folder / file, functools.partial(not_empty, name)
                yield functools.partial(_open_file, path, f"{folder.name}/{path.stem}", caption, label)


_PICTURES = tuple("." + suffix for suffix in tars.IMAGE_SUFFIXES)
_BESIDE = (".txt", ".json")  # captions, and what img2dataset notes of a picture


def is_picture(name: str) -> bool:
    """Whether a file is called as pictures are."""
    return name.lower().endswith(_PICTURES)


def file_names(folder: Path) -> list[str]:
    """Names of a folder's pictures, and of files that are not called so, sorted.

    Hidden files are not pictures: macOS leaves a `._name.jpg` beside each file that it unpacks.
    """
    with os.scandir(folder) as entries:
        return sorted(
            entry.name for entry in entries
            if not entry.name.startswith(".") and not entry.name.lower().endswith(_BESIDE)
            and (is_picture(entry.name) or not entry.is_dir())
        )  # fmt: skip


def _open_file(path: Path, key: str, caption: Callable[[], str], label: int | None, number: int) -> Captioned | Refused:
    def content() -> tuple[bytes, str, int | None]:
        if not is_picture(path.name):
            raise Unusable(tars.UNKNOWN_SUFFIX, f"{path.suffix!r} is none of {', '.join(tars.IMAGE_SUFFIXES)}")
        text = caption()
        return file_bytes(path, tars.MAX_BYTES), text, label

    return opened(number, key, str(path), content)


def _text_beside(path: Path) -> str:
    return caption_text(file_bytes(path.with_suffix(".txt"), MAX_TEXT_BYTES, missing="no caption"))


def _classes(source: ClassFolderSource) -> list[tuple[Path, int, str]]:
    """(folder, label, name) of each class, in the order of the folders."""
    root = existing_folder(source.folder)
    folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not folders:
        raise UserError("no class folders", where=str(root), hint="check `folder` of the data section")
    if source.class_index is None:
        return [(folder, label, folder.name) for label, folder in enumerate(folders)]
    path = Path(source.class_index)
    labels = {}
    try:
        for label, (folder_name, name) in json_file(path).items():
            labels[folder_name] = int(label), name
    except (TypeError, ValueError) as error:
        hint = 'give {"0": ["n01440764", "tench"], ...}'
        raise UserError(f"not a class index: {error}", where=str(path), hint=hint) from error
    unknown = [folder.name for folder in folders if folder.name not in labels]
    if unknown:
        raise UserError(f"{len(unknown)} class folders without a label, first {unknown[0]!r}", where=str(path))
    return [(folder, *labels[folder.name]) for folder in folders]


def class_labels(source: ClassFolderSource) -> list[tuple[str, int]]:
    """(name, label) of each class."""
    return [(name, label) for _, label, name in _classes(source)]


class CocoSource(Source):
    """MS-COCO captions of 2014 or 2017, in the order of image ids."""

    kind: Literal["coco"]
    # captions_train2014.json, captions_val2017.json, ...
    annotations: Place
    # The folder of pictures; null: captions alone, as prompts.
    images: Place | None = None
    # Of an image's captions the first by annotation id, the longest, or each as an item of its own.
    which: Literal["first", "longest", "all"] = "first"

    def openers(self, start: int) -> Iterator[Opener]:
        """One for each item, in the order of image ids."""
        folder = None if self.images is None else existing_folder(self.images)
        return itertools.islice(_coco_openers(self, folder, _images(Path(self.annotations))), start, None)


def _images(path: Path) -> list[tuple[int, str, list[tuple[int, str]]]]:
    """(image id, file name, [(annotation id, caption)]) in the order of the ids."""
    file = json_file(path)
    images: dict[int, tuple[str, list[tuple[int, str]]]] = {}
    try:
        for image in file["images"]:
            images[int(image["id"])] = str(image["file_name"]), []
        for annotation in file["annotations"]:
            if not isinstance(annotation["caption"], str):
                raise TypeError("a caption that is not text")
            images[int(annotation["image_id"])][1].append((int(annotation["id"]), annotation["caption"]))
    except (KeyError, TypeError, ValueError) as error:
        hint = "give captions_*.json of MS-COCO; instances_*.json holds no captions"
        raise UserError(f"not MS-COCO captions: {error!r}", where=str(path), hint=hint) from error
    return [(number, name, sorted(captions)) for number, (name, captions) in sorted(images.items())]


def _coco_openers(source: CocoSource, folder: Path | None, images: list) -> Iterator[Opener]:
    for image_id, name, captions in images:
        where = f"{source.annotations}, image {image_id}"
        match source.which:
            case "first":
                chosen = captions[:1]
            case "longest":
                chosen = sorted(captions, key=lambda c: -len(c[1]))[:1]
            case "all":
                chosen = captions
        for annotation_id, caption in chosen or [(None, None)]:
            key = f"{image_id}-{annotation_id}" if source.which == "all" else str(image_id)
            content = functools.partial(_coco_content, folder, name, caption)
            yield functools.partial(opened, key=key, where=where, content=content)


def _coco_content(folder: Path | None, name: str, caption: str | None) -> tuple[bytes, str, None]:
    if caption is None:
        raise Unusable("no caption", "the image has no annotation")
    if problem := tars.unsafe_name(name):
        raise Unusable("unsafe name", f"{name!r}: {problem}")
    return b"" if folder is None else file_bytes(folder / name, tars.MAX_BYTES), not_empty(caption), None
