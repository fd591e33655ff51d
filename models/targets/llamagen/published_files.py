"""Published `.pt` files: weights without running anything that is in the file, and the config behind their shapes.

LlamaGen's files hold no config: names and shapes tell all of it but the heads, the image size and the group norms.
"""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from ....core.errors import UserError, did_you_mean, first_line
from ....core.json_types import JsonObject
from ...folders import State
from .lantern_layout import LAYER
from .transformer import SIZES, LlamaGenConfig
from .vq import VqConfig

# Where training scripts put the weights: DDP, DeepSpeed, others; FSDP files are the bare dict.
WRAPPERS = ("model", "module", "state_dict")


def load_pickle(path: Path) -> dict[str, object]:
    """A `.pt` file's top level, memory mapped. Runs no code from it.

    Raises:
        UserError: not such a file, or one that would build objects other than tensors (and a script's own arguments).
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise UserError(
            "the file asks for more than tensors" + (f" ({name[1]})" if name else "")
            + ": loading that could run code from the file, so it is not loaded",
            where=str(path),
            hint="fetch it from its publisher again; if it is your own, save only the state dict",
        ) from error  # fmt: skip
    except (OSError, RuntimeError, EOFError) as error:
        raise UserError(
            f"cannot be read as a .pt file: {first_line(error)}", where=str(path), hint="fetch it again"
        ) from error
    if not isinstance(loaded, dict):
        raise UserError(f"holds a {type(loaded).__name__}, expected a dict of weights", where=str(path))
    return loaded


def weights_in(loaded: Mapping[str, Any], *, where: str) -> State:
    """The state dict among a file's top-level entries, or the file itself."""
    inner = next((loaded[name] for name in WRAPPERS if isinstance(loaded.get(name), Mapping)), loaded)
    if not inner or not all(isinstance(value, Tensor) for value in inner.values()):
        hint = f"weights are looked for under {', '.join(WRAPPERS)}, or as the whole file"
        held = ", ".join(list(map(str, loaded))[:8]) or "nothing"
        raise UserError(f"no weights found; the file holds {held}", where=where, hint=hint)
    return dict(inner)


def grid_of(name: str, image_size: int | None = None) -> int:
    """Codes per side: of `image_size` pixels, or of the size in a published file's name (c2i_B_384.pt)."""
    named = re.search(r"(?<!\d)(256|384|512)(?!\d)", name)
    size = image_size or (int(named[1]) if named else None)
    if size is None:
        hint = "give --image-size: 256, 384 or 512; the file does not hold it, and the wrong one gives garbled images"
        raise UserError("the image size is neither given nor part of the file's name", where=name, hint=hint)
    if size % 16 or size < 16:
        raise UserError(f"image size {size} is not a multiple of 16 pixels, the side of a code", where=name)
    return size // 16


def infer_config(
    state: Mapping[str, Tensor], *, grid: int, size: str | None = None, num_heads: int | None = None, where: str = ""
) -> LlamaGenConfig:
    """The config behind an official state dict. Heads are not in it: they come from the published size that has as
    many layers of this width, or from the arguments.

    Args:
        grid: codes per side; see `grid_of`.
        size: a key of `SIZES`.
    """
    rows, dim = _shape(state, "tok_embeddings.weight", where)
    layers = 1 + max((int(m[1]) for name in state if (m := LAYER.fullmatch(name))), default=-1)
    if size is not None and size not in SIZES:
        raise UserError(f"no published size {size!r}", where=where, hint=did_you_mean(size, SIZES))
    names = [n for n, (depth, _, width) in SIZES.items() if (depth, width) == (layers, dim) and size in (None, n)]
    if size is not None and not names:
        raise UserError(
            f"size {size} has {SIZES[size][0]} layers of width {SIZES[size][2]}, the file {layers} of width {dim}",
            where=where,
            hint="leave the size out: the published ones are told apart by their shapes",
        )
    if num_heads is None and not names:
        hint = f"give --heads; published sizes are {', '.join(SIZES)}"
        raise UserError(f"{layers} layers of width {dim} are no published size: heads unknown", where=where, hint=hint)
    known: JsonObject = {}
    if "cls_embedding.embedding_table.weight" in state:
        known |= {"condition": "class", "num_classes": len(state["cls_embedding.embedding_table.weight"]) - 1}
    else:
        slots, width = _shape(state, "cls_embedding.uncond_embedding", where)
        known |= {"condition": "text", "caption_slots": slots, "caption_dim": width}
    try:
        heads = num_heads or SIZES[names[0]][1]
        config = LlamaGenConfig(num_layers=layers, num_heads=heads, dim=dim, vocab_size=rows, grid=grid, **known)
    except ValidationError as error:
        raise UserError(error.errors()[0]["msg"], where=where, hint="give other --heads") from error
    hidden, _ = _shape(state, "layers.0.feed_forward.w1.weight", where)
    return config if hidden == config.hidden else config.model_copy(update={"ffn_hidden": hidden})


def infer_vq_config(state: Mapping[str, Tensor], *, where: str = "") -> VqConfig:
    """The config behind an official tokenizer's state dict (32 groups, which the file does not hold)."""
    base = _shape(state, "encoder.conv_in.weight", where)[0]
    blocks = re.compile(r"encoder\.conv_blocks\.(\d+)\.res\.(\d+)\.conv1\.weight")
    channels = {(int(m[1]), int(m[2])): state[name].shape[0] for name in state if (m := blocks.fullmatch(name))}
    levels = sorted({level for level, _ in channels})
    rows, width = _shape(state, "quantize.embedding.weight", where)
    try:
        return VqConfig(
            base_channels=base,
            ch_mult=tuple(channels[level, 0] // base for level in levels),
            num_res_blocks=1 + max((block for _, block in channels), default=0),
            z_channels=_shape(state, "quant_conv.weight", where)[1],
            codebook_size=rows,
            codebook_dim=width,
        )
    except ValidationError as error:
        raise UserError(error.errors()[0]["msg"], where=where or None, hint="give a published tokenizer") from error


def _shape(state: Mapping[str, Tensor], name: str, where: str) -> tuple[int, ...]:
    if name not in state:
        first = ", ".join(list(state)[:3])
        raise UserError(
            f"{name} is missing; the file begins with {first}",
            where=where or None,
            hint="give a LlamaGen transformer, or --vq for its tokenizer",
        )
    return tuple(state[name].shape)
