"""`draftsmith verify`: whether a published folder is what was published, and decodes as it did."""

from __future__ import annotations

import argparse

from ...core.errors import UserError, did_you_mean
from ..exit_codes import FAULTS, OK
from ..launch import say
from .command import Argument, Command

# Parts of a target: of language models the first two; a generator may keep tokenizer and encoder elsewhere.
PARTS = ("target", "processor", "vq", "text")


def places(words: list[str]) -> dict[str, str] | None:
    """`--target PLACE` and `--target PART=PLACE` as part -> place; None: as the manifest names the target."""
    named: dict[str, str] = {}
    for word in words:
        part, sign, place = word.partition("=")
        part, place = (part, place) if sign else ("target", word)
        if part not in PARTS:
            raise UserError(f"--target {word}: no part {part!r}", hint=did_you_mean(part, PARTS))
        if part in named:
            raise UserError(f"--target: {part} is named twice", hint="name each part once")
        named[part] = place
    return named or None


def _run(options: argparse.Namespace) -> int:
    from ..finding import any_fault, shown
    from ..verify_findings import verify

    findings = verify(options.folder, places(options.target), options.revision, files_only=options.files_only,
                      allow_import=options.allow_import)  # fmt: skip
    say(shown(findings))
    return FAULTS if any_fault(findings) else OK


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
