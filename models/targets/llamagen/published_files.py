"""Published LlamaGen files as directories that recipes read, or in LANTERN's layout and back.

The files: t2i_XL_stage1_256.pt, t2i_XL_stage2_512.pt and vq_ds16_t2i.pt in peizesun/llamagen_t2i on the Hub, c2i_*.pt
and vq_ds16_c2i.pt in FoundationVision/LlamaGen. Nothing that is in them is run. They hold no config: names and shapes
tell all of it but the heads, the image size and the group norms.
"""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....core.errors import UserError, not_loaded
from ....core.files import check_new, checked, new_folder
from ....core.finite import check_weights
from ....core.json_types import JsonObject
from ....core.section import torch_dtype
from ...folders import State, check_shapes, shapes_of, write_folder
from . import files
from .transformer import SIZES, LlamaGenConfig
from .vq import VqConfig

# Where training scripts put the weights: DDP, DeepSpeed, others; FSDP files are the bare dict.
WRAPPERS = ("model", "module", "state_dict")
_PARTS = ("layers.", "encoder.", "decoder.", "quantize.")  # of which no tensor is left out


def convert(
    source: str,
    destination: Path,
    *,
    to: str = "draftsmith",
    dtype: str | None = None,
    revision: str | None = None,
    **of_pickle: Any,
) -> list[str]:
    """Writes a new directory, which appears whole or not at all. No code in a file is run.

    Args:
        source: a .pt file, our directory, one of LANTERN's layout, or a Hub id of such.
        to: "draftsmith" or "lantern".
        dtype: type to store; None: as found.
        revision: branch, tag or commit of a Hub id.
        of_pickle: of a .pt file: vq (it is an image tokenizer), image_size, heads (`grid_of`, `infer_config`).

    Returns:
        Lines on what was read, left out and written.

    Raises:
        UserError: the destination exists; a file is none of LlamaGen, or holds NaN; an option does not apply.
    """
    check_new(destination)
    if of_pickle.get("vq") and to == "lantern":
        raise UserError("LANTERN's layout is for the transformer", hint="leave out --vq or --to lantern")
    left_out: list[str] = []
    config: LlamaGenConfig | VqConfig
    if source.endswith((".pt", ".pth", ".bin")) or Path(source).is_file():
        state, config, left_out = _published(Path(source), **of_pickle)
    else:
        if unread := [name for name, value in of_pickle.items() if value]:
            problem = f"--{unread[0].replace('_', '-')} is for .pt files; a directory says what it is"
            raise UserError(problem, where=source, hint="leave it out")
        state, config = files.read_llamagen(source, revision=revision)
    if dtype:
        state = {name: tensor.to(torch_dtype(dtype)) for name, tensor in state.items()}
    buffers = {"quantize.codebook_used", "cls_embedding.uncond_embedding"}
    count = sum(tensor.numel() for name, tensor in state.items() if name not in buffers)
    values = files.values_of(config)
    if isinstance(config, VqConfig):
        what = f"VQ tokenizer, {config.factor} pixels per code"
    else:
        shape = (config.num_layers, config.num_heads, config.dim)
        size = next((name for name, published in SIZES.items() if published == shape), "of no published size")
        what = (
            f"LlamaGen {size}, {config.condition}-conditional, {shape[0]} layers, {shape[1]} heads, "
            f"width {shape[2]}, {config.grid}x{config.grid} codes"
        )
        if to == "lantern":
            state, values = files.to_lantern(state, config)
    with new_folder(destination) as folder:
        write_folder(folder, values, state)
    types = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in state.values()}))
    return [
        f"read      {source}: {what}",
        f"weights   {count:,} parameters in {len(state)} tensors, {types}",
        f"left out  {', '.join(left_out) or 'nothing'}",
        f"written   {destination} ({to})",
    ]


def _published(
    path: Path, *, vq: bool = False, image_size: int | None = None, heads: int | None = None
) -> tuple[State, LlamaGenConfig | VqConfig, list[str]]:
    """Weights and config of an official `.pt` file, and names of what it holds besides."""
    state, aside = read_pickle(path)
    config: LlamaGenConfig | VqConfig
    if vq:
        config = infer_vq_config(state, where=str(path))
    else:
        config = infer_config(state, grid=grid_of(path.name, image_size), num_heads=heads, where=str(path))
    expected = files.shapes_for(config)
    known = {name: tensor for name, tensor in state.items() if name in expected}
    if strange := sorted(name for name in state if name not in expected and name.startswith(_PARTS)):
        more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        raise UserError(f"{strange[0]}{more} is no part of this model, which would compute without it", where=str(path),
                        hint="give files of LlamaGen's own architecture")  # fmt: skip
    check_shapes(shapes_of(known), expected, where=str(path))
    check_weights(known, path)
    return known, config, [*aside, *(name for name in state if name not in expected)]


def read_pickle(path: Path) -> tuple[State, list[str]]:
    """The weights in a `.pt` file, memory mapped, and names of what it holds besides. Runs no code from it. Raises
    `UserError`: not such a file, or one that would build objects other than tensors (and a script's own arguments).
    """
    where = str(path)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, OSError, RuntimeError, EOFError) as error:
        hint = "fetch it from its publisher again; if it is your own, save only the state dict"
        raise UserError(f"cannot be read as weights: {not_loaded(error)}", where=where, hint=hint) from error
    if not isinstance(loaded, dict):
        raise UserError(f"holds a {type(loaded).__name__}, expected a dict of weights", where=where)
    state = next((loaded[name] for name in WRAPPERS if isinstance(loaded.get(name), dict)), loaded)
    if not state or not all(isinstance(value, Tensor) for value in state.values()):
        hint = f"weights are looked for under {', '.join(WRAPPERS)}, or as the whole file"
        held = ", ".join(list(map(str, loaded))[:8]) or "nothing"
        raise UserError(f"no weights found; the file holds {held}", where=where, hint=hint)
    return state, [str(name) for name in loaded if name not in state and name not in WRAPPERS]


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
    state: Mapping[str, Tensor], *, grid: int, num_heads: int | None = None, where: str = ""
) -> LlamaGenConfig:
    """The config behind an official state dict. Heads are not in it: they come from the published size that has as many
    layers of this width, or from the argument. `grid`: codes per side; see `grid_of`.
    """
    rows, dim = _shape(state, "tok_embeddings.weight", where)
    layers = 1 + max((int(m[1]) for name in state if (m := re.match(r"layers\.(\d+)\.", name))), default=-1)
    heads = num_heads or next(
        (heads for depth, heads, width in SIZES.values() if (depth, width) == (layers, dim)), None
    )
    if heads is None:
        hint = f"give --heads; published sizes are {', '.join(SIZES)}"
        raise UserError(f"{layers} layers of width {dim} are no published size: heads unknown", where=where, hint=hint)
    known: JsonObject = {}
    if "cls_embedding.embedding_table.weight" in state:
        known |= {"condition": "class", "num_classes": len(state["cls_embedding.embedding_table.weight"]) - 1}
    else:
        slots, width = _shape(state, "cls_embedding.uncond_embedding", where)
        known |= {"condition": "text", "caption_slots": slots, "caption_dim": width}
    known |= {"num_layers": layers, "num_heads": heads, "dim": dim, "vocab_size": rows}
    config = checked(known | {"grid": grid}, LlamaGenConfig, where=where, hint="give other --heads")
    hidden, _ = _shape(state, "layers.0.feed_forward.w1.weight", where)
    return config if hidden == config.hidden else config.model_copy(update={"ffn_hidden": hidden})


def infer_vq_config(state: Mapping[str, Tensor], *, where: str = "") -> VqConfig:
    """The config behind a tokenizer's state dict, LlamaGen's or Chameleon's, whose names differ in the levels alone.
    Both have 32 groups, which the file does not hold.
    """
    hint = "give a published tokenizer"
    base = _shape(state, "encoder.conv_in.weight", where, hint)[0]
    blocks = re.compile(r"encoder\.(?:conv_blocks|down)\.(\d+)\.(?:res|block)\.(\d+)\.conv1\.weight")
    channels = {(int(m[1]), int(m[2])): state[name].shape[0] for name in state if (m := blocks.fullmatch(name))}
    levels = sorted(level for level, block in channels if block == 0)
    rows, width = _shape(state, "quantize.embedding.weight", where, hint)
    known = {
        "base_channels": base, "ch_mult": [channels[level, 0] // base for level in levels],
        "num_res_blocks": 1 + max((block for _, block in channels), default=0),
        "z_channels": _shape(state, "quant_conv.weight", where, hint)[1], "codebook_size": rows, "codebook_dim": width,
    }  # fmt: skip
    return checked(known, VqConfig, where=where, hint=hint)


def _shape(
    state: Mapping[str, Tensor],
    name: str,
    where: str,
    hint: str = "give LlamaGen's transformer, or --vq for its tokenizer",
) -> tuple[int, ...]:
    if name not in state:
        first = ", ".join(list(state)[:3])
        raise UserError(f"{name} is missing; the file begins with {first}", where=where or None, hint=hint)
    return tuple(state[name].shape)
