"""`draftsmith check`: what a recipe would do and whether it can begin. Nothing is trained, fetched or written."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...core.pages import page
from ..exit_codes import FAULTS, OK
from ..finding import any_fault, shown, warning
from ..launch import say
from ..load import load
from ..uncollected import leave_at_once
from .command import NAME, SETTINGS, Argument, Command, recipe_arguments


def _run(options: argparse.Namespace) -> int:
    from .. import checks
    from ..dry_run import dry_run
    from ..plan import plan

    leave_at_once()
    loaded = load(recipe_arguments(options))
    planned = plan(loaded.recipe, loaded.path)
    text = dry_run(loaded.recipe, planned, loaded.options.stages)
    say(text)
    chosen = loaded.options.stages or tuple(p.name for p in planned)
    findings = [
        *checks.engine_findings(loaded.recipe),
        *checks.models_findings(loaded.recipe),
        *checks.disk_findings(Path(loaded.recipe.output)),
    ]
    findings += [
        warning(f"stages.{p.name}", text, f"see {page('evaluation.md')}")
        for p in planned
        for text in p.stage.warnings()
    ]
    findings += checks.results_findings(loaded, planned, chosen)
    findings += checks.stages_findings(loaded, planned, chosen, options.samples, checks.states_too_large(text))
    say(f"\ncheck of {loaded.path}\n{shown(findings)}")
    return FAULTS if any_fault(findings) else OK


COMMAND = Command(
    name="check",
    summary="look at a recipe before it runs: sizes, data, room, stages that finished",
    description="Print a dry run, then check whether the run can begin: the engine on this machine, models and data\n"
    "on disk, room for the output, stages that have finished or whose inputs changed. Records are encoded as training\n"
    "would encode them, and one is shown with its supervised text in [[ ]]. Nothing is trained,\n"
    "fetched or written.\n"
    "Exits with 3 if something must be fixed.",
    examples=(
        ("draftsmith check llava15-68m", "sizes and what is missing"),
        ("draftsmith check llava15-68m stages.finetune.data.path=/data/mix665k.json", "with your own file"),
        ("draftsmith check llava15-68m --samples 5000", "read more records of each file"),
    ),
    arguments=(
        NAME,
        SETTINGS,
        Argument("--samples", "records of each data section that are read (64)", {"type": int, "default": 64}),
    ),
    run=_run,
)
