"""How states are stored: in bfloat16, or in one byte for each value with scales; and the size of a cache beforehand.

A language model's states have a few channels that are many times as loud as all others. A scale for each place would
be theirs, and the others would round to nothing; one for each 64 channels keeps them apart (int8), and the loudest
channels of a record are kept beside in bfloat16.
Letters: n places, D width, b blocks, k loud channels.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.errors import UserError
from ...core.states import Taps
from ..shards.shards import SAMPLE_BYTES

StatesDtype = Literal["bf16", "int8", "fp8"]
DTYPES: tuple[StatesDtype, ...] = get_args(StatesDtype)

BLOCK = 64  # channels that share a scale in int8
# A channel whose peak is this many times the median peak is stored separately.
LOUD = 6.0
_FP8_MOST = 448.0  # of e4m3
_SPARE = 2**26  # bytes that are left to others
# A shard is one rank's work: a small set is at least so many of them, but for records of a few batches.
_SHARES, _LEAST_SHARE = 8, 64


def encode(states: Tensor, dtype: StatesDtype) -> dict[str, Tensor]:
    """[n,D] as named tensors: "" holds the values, the others what is needed to read them."""
    if dtype == "bf16":
        return {"": states.to(torch.bfloat16)}
    wide = states.float()
    if dtype == "fp8":
        scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / _FP8_MOST  # [n,1]
        return {"": (wide / scale).to(torch.float8_e4m3fn), "scale": scale}
    loud = loud_channels(wide)
    outliers = wide[:, loud].to(torch.bfloat16)
    wide = wide.index_fill(1, loud, 0.0)
    blocks = F.pad(wide, (0, -wide.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))  # [n,b,64]
    # 126.5 and not 127: a scale that bfloat16 rounds down must not push the largest value over the edge.
    scale = (blocks.abs().amax(-1) / 126.5).clamp(min=1e-12).to(torch.bfloat16)
    values = (blocks / scale.float().unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8)
    return {
        "": values.flatten(1)[:, : states.shape[1]],
        "scale": scale,
        "loud": outliers,
        "channels": loud.to(torch.int32),
    }


def decode(parts: dict[str, Tensor], dtype: StatesDtype, into: torch.dtype) -> Tensor:
    """[n,D] of type `into`, on the device of `parts`."""
    values = parts[""]
    if dtype == "bf16":
        return values.to(into)
    if dtype == "fp8":
        return (values.float() * parts["scale"]).to(into)
    blocks = F.pad(values.float(), (0, -values.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    wide = (blocks * parts["scale"].float().unsqueeze(-1)).flatten(1)[:, : values.shape[1]]
    return wide.index_copy(1, parts["channels"].long(), parts["loud"].float()).to(into)


def loud_channels(states: Tensor) -> Tensor:
    """[k] int64, ascending: channels of [n,D] far above the usual one; at most one in 64."""
    if not len(states):
        return torch.zeros(0, dtype=torch.int64)
    peaks = states.abs().amax(0)
    most = max(1, states.shape[1] // BLOCK)
    loudest = peaks.topk(min(most, len(peaks))).indices
    return loudest[peaks[loudest] > LOUD * peaks.median()].sort().values


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
    # Of int8 without its loud channels, two bytes each.
    each = {"bf16": 2.0 * width, "int8": width + 2.0 * -(-width // BLOCK), "fp8": width + 4.0}[dtype]
    return states * each + ids + SAMPLE_BYTES


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
