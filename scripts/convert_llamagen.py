#!/usr/bin/env python
"""Turn published LlamaGen files into directories that recipes read, or into LANTERN's layout and back.

    scripts/convert_llamagen.py t2i_XL_stage1_256.pt weights/llamagen-t2i-xl-256
    scripts/convert_llamagen.py t2i_XL_stage2_512.pt weights/llamagen-t2i-xl-512 --dtype bfloat16
    scripts/convert_llamagen.py c2i_B_384.pt weights/llamagen-c2i-b-384
    scripts/convert_llamagen.py --vq vq_ds16_t2i.pt weights/llamagen-vq-t2i
    scripts/convert_llamagen.py jadohu/LlamaGen-T2I weights/llamagen-t2i-xl-256
    scripts/convert_llamagen.py weights/llamagen-t2i-xl-256 weights/for-lantern --to lantern

The files: t2i_XL_stage1_256.pt, t2i_XL_stage2_512.pt and vq_ds16_t2i.pt in peizesun/llamagen_t2i on the Hub, c2i_*.pt
and vq_ds16_c2i.pt in FoundationVision/LlamaGen. No code in them is run. The destination must not exist; it appears
whole or not at all.
"""

import sys
from pathlib import Path
from typing import Any

from draftsmith.core.errors import UserError
from draftsmith.core.files import check_new, new_folder
from draftsmith.core.finite import check_weights
from draftsmith.core.section import torch_dtype
from draftsmith.eval.timing import options
from draftsmith.models.llamagen import files, folders, lantern_layout, published_files
from draftsmith.models.llamagen.transformer import SIZES


def from_pickle(arguments):
    """Weights, config, and what was left out, of an official `.pt` file."""
    path = Path(arguments.source)
    loaded = published_files.load_pickle(path)
    state = published_files.weights_in(loaded, where=str(path))
    aside = [str(name) for name in loaded if name not in state and name not in published_files.WRAPPERS]
    if arguments.vq:
        config: Any = published_files.infer_vq_config(state, where=str(path))
    else:
        grid = published_files.grid_of(path.name, arguments.image_size)
        config = published_files.infer_config(
            state, grid=grid, size=arguments.size, num_heads=arguments.heads, where=str(path)
        )
    expected = files.shapes_for(config)
    state, unknown = published_files.leave_out(state, expected)
    folders.check_shapes(folders.shapes_of(state), expected, where=str(path))
    check_weights(state, path)
    return state, config, [*aside, *unknown]


def from_folder(arguments):
    """Weights, config, and what was left out (nothing), of a directory or a Hub id."""
    for name in ("vq", "size", "image_size", "heads"):
        if vars(arguments)[name]:
            problem = f"--{name.replace('_', '-')} is for .pt files; a directory says what it is"
            raise UserError(problem, where=arguments.source, hint="leave it out")
    return *files.read_llamagen(arguments.source, revision=arguments.revision), []


def described(config) -> str:
    """One line about a model's size."""
    shape = (config.num_layers, config.num_heads, config.dim)
    names = [name for name, size in SIZES.items() if size == shape]
    return (
        f"LlamaGen {names[0] if names else 'of no published size'}, {config.condition}-conditional, "
        f"{shape[0]} layers, {shape[1]} heads, width {shape[2]}, {config.grid}x{config.grid} codes"
    )


def convert(arguments) -> None:
    """Write `arguments.source` to a new directory in the layout asked for, and print what was read and left out."""
    destination = Path(arguments.destination)
    check_new(destination)
    if arguments.vq and arguments.to == "lantern":
        raise UserError("LANTERN's layout is for the transformer", hint="leave out --vq or --to lantern")
    is_pickle = arguments.source.endswith((".pt", ".pth", ".bin")) or Path(arguments.source).is_file()
    state, config, left_out = (from_pickle if is_pickle else from_folder)(arguments)
    if arguments.dtype:
        state = {name: tensor.to(torch_dtype(arguments.dtype)) for name, tensor in state.items()}
    values = files.values_of(config)
    what = f"VQ tokenizer, {config.factor} pixels per code" if arguments.vq else described(config)
    buffers = {"quantize.codebook_used", "cls_embedding.uncond_embedding"}
    count = sum(tensor.numel() for name, tensor in state.items() if name not in buffers)
    if arguments.to == "lantern":
        state, values = lantern_layout.to_lantern(state, config)
    with new_folder(destination) as folder:
        folders.write_folder(folder, values, state)
    types = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in state.values()}))
    print(f"read      {arguments.source}: {what}")
    print(f"weights   {count:,} parameters in {len(state)} tensors, {types}")
    print(f"left out  {', '.join(left_out) or 'nothing'}")
    print(f"written   {destination} ({arguments.to})")


def main(argv: list[str] | None = None) -> int:
    """Converts as the command line says. Returns the exit code: 0, or 2 after an error of the user."""
    parser = options(__doc__)
    parser.add_argument("source", help="a .pt file, our directory, one of LANTERN's layout, or a Hub id of such")
    parser.add_argument("destination", help="a directory that does not exist yet")
    parser.add_argument("--to", choices=("draftsmith", "lantern"), default="draftsmith", help="layout to write")
    parser.add_argument("--vq", action="store_true", help="the .pt file is an image tokenizer")
    parser.add_argument(
        "--image-size", type=int, help="pixels along a side that a .pt file draws; default: 256, 384 or 512 in its name"
    )
    parser.add_argument("--size", choices=tuple(SIZES), help="published size of a .pt file; default: by its shapes")
    parser.add_argument("--heads", type=int, help="attention heads of a .pt file of no published size")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="type to store; default: as found")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id")
    try:
        convert(parser.parse_args(argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
