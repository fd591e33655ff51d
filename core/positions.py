"""Positions of prompts with pictures: the same in prefill, decoding and training, and with any version of transformers.

One row of positions counts tokens. M-RoPE (Qwen2-VL) has three rows, time, height and width: equal on text, on a
picture the coordinates of each of its tokens. Letters: B rows, T places, n coordinates (1 or 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .pictures import TEXT, PatchGrid, Picture

# Position of the first text token after a picture: one past the largest coordinate so far, as Qwen's models were
# trained, or the picture's start plus its longer side, as transformers counts since 5.3. The two differ for clips only.
Resume = Literal["max_plus_one", "longer_side"]


@dataclass(frozen=True)
class PositionScheme:
    """How a model family counts.

    Args:
        tokens_per_second: steps in time for a second of a clip (Qwen2.5-VL); None: one for each frame of the tower.
    """

    coordinates: Literal[1, 3] = 1
    tokens_per_second: float | None = None
    resume: Resume = "max_plus_one"


FLAT = PositionScheme()


def place_positions(
    modality: Tensor, mask: Tensor, pictures: Sequence[Picture], scheme: PositionScheme
) -> tuple[Tensor, Tensor]:
    """Positions [n,B,T] (0 on padding), and the position [B] of the next token after each row.

    Args:
        modality: [B,T] int8.
        mask: [B,T] bool: no padding, which may stand on either side.
        pictures: of all rows, in order.
    """
    if scheme.coordinates == 1:
        counted = mask.long().cumsum(1)
        return ((counted - 1) * mask)[None], counted[:, -1]
    positions = torch.zeros(3, *modality.shape, dtype=torch.int64)
    next_positions, left = [], iter(pictures)
    for row, (kinds, real) in enumerate(zip(modality.cpu(), mask.cpu(), strict=True)):
        row_positions, end = _of_row(kinds[real], left, scheme)
        positions[:, row, real] = row_positions
        next_positions.append(end)
    assert next(left, None) is None, "pictures without a run"
    return positions.to(modality.device), torch.tensor(next_positions, device=modality.device)


def _of_row(modality: Tensor, pictures: Iterator[Picture], scheme: PositionScheme) -> tuple[Tensor, int]:
    """[3,T] of one row without padding, and the position after it."""
    kinds, parts, place, start = modality.tolist(), [torch.empty(3, 0, dtype=torch.int64)], 0, 0
    while place < len(kinds):
        if kinds[place] == TEXT:
            length = next((n for n, kind in enumerate(kinds[place:]) if kind != TEXT), len(kinds) - place)
            parts.append(torch.arange(start, start + length).expand(3, -1))
            start += length
        else:
            picture = next(pictures)
            length, grid = picture.num_tokens, picture.whole
            assert grid is not None, "three coordinates are of pictures that are read whole"
            assert kinds[place : place + length] == [picture.modality] * length, f"run of {picture} at {place}"
            parts.append(start + _coordinates(grid, scheme))
            longer_side = max(grid.of_tokens[1:])
            start = start + longer_side if scheme.resume == "longer_side" else int(parts[-1].max()) + 1
        place += length
    return torch.cat(parts, dim=1), start


def _coordinates(grid: PatchGrid, scheme: PositionScheme) -> Tensor:
    """[3,n] of a picture's tokens, counted from its start."""
    frames, rows, columns = (torch.arange(size) for size in grid.of_tokens)
    if scheme.tokens_per_second is not None and grid.frames > 1:
        # float32, as the published code has it: the product is cut to a whole number.
        frames = (frames * (scheme.tokens_per_second * torch.tensor(grid.seconds))).long()
    return torch.stack(torch.meshgrid(frames, rows, columns, indexing="ij")).flatten(1)
