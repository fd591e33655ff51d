"""`draftsmith check`: what a recipe would do and whether it can begin. Nothing is trained, fetched or written."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ...core.errors import page
from ..config.finding import report, warning
from ..config.launch import say
from ..config.load import leave_at_once, load
from .command import NAME, SETTINGS, Argument, Command, recipe_arguments


def _run(options: argparse.Namespace) -> int:
    from ..config import checks
    from ..config.dry_run import dry_run
    from ..config.health import room
    from ..config.plan import plan
    from ..config.preflight_parallel import check_parallel
    from ..config.preflight_samples import model_findings
    from ..config.preflight_weights import models_findings

    leave_at_once()
    loaded = load(recipe_arguments(options))
    recipe, planned = loaded.recipe, plan(loaded.recipe, loaded.path)
    broken = [finding for finding in model_findings(recipe) if finding.level == "fault"]
    text = ""
    if not broken:
        check_parallel(recipe, planned, loaded.options.stages, dry_run=True)
        text = dry_run(recipe, planned, loaded.options.stages)
        say(text)
    chosen = loaded.options.stages or tuple(p.name for p in planned)
    findings = [
        checks.engine_finding(recipe),
        *models_findings(recipe),
        *broken,
        room("output", Path(recipe.output), "choose another output=", wanted=1, least=1),
        *(warning(stage, words, f"see {page('evaluation.md')}") for stage, words in recipe.warnings()),
        *checks.results_findings(loaded, planned, chosen),
    ]
    count = sys.maxsize if options.all_records else options.samples
    findings += checks.stages_findings(loaded, planned, chosen, count, checks.states_too_large(text))
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
