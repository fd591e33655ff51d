"""`draftsmith import`: turn a published drafter into a folder that recipes read."""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from ...core.errors import OK, UserError, page
from ..config.launch import say
from .command import Argument, Command

TARGET = "target"  # --as: what is no drafter


def _run(options: argparse.Namespace) -> int:
    destination = Path(options.destination)
    of_drafters = ("target", "image", "revision", "target_revision", "no_weights")
    if options.kind == TARGET:
        from ...core.files import new_folder
        from ...core.section import torch_dtype
        from ...models.formats import gguf

        if unread := [name for name in of_drafters if vars(options)[name]]:
            problem = f"--{unread[0].replace('_', '-')} is of drafters, and --as target reads a target's file alone"
            raise UserError(problem, hint="leave it out")
        with new_folder(destination) as folder:
            notes = gguf.to_ours(Path(options.source), folder, dtype=torch_dtype(options.dtype or "float32"))
        shown = f"target: {{kind: causal_lm, path: {destination}}}"
    else:
        if options.dtype is not None:
            raise UserError("--dtype is of --as target: a drafter is stored as it was found", hint="leave it out")
        if options.target is None:
            raise UserError("--target is missing: Hub id or directory of the model that it drafts for",
                            hint="see draftsmith import --help")  # fmt: skip
        from .importing import import_drafter

        section, notes = import_drafter(options, destination)
        shown = yaml.safe_dump(section, default_flow_style=None, sort_keys=False).rstrip()
    say(f"written  {destination}")
    for note in notes:
        say(f"note     {note}")
    say(shown)
    return OK


COMMAND = Command(
    name="import",
    summary="turn a published drafter, or a target's GGUF, into a folder that recipes read",
    description="Write a published drafter as a folder that recipes read. What its files do not say is derived from\n"
    "the target, or an option is asked for. Weights are read from safetensors, or from a pickle without running its\n"
    f"code. The command prints the drafter section for a recipe. {page('exports.md')} lists the layouts that it reads.",
    examples=(
        ("draftsmith import lucylyn/MSD-LLaVA1.5-7B weights/msd --as msd --target llava-hf/llava-1.5-7b-hf", ""),
        ("draftsmith import downloads/vispec weights/vispec --as vispec --target Qwen/Qwen2.5-VL-7B-Instruct", ""),
        ("draftsmith import Rayzl/qwen2.5-vl-7b-eagle3-sgl weights/eagle3 --as eagle3 --image projected"
         " --target Qwen/Qwen2.5-VL-7B-Instruct", ""),
        ("draftsmith import jadohu/llamagen_drafter weights/lantern --as lantern"
         " --target weights/llamagen-t2i-xl-256", ""),
        ("draftsmith import mjbooo/lvlm68m weights/lvlm68m --as lvlm --target llava-hf/llava-1.5-7b-hf", ""),
        ("draftsmith import SmolLM2-135M-Instruct.Q4_1.gguf weights/smollm2 --as target", "a language model's GGUF"),
    ),
    arguments=(
        Argument("source", "Hub id or directory of the published drafter; the .gguf file of a target",
                 {"metavar": "drafter"}),
        Argument("destination", "a directory that does not exist yet"),
        Argument("--as", "eagle, eagle3, peagle, dflash, dspark, dflash2, msd, vispec, medusa, lantern, lvlm; a model: "
                 "target",
                 {"dest": "kind", "required": True, "metavar": "KIND"}),
        Argument("--target", "Hub id or directory of the model that it drafts for; not with --as target"),
        Argument("--dtype", "--as target: type to store; default: float32", {"choices": ("float32", "bfloat16")}),
        Argument("--image", "eagle, eagle3, peagle: what the drafter saw in place of picture tokens in its training",
                 {"choices": ("placeholder", "projected")}),
        Argument("--revision", "revision of the drafter"),
        Argument("--target-revision", "revision of the target"),
        Argument("--no-weights", "do not compare embeddings: the target's config is enough", {"action": "store_true"}),
    ),
    run=_run,
)  # fmt: skip
