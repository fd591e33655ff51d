"""`draftsmith verify`: whether a published folder is what was published, and decodes as it did."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from ...core.errors import UserError, did_you_mean
from ...core.files import open_data
from ...core.results import SUMS, check_sums, read_sums
from ..config.finding import Finding, fault, report, tried
from .command import Argument, Command

# Parts of a target: of language models the first two; a generator may keep tokenizer and encoder elsewhere.
PARTS = ("target", "processor", "vq", "text")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
_CURE = "fetch it again, or publish it anew"


def _run(options: argparse.Namespace) -> int:
    """Nothing of a folder with a fault among its files is loaded."""
    from ...eval.published import LOST_TARGET, fetch, lost_target, reproduce
    from ...models.drafters.manifest import MANIFEST

    target: dict[str, str] = {}
    for word in options.target:
        part, place = word.split("=", 1) if "=" in word else ("target", word)
        if part not in PARTS:
            raise UserError(f"--target {word}: no part {part!r}", hint=did_you_mean(part, PARTS))
        if part in target:
            raise UserError(f"--target: {part} is named twice", hint="name each part once")
        target[part] = place
    folder = fetch(options.folder, options.revision)

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
        listed = read_sums(folder)
        size = sum((folder / name).stat().st_size for name in listed)
        return f"{len(listed)} files, {size / 2**20:,.1f} MiB, as they were published"

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


COMMAND = Command(
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
    run=_run,
)  # fmt: skip
