"""The nearest codes of each code of a codebook, which LANTERN treats as interchangeable (appendix D.2).

The table is computed once for a codebook and kept on disk under its hash: 16384 codes take half a minute on one core.
Letters: C codes, K neighbours, D width of a code, N tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save
from torch import Tensor

from ...core.errors import UserError
from ...core.files import write_whole
from ...core.pretrained import opened
from ...core.ranks import notice
from ...core.states import OnDevice

Metric = Literal["l2", "cosine", "random"]
NAME = "codes"  # of the tensor in the file
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


def load_neighbours(
    codebook: Tensor, k: int, *, metric: Metric, offset: int = 0, seed: int = 0, folder: Path | None = None
) -> NeighbourTable:
    """The table of `codebook` [C,D], from `folder` where it was computed before.

    Args:
        k: neighbours to keep, without the code itself, at most C-1.
        seed: of the "random" metric, the control in which neighbours have nothing to do with one another.

    Raises:
        UserError: too many neighbours asked for, a codebook that is not finite, or an unreadable file.
    """
    if not 0 <= k < len(codebook):
        raise UserError(
            f"{k} neighbours of each code, in a codebook of {len(codebook)}",
            hint=f"ask for at most {len(codebook) - 1}",
        )
    if not bool(codebook.isfinite().all()):
        raise UserError("the codebook holds values that are not finite", hint="check the tokenizer's checkpoint")
    if folder is None:
        return NeighbourTable(nearest(codebook, k, metric=metric, seed=seed), offset)
    values = codebook.detach().float().cpu().contiguous().numpy()
    sha256 = hashlib.sha256(str(values.shape).encode() + values.tobytes()).hexdigest()
    facts = {"sha256": sha256, "metric": metric, "k": str(k)} | ({"seed": str(seed)} if metric == "random" else {})
    path = folder / f"neighbours-{sha256[:16]}-{metric}{facts.get('seed', '')}-{k}.safetensors"
    codes: Tensor | None = None
    if path.is_file():
        try:
            with opened(path) as file:
                codes = file.get_tensor(NAME) if file.metadata() == facts else None
        except UserError as error:
            notice(f"the neighbour table {path} is damaged and is made again ({error.problem})")
    if codes is None:
        codes = nearest(codebook, k, metric=metric, seed=seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, save({NAME: codes.cpu().contiguous()}, metadata=facts))
    return NeighbourTable(codes.to(codebook.device), offset)


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
