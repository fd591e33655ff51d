"""Published LlamaGen files as directories that recipes read, or in LANTERN's layout and back.

The files: t2i_XL_stage1_256.pt, t2i_XL_stage2_512.pt and vq_ds16_t2i.pt in peizesun/llamagen_t2i on the Hub, c2i_*.pt
and vq_ds16_c2i.pt in FoundationVision/LlamaGen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ....core.errors import UserError
from ....core.files import check_new, new_folder
from ....core.finite import check_weights
from ....core.section import torch_dtype
from ... import folders
from . import files, lantern_layout, published_files
from .transformer import SIZES


@dataclass(frozen=True)
class Conversion:
    """What is converted, and how.

    Args:
        source: a .pt file, our directory, one of LANTERN's layout, or a Hub id of such.
        to: "draftsmith" or "lantern".
        vq: the .pt file is an image tokenizer.
        image_size: pixels along a side that a .pt file draws; None: 256, 384 or 512 in its name.
        size: published size of a .pt file; None: by its shapes.
        heads: attention heads of a .pt file of no published size.
        dtype: type to store; None: as found.
        revision: branch, tag or commit of a Hub id.
    """

    source: str
    to: str = "draftsmith"
    vq: bool = False
    image_size: int | None = None
    size: str | None = None
    heads: int | None = None
    dtype: str | None = None
    revision: str | None = None


def convert(asked: Conversion, destination: Path) -> list[str]:
    """Writes a new directory, which appears whole or not at all. No code in a file is run.

    Returns:
        Lines on what was read, left out and written.

    Raises:
        UserError: the destination exists; a file is none of LlamaGen, or holds NaN; an option does not apply.
    """
    check_new(destination)
    if asked.vq and asked.to == "lantern":
        raise UserError("LANTERN's layout is for the transformer", hint="leave out --vq or --to lantern")
    is_pickle = asked.source.endswith((".pt", ".pth", ".bin")) or Path(asked.source).is_file()
    state, config, left_out = (_from_pickle if is_pickle else _from_folder)(asked)
    if asked.dtype:
        state = {name: tensor.to(torch_dtype(asked.dtype)) for name, tensor in state.items()}
    values = files.values_of(config)
    what = f"VQ tokenizer, {config.factor} pixels per code" if asked.vq else _described(config)
    buffers = {"quantize.codebook_used", "cls_embedding.uncond_embedding"}
    count = sum(tensor.numel() for name, tensor in state.items() if name not in buffers)
    if asked.to == "lantern":
        state, values = lantern_layout.to_lantern(state, config)
    with new_folder(destination) as folder:
        folders.write_folder(folder, values, state)
    types = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in state.values()}))
    return [
        f"read      {asked.source}: {what}",
        f"weights   {count:,} parameters in {len(state)} tensors, {types}",
        f"left out  {', '.join(left_out) or 'nothing'}",
        f"written   {destination} ({asked.to})",
    ]


_Read = tuple[dict[str, Tensor], Any, list[str]]  # weights, config, and what was left out


def _from_pickle(asked: Conversion) -> _Read:
    """Read an official `.pt` file."""
    path = Path(asked.source)
    loaded = published_files.load_pickle(path)
    state = published_files.weights_in(loaded, where=str(path))
    aside = [str(name) for name in loaded if name not in state and name not in published_files.WRAPPERS]
    config: Any
    if asked.vq:
        config = published_files.infer_vq_config(state, where=str(path))
    else:
        grid = published_files.grid_of(path.name, asked.image_size)
        config = published_files.infer_config(state, grid=grid, size=asked.size, num_heads=asked.heads, where=str(path))
    expected = files.shapes_for(config)
    unknown = [name for name in state if name not in expected]
    state = {name: tensor for name, tensor in state.items() if name in expected}
    folders.check_shapes(folders.shapes_of(state), expected, where=str(path))
    check_weights(state, path)
    return state, config, [*aside, *unknown]


def _from_folder(asked: Conversion) -> _Read:
    """Read a directory or a Hub id, leaving nothing out. Raises `UserError` for options of `.pt` files."""
    for name in ("vq", "size", "image_size", "heads"):
        if vars(asked)[name]:
            problem = f"--{name.replace('_', '-')} is for .pt files; a directory says what it is"
            raise UserError(problem, where=asked.source, hint="leave it out")
    return *files.read_llamagen(asked.source, revision=asked.revision), []


def _described(config: Any) -> str:
    """One line about a model's size."""
    shape = (config.num_layers, config.num_heads, config.dim)
    names = [name for name, size in SIZES.items() if size == shape]
    return (
        f"LlamaGen {names[0] if names else 'of no published size'}, {config.condition}-conditional, "
        f"{shape[0]} layers, {shape[1]} heads, width {shape[2]}, {config.grid}x{config.grid} codes"
    )
