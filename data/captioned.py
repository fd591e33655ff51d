"""Pictures with captions (LAION-COCO tars, folders, ImageNet, MS-COCO) as one stream of numbered items.

An item that cannot be used keeps its number and says why, so that counts add up and a pass can go on anywhere. No more
than one picture is held at a time; nothing of a file is run or unpacked (see `tars.py`).
"""

from __future__ import annotations

import functools
import heapq
import io
import itertools
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from PIL import Image
from pydantic import Field

from ..core.errors import UserError
from ..core.section import Section
from . import tars

MAX_TEXT_BYTES = 1 << 20  # of a caption file or of a sample's json
MAX_PIXELS = 89_478_485  # above it a picture is taken for a decompression bomb (Pillow's own limit)
NAMES_HELD = 65536  # of a folder at a time


class Source(Section):
    """What every kind of source can be told."""

    # Read the first so many items, refused ones included; null: all.
    max_samples: int | None = Field(None, ge=1)


class TarSource(Source):
    """Tar shards as img2dataset writes them: `key.jpg` with `key.txt` and `key.json`."""

    kind: Literal["webdataset"]
    # Local tar files; braces and glob patterns are expanded: shards/{00000..00041}.tar
    path: str | list[str]
    # Field of the json member that holds the caption; null: the txt member is the caption.
    caption_key: str | None = None


class FolderSource(Source):
    """A folder of `name.jpg` (png, webp) beside `name.txt`, in the order of the names."""

    kind: Literal["folder"]
    # The folder; folders inside it are not looked into.
    folder: str


class ClassFolderSource(Source):
    """ImageNet's layout: one folder for each class; the caption is the class's name."""

    kind: Literal["classes"]
    # The folder of class folders (ImageNet: train).
    folder: str
    # JSON {"0": ["n01440764", "tench"], ...} of labels, folders and names; null: labels in the order of the folders.
    class_index: str | None = None


class CocoSource(Source):
    """MS-COCO captions of 2014 or 2017, in the order of image ids."""

    kind: Literal["coco"]
    # captions_train2014.json, captions_val2017.json, ...
    annotations: str
    # The folder of pictures; null: captions alone, as prompts.
    images: str | None = None
    # Of an image's captions the first by annotation id, the longest, or each as an item of its own.
    which: Literal["first", "longest", "all"] = "first"


CaptionedSource = Annotated[TarSource | FolderSource | ClassFolderSource | CocoSource, Field(discriminator="kind")]


@dataclass(frozen=True)
class Captioned:
    """One picture, still encoded, with its caption."""

    number: int  # place in the source, refused items counted
    key: str  # the source's own name of it
    image: bytes  # empty where only captions are read
    caption: str
    label: int | None  # class index
    where: str  # file and place, for messages


@dataclass(frozen=True)
class Refused:
    """An item that cannot be used. `reason` is one of few, to be counted; `detail` is for the log."""

    number: int
    key: str
    reason: str
    where: str
    detail: str


class _Unusable(Exception):
    """Carries `reason` and `detail` to where the item's number is known."""


Opener = Callable[[int], Captioned | Refused]  # number -> item; only then are picture and caption read


def read(source: CaptionedSource, start: int = 0) -> Iterator[Captioned | Refused]:
    """Items from number `start` on, in a fixed order; those before it are passed over without being read.

    Raises:
        UserError: a missing file or folder, an address, a damaged tar or json; at once or where the stream comes to it.
    """
    assert start >= 0, start
    openers = _openers(source, start)
    left = None if source.max_samples is None else max(source.max_samples - start, 0)
    return (opener(number) for number, opener in enumerate(itertools.islice(openers, left), start))


def num_items(source: CaptionedSource) -> int:
    """How many items `read` gives, refused ones included; no picture is read."""
    if isinstance(source, TarSource):
        count = sum(_num_tar_items(path) for path in tars.expand_paths(source.path))
    else:
        count = sum(1 for _ in _openers(source, 0))
    return count if source.max_samples is None else min(count, source.max_samples)


def decode_image(item: Captioned, size: int, *, min_side: int = 1) -> Image.Image | Refused:
    """The picture as RGB, size x size, cut by `center_crop`; or why not.

    Args:
        min_side: pictures whose shorter side has fewer pixels are refused.
    """
    try:
        # The formats are listed because others run programs (EPS) or have never been looked at.
        with Image.open(io.BytesIO(item.image), formats=("JPEG", "PNG", "WEBP")) as image:
            short, long = sorted(image.size)
            # The second product is the area once the shorter side has been scaled to `size`.
            if short * long > MAX_PIXELS or size * size * long > MAX_PIXELS * short:
                raise _Unusable("too many pixels", f"{image.width} x {image.height}")
            if short < min_side:
                raise _Unusable("image too small", f"{image.width} x {image.height}, min_side is {min_side}")
            if image.mode[0] in "IF":
                raise _Unusable("unreadable image", f"pixels of more than 8 bits (mode {image.mode})")
            return center_crop(image.convert("RGB"), size)
    except _Unusable as error:
        reason, detail = error.args
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        reason, detail = "too many pixels", str(error)
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error) as error:
        reason, detail = (
            ("unreadable image", str(error))
            if item.image
            else ("no image", "no bytes; the source reads captions only, or the file is empty")
        )
    return Refused(item.number, item.key, reason, item.where, detail)


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """ADM's crop (Dhariwal and Nichol 2021, as LlamaGen and LANTERN use it): the middle square as size x size pixels.

    Halve with a box filter while the shorter side is at least twice `size`, then scale it to `size` bicubically, so
    that small details neither alias nor blur.
    """
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def _openers(source: CaptionedSource, start: int) -> Iterator[Opener]:
    """One for each item from `start` on."""
    match source:
        case TarSource():
            return _tar_openers(source, tars.expand_paths(source.path), start)
        case FolderSource():
            return itertools.islice(_folder_openers(_existing_folder(source.folder)), start, None)
        case ClassFolderSource():
            return itertools.islice(_class_openers(_classes(source)), start, None)
        case CocoSource():
            images = None if source.images is None else _existing_folder(source.images)
            return itertools.islice(_coco_openers(source, images, _coco_images(Path(source.annotations))), start, None)
    raise AssertionError(source)


# Tars


def _tar_openers(source: TarSource, paths: list[Path], start: int) -> Iterator[Opener]:
    for path in paths:
        held = _num_tar_items(path) if start else 0
        if held and start >= held:
            start -= held
            continue
        for sample in itertools.islice(tars.samples(path), start, None):
            yield functools.partial(_open_tar_sample, source, path, sample)
        start = 0


def _num_tar_items(path: Path) -> int:
    state = path.stat()
    return _count_tar(path, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=1 << 16)
def _count_tar(path: Path, size: int, mtime_ns: int) -> int:
    """Remembered, because passes that begin at many places of one source would read all headers again each time."""
    return sum(1 for _ in tars.samples(path))


def _open_tar_sample(source: TarSource, path: Path, sample: tars.TarSample | tars.RefusedMember, number: int):
    if isinstance(sample, tars.RefusedMember):
        return Refused(number, sample.name, sample.reason, f"{path}, {sample.name!r}", sample.detail)
    return _item(number, sample.key, f"{path}, {sample.key!r}", lambda: _tar_content(source, path, sample))


def _tar_content(source: TarSource, path: Path, sample: tars.TarSample) -> tuple[bytes, str, None]:
    image = next((sample.members[s] for s in tars.IMAGE_SUFFIXES if s in sample.members), None)
    if image is None:
        raise _Unusable("no image", f"members: {', '.join(sample.members)}")
    suffix = "txt" if source.caption_key is None else "json"
    text = sample.members.get(suffix)
    if text is None:
        raise _Unusable("no caption", f"no {suffix} member")
    if text.size > MAX_TEXT_BYTES:
        raise _Unusable("member too large", f"{text.size} bytes of text, more than {MAX_TEXT_BYTES}")
    data = tars.content(path, text.offset, text.size)
    caption = _text(data) if source.caption_key is None else _json_caption(data, source.caption_key)
    return tars.content(path, image.offset, image.size), caption, None


def _json_caption(data: bytes, key: str) -> str:
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _Unusable("bad json", str(error)) from error
    caption = record.get(key) if isinstance(record, dict) else None
    if not isinstance(caption, str):
        raise _Unusable("no caption", f"{key!r} is missing or not text")
    return _not_empty(caption)


# Folders


def _folder_openers(folder: Path) -> Iterator[Opener]:
    found = False
    for name in image_names(folder):
        found = True
        yield functools.partial(_open_pair, folder / name)
    if not found:
        raise UserError("no jpg, png or webp files", where=str(folder), cure="check `folder` of the data section")


def _open_pair(path: Path, number: int) -> Captioned | Refused:
    def content() -> tuple[bytes, str, None]:
        caption = _file(path.with_suffix(".txt"), MAX_TEXT_BYTES, missing="no caption")
        return _file(path, tars.MAX_BYTES), _text(caption), None

    return _item(number, path.stem, str(path), content)


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
    root = _existing_folder(source.folder)
    folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not folders:
        raise UserError("no class folders", where=str(root), cure="check `folder` of the data section")
    if source.class_index is None:
        return [(folder, label, folder.name) for label, folder in enumerate(folders)]
    path = Path(source.class_index)
    labels = {}
    try:
        for label, (folder_name, name) in _json_file(path).items():
            labels[folder_name] = int(label), name
    except (AttributeError, TypeError, ValueError) as error:
        cure = 'give {"0": ["n01440764", "tench"], ...}'
        raise UserError(f"not a class index: {error}", where=str(path), cure=cure) from error
    unknown = [folder.name for folder in folders if folder.name not in labels]
    if unknown:
        raise UserError(f"{len(unknown)} class folders without a label, first {unknown[0]!r}", where=str(path))
    return [(folder, *labels[folder.name]) for folder in folders]


def _class_openers(classes: list[tuple[Path, int, str]]) -> Iterator[Opener]:
    for folder, label, name in classes:
        for file in image_names(folder):
            yield functools.partial(_open_labelled, folder / file, label, name)


def _open_labelled(path: Path, label: int, name: str, number: int) -> Captioned | Refused:
    key = f"{path.parent.name}/{path.stem}"
    return _item(number, key, str(path), lambda: (_file(path, tars.MAX_BYTES), name, label))


# MS-COCO


def _coco_images(path: Path) -> list[tuple[int, str, list[tuple[int, str]]]]:
    """(image id, file name, [(annotation id, caption)]) in the order of the ids."""
    file = _json_file(path)
    images: dict[int, tuple[str, list[tuple[int, str]]]] = {}
    try:
        for image in file["images"]:
            images[int(image["id"])] = str(image["file_name"]), []
        for annotation in file["annotations"]:
            if not isinstance(annotation["caption"], str):
                raise TypeError("a caption that is not text")
            images[int(annotation["image_id"])][1].append((int(annotation["id"]), annotation["caption"]))
    except (KeyError, TypeError, ValueError) as error:
        cure = "give captions_*.json of MS-COCO; instances_*.json holds no captions"
        raise UserError(f"not MS-COCO captions: {error!r}", where=str(path), cure=cure) from error
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
            yield functools.partial(_item, key=key, where=where, content=content)


def _coco_content(folder: Path | None, name: str, caption: str | None) -> tuple[bytes, str, None]:
    if caption is None:
        raise _Unusable("no caption", "the image has no annotation")
    if problem := tars.unsafe_name(name):
        raise _Unusable("unsafe name", f"{name!r}: {problem}")
    return b"" if folder is None else _file(folder / name, tars.MAX_BYTES), _not_empty(caption), None


# What all of them share


def _item(number: int, key: str, where: str, content: Callable[[], tuple[bytes, str, int | None]]):
    try:
        image, caption, label = content()
    except _Unusable as error:
        return Refused(number, key, error.args[0], where, error.args[1])
    return Captioned(number, key, image, caption, label, where)


def _text(data: bytes) -> str:
    try:
        return _not_empty(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _Unusable("caption not UTF-8", str(error)) from error


def _not_empty(caption: str) -> str:
    if not caption.strip():
        raise _Unusable("empty caption", "nothing but blanks")
    return caption.strip()


def _file(path: Path, max_bytes: int, missing: str = "missing image") -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError as error:
        raise _Unusable(missing, f"no file {path.name}") from error
    except OSError as error:
        raise _Unusable("unreadable file", f"{path.name}: {error.strerror}") from error
    if len(data) > max_bytes:
        raise _Unusable("file too large", f"{path.name} has more than {max_bytes} bytes")
    return data


def _existing_folder(folder: str) -> Path:
    path = Path(folder)
    if not path.is_dir():
        raise UserError("folder not found", where=folder, cure="check the data section")
    return path


def _json_file(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError("file not found", where=str(path), cure="check the data section") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"not valid JSON: {error}", where=str(path), cure="fetch the file again") from error
