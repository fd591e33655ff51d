"""`draftsmith compare`: runs side by side, printed and drawn."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ...core.errors import UserError
from ...core.secrets import redact
from ..launch import say
from .command import OK, Argument, Command


def _run(options: argparse.Namespace) -> int:
    from ...eval import side_by_side
    from ...eval.figures import draw_curves

    folders = [Path(run) for run in options.runs]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("one run is named twice", hint="name each run once")
    runs = side_by_side.read_runs(folders)
    panels = side_by_side.panels(runs, options.metrics.split(",") if options.metrics else None)
    page = side_by_side.markdown(runs)
    say(page)
    output = Path(options.output)
    if output.resolve() in {folder.resolve() for folder in folders}:
        raise UserError("the page would lie among a run's stages", where=str(output), hint="choose another --output")
    output.mkdir(parents=True, exist_ok=True)
    if panels:
        draw_curves(output / "curves.png", panels)
        page += "\n![training curves](curves.png)\n"
    (output / "compare.md").write_text(redact(page))
    (output / "compare.json").write_text(redact(json.dumps(side_by_side.as_data(runs), indent=1)))
    say(f"written: {', '.join(str(p) for p in sorted(output.glob('c*')))}")
    return OK


COMMAND = Command(
    name="compare",
    summary="put runs side by side: settings, training curves, evaluation",
    description="Settings that differ, training curves (from each stage's metrics.jsonl) and evaluation tables of\n"
    "runs, finished or under way. Printed, and written to a folder with the curves as a picture.",
    examples=(
        ("draftsmith compare runs/a runs/b", "page and curves go to compare/"),
        ("draftsmith compare runs/a runs/b runs/c --metrics loss,val_loss,tau_T0", "these curves"),
        ("draftsmith compare runs/a", "one run alone"),
    ),
    arguments=(
        Argument("runs", "output folders of runs", {"nargs": "+", "metavar": "RUN"}),
        Argument("--output", "folder for compare.md, compare.json and curves.png (compare)", {"default": "compare"}),
        Argument("--metrics", "curves to draw, with commas between (losses and tau)", {"metavar": "NAMES"}),
    ),
    run=_run,
    takes="folder",
)
