"""The report of an evaluation, the same for every target: findings, tables, contrasts, figures, and sections.

Everything in it is computed from rows. The papers' own tables and figures are sections that `eval/studies/` makes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ..core.json_types import JsonMapping, JsonObject, nulls
from ..core.markdown import plain
from ..core.secrets import redact, redact_markdown
from . import figures
from .cells import Cell, MethodInfo, Quality, cells_of, labels, methods_table, placed, tables_of
from .contrasts import Comparison, Contrasts, differences, drafters_table
from .findings import binding_sentence, findings, unsteady
from .measured_rows import PLAIN, Row, frame, write_rows
from .tables import Figure, Items, Part, ReportSection, Table, html_page, markdown

__all__ = ["Comparison", "MethodInfo", "Report", "build", "write"]

VERSION = 2  # of report.json


@dataclass(frozen=True)
class Report:
    """What `write` writes."""

    about: JsonMapping
    methods: Mapping[str, MethodInfo]
    cells: tuple[Cell, ...]
    findings: tuple[str, ...]
    tables: tuple[Table, ...]
    sections: tuple[ReportSection, ...] = ()
    quality: Quality = field(default_factory=dict)
    data: JsonMapping = field(default_factory=dict)  # differences and comparisons

    def to_json(self) -> JsonObject:
        """The content of report.json."""
        return nulls({
            "version": VERSION,
            "about": dict(self.about),
            "methods": {name: asdict(info) for name, info in self.methods.items()},
            "findings": list(self.findings),
            "cells": [cell.to_json() for cell in self.cells],
            "quality": {f"{t:g}": dict(methods) for t, methods in self.quality.items()},
            **self.data,
            "tables": [table.to_json() for table in self.tables],
            "sections": [
                {"title": s.title, "name": s.name, "data": dict(s.data),
                 "tables": [part.to_json() for part in s.content if isinstance(part, Table)]}
                for s in self.sections
            ],
        })  # fmt: skip


def build(
    rows: Iterable[Row],
    *,
    about: JsonMapping,
    methods: Mapping[str, MethodInfo],
    contrasts: Contrasts | None = None,
    compare: Comparison | None = None,
    binding: Mapping[str, float] | None = None,
    quality: Quality | None = None,
    sections: Sequence[ReportSection] = (),
    warnings: Sequence[str] = (),
) -> Report:
    """The report of some rows.

    Args:
        about: command, device, date, seed, settings: what a number is worth nothing without.
        methods: in the order of the tables.
        contrasts: pairs of drafters (or methods) whose difference says what one change does.
        compare: two ways of training over seeds.
        binding: accuracy of the target's answers with the picture and without it, where it was asked for: `questions`,
            `accuracy`, `blind_accuracy`.
        quality: of drawn pictures, plain decoding's too.
        warnings: of settings that mislead; findings, too.
    """
    answers = placed(frame(rows))
    cells = cells_of(answers, methods)
    assert cells, "nothing was drafted"
    single = answers[(answers.turn == "") & (answers.method != PLAIN)]  # of suites their own tables say more
    data, effects = differences(single, contrasts or {}, compare)
    tables = [*tables_of(cells, methods, quality or {}), drafters_table(single), effects]
    data |= {"binding": dict(binding)} if binding else {}
    sentences = (*findings(cells), *binding_sentence(binding), *unsteady(answers),
                 *(f"**Warning**: {text}." for text in warnings))  # fmt: skip
    return Report(about, methods, cells, sentences, tuple(filter(None, tables)), tuple(sections), quality or {}, data)


def write(folder: Path, report: Report, rows: Sequence[Row]) -> None:
    """`report.md`, `report.html`, `report.json`, `rows.jsonl` (without the tokens, which the resume log has), figures.

    Without rows there is no `rows.jsonl`: pictures were drawn for their quality alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if rows:
        write_rows(folder / "rows.jsonl", (replace(row, tokens=()) for row in rows))
    (folder / "report.json").write_text(redact(json.dumps(report.to_json(), indent=1)))
    text = redact_markdown(page(report, _figures(folder, report.cells)))
    (folder / "report.md").write_text(text)
    (folder / "report.html").write_text(html_page(text, folder))


def _figures(folder: Path, cells: Sequence[Cell]) -> list[Figure]:
    """Those of a report, drawn: at the lowest temperature, of the longest answers, each set at its most visual tokens,
    of suites the first turns, and of an engine the fewest requests at once.
    """
    cold = [c for c in cells if c.temperature == min(c.temperature for c in cells) and c.turn in ("", "first")]
    longest = max((c.max_new_tokens for c in cold if c.is_measured), default=0)
    alone = min((c.concurrency for c in cold if c.is_measured and c.engine), default=1)
    some = [
        c for c in cold if c.is_measured and c.max_new_tokens == longest and (not c.engine or c.concurrency == alone)
    ]
    most = {c.benchmark: c.budget for c in sorted(some, key=lambda c: c.visual_tokens)}
    label = labels(some)
    places: dict[str, dict[str, Cell]] = {}
    for cell in (cell for cell in some if cell.budget == most[cell.benchmark]):
        places.setdefault(label(cell), {})[cell.method] = cell
    if not places:
        return []
    at = f" At temperature {some[0].temperature:g}." if len({cell.temperature for cell in cells}) > 1 else ""
    drawn: list[Figure] = []
    if methods_table(cells) is not None:
        figures.methods(folder / "methods.png", places)
        what = f"tau and the measured speedup of decoding, of every method on every set.{at}"
        drawn.append(Figure("methods.png", what))
    expected = [cell.expected_speedup for methods in places.values() for cell in methods.values()]
    if len(expected) <= figures.MOST_BARS and not all(map(math.isnan, expected)):
        figures.speedups(folder / "speedup.png", places)
        what = f"Expected and measured speedup of decoding, each at the tau of its set and method.{at}"
        drawn.append(Figure("speedup.png", what))
    figures.acceptance_by_depth(folder / "acceptance.png", places)
    panels = f" of the first {figures.MOST_PANELS} sets" if len(places) > figures.MOST_PANELS else ""
    what = f"Share of drafted tokens accepted, by depth{panels}; the numbers are n, the cycles of each point.{at}"
    return [*drawn, Figure("acceptance.png", what)]


def page(report: Report, drawn: Sequence[Figure]) -> str:
    """The report as Markdown."""
    trees = (f"{name}: {line}" for name, info in report.methods.items() if (line := described(info)))
    measured = Items((*(f"{key}: {value}" for key, value in report.about.items()), *trees))
    how = ReportSection("How it was measured", (measured,))
    parts: list[Part] = [Items(report.findings), *report.tables, *drawn, *report.sections, how]
    lines = [line for part in parts for line in markdown(part)]
    return "\n".join([f"# {plain(title(report))}", "", *lines])


def title(report: Report) -> str:
    """The title of both pages: whose run, which target, on what, when, as far as `about` says."""
    about = {key: str(value) for key, value in report.about.items()}
    what = "speculative decoding" if report.cells else "quality of drawn pictures"
    target = about.get("target", "")
    said = [what, target and f"target {target if ' ' in target else Path(target).name}",
            about.get("device", "").partition(",")[0], about.get("date", "")]  # fmt: skip
    line = ", ".join(part for part in said if part)
    return f"{about['run']}: {line}" if "run" in about else line[0].upper() + line[1:]


def described(info: MethodInfo) -> str:
    """A method in a line."""
    parts = [info.drafter and f"drafter {info.drafter}", info.mode and f"mode {info.mode}",
             info.tree and f"tree {info.tree}", info.rule != "exact" and f"rule {info.rule}",
             info.draw != "top-k" and f"draws by {info.draw}",
             info.visual_skip is not None and f"no draft at {info.visual_skip:g} on pictures"]  # fmt: skip
    return ", ".join(part for part in parts if part)
