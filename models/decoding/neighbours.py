"""The nearest codes of each code of a codebook, which LANTERN treats as interchangeable (appendix D.2).

The table of 16384 codes takes half a minute on one core.
Letters: C codes, K neighbours, D width of a code, N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...core.errors import UserError
from ...core.states import OnDevice

Metric = Literal["l2", "cosine", "random"]
ROWS = 256  # rows of distances held at once: 256 rows of 16384 float64 are 32 MiB


@dataclass(frozen=True)
class NeighbourTable(OnDevice):
    """The nearest codes of each code, nearest first, equally near ones by index. A code is not its own neighbour."""

    codes: Tensor  # [C,K] int32
    offset: int = 0  # a token's id is its code + offset (Anole: 4)

    @property
    def num_codes(self) -> int:
        """Codes in the codebook."""
        return self.codes.shape[0]

    @property
    def num_neighbours(self) -> int:
        """Neighbours that the table keeps of each code."""
        return self.codes.shape[1]

    def of(self, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Token ids [N,k] of the k nearest to `tokens` [N], and which of the tokens are codes at all [N] bool.

        The row of a token that is no code means nothing.
        """
        codes = tokens - self.offset
        known = (codes >= 0) & (codes < self.num_codes)
        return self.codes[codes.where(known, 0), :k].long() + self.offset, known


def load_neighbours(codebook: Tensor, k: int, *, metric: Metric, offset: int = 0, seed: int = 0) -> NeighbourTable:
    """The table of `codebook` [C,D].

    Args:
        k: neighbours to keep, without the code itself, at most C-1.
        seed: of the "random" metric, the control in which neighbours have nothing to do with one another.

    Raises:
        UserError: too many neighbours asked for, or a codebook that is not finite.
    """
    if not 0 <= k < len(codebook):
        raise UserError(
            f"{k} neighbours of each code, in a codebook of {len(codebook)}",
            hint=f"ask for at most {len(codebook) - 1}",
        )
    if not bool(codebook.isfinite().all()):
        raise UserError("the codebook holds values that are not finite", hint="check the tokenizer's checkpoint")
    return NeighbourTable(nearest(codebook, k, metric=metric, seed=seed), offset)


def nearest(codebook: Tensor, k: int, *, metric: Metric, seed: int = 0) -> Tensor:
    """[C,k] int32: the nearest other codes, by distances in float64, equally near ones by index.

    "l2" reads the codebook as it stands: the published tables use the stored rows, also where the tokenizer
    normalises them to decode. "cosine" normalises them, which ranks as l2 between normalised rows does.
    """
    points, ids = codebook.detach().double(), []
    if metric == "cosine":
        points = torch.nn.functional.normalize(points, dim=-1)
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, len(points), ROWS):
        rows = torch.arange(len(points[start : start + ROWS]))
        if metric == "random":
            shape = len(rows), len(points)
            distances = torch.rand(shape, generator=generator, dtype=torch.float64).to(points.device)
        else:
            # By differences: products would round equal distances apart.
            block = points[start : start + ROWS]
            distances = torch.cdist(block, points, compute_mode="donot_use_mm_for_euclid_dist")
        distances[rows, rows + start] = float("inf")
        ids.append(distances.argsort(dim=-1, stable=True)[:, :k].int())
    return torch.cat(ids)
