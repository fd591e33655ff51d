"""`draftsmith export`: write a trained drafter in the layout of a serving engine."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from ...core.errors import OK, UserError, page
from ...core.files import check_new, checked
from ..config.launch import say
from .command import Argument, Command


def _template_of(
    options: argparse.Namespace, folder: Path, target: str | None, *, compared: bool
) -> tuple[str | None, list[str]]:
    """A chat template for the prompts that what lies in `folder` was trained with, and what is to be said of it; None:
    the target's own writes them, or none can be written. `compared`: with the target's own, if it has one.
    """
    from ...data.conversations import PromptFormat
    from ...data.processor_files import load_processor
    from ...data.served_prompt import chat_template, difference
    from ...models.drafters.manifest import MANIFEST, read_manifest
    from ...models.formats.source import find_target

    written = read_manifest(folder).get("format")
    if written is None or options.to == "eagle":  # whose code writes prompts of its own
        return None, []
    try:
        whose = find_target(folder, target)
        form = checked(written, PromptFormat, where=f"{folder / MANIFEST}, format", hint="train it with this version")
        processor = load_processor(whose.place, revision=whose.revision, text_only=not whose.sees)
        pictures, has_own = options.prompts == "all" and whose.sees, bool(processor.tokenizer.chat_template)
        part = difference(form, processor, pictures=pictures) if has_own else "which has none"
        if part is None or (has_own and not compared):
            return None, []
        prompt = chat_template(form, processor, pictures=pictures)
    except UserError as error:
        return None, [f"the prompts of training were not compared with the server's: {error.problem}"]
    cure = "start the server with prompt.jinja, as printed" if prompt else "train with format: {template: chat}"
    return prompt, [f"the prompts of training part from the target's chat template ({part}): {cure}"]


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
        template, _ = _template_of(options, Path(target), target, compared=False)
        target = str(options.target_to)
        if template is not None:
            (Path(target) / "chat_template.jinja").write_text(template, "utf-8")
    try:
        prompt, said = _template_of(options, Path(options.drafter), target, compared=True)
        export = export_drafter(
            options.drafter, options.destination, options.to, target=target, prompts=options.prompts, mode=options.mode,
            prompt=prompt,
        )  # fmt: skip
    except BaseException:
        if options.target_to:  # of the pair both are written or none: the same command can be given again
            shutil.rmtree(options.target_to)
        raise
    if options.target_to:
        say(f"written  {target} (the target)")
    say(f"written  {export.folder} ({export.engine}, {export.method})")
    for note in (*export.notes, *said):
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
