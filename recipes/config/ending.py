"""The end of a run's output: a short table of results, the paths of the reports, and commands to try next."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from ...core.errors import UserError
from ...core.files import LOG_BYTES, read_json
from ...core.json_types import JsonObject
from ...core.section import written_kind
from ...eval.cells import Cell
from ...eval.run_reports import cells
from ...trainers.publish.lineage import finished
from .announce import shown_place
from .schema import Recipe

SHOWN_AS = "DRAFTSMITH_SHOWN_AS"  # set by scripts/demo: the command's path, where the caller's PATH lacks it
WIDTH, MOST_METHODS = 100, 30
_NOTE = "tau: tokens per target pass; x: measured speedup of decoding; same: outputs equal plain decoding's"
_ROOM = 13  # of a set: "12.34 10.12x"


def ending(recipe: Recipe, path: Path, ran: Sequence[str]) -> str:
    """The lines; "" where nothing was measured.

    Args:
        path: of the recipe's file.
        ran: names of the stages that ran or had finished.
    """
    output = Path(recipe.output)
    measured = [n for n in ran if recipe.stages[n].kind == "evaluate" and (output / n / "report.json").is_file()]
    if not measured:
        return ""
    lines: list[str] = []
    for name in measured:
        try:
            hint = f"restart={name} writes it again"
            report = read_json(output / name / "report.json", JsonObject, hint=hint, max_bytes=LOG_BYTES)
            lines += ["", *short_table(name, report)]
        except UserError as error:  # the run itself is over
            lines += ["", str(error)]
        lines += [f"report: {shown_place(output / name / 'report.html')} (report.md says the same)"]
    lines += ["", "try next:"]
    offered = try_next(recipe, path, ran)
    if SHOWN_AS in os.environ:
        program = shlex.quote(os.environ[SHOWN_AS])
        offered = [(f"{program} {command.removeprefix('draftsmith ')}", what) for command, what in offered]
    width = max(len(command) for command, _ in offered)
    return "\n".join([*lines, *(f"  {command:<{width}}  {what}" for command, what in offered)])


def short_table(stage: str, report: JsonObject) -> list[str]:
    """A line for each method, at most 100 columns wide: tau and speedup on as many sets as there is room for."""
    try:
        measured = cells(report)
    except (KeyError, TypeError, ValueError):  # an earlier version wrote it
        return []
    if not measured:
        return []
    places = list(dict.fromkeys(cell.where for cell in measured))
    methods = list(dict.fromkeys(cell.method for cell in measured))
    longest = min(max(len(name) for name in (*methods, stage)), 36)
    shown = places[: (WIDTH - longest - len("  same 1,000/1,000")) // (_ROOM + 2)]
    by_place = {(cell.method, cell.where): cell for cell in measured}
    lines = [_row(stage, longest, [_cut(place, _ROOM) for place in shown], "same")]
    for method in methods[:MOST_METHODS]:
        its = [cell for cell in measured if cell.method == method and cell.exact]
        same, of = sum(cell.identical for cell in its), sum(cell.answers for cell in its)
        numbers = [_numbers(by_place.get((method, place))) for place in shown]
        lines.append(_row(method, longest, numbers, f"{same:,}/{of:,}" if its else "-"))
    left = [(len(methods) - MOST_METHODS, "methods"), (len(places) - len(shown), "sets")]
    more = " and ".join(f"{count} more {what}" for count, what in left if count > 0)
    return [*lines, _NOTE, *([f"{more} in the report"] if more else [])]


def _row(name: str, longest: int, values: Sequence[str], same: str) -> str:
    return "  ".join([f"{_cut(name, longest):<{longest}}", *(f"{value:>{_ROOM}}" for value in values), same]).rstrip()


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _numbers(cell: Cell | None) -> str:
    if cell is None or cell.tau is None:
        return "-"
    return f"{cell.tau:.2f}" + ("" if cell.DSR is None else f" {cell.DSR:.2f}x")


def try_next(recipe: Recipe, path: Path, ran: Sequence[str]) -> list[tuple[str, str]]:
    """Commands that make sense after this run, and what each does. Tests parse every one of them."""
    place = Path(shown_place(recipe.output))
    output = shlex.quote(str(place))
    offered = [
        (f"draftsmith compare {output}", "curves of the training beside the numbers; with more runs, a leaderboard")
    ]
    stages = {name: recipe.stages[name] for name in ran}
    published = [name for name, stage in stages.items() if stage.kind == "publish"]
    trained = {name: stage for name, stage in recipe.heads.items() if name in stages}
    if published:
        folder = shlex.quote(str(place / published[-1] / "repository"))
        offered.append((f"draftsmith verify {folder}", "decode the stored prompt with the published drafter"))
    elif trained:
        # Of several the recipe's own: what stands first beside the others was meant to be compared with them.
        last = finished(recipe.model_dump(mode="json", by_alias=True)["stages"])
        what = "build the drafter's folder and decode one prompt with it"
        # A head of another package is what its author ran all of this for.
        own = [n for n in last if (kept := trained.get(n)) is not None and kept.drafter and ":" in kept.drafter.kind]
        for name in dict.fromkeys([*own[-1:], last[0]]):
            offered.append((f"draftsmith publish {output}" + (f" from={name}" if len(last) > 1 else ""), what))
    if path.parent.name == "demo":
        offered.append(("draftsmith recipes demo", "the other demos"))
    elif trained and recipe.target.path is not None:  # engines know these drafters by their names
        name, stage = list(trained.items())[-1]
        kind = written_kind(stage.drafter or recipe.drafter)
        prompts = ["--prompts", "text"] if kind == "lvlm" else []
        words = ["draftsmith", "export", str(place / name), str(place / f"{name}-vllm"), "--to", "vllm", *prompts]
        if kind in ("eagle", "eagle3", "lvlm"):
            offered.append((shlex.join(words), "write it for a serving engine"))
    return offered
