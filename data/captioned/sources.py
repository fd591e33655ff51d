"""Sources of captioned pictures: tar shards (LAION-COCO), folders, a folder for each class (ImageNet), MS-COCO.

Each source is one stream of numbered items. An item that cannot be used keeps its number and says why, so that counts
add up and a pass can go on anywhere. No more than one picture is held at a time; nothing of a file is run or unpacked
(see `tars.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field

from ...core.errors import NotFound, UserError, encodable
from ...core.fields import Place
from ...core.files import LOG_BYTES, read_json, write_whole
from ...core.json_types import JsonObject, text_at
from ...core.section import Section
from ..records import tars
from .items import MAX_TEXT_BYTES, Captioned, Refused, Unusable, caption_text, file_bytes, not_empty

Content = tuple[bytes, str, int | None]  # picture, caption, class index


class Entry(NamedTuple):
    """An item that is not read yet."""

    key: str
    where: str
    content: Callable[[], Content]  # raises `Unusable`


class Source(Section):
    """Settings and methods of every kind of source."""

    # Read only this number of items, refused ones included; null: all.
    max_samples: int | None = Field(None, ge=1)

    def entries(self, start: int) -> Iterator[Entry]:
        """One for each item from number `start` on, in a fixed order."""
        raise NotImplementedError

    def num_items(self) -> int:
        """All of them, before `max_samples`."""
        return sum(1 for _ in self.entries(0))


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

    def entries(self, start: int) -> Iterator[Entry]:
        """One for each item from `start` on; whole tars before it are passed over by their index."""
        return self._entries(tars.expand_paths(self.path), start)

    def _entries(self, paths: list[Path], start: int) -> Iterator[Entry]:
        for path in paths:
            number = offset = 0
            if start:
                index = tars.tar_index(path)
                if start >= index.num_items:
                    start -= index.num_items
                    continue
                number, offset = index.before(start)
            for sample in islice(tars.samples(path, start=offset), start - number, None):
                key = sample.name if isinstance(sample, tars.RefusedMember) else sample.key
                yield Entry(key, f"{path}, {key!r}", partial(self._content, path, sample))
            start = 0

    def _content(self, path: Path, sample: tars.TarSample | tars.RefusedMember) -> Content:
        if isinstance(sample, tars.RefusedMember):
            raise Unusable(sample.reason, sample.detail)
        image = next((sample.members[s] for s in tars.IMAGE_SUFFIXES if s in sample.members), None)
        if image is None:
            raise Unusable("no image", f"members: {', '.join(sample.members)}")
        suffix = "txt" if self.caption_key is None else "json"
        text = sample.members.get(suffix)
        if text is None:
            raise Unusable("no caption", f"no {suffix} member")
        if text.size > MAX_TEXT_BYTES:
            raise Unusable("member too large", f"{text.size} bytes of text, more than {MAX_TEXT_BYTES}")
        data = tars.content(path, text.offset, text.size)
        caption = caption_text(data) if self.caption_key is None else _json_caption(data, self.caption_key)
        return tars.content(path, image.offset, image.size), caption, None


def _json_caption(data: bytes, key: str) -> str:
    try:  # the caption alone is read: NaN beside it, as img2dataset writes what it does not know, does no harm
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

    def entries(self, start: int) -> Iterator[Entry]:
        """One for each picture, in the order of the names. Raises `UserError`: none is a picture."""
        folder = _existing_folder(self.folder)
        names = _file_names(folder)
        if not any(map(_is_picture, names)):
            problem = f"no pictures ({', '.join(tars.IMAGE_SUFFIXES)})"
            raise UserError(problem, where=str(folder), hint="check `folder` of the data section")
        paths = (folder / name for name in names[start:])
        return (Entry(path.stem, str(path), partial(_beside_its_caption, path)) for path in paths)


def _beside_its_caption(path: Path) -> Content:
    _check_name(path)
    caption = file_bytes(path.with_suffix(".txt"), MAX_TEXT_BYTES, missing="no caption")
    return file_bytes(path, tars.MAX_BYTES), caption_text(caption), None


class ClassFolderSource(Source):
    """ImageNet's layout: one folder for each class; the caption is the class's name."""

    kind: Literal["classes"]
    # The folder of class folders (ImageNet: train).
    folder: Place
    # JSON {"0": ["n01440764", "tench"], ...} of labels, folders and names; null: labels in the order of the folders, or
    # the folders' names where all are numbers.
    class_index: Place | None = None
    # Read only this number of pictures of each class: items come class by class, so a limit on all of them would leave
    # few classes; null: all.
    max_per_class: int | None = Field(None, ge=1)

    def entries(self, start: int) -> Iterator[Entry]:
        """One for each picture, class by class in the order of the folders."""
        return islice(self._entries(self._classes()), start, None)

    def _entries(self, classes: list[tuple[Path, int, str]]) -> Iterator[Entry]:
        for folder, label, name in classes:
            left = self.max_per_class
            for path in (folder / file for file in _file_names(folder)):
                if left == 0:
                    break
                if left is not None:
                    left -= _is_picture(path.name)
                yield Entry(f"{folder.name}/{path.stem}", str(path), partial(_of_a_class, path, label, name))

    def class_labels(self) -> list[tuple[str, int]]:
        """(name, label) of each class."""
        return [(name, label) for _, label, name in self._classes()]

    def _classes(self) -> list[tuple[Path, int, str]]:
        """(folder, label, name) of each class, in the order of the folders."""
        root = _existing_folder(self.folder)
        folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
        if not folders:
            raise UserError("no class folders", where=str(root), hint="check `folder` of the data section")
        for folder in folders:  # as torchvision does: one that is none (__MACOSX, lost+found) would shift the labels
            if not any(_is_picture(name) and (folder / name).is_file() for name in _file_names(folder)):
                hint = "labels count the folders in their order: remove this one, or give it pictures"
                raise UserError("a class folder without pictures", where=str(folder), hint=hint)
        if self.class_index is None:
            # "10" is label 10, though it stands before "2".
            are_labels = all(folder.name.isdecimal() for folder in folders)
            return [(f, int(f.name) if are_labels else place, f.name) for place, f in enumerate(folders)]
        path = Path(self.class_index)
        labels = {}
        try:
            for label, (folder_name, name) in _json_file(path).items():
                if folder_name in labels:
                    raise ValueError(f"two labels for {folder_name!r}")
                labels[folder_name] = int(label), name
        except (TypeError, ValueError) as error:
            hint = 'give {"0": ["n01440764", "tench"], ...}'
            raise UserError(f"not a class index: {error}", where=str(path), hint=hint) from error
        unknown = [folder.name for folder in folders if folder.name not in labels]
        if unknown:
            raise UserError(f"{len(unknown)} class folders without a label, first {unknown[0]!r}", where=str(path))
        return [(folder, *labels[folder.name]) for folder in folders]


def _of_a_class(path: Path, label: int, name: str) -> Content:
    _check_name(path)
    return file_bytes(path, tars.MAX_BYTES), not_empty(name), label


class CocoSource(Source):
    """MS-COCO captions of 2014 or 2017, in the order of image ids. An annotation's `category_id` is its class index."""

    kind: Literal["coco"]
    # captions_train2014.json, captions_val2017.json, ...
    annotations: Place
    # The folder of pictures; null: captions alone, as prompts.
    images: Place | None = None
    # Of an image's captions the first by annotation id, the longest, or each as an item of its own.
    which: Literal["first", "longest", "all"] = "first"

    def entries(self, start: int) -> Iterator[Entry]:
        """One for each item, in the order of image ids."""
        folder = None if self.images is None else _existing_folder(self.images)
        return islice(self._entries(folder, self._read()), start, None)

    def _entries(self, folder: Path | None, images: list[tuple[int, str, list]]) -> Iterator[Entry]:
        for image_id, name, captions in images:
            if self.which == "longest":
                captions = sorted(captions, key=lambda c: -len(c[1]))
            for annotation_id, *text in (captions if self.which == "all" else captions[:1]) or [(None, None, None)]:
                key = f"{image_id}-{annotation_id}" if self.which == "all" else str(image_id)
                content = partial(_of_an_annotation, folder, name, *text)
                yield Entry(key, f"{self.annotations}, image {image_id}", content)

    def _read(self) -> list[tuple[int, str, list[tuple[int, str, int | None]]]]:
        """(image id, file name, [(annotation id, caption, category)]) in the order of the ids."""
        path = Path(self.annotations)
        file = _json_file(path)
        images: dict[int, tuple[str, list[tuple[int, str, int | None]]]] = {}
        try:
            for image in file["images"]:
                images[int(image["id"])] = str(image["file_name"]), []
            for annotation in file["annotations"]:
                if not isinstance(annotation["caption"], str):
                    raise TypeError("a caption that is not text")
                label = annotation.get("category_id")  # MS-COCO's captions have none
                label = None if label is None else int(label)
                images[int(annotation["image_id"])][1].append((int(annotation["id"]), annotation["caption"], label))
        except (KeyError, TypeError, ValueError) as error:
            hint = "give captions_*.json of MS-COCO; instances_*.json holds no captions"
            raise UserError(f"not MS-COCO captions: {error!r}", where=str(path), hint=hint) from error
        by_id = itemgetter(0, 1)
        return [(number, name, sorted(of, key=by_id)) for number, (name, of) in sorted(images.items())]


def _of_an_annotation(folder: Path | None, name: str, caption: str | None, label: int | None) -> Content:
    if caption is None:
        raise Unusable("no caption", "the image has no annotation")
    if problem := tars.unsafe_name(name):
        raise Unusable("unsafe name", f"{name!r}: {problem}")
    return b"" if folder is None else file_bytes(folder / name, tars.MAX_BYTES), not_empty(caption), label


CaptionedSource = Annotated[TarSource | FolderSource | ClassFolderSource | CocoSource, Field(discriminator="kind")]


def read(source: CaptionedSource, start: int = 0) -> Iterator[Captioned | Refused]:
    """Items from number `start` on, in a fixed order; those before it are passed over without being read. Raises
    `UserError`: a missing file or folder, an address, a damaged tar or json; at once or where the stream comes to it.
    """
    assert start >= 0, start
    left = None if source.max_samples is None else max(source.max_samples - start, 0)
    return (_opened(number, entry) for number, entry in enumerate(islice(source.entries(start), left), start))


def _opened(number: int, entry: Entry) -> Captioned | Refused:
    key, where, content = entry
    if encodable(key) != key:  # of a file whose name is in another code
        return Refused(number, encodable(key), "unsafe name", encodable(where), "not UTF-8")
    try:
        return Captioned(number, key, *content(), where)
    except Unusable as error:
        return Refused(number, key, error.args[0], where, error.args[1])


def usable(items: Iterable[Captioned | Refused]) -> Iterator[Captioned]:
    """Those that can be used."""
    return (item for item in items if isinstance(item, Captioned))


def num_items(source: CaptionedSource) -> int:
    """The number of items that `read` gives, refused ones included; no picture is read."""
    count = source.num_items()
    return count if source.max_samples is None else min(count, source.max_samples)


_DIGEST_BYTES = 16  # of a picture's SHA-256


def write_digests(items: Iterable[Captioned | Refused], path: Path) -> None:
    """Keep a digest of each picture's bytes, and zeros for an item that cannot be used."""
    nothing = bytes(_DIGEST_BYTES)
    digests = (hashlib.sha256(i.image).digest()[:_DIGEST_BYTES] if isinstance(i, Captioned) else nothing for i in items)
    content = b"".join(digests)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)


def repeated(paths: Sequence[Path]) -> dict[int, int]:
    """Number of an item -> number of the first one with the same picture, by the digests in these files.

    LAION-COCO holds many copies of one picture; a drafter trained on them, or a hold-out that shares them, measures
    memory instead of prediction.
    """
    digests = np.concatenate([np.fromfile(path, dtype=f"V{_DIGEST_BYTES}") for path in paths])
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
    earlier, nothing = first[inverse], np.zeros(1, digests.dtype)
    repeats = np.flatnonzero((earlier < np.arange(len(digests))) & (digests != nothing))
    return dict(zip(repeats.tolist(), earlier[repeats].tolist(), strict=True))


_PICTURES = tuple("." + suffix for suffix in tars.IMAGE_SUFFIXES)
_BESIDE = (".txt", ".json")  # captions, and what img2dataset notes of a picture


def _is_picture(name: str) -> bool:
    return name.lower().endswith(_PICTURES)


def _check_name(path: Path) -> None:
    if not _is_picture(path.name):
        raise Unusable(tars.UNKNOWN_SUFFIX, f"{path.suffix!r} is none of {', '.join(tars.IMAGE_SUFFIXES)}")


def _file_names(folder: Path) -> list[str]:
    """Names of a folder's pictures, and of files that are not called so, sorted.

    Hidden files are not pictures: macOS leaves a `._name.jpg` beside each file that it unpacks.
    """
    return _names_at(folder, folder.stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _names_at(folder: Path, mtime_ns: int) -> list[str]:
    """Kept for the next pass over the folder, as long as nothing in it comes, goes or is renamed."""
    with os.scandir(folder) as entries:
        return sorted(
            entry.name for entry in entries
            if not entry.name.startswith(".") and not entry.name.lower().endswith(_BESIDE)
            and (_is_picture(entry.name) or not entry.is_dir())
        )  # fmt: skip


def _existing_folder(folder: str) -> Path:
    """The folder as a path. Raises `UserError` where there is none."""
    path = Path(folder)
    if not path.is_dir():
        raise NotFound("folder not found", where=folder, hint="check the data section")
    return path


def _json_file(path: Path) -> JsonObject:
    """The object in a large JSON file. Raises `UserError` where it is missing, cannot be read, or is no object."""
    return read_json(path, JsonObject, hint="check the data section, or fetch the file again", max_bytes=LOG_BYTES)
