"""`draftsmith import`: turn a published drafter into a folder that recipes read."""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from ...core.pages import page
from ..exit_codes import OK
from ..launch import say
from .command import Argument, Command


def _run(options: argparse.Namespace) -> int:
    from ..importing import ImportOptions, import_drafter

    destination = Path(options.destination)
    asked = ImportOptions(
        source=options.drafter,
        kind=options.kind,
        target=options.target,
        image=options.image,
        revision=options.revision,
        target_revision=options.target_revision,
        no_weights=options.no_weights,
    )
    section, notes = import_drafter(asked, destination)
    say(f"written  {destination}")
    for note in notes:
        say(f"note     {note}")
    say(yaml.safe_dump(section, default_flow_style=None, sort_keys=False).rstrip())
    return OK


COMMAND = Command(
    name="import",
    summary="turn a published drafter into a folder that recipes read",
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
    ),
    arguments=(
        Argument("drafter", "Hub id or directory of the published drafter"),
        Argument("destination", "a directory that does not exist yet"),
        Argument("--as", "what it is: eagle, eagle3, peagle, dflash, msd, vispec, lantern or lvlm",
                 {"dest": "kind", "required": True, "metavar": "KIND"}),
        Argument("--target", "Hub id or directory of the model that it drafts for", {"required": True}),
        Argument("--image", "eagle, eagle3, peagle: what the drafter saw in place of picture tokens in its training",
                 {"choices": ("placeholder", "projected")}),
        Argument("--revision", "revision of the drafter"),
        Argument("--target-revision", "revision of the target"),
        Argument("--no-weights", "do not compare embeddings: the target's config is enough", {"action": "store_true"}),
    ),
    run=_run,
    takes="folder",
)  # fmt: skip
