"""Requests as an engine takes them: one placeholder for a picture, and pictures at the size that the tower reads.

An engine resizes pictures with other code than ours, so it gets what our own processor made of them, turned back into
bytes.
Letters: I tiles, P patches, C channels, S side, H height, W width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...core.batch import Request
from ...core.errors import UserError
from ...core.json_types import JsonObject
from ...core.pictures import VIDEO, Picture, one_placeholder_each
from ...data.families.processor import Processor

_PASSED = "engine: {kind: transformers} reads them"


def engine_job(requests: Iterable[Request], processor: Processor) -> tuple[list[JsonObject], dict[str, Tensor]]:
    """`ids` and `pictures` of each request, and these pictures [H,W,3] uint8 by name. Raises `UserError` as `shown`."""
    lines, pictures = list[JsonObject](), dict[str, Tensor]()
    for number, request in enumerate(requests):
        named = {
            f"{number}-{index}": pixels
            for index, pixels in enumerate(shown(request.pixels, request.pictures, processor, request.name))
        }
        ids = one_placeholder_each(request.ids.tolist(), request.modality.tolist(), request.pictures)
        lines.append({"ids": ids, "pictures": list(named)})
        pictures |= named
    return lines, pictures


def shown(pixels: Tensor | None, pictures: Sequence[Picture], processor: Processor, name: str) -> list[Tensor]:
    """The pictures of a row as [H,W,3] uint8, of its tiles [I,3,S,S] or patches [P,...].

    Raises:
        UserError: a clip, or a picture in several tiles, which an engine would cut by itself.
    """
    found, place = [], 0
    for picture in pictures:
        if picture.modality == VIDEO:
            raise UserError("the engine is handed pictures, and this record has a clip", where=name, hint=_PASSED)
        if picture.whole is None and picture.num_tiles > 1:
            raise UserError("the engine cuts tiles by itself, and this picture has several", where=name, hint=_PASSED)
        assert pixels is not None
        part = pixels[place : place + picture.num_tiles]
        found.append(_bytes(part[0] if picture.whole is None else _joined(part, picture, processor), processor))
        place += picture.num_tiles
    return found


def _joined(patches: Tensor, picture: Picture, processor: Processor) -> Tensor:
    """[3,H,W] of patches in the order of tokens, as `ordered` of the Qwen family makes them."""
    grid, side = picture.whole, processor.patch_size
    assert grid is not None and grid.frames == 1
    merge, rows, columns = grid.merge, grid.rows // grid.merge, grid.columns // grid.merge
    cut = patches.view(rows, columns, merge, merge, 3, 2, side, side)[:, :, :, :, :, 0]  # both frames are one picture
    return cut.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, grid.rows * side, grid.columns * side)


def _bytes(picture: Tensor, processor: Processor) -> Tensor:
    """[3,H,W] normalised -> [H,W,3] uint8, exactly what was normalised."""
    images = processor.image_processor
    mean, std = (torch.tensor(values)[:, None, None] for values in (images.image_mean, images.image_std))
    return ((picture.float() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).contiguous()
