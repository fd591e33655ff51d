"""Other views of a request's pictures: without a newline, pooled, or the runs of tokens that are kept.

Letters: T ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..core.batch import Request
from ..core.errors import UserError
from ..core.pictures import TEXT, Picture, TileGrid


def pictures_of(request: Request) -> tuple[Picture, ...]:
    """The request's pictures, in prompt order; where it names none, a plain one for each tile."""
    if request.pixels is None or request.pictures:
        return request.pictures
    tiles = len(request.pixels)
    patches = math.isqrt(int((request.modality != TEXT).sum()) // tiles)
    return (Picture(patches),) * tiles


def with_pictures(request: Request, pictures: Sequence[Picture], pixels: Tensor) -> Request:
    """The prompt with its pictures packed otherwise, each into the first tokens of its run; two may be adjacent."""
    pairs, stays = zip(pictures_of(request), pictures, strict=True), request.modality == TEXT
    if inside := [torch.arange(old.num_tokens) < new.num_tokens for old, new in pairs]:
        stays[~stays] = torch.cat(inside).to(stays.device)
    return replace(
        request, ids=request.ids[stays], modality=request.modality[stays], pixels=pixels, pictures=tuple(pictures)
    )


def flat_view(request: Request) -> Request:
    """The request for a model without a newline: each image's first tile (all of it), clips without newlines."""
    if request.pixels is None or all(picture.newline == "none" for picture in request.pictures):
        return request
    pictures: list[Picture] = []
    tiles: list[int] = []
    first = 0
    for picture in request.pictures:
        pictures.append(picture.flat)
        tiles += range(first, first + picture.flat.num_tiles)
        first += picture.num_tiles
    return with_pictures(request, pictures, request.pixels[torch.tensor(tiles, device=request.pixels.device)])


def without_first(request: Request) -> Request:
    """The request without its first token, for drafts trained so. Raises `UserError` where that is a picture's."""
    if int(request.modality[0]) != TEXT:
        raise UserError("a prompt begins with a picture, and this draft leaves out a prompt's first token",
                        where=request.name, hint="use a template that begins with text")  # fmt: skip
    return replace(request, ids=request.ids[1:], modality=request.modality[1:])


def pooled_view(request: Request, pool: int) -> Request:
    """Tokens of a model that pools `pool` x `pool` patches before its projector: about `pool`^2 times fewer."""
    if request.pixels is None or pool == 1:
        return request
    return with_pictures(request, [_pooled(picture, pool) for picture in pictures_of(request)], request.pixels)


def _pooled(picture: Picture, pool: int) -> Picture:
    patches, side, old = picture.patches, picture.patches // pool, picture.grid
    if old is None:
        return replace(picture, patches=side)
    down, across = old.tiles
    # As much padding goes as covered whole pooled patches.
    rows = down * side - 2 * ((down * patches - old.unpadded[0]) // 2 // pool)
    columns = across * side - 2 * ((across * patches - old.unpadded[1]) // 2 // pool)
    is_shrunk = old.final != old.unpadded
    final = (max(1, old.final[0] // pool), max(1, old.final[1] // pool)) if is_shrunk else (rows, columns)
    return replace(picture, patches=side, grid=TileGrid(old.tiles, (rows, columns), final))
