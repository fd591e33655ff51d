"""MS-COCO's captions and their pictures, or the captions alone (Chen et al. 2015)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from ...core.errors import UserError
from .. import tars
from .items import Opener, Source, Unusable, existing_folder, file_bytes, json_file, not_empty, opened


class CocoSource(Source):
    """MS-COCO captions of 2014 or 2017, in the order of image ids."""

    kind: Literal["coco"]
    # captions_train2014.json, captions_val2017.json, ...
    annotations: str
    # The folder of pictures; null: captions alone, as prompts.
    images: str | None = None
    # Of an image's captions the first by annotation id, the longest, or each as an item of its own.
    which: Literal["first", "longest", "all"] = "first"

    def openers(self, start: int) -> Iterator[Opener]:
        """One for each item, in the order of image ids."""
        folder = None if self.images is None else existing_folder(self.images)
        return itertools.islice(_openers(self, folder, _images(Path(self.annotations))), start, None)


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
        cure = "give captions_*.json of MS-COCO; instances_*.json holds no captions"
        raise UserError(f"not MS-COCO captions: {error!r}", where=str(path), cure=cure) from error
    return [(number, name, sorted(captions)) for number, (name, captions) in sorted(images.items())]


def _openers(source: CocoSource, folder: Path | None, images: list) -> Iterator[Opener]:
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
            content = functools.partial(_content, folder, name, caption)
            yield functools.partial(opened, key=key, where=where, content=content)


def _content(folder: Path | None, name: str, caption: str | None) -> tuple[bytes, str, None]:
    if caption is None:
        raise Unusable("no caption", "the image has no annotation")
    if problem := tars.unsafe_name(name):
        raise Unusable("unsafe name", f"{name!r}: {problem}")
    return b"" if folder is None else file_bytes(folder / name, tars.MAX_BYTES), not_empty(caption), None
