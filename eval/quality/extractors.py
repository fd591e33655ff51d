"""What turns pictures into numbers: an argument of every metric, so that synthetic datasets bring their own network.

A result always says whose features it stands on: a distance between features of one network means nothing beside
the same distance between another's. A resizing filter moves FID by more than the methods that it compares (Parmar et
al. 2022), so that each metric names its own rule, which takes uint8 [H,W,3] and gives uint8 [S,S,3]. All filters are
Pillow's, which widens them when it shrinks. Letters: B images, S side in pixels, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ...core.errors import UserError
from ...data.captioned.items import decode_image
from ...data.captioned.sources import CocoSource, read, usable
from ...data.pictures.picture_files import MAX_CANVAS, check_area, load_image

Picture = np.ndarray  # uint8 [H,W,3]
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}


class Folder(Sequence[Picture]):
    """The pictures under a folder by their paths, read when asked for. Raises `UserError`: none, or a bad one."""

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


def captioned_pictures(annotations: str, side: int) -> tuple[list[Picture], list[str]]:
    """Pictures as a generator of `side` pixels learns them, and their captions, of a file in MS-COCO's layout with its
    pictures beside it. Raises `UserError`: none can be read.
    """
    source = CocoSource(kind="coco", annotations=annotations, images=str(Path(annotations).parent))
    items = [(decode_image(item, side), item.caption) for item in usable(read(source))]
    kept = [(np.asarray(image), caption) for image, caption in items if isinstance(image, Image.Image)]
    if not kept:
        raise UserError("no picture can be read", where=annotations, hint="its pictures lie beside it, by file_name")
    return [picture for picture, _ in kept], [caption for _, caption in kept]


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
    """clean-fid's step to the network: bicubic on each channel as floats, neither rounded nor clipped. uint8 [B,3,H,W]
    to float32 [B,3,side,side] around [0, 255], on the same device.
    """
    planes = images.flatten(0, 1).cpu().numpy().astype(np.float32)
    resized = [np.asarray(Image.fromarray(plane).resize((side, side), Image.Resampling.BICUBIC)) for plane in planes]
    return torch.from_numpy(np.stack(resized)).unflatten(0, images.shape[:2]).to(images.device)


@dataclass(frozen=True)
class Extractor:
    """A network that sees pictures, and for `clip` and `hpsv2` texts, too. Features for `fid` and `precision_recall`,
    logits of classes for `inception_score`, one score for `aesthetic`.
    """

    name: str  # stands in every result
    prepare: Callable[[Picture], Picture]  # uint8 [H,W,3] to uint8 [S,S,3], the same S for all
    features: Callable[[Tensor], Tensor]  # uint8 [B,3,S,S] in [0, 255] to [B,D] float on any device
    # B texts to [B,D] float, beside which an image's features of the same network may be laid.
    texts: Callable[[Sequence[str]], Tensor] | None = None


@torch.inference_mode()
def extract(
    extractor: Extractor, pictures: Sequence[Picture], *, batch_size: int, device: torch.device | str
) -> Tensor:
    """Features of all pictures, [n,D] float32 on the CPU. Pictures are read batch by batch."""
    parts = []
    for start in range(0, len(pictures), batch_size):
        stop = min(start + batch_size, len(pictures))
        prepared = [extractor.prepare(pictures[index]) for index in range(start, stop)]
        sizes = {picture.shape for picture in prepared}
        assert len(sizes) == 1, f"{extractor.name}: pictures prepared to different sizes {sorted(sizes)}"
        images = torch.from_numpy(np.stack(prepared)).permute(0, 3, 1, 2).to(device)
        parts.append(extractor.features(images).float().cpu())
    return torch.cat(parts)


@torch.inference_mode()
def embed(extractor: Extractor, texts: Sequence[str], *, batch_size: int) -> Tensor:
    """Embeddings of all texts, [n,D] float32 on the CPU."""
    assert extractor.texts is not None, f"{extractor.name} does not read texts"
    return torch.cat(
        [extractor.texts(texts[i : i + batch_size]).float().cpu() for i in range(0, len(texts), batch_size)]
    )


def standardize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 [B,3,H,W] to float32 with the mean and deviation of each channel in [0, 1] taken off."""
    shape = (1, 3, 1, 1)
    return (images.float() / 255 - images.new_tensor(mean, dtype=torch.float32).view(shape)) / images.new_tensor(
        std, dtype=torch.float32
    ).view(shape)
