"""From projected tiles to the runs of tokens that pictures and clips become in a LLaVA.

LLaVA-NeXT and LLaVA-OneVision: the grid of tiles is stitched, loses its padding, and each row ends with a learned
newline; a clip's frames are pooled. What is done to a picture is said by its `Picture`, never guessed from sizes.
Letters: I tiles, P patches of a tile, D width, F frames, R rows and C columns of patches, n tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....core.errors import UserError
from ....core.pictures import Picture, TileGrid


def pack(features: Tensor, pictures: Sequence[Picture], newline: Tensor | None) -> Tensor:
    """Projected features [I,P,D] of the tiles of `pictures`, in order, to the embeddings [n,D] of their runs.

    Args:
        pictures: none given: each tile is a plain picture.
        newline: [D]; None where the model has none.
    """
    if all(picture.is_plain for picture in pictures):
        tiles = sum(picture.num_tiles for picture in pictures)
        assert not pictures or tiles == len(features), f"{len(features)} tiles, and pictures take {tiles}"
        return features.flatten(0, 1)
    if newline is None and any(picture.newline != "none" for picture in pictures):
        raise UserError(
            "a picture's tokens hold newlines and the model has learned none",
            hint="set aspect: square or pad and video.newline: none, or use a model with an image newline (LLaVA-NeXT, "
            "LLaVA-OneVision, a drafter with newline: true)",
        )
    each = features.split([picture.num_tiles for picture in pictures])
    return torch.cat([_run(tiles, picture, newline) for tiles, picture in zip(each, pictures, strict=True)])


def _run(tiles: Tensor, picture: Picture, newline: Tensor | None) -> Tensor:
    """[I,P,D] of one picture -> [n,D]."""
    if picture.grid is not None:
        return torch.cat([tiles[0], _grid(tiles[1:], picture.grid, newline)])
    if picture.pooling != "none" or picture.newline == "grid":
        tiles = _pooled_rows(tiles, picture, newline)
    run = tiles.flatten(0, 1)
    if picture.newline != "one_token":
        return run
    assert newline is not None, "checked in `pack`"
    return torch.cat([run, newline.to(run)[None]])


def _grid(tiles: Tensor, grid: TileGrid, newline: Tensor | None) -> Tensor:
    """[I,P,D], row by row -> [R (C + 1),D]: stitched, without padding, shrunk to the cap, each row with a newline."""
    (down, across), side = grid.tiles, math.isqrt(tiles.shape[1])
    stitched = tiles.view(down, across, side, side, -1).permute(4, 0, 2, 1, 3).flatten(3, 4).flatten(1, 2)  # [D,R,C]
    top, left = (down * side - grid.unpadded[0]) // 2, (across * side - grid.unpadded[1]) // 2
    unpadded = stitched[:, top : top + grid.unpadded[0], left : left + grid.unpadded[1]]
    if grid.final != grid.unpadded:
        unpadded = F.interpolate(unpadded[None], list(grid.final), mode="bilinear")[0]
    return _with_newlines(unpadded[None], newline)[0]


def _pooled_rows(frames: Tensor, picture: Picture, newline: Tensor | None) -> Tensor:
    """[F,P,D] -> [F,n,D]: fewer patches, and a newline after each row where the picture has them."""
    side = math.isqrt(frames.shape[1])
    grid = frames.transpose(1, 2).unflatten(2, (side, side))  # [F,D,R,C]
    if picture.pooling == "bilinear":
        grid = F.interpolate(grid, [picture.side] * 2, mode="bilinear")
    elif picture.pooling == "average":
        grid = F.avg_pool2d(grid, 2)
    return _with_newlines(grid, newline) if picture.newline == "grid" else grid.flatten(2).transpose(1, 2)


def _with_newlines(grid: Tensor, newline: Tensor | None) -> Tensor:
    """[F,D,R,C] -> [F,R (C + 1),D]."""
    assert newline is not None, "checked in `pack`"
    column = newline.to(grid)[:, None, None].expand(*grid.shape[:3], 1)
    return torch.cat([grid, column], dim=3).flatten(2).transpose(1, 2)


def newline_of(core: nn.Module) -> nn.Parameter | None:
    """The embedding [D] that LLaVA-NeXT and LLaVA-OneVision learn for the end of a row; None: LLaVA-1.5 has none."""
    return dict(core.named_parameters(recurse=False)).get("image_newline")


class Packing(nn.Module):
    """`pack` as a module that shares the newline of a LLaVA's core: ZeRO-3 gathers weights by module call."""

    def __init__(self, core: nn.Module):
        super().__init__()
        self.image_newline = newline_of(core)

    def forward(self, features: Tensor, pictures: Sequence[Picture]) -> Tensor:
        """`pack` with the core's newline: features [I,P,D] -> [n,D]."""
        packed = pack(features, pictures, self.image_newline)
        # Ranks whose pictures need no newline have it in their graph, too.
        return packed if self.image_newline is None else packed + 0.0 * self.image_newline.sum().to(packed)
