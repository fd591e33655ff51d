"""`draftsmith check`, `doctor` and `verify`: whether a recipe can begin, this machine run it, and a published folder is
what was published. Each prints its findings; nothing is trained or written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from ...core.errors import UserError, did_you_mean
from ...core.files import open_data
from ...core.results import SUMS, check_sums, read_sums
from ..config.finding import Finding, fault, report, tried
from ..config.load import leave_at_once, load
from .command import NAME, SETTINGS, Argument, Command, recipe_arguments

# Parts of a target: of language models the first two; a generator may keep tokenizer and encoder elsewhere.
PARTS = ("target", "processor", "vq", "text")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
_CURE = "fetch it again, or publish it anew"


def _check(options: argparse.Namespace) -> int:
    from ..config.checks import findings_of

    leave_at_once()
    loaded = load(recipe_arguments(options))
    findings = findings_of(loaded, sys.maxsize if options.all_records else options.samples)
    return report(findings, f"\ncheck of {loaded.path}\n")


CHECK = Command(
    name="check",
    summary="look at a recipe before it runs: sizes, data, room, stages that finished",
    description="Print a dry run, then check whether the run can begin: the engine on this machine, models and data\n"
    "on disk, room for the output, stages that have finished or whose inputs changed. Records are encoded as training\n"
    "would encode them, one is shown with its supervised text in [[ ]], and one of each kind goes through the stage's\n"
    "model without weights. Nothing is trained or written; of a target on the Hub its small files are fetched.\n"
    "Exits with 3 if something must be fixed.",
    examples=(
        ("draftsmith check llava15-68m", "sizes and what is missing"),
        ("draftsmith check llava15-68m stages.finetune.data.path=/data/mix665k.json", "with your own file"),
        ("draftsmith check llava15-68m --all-records", "read the whole set: the usable share, and every reason"),
    ),
    arguments=(
        NAME,
        SETTINGS,
        Argument("--samples", "records of each data section that are read (64)", {"type": int, "default": 64}),
        Argument("--all-records", "read them all", {"action": "store_true"}),
    ),
    run=_check,
)


def _doctor(options: argparse.Namespace) -> int:
    from ..config.health import look

    if options.ranks is not None and options.ranks < 1:
        raise UserError(f"--ranks {options.ranks}", hint="the processes on one node: 1 or more")
    return report([*look(Path(options.output), options.ranks)])


DOCTOR = Command(
    name="doctor",
    summary="check this environment and machine, and say how to fix each fault",
    description="Compare installed versions with the tested ones, and check devices, DeepSpeed, disk and\n"
    "memory, cores against threads and ranks, Hub and wandb login. No network is used.\n"
    "Exits with 3 if something must be fixed; warnings alone exit with 0.",
    examples=(
        ("draftsmith doctor", ""),
        ("draftsmith doctor --ranks 8", "do the threads of eight processes fit this node?"),
    ),
    arguments=(
        Argument("--ranks", "processes that will run on this node (one for each GPU, or one)", {"type": int}),
        Argument("--output", "folder that runs are written to (runs)", {"default": "runs", "metavar": "FOLDER"}),
    ),
    run=_doctor,
)


def _verify(options: argparse.Namespace) -> int:
    """Nothing of a folder with a fault among its files is loaded."""
    from ...eval.published import LOST_TARGET, lost_target, reproduce
    from ...models.drafters.manifest import MANIFEST
    from ...models.folders import downloaded

    target: dict[str, str] = {}
    for word in options.target:
        part, place = word.split("=", 1) if "=" in word else ("target", word)
        if part not in PARTS:
            raise UserError(f"--target {word}: no part {part!r}", hint=did_you_mean(part, PARTS))
        if part in target:
            raise UserError(f"--target: {part} is named twice", hint="name each part once")
        target[part] = place
    folder = downloaded(options.folder, options.revision)

    def decoded() -> str:
        expected = reproduce(folder, target=target or None, allow_import=options.allow_import)
        cycles = f"{len(expected.tokens)} tokens in {len(expected.accepted)} cycles, tau {expected.tau:.2f}"
        return f"{cycles}: the same tokens and accepted drafts as published"

    findings = [*_file_findings(folder, options.allow_import)]
    if not options.files_only and not any(finding.level == "fault" for finding in findings):
        if not target and lost_target(folder):
            hint = "give its folder (--target FOLDER), or check the files alone (--files-only)"
            raise UserError(LOST_TARGET, where=str(folder / MANIFEST), hint=hint)
        findings.append(tried("stored prompt", decoded, _CURE))
    return report(findings)


def _file_findings(folder: Path, allow_import: bool) -> Iterator[Finding]:
    """The sums of a published folder's files, those that could run code, and the manifest."""
    from ...eval.published import read_published

    def sums() -> str:
        if not (folder / SUMS).is_file():
            raise UserError(f"{folder / SUMS} is missing: nothing shows whether a file was changed")
        check_sums(folder)
        return f"{len(read_sums(folder))} files, as they were published"

    def manifest() -> str:
        section = read_published(folder, allow_import=allow_import)
        target = section.target.get("path") or "a target that its maker trained"
        return f"{section.drafter.get('kind')} drafter for {target}, method {section.decoding.name}"

    yield tried("files", sums, _CURE)
    cure = "remove it, or fetch the folder from who published it: weights are in model.safetensors alone"
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and _is_pickle(path)):
        yield fault("pickles", f"{path} is a pickle, and may run code where it is loaded", cure)
    yield tried("manifest", manifest, _CURE)


def _is_pickle(path: Path) -> bool:
    """By its name, or by how it begins: pickle's protocols from 2 on, or torch's archive around one."""
    if path.suffix.lower() in PICKLES:
        return True
    with open_data(path) as file:
        head = file.read(4)
    pickled = len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5
    return pickled or (head == b"PK\x03\x04" and path.suffix.lower() not in (".npz", ".zip"))


VERIFY = Command(
    name="verify",
    summary="check a published folder: its files, and the tokens of its stored prompt",
    description="Check a published drafter, a folder or a Hub id: every file against SHA256SUMS, the manifest, and\n"
    "the stored prompt, which must give the tokens and accepted drafts that it was published with. The stored prompt\n"
    "needs the target, which the manifest or --target names. Exits with 3 if something differs.",
    examples=(
        ("draftsmith verify runs/llava15-68m/publish/repository", "the target is the one that the manifest names"),
        ("draftsmith verify me/llava-1.5-7b-draft --target weights/llava-1.5-7b-hf", "a target on this machine"),
        ("draftsmith verify FOLDER --target target=runs/a/target --target processor=runs/a/world", "in two folders"),
        ("draftsmith verify FOLDER --files-only", "checksums and manifest, without a target"),
    ),
    arguments=(
        Argument("folder", "a published folder, or the Hub id of one"),
        Argument("--target", f"Hub id or directory of the target, or PART=PLACE; parts: {', '.join(PARTS)}",
                 {"action": "append", "default": [], "metavar": "[PART=]PLACE"}),
        Argument("--revision", "revision, if FOLDER is a Hub id"),
        Argument("--files-only", "check the files, decode nothing", {"action": "store_true"}),
        Argument("--allow-import", "import the package of the drafter that the folder names: its code runs",
                 {"action": "store_true"}),
    ),
    run=_verify,
)  # fmt: skip
