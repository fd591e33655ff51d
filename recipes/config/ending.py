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
from ...eval.run_reports import cells
from ...trainers.publish.lineage import finished
from .schema import Recipe

SHOWN_AS = "DRAFTSMITH_SHOWN_AS"  # set by scripts/demo: the command's path, where the caller's PATH lacks it
WIDTH, MOST_METHODS = 100, 30
_NOTE = "tau: tokens per target pass; x: measured speedup of decoding; same: outputs equal plain decoding's"
_ROOM = 13  # of a set: "12.34 10.12x"


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
        try:
            hint = f"restart={name} writes it again"
            report = read_json(output / name / "report.json", JsonObject, hint=hint, max_bytes=LOG_BYTES)
            lines += ["", *short_table(name, report)]
        except UserError as error:  # the run itself is over
            lines += ["", str(error)]
        lines += [f"report: {place / name / 'report.html'} (report.md says the same)"]
    lines += ["", "try next:"]
    offered = try_next(recipe, path, ran, place)
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
    rows = [[stage, *shown, "same"]]
    for method in methods[:MOST_METHODS]:
        by_place = {cell.where: cell for cell in measured if cell.method == method}
        numbers = []
        for cell in map(by_place.get, shown):
            speed = "" if cell is None or cell.DSR is None else f" {cell.DSR:.2f}x"
            numbers.append("-" if cell is None or cell.tau is None else f"{cell.tau:.2f}{speed}")
        compared = [cell for cell in by_place.values() if cell.exact]
        same, answers = sum(cell.identical for cell in compared), sum(cell.answers for cell in compared)
        rows.append([method, *numbers, f"{same:,}/{answers:,}" if compared else "-"])
    lines = [
        "  ".join([f"{name:<{longest}.{longest}}", *(f"{value:>{_ROOM}.{_ROOM}}" for value in values), last])
        for name, *values, last in rows
    ]
    left = [(len(methods) - MOST_METHODS, "methods"), (len(places) - len(shown), "sets")]
    more = " and ".join(f"{count} more {what}" for count, what in left if count > 0)
    return [*lines, _NOTE, *([f"{more} in the report"] if more else [])]


def try_next(recipe: Recipe, path: Path, ran: Sequence[str], place: Path | None = None) -> list[tuple[str, str]]:
    """Commands that make sense after this run, and what each does. Tests parse every one of them."""
    place = place or Path(recipe.output)
    output = shlex.quote(str(place))
    offered = [
        (f"draftsmith compare {output}", "curves of the training beside the numbers; with more runs, a leaderboard")
    ]
    trained = {name: stage for name, stage in recipe.heads.items() if name in ran}
    if published := [name for name in ran if recipe.stages[name].kind == "publish"]:
        folder = shlex.quote(str(place / published[-1] / "repository"))
        offered.append((f"draftsmith verify {folder}", "decode the stored prompt with the published drafter"))
    elif trained:
        # Of several the recipe's own: what stands first beside the others was meant to be compared with them. A head of
        # another package is what its author ran all of this for.
        last = finished(recipe.model_dump(mode="json", by_alias=True)["stages"])
        ready = [name for name in last if name in trained]
        theirs = [n for n in ready if ":" in (written_kind(trained[n].drafter) or "")]
        for name in dict.fromkeys([*theirs[-1:], *ready[:1]]):
            command = f"draftsmith publish {output}" + (f" from={name}" if len(last) > 1 else "")
            offered.append((command, "build the drafter's folder and decode one prompt with it"))
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
