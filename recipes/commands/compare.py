"""`draftsmith compare`: a leaderboard of runs and the runs side by side, printed, drawn and written as files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ...core.errors import OK, UserError
from ...core.files import write_whole
from ...core.json_types import nulls
from ...core.secrets import redact, redact_markdown
from ..config.launch import say
from .command import Argument, Command

PAGE, CURVES = "compare.html", "curves.png"


def _run(options: argparse.Namespace) -> int:
    from ...eval.figures import draw_curves
    from ...eval.run_reports import read_runs
    from ...eval.tables import for_terminal, html_page
    from . import comparison

    folders = [Path(run) for run in options.runs]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("one run is named twice", hint="name each run once")
    output = Path(options.output)
    if output.resolve() in {folder.resolve() for folder in folders}:
        raise UserError("the page would lie among a run's stages", where=str(output), hint="choose another --output")
    runs = read_runs(folders)
    panels = comparison.panels(runs, options.metrics.split(",") if options.metrics else None)
    shown = comparison.tables_of(runs)
    page = comparison.markdown(runs, shown)
    output.mkdir(parents=True, exist_ok=True)
    if panels:
        draw_curves(output / CURVES, panels)
        page += f"\n![training curves]({CURVES})\n"
    page = redact_markdown(page)
    data = nulls({"runs": [run.name for run in runs], "tables": [table.to_json() for table in shown]})
    texts = {
        PAGE: html_page(page, output),
        "compare.md": page,
        "compare.json": redact(json.dumps(data, indent=1)),
    }
    for name, content in texts.items():
        write_whole(output / name, content.encode())
    say("written: " + ", ".join(str(output / name) for name in [*texts, *([CURVES] if panels else [])]))
    say("\n".join(["", comparison.title(runs), "", *(line for table in shown for line in for_terminal(table))]))
    return OK


COMMAND = Command(
    name="compare",
    summary="a leaderboard of runs, and the runs side by side: settings, training curves",
    description="Compare runs, finished or under way. The leaderboard has tau (tokens per pass of the target), the\n"
    "expected and measured speedup, the drafter's memory and the cost of its training, a table for each set of\n"
    "requests. Runs that differ only in `seed` get a table of means with their spread. Then come settings that\n"
    "differ and training curves (from each stage's metrics.jsonl). The tables are printed, and\n"
    "the page is written to a folder: compare.md, compare.html (one file, with the pictures), compare.json,\n"
    "curves.png.",
    examples=(
        ("draftsmith compare runs/*", "one leaderboard; the pages go to compare/"),
        ("draftsmith compare runs/a runs/b --output out/ab", "two runs; the pages go to out/ab"),
        ("draftsmith compare runs/a runs/b runs/c --metrics loss,val_loss,tau_T0", "these curves"),
        ("draftsmith compare runs/a runs/a-seed1 runs/a-seed2", "means over the seeds of one recipe"),
        ("draftsmith compare runs/a", "one run alone"),
    ),
    arguments=(
        Argument("runs", "output folders of runs", {"nargs": "+", "metavar": "RUN"}),
        Argument("--output", "folder for the pages (compare)", {"default": "compare"}),
        Argument("--metrics", "curves to draw, separated by commas (losses and tau)", {"metavar": "NAMES"}),
    ),
    run=_run,
)
