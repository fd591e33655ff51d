"""`draftsmith export`: write a trained drafter in the layout of a serving engine."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from ...core.errors import UserError, page
from ...core.files import check_new
from ..config.exit_codes import OK
from ..config.launch import say
from .command import Argument, Command


def _run(options: argparse.Namespace) -> int:
    from ...models.formats.export import V1_FAULT, export_drafter
    from ...models.formats.target import export_target

    target = options.target
    if options.target_to:  # the exported drafter then names the target's new place
        if options.to != "vllm" or target is None or not Path(target).is_dir():
            hint = "add --to vllm --target runs/x/target"
            raise UserError("--target-to writes the target of a run for vLLM", hint=hint)
        check_new(Path(options.destination))
        export_target(Path(target), Path(options.target_to))
        target = str(options.target_to)
    try:
        export = export_drafter(
            options.drafter, options.destination, options.to, target=target, prompts=options.prompts, mode=options.mode
        )
    except BaseException:
        if options.target_to:  # of the pair both are written or none: the same command can be given again
            shutil.rmtree(options.target_to)
        raise
    if options.target_to:
        say(f"written  {target} (the target)")
    say(f"written  {export.folder} ({export.engine}, {export.method})")
    for note in export.notes:
        say(f"note     {note}")
    if export.engine == "vllm" and (export.patched or export.method not in ("draft_model", "mtp")):
        is_here = export.target is not None and Path(export.target).is_dir()
        place = target or (export.target if is_here else None)
        whose = f" --target {place}" if place else ""
        # Chains can be read from the V1 runner alone, so its known fault is patched there.
        patched = " --without-known-faults" if V1_FAULT in export.notes else ""
        say(f"check    {export.asks}draftsmith verify-engine {export.folder}{whose}{patched}")
    say(f"serve    {export.command}")
    return OK


COMMAND = Command(
    name="export",
    summary="write a trained drafter in the layout of a serving engine",
    description="Write a trained drafter in the layout of a serving engine. Export refuses a drafter that the engine\n"
    f"would run incorrectly, and lists the reasons. {page('exports.md')} has the table of engines and drafters.",
    examples=(
        ("draftsmith export runs/eagle3-qwen2.5-vl-7b/pictures out/EAGLE3-Qwen2.5-VL-7B --to vllm", ""),
        ("draftsmith export runs/llava15-68m/finetune out/llava15-68m-text --to vllm --prompts text", ""),
        (
            "draftsmith export runs/x/eagle3 out/head --to vllm --target runs/x/target --target-to out/target",
            "a pair",
        ),
        ("draftsmith export runs/msd/train out/MSD --to eagle --target weights/llava-1.5-7b-hf", ""),
    ),
    arguments=(
        Argument("drafter", "folder of the stage that trained it, or of draftsmith import"),
        Argument("destination", "a directory that does not exist yet"),
        Argument("--to", "vllm, sglang, speculators or eagle", {"required": True}),
        Argument("--target", "Hub id or directory of the target (as the drafter's manifest names it)"),
        Argument("--target-to", "also write the run's target to this folder as vLLM reads it, to serve both together"),
        Argument(
            "--prompts", "text: the engine will never receive images", {"choices": ("all", "text"), "default": "all"}
        ),
        Argument(
            "--mode",
            "of a draft LVLM in vLLM: M, the pictures, or T, newlines (as its settings say)",
            {"choices": ("M", "T")},
        ),
    ),
    run=_run,
)
