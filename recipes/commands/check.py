"""`draftsmith check`: what a recipe would do and whether it can begin. Nothing is trained, fetched or written."""

from __future__ import annotations

import argparse
import sys

from ..config.finding import report
from ..config.load import leave_at_once, load
from .command import NAME, SETTINGS, Argument, Command, recipe_arguments


def _run(options: argparse.Namespace) -> int:
    from ..config.checks import findings_of

    leave_at_once()
    loaded = load(recipe_arguments(options))
    findings = findings_of(loaded, sys.maxsize if options.all_records else options.samples)
    return report(findings, f"\ncheck of {loaded.path}\n")


COMMAND = Command(
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
    run=_run,
)
