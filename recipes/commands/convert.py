"""`draftsmith convert`: turn published LlamaGen files into folders that recipes read, or into LANTERN's layout."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...core.errors import OK
from ..config.launch import say
from .command import Argument, Command


def _run(options: argparse.Namespace) -> int:
    from ...models.targets.llamagen.published_files import convert

    settings = {name: vars(options)[name] for name in ("to", "vq", "image_size", "heads", "dtype", "revision")}
    for line in convert(options.source, Path(options.destination), **settings):
        say(line)
    return OK


COMMAND = Command(
    name="convert",
    summary="turn published LlamaGen weights into a folder that recipes read",
    description="Write a published LlamaGen transformer or image tokenizer (.pt) as a folder that recipes read, or a\n"
    "transformer in LANTERN's layout. The files are t2i_XL_stage1_256.pt, t2i_XL_stage2_512.pt and vq_ds16_t2i.pt in\n"
    "peizesun/llamagen_t2i on the Hub, c2i_*.pt and vq_ds16_c2i.pt in FoundationVision/LlamaGen; none of their code\n"
    "is run.",
    examples=(
        ("draftsmith convert t2i_XL_stage1_256.pt models/llamagen-t2i-xl-256", ""),
        ("draftsmith convert --vq vq_ds16_t2i.pt models/llamagen-vq-t2i", ""),
        ("draftsmith convert t2i_XL_stage2_512.pt models/llamagen-t2i-xl-512 --dtype bfloat16", ""),
        ("draftsmith convert jadohu/LlamaGen-T2I models/llamagen-t2i-xl-256", ""),
        ("draftsmith convert models/llamagen-t2i-xl-256 models/for-lantern --to lantern", ""),
    ),
    arguments=(
        Argument("source", "a .pt file, our directory, one of LANTERN's layout, or a Hub id of such"),
        Argument("destination", "a directory that does not exist yet"),
        Argument("--to", "layout to write", {"choices": ("draftsmith", "lantern"), "default": "draftsmith"}),
        Argument("--vq", "the .pt file is an image tokenizer", {"action": "store_true"}),
        Argument("--image-size", "pixels along a side that a .pt file draws; default: 256, 384 or 512 in its name",
                 {"type": int}),
        Argument("--heads", "attention heads of a .pt file of no published size", {"type": int}),
        Argument("--dtype", "type to store; default: as found", {"choices": ("float32", "bfloat16", "float16")}),
        Argument("--revision", "branch, tag or commit of a Hub id"),
    ),
    run=_run,
)  # fmt: skip
