"""Pictures and the sizes that metrics want them in: every rule takes uint8 [H,W,3] and gives uint8 [S,S,3].

A resizing filter moves FID by more than the methods that it compares (Parmar et al. 2022), so that each metric names
its own. All filters are Pillow's, which widens them when it shrinks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ...core.errors import UserError
from ...data.pictures.picture_files import MAX_CANVAS, check_area, load_image

Picture = np.ndarray  # uint8 [H,W,3]
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}


class Folder(Sequence[Picture]):
    """The pictures under a folder in the order of their paths, read when asked for.

    Raises `UserError` where there are none, or where one cannot be read.
    """

    def __init__(self, folder: str | Path):
        self.paths = sorted(p for p in Path(folder).expanduser().rglob("*") if p.suffix.lower() in SUFFIXES)
        if not self.paths:
            raise UserError(
                f"no pictures ({', '.join(sorted(SUFFIXES))}) found", where=str(folder), hint="name another folder"
            )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index):  # type: ignore[override]  # no slices
        return np.asarray(load_image(self.paths[index]))

    def __iter__(self) -> Iterator[Picture]:
        return (self[index] for index in range(len(self)))


def as_is(picture: Picture) -> Picture:
    """For networks that were trained on pictures of this very size."""
    return picture


def crop_lanczos(picture: Picture, side: int) -> Picture:
    """The largest square in the middle, resized with Lanczos: how LANTERN prepares for FID and CLIP score, at 256."""
    image = Image.fromarray(picture)
    edge = min(image.size)
    # Halves round to even, as in torchvision's centre crop, which that code calls.
    left, top = (round((length - edge) / 2) for length in image.size)
    image = image.crop((left, top, left + edge, top + edge))
    return np.asarray(image.resize((side, side), Image.Resampling.LANCZOS))


def crop_bicubic(picture: Picture, side: int) -> Picture:
    """CLIP's own processing: the shorter edge to `side`, bicubic, then the middle."""
    image = Image.fromarray(picture)
    width, height = (int(side * length / min(image.size)) for length in image.size)
    check_area((width, height), MAX_CANVAS, f"resized to a shorter side of {side}, a picture has")
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - side) / 2), round((height - side) / 2)
    return np.asarray(image.crop((left, top, left + side, top + side)))


def pad_bicubic(picture: Picture, side: int) -> Picture:
    """The longer edge to `side`, bicubic, centred on black: HPS v2, which resizes before rounding to 8 bits."""
    image = Image.fromarray(picture)
    width, height = (max(round(side * length / max(image.size)), 1) for length in image.size)
    canvas = Image.new("RGB", (side, side))
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    canvas.paste(resized, ((side - width) // 2, (side - height) // 2))
    return np.asarray(canvas)


def squash_bilinear(picture: Picture, side: int) -> Picture:
    """Both edges to `side`, whatever the aspect: how LANTERN prepares for precision and recall, at 224."""
    return np.asarray(Image.fromarray(picture).resize((side, side), Image.Resampling.BILINEAR))


def clean_resize(images: Tensor, side: int) -> Tensor:
    """clean-fid's step to the network: bicubic on each channel as floats, neither rounded nor clipped.

    uint8 [B,3,H,W] to float32 [B,3,side,side] around [0, 255], on the same device.
    """
    planes = images.flatten(0, 1).cpu().numpy().astype(np.float32)
    resized = [np.asarray(Image.fromarray(plane).resize((side, side), Image.Resampling.BICUBIC)) for plane in planes]
    return torch.from_numpy(np.stack(resized)).unflatten(0, images.shape[:2]).to(images.device)
