"""Reading the weights of a LLaVA whose kind its own config names: a draft LVLM, a captioner, a draft's target."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from ....core.errors import UserError, did_you_mean
from ...hub import read_config
from ..loading import load_weights
from .model import MODELS


def load_llava(
    source: str | Path,
    *,
    revision: str | None,
    dtype: torch.dtype | Literal["auto"],
    key: str,
    device: torch.device | None = None,
    device_map: str | None = None,
    offload: str | None = None,
    attn_implementation: str = "auto",
    whole: bool = False,
) -> PreTrainedModel:
    """A LLaVA of the family that its own config names.

    Args:
        dtype: auto: as it is stored.
        device, device_map, offload, attn_implementation: as of `load_weights`.
        whole: refuse weights that lack a tensor, where transformers draws a random one, or have one of another shape.

    Raises:
        UserError: the weights cannot be read, or are of another family.
    """
    actual = read_config(str(source), key=key, revision=revision).model_type
    if actual not in MODELS:
        raise UserError(
            f"{key}: {str(source)!r} is of model_type {actual!r}, expected {' or '.join(MODELS)}",
            hint=did_you_mean(actual, MODELS),
        )
    maker = MODELS[actual]
    held: dict[str, Any] = {"dtype": dtype, "device": device, "device_map": device_map, "offload": offload}
    held["attn_implementation"] = attn_implementation
    return load_weights(maker, source, revision=revision, key=key, whole=whole, **held)
