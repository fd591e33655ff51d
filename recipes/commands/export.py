"""`draftsmith export`, `verify-engine`, `import` and `convert`: what other tools read and write, both ways."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import yaml

from ...core.errors import FAULTS, OK, UserError, page
from ...core.files import check_new, checked, new_folder
from ..config.launch import say
from .command import Argument, Command

TARGET = "target"  # of import --as: what is no drafter


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


def _export(options: argparse.Namespace) -> int:
    from ...models.formats.export import V1_FAULT, export_drafter
    from ...models.formats.target import export_target

    target = options.target
    if options.target_to:  # the exported drafter then names the target's new place
        if options.to != "vllm" or target is None or not Path(target).is_dir():
            hint = "add --to vllm --target runs/x/target"
            raise UserError("--target-to writes the target of a run for vLLM", hint=hint)
        check_new(Path(options.destination))
        what = export_target(Path(target), Path(options.target_to))
        template, _ = _template_of(options, Path(target), target, compared=False)
        target = str(options.target_to)
        if template is not None:
            (Path(target) / "chat_template.jinja").write_text(template, "utf-8")
    try:
        prompt, said = _template_of(options, Path(options.drafter), target, compared=True)
        export = export_drafter(
            options.drafter, options.destination, options.to, target=target, prompts=options.prompts, mode=options.mode,
            prompt=prompt, target_gguf=None if options.target_gguf is None else Path(options.target_gguf),
        )  # fmt: skip
    except BaseException:
        if options.target_to:  # of the pair both are written or none: the same command can be given again
            shutil.rmtree(options.target_to)
        raise
    if options.target_to:
        say(f"written  {target} ({what})")
    say(f"written  {export.folder} ({export.engine}, {export.method})")
    for note in (*export.notes, *said):
        say(f"note     {note}")
    unshown = ("draft_model", "draft-simple", "mtp")  # whose chains are not compared
    if export.engine in ("vllm", "gguf") and (export.patched or export.method not in unshown):
        is_here = export.target is not None and Path(export.target).is_dir()
        place = target or (export.target if is_here else None)
        whose = f" --target {place}" if place else ""
        # Chains can be read from the V1 runner alone, so its known fault is patched there.
        patched = " --without-known-faults" if V1_FAULT in export.notes else ""
        say(f"check    {export.asks}draftsmith verify-engine {export.folder}{whose}{patched}")
    say(f"serve    {export.command}")
    return OK


EXPORT = Command(
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
        ("draftsmith export runs/x/eagle3 out/head --to gguf --target-gguf target.gguf", "for llama.cpp"),
    ),
    arguments=(
        Argument("drafter", "folder of the stage that trained it, or of draftsmith import"),
        Argument("destination", "a directory that does not exist yet"),
        Argument("--to", "vllm, sglang, speculators, eagle or gguf (llama.cpp)", {"required": True}),
        Argument("--target", "Hub id or directory of the target (as the drafter's manifest names it)"),
        Argument("--target-gguf", "with --to gguf: the target as llama.cpp reads it", {"metavar": "FILE"}),
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
    run=_export,
)


def _verify_engine(options: argparse.Namespace) -> int:
    from ...eval.engines.engine_check import verify_engine
    from ...eval.engines.program import find_python
    from ...models.formats.export import read_export

    written = read_export(Path(options.folder))
    in_llama = written is not None and written[0].engine == "gguf"
    python = (options.python or sys.executable) if in_llama else find_python(options.python)
    with tempfile.TemporaryDirectory(prefix="verify-engine-") as folder:
        place = Path(folder)
        if options.keep is not None:
            check_new(Path(options.keep))
            place = Path(options.keep)
            place.mkdir(parents=True)
        verification = verify_engine(
            Path(options.folder), place, python=python, target=options.target, max_new_tokens=options.tokens,
            without_known_faults=options.without_known_faults, timeout_s=options.timeout,
        )  # fmt: skip
    say(verification.shown())
    return FAULTS if verification.faults else OK


VERIFY_ENGINE = Command(
    name="verify-engine",
    summary="serve an exported folder with its engine, and compare every drafted chain with draftsmith's own",
    description="Serve a folder of `draftsmith export --to vllm` with the vLLM that is installed, and decode the same\n"
    "requests here: texts, one picture, two pictures, and pictures that are resized. The command compares plain\n"
    "answers, answers with the drafter, and every drafted chain, token by token, and says what each difference may\n"
    "come of. vLLM runs in its own Python: --python, or the environment variable DRAFTSMITH_VLLM_PYTHON. A folder of\n"
    "--to gguf is served by llama.cpp (pip install xllamacpp), on texts, alone and three at once. Exits\n"
    "with 3 if an answer differs, or more than 2% of the chains of a group.",
    examples=(
        ("draftsmith verify-engine out/EAGLE3-Qwen2.5-VL-7B", "vLLM in this environment"),
        (
            "draftsmith verify-engine out/head --target runs/x/target --python ~/vllm/bin/python",
            "in its own environment",
        ),
    ),
    arguments=(
        Argument("folder", "a folder of draftsmith export --to vllm"),
        Argument("--target", "Hub id or directory of the target (as the drafter's manifest names it)"),
        Argument("--python", "an interpreter with vLLM"),
        Argument("--tokens", "tokens of each answer", {"type": int, "default": 48, "metavar": "N"}),
        Argument(
            "--without-known-faults",
            "patch the engine's known faults in its process, to test the export by itself",
            {"action": "store_true"},
        ),
        Argument(
            "--timeout",
            "after which the engine is taken for hung",
            {"type": float, "default": 3600.0, "metavar": "SECONDS"},
        ),
        Argument("--keep", "keep requests, answers and logs in this new folder", {"metavar": "FOLDER"}),
    ),
    run=_verify_engine,
)


def _import(options: argparse.Namespace) -> int:
    destination = Path(options.destination)
    of_drafters = ("target", "image", "revision", "target_revision", "no_weights")
    if options.kind == TARGET:
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


IMPORT = Command(
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
    run=_import,
)  # fmt: skip


def _convert(options: argparse.Namespace) -> int:
    from ...models.targets.llamagen.published_files import convert

    settings = {name: vars(options)[name] for name in ("to", "vq", "image_size", "heads", "dtype", "revision")}
    for line in convert(options.source, Path(options.destination), **settings):
        say(line)
    return OK


CONVERT = Command(
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
    run=_convert,
)  # fmt: skip
