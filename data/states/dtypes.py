"""Storage types of states: bfloat16, or one byte for each value with scales.

A language model's states have a few channels that are many times as loud as all others. A scale for each place would
be theirs, and the others would round to nothing; one for each 64 channels keeps them apart (int8), and the loudest
channels of a record are kept beside in bfloat16.
Letters: n places, D width, b blocks, k loud channels.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

StatesDtype = Literal["bf16", "int8", "fp8"]
DTYPES: tuple[StatesDtype, ...] = get_args(StatesDtype)

BLOCK = 64  # channels that share a scale in int8
# A channel whose peak is this many times the median peak is stored separately.
LOUD = 6.0
_FP8_MOST = 448.0  # of e4m3


def encode(states: Tensor, dtype: StatesDtype) -> dict[str, Tensor]:
    """[n,D] as named tensors: "" holds the values, the others what is needed to read them."""
    if dtype == "bf16":
        return {"": states.to(torch.bfloat16)}
    wide = states.float()
    if dtype == "fp8":
        scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / _FP8_MOST  # [n,1]
        return {"": (wide / scale).to(torch.float8_e4m3fn), "scale": scale}
    loud = loud_channels(wide)
    kept = wide[:, loud].to(torch.bfloat16)
    wide = wide.index_fill(1, loud, 0.0)
    blocks = F.pad(wide, (0, -wide.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))  # [n,b,64]
    # 126.5 and not 127: a scale that bfloat16 rounds down must not push the largest value over the edge.
    scale = (blocks.abs().amax(-1) / 126.5).clamp(min=1e-12).to(torch.bfloat16)
    values = (blocks / scale.float().unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8)
    return {
        "": values.flatten(1)[:, : states.shape[1]],
        "scale": scale,
        "loud": kept,
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


def state_bytes(width: int, dtype: StatesDtype) -> float:
    """Bytes of one state of D = `width`; of int8 without its loud channels, two bytes each."""
    return {"bf16": 2.0 * width, "int8": width + 2.0 * -(-width // BLOCK), "fp8": width + 4.0}[dtype]
