"""Pictures with captions (LAION-COCO tars, folders, ImageNet, MS-COCO) as one stream of numbered items.

An item that cannot be used keeps its number and says why, so that counts add up and a pass can go on anywhere. No more
than one picture is held at a time; nothing of a file is run or unpacked (see `tars.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Annotated

from pydantic import Field

from .items import Captioned, Refused, center_crop, decode_image
from .sources import ClassFolderSource, CocoSource, FolderSource, TarSource, class_labels

__all__ = [
    "Captioned",
    "CaptionedSource",
    "ClassFolderSource",
    "CocoSource",
    "FolderSource",
    "Refused",
    "TarSource",
    "center_crop",
    "class_labels",
    "decode_image",
    "num_items",
    "read",
    "usable",
]

CaptionedSource = Annotated[TarSource | FolderSource | ClassFolderSource | CocoSource, Field(discriminator="kind")]


def usable(items: Iterable[Captioned | Refused]) -> Iterator[Captioned]:
    """Those that can be used."""
    return (item for item in items if isinstance(item, Captioned))


def read(source: CaptionedSource, start: int = 0) -> Iterator[Captioned | Refused]:
    """Items from number `start` on, in a fixed order; those before it are passed over without being read.

    Raises:
        UserError: a missing file or folder, an address, a damaged tar or json; at once or where the stream comes to it.
    """
    assert start >= 0, start
    left = None if source.max_samples is None else max(source.max_samples - start, 0)
    openers = itertools.islice(source.openers(start), left)
    return (opener(number) for number, opener in enumerate(openers, start))


def num_items(source: CaptionedSource) -> int:
    """How many items `read` gives, refused ones included; no picture is read."""
    count = source.num_items()
    return count if source.max_samples is None else min(count, source.max_samples)
