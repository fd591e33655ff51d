"""Pictures with captions (LAION-COCO tars, folders, ImageNet, MS-COCO) as one stream of numbered items.

An item that cannot be used keeps its number and says why, so that counts add up and a pass can go on anywhere. No more
than one picture is held at a time; nothing of a file is run or unpacked (see `tars.py`).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from ...core.files import write_whole
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
    "repeated",
    "usable",
    "write_digests",
]

CaptionedSource = Annotated[TarSource | FolderSource | ClassFolderSource | CocoSource, Field(discriminator="kind")]


def usable(items: Iterable[Captioned | Refused]) -> Iterator[Captioned]:
    """Those that can be used."""
    return (item for item in items if isinstance(item, Captioned))


def read(source: CaptionedSource, start: int = 0) -> Iterator[Captioned | Refused]:
    """Items from number `start` on, in a fixed order; those before it are passed over without being read. Raises
    `UserError`: a missing file or folder, an address, a damaged tar or json; at once or where the stream comes to it.
    """
    assert start >= 0, start
    left = None if source.max_samples is None else max(source.max_samples - start, 0)
    openers = itertools.islice(source.openers(start), left)
    return (opener(number) for number, opener in enumerate(openers, start))


def num_items(source: CaptionedSource) -> int:
    """How many items `read` gives, refused ones included; no picture is read."""
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
