"""The end of a run's output: the table of a model card, the paths of the reports, and commands to try next."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...core.errors import UserError
from ...core.files import LOG_BYTES, read_json
from ...core.json_types import JsonObject
from ...eval.run_reports import COLOURED, EXAMPLES, cells, overview
from ...eval.tables import for_terminal
from ...trainers.publish.lineage import finished
from ...trainers.run.progress import watched
from .schema import Recipe

SHOWN_AS = "DRAFTSMITH_SHOWN_AS"  # set by scripts/demo: the command's path, where the caller's PATH lacks it
MOST_LINES = 40  # of a table


def ending(recipe: Recipe, path: Path, ran: Sequence[str], shown: str | None = None) -> str:
    """The lines; "" where nothing was measured.

    Args:
        path: of the recipe's file.
        ran: names of the stages that ran or had finished.
        shown: the output folder as people are told it; None: as the recipe has it.
    """
    output, place = Path(recipe.output), Path(shown or recipe.output)
    measured = [n for n in ran if recipe.stages[n].kind == "evaluate" and (output / n / "report.json").is_file()]
    if not measured:
        return ""
    lines: list[str] = []
    for name in measured:
        hint = f"restart={name} writes it again"
        try:
            report = read_json(output / name / "report.json", JsonObject, hint=hint, max_bytes=LOG_BYTES)
            table = overview(cells(report))
            if table.rows:
                lines += ["", *for_terminal(replace(table, title=name, rows=table.rows[:MOST_LINES]))]
            if (more := len(table.rows) - MOST_LINES) > 0:
                lines += [f"{more} more lines in the report"]
        except (UserError, KeyError, TypeError, ValueError) as error:  # the run itself is over
            lines += ["", f"{name}: its report cannot be read: {error}"]
        lines += [f"report: {place / name / 'report.html'} (report.md says the same)"]
    if (examples := output / measured[-1] / EXAMPLES).is_file():
        begin, end = COLOURED if watched() and not os.environ.get("NO_COLOR") else "[]"
        lines += ["", *examples.read_text().replace(COLOURED[0], begin).replace(COLOURED[1], end).splitlines()]
    lines += ["", "try next:"]
    offered = try_next(recipe, path, ran, place)
    if SHOWN_AS in os.environ:
        program = shlex.quote(os.environ[SHOWN_AS])
        offered = [(f"{program} {command.removeprefix('draftsmith ')}", what) for command, what in offered]
    width = max(len(command) for command, _ in offered)
    return "\n".join([*lines, *(f"  {command:<{width}}  {what}" for command, what in offered)])


def try_next(recipe: Recipe, path: Path, ran: Sequence[str], place: Path | None = None) -> list[tuple[str, str]]:
    """Commands that make sense after this run, and what each does. Tests parse every one of them."""
    place = place or Path(recipe.output)
    output = shlex.quote(str(place))
    offered = [
        (f"draftsmith compare {output}", "curves of the training beside the numbers; with more runs, a leaderboard")
    ]
    if published := [name for name in ran if recipe.stages[name].kind == "publish"]:
        folder = shlex.quote(str(place / published[-1] / "repository"))
        offered.append((f"draftsmith verify {folder}", "decode the stored prompt with the published drafter"))
    elif recipe.heads.keys() & set(ran):
        # Of several the recipe's own, which the others were meant to be compared with.
        last = finished(recipe.model_dump(mode="json", by_alias=True)["stages"])
        if ready := [name for name in last if name in ran]:
            command = f"draftsmith publish {output}" + (f" from={ready[0]}" if len(last) > 1 else "")
            offered.append((command, "build the drafter's folder and decode one prompt with it"))
    if path.parent.name == "demo":
        offered.append(("draftsmith recipes demo", "the other demos"))
    return offered
