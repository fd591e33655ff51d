"""Estimates the size of a cache before anything is written.

Letters: D width.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import UserError
from ...core.states import Taps
from ..shards.shards import SAMPLE_BYTES
from .dtypes import StatesDtype, state_bytes

_SPARE = 2**26  # bytes that are left to others
# A shard is one rank's work: a small set is at least so many of them, but for records of a few batches.
_SHARES, _LEAST_SHARE = 8, 64


@dataclass(frozen=True)
class Size:
    """What `samples` records take on disk."""

    samples: int
    total_bytes: float

    @property
    def sample_bytes(self) -> float:
        """The mean."""
        return self.total_bytes / max(1, self.samples)

    def __str__(self) -> str:
        return f"{self.samples:,} samples, {shown(self.sample_bytes)} each, {shown(self.total_bytes)} in all"


def record_bytes(
    wanted: Taps, width: int, dtype: StatesDtype, *, text: float, visual: float, position_rows: int = 1
) -> float:
    """Bytes of one record.

    Args:
        width: D.
        text: places that states are kept at for their text, `feature_places`; a sample's text tokens are as many.
        visual: visual tokens.
    """
    at_text = text + (visual if wanted.everywhere else 0)
    states = at_text * (int(wanted.feature) + len(wanted.text_layers))
    states += visual * len({*wanted.visual_layers} - ({*wanted.text_layers} if wanted.everywhere else set()))
    ids = (text + visual) * (4 + 1 + 1 + 4 * position_rows)  # ids, modality, loss mask, positions
    return states * state_bytes(width, dtype) + ids + SAMPLE_BYTES


def samples_per_shard(size: Size, shard_bytes: int) -> int:
    """So many records make a shard of about `shard_bytes`, and of a small set an eighth, so that ranks share it."""
    share = max(_LEAST_SHARE, -(-size.samples // _SHARES))
    return max(1, min(size.samples, share, round(shard_bytes / size.sample_bytes)))


def check_disk(folder: Path, needed: float) -> None:
    """Raises `UserError` where the disk of `folder` (or of the nearest folder above that is there) has no room."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if needed + _SPARE > free:
        raise UserError(
            f"the states take {shown(needed)} and the disk has {shown(free)} free", where=str(folder),
            hint="choose another output, fewer samples, a smaller states.dtype (int8, fp8), or source: online, which "
            "keeps nothing",
        )  # fmt: skip


def shown(size: float) -> str:
    """Bytes for people, in powers of ten as the papers' tables."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} bytes"
