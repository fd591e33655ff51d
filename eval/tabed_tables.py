"""Tables of TABED's suite: methods by sets, first and second turns, averages, expected and measured speedup.

A suite's rows have a turn: first, or the task of a second turn. Source: TABED, tables 1, 2 and 10 to 14, equation 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .measured_rows import PLAIN, Row, grouped
from .style import BLUE, Panel, panel_grid, save, styled
from .summary import mean, summarize, tau_of
from .tables import Column, Figure, Mark, ReportSection, Table, Value, text

FIRST = "first"
AVERAGE = "Avg."
Tau = Callable[[str, str], float | None]  # of a set and a turn

NOTE = (
    "Cells are tau: tokens emitted after the prefill divided by verification passes, bonus token included; plain "
    "decoding has 1. Averages are unweighted over sets; the "
    "second turn of a set is the mean over its tasks. The table of all results has each cell's n and 95% interval."
)
SPEED_NOTE = (
    "Speedups are over all first turns. Eq. 1 is TABED's: tau / (gamma T_q/T_p + 1). Expected uses the levels that "
    "were drafted, and T_verify/T_p instead of 1. DSR is the measured speedup of decoding."
)


@dataclass(frozen=True)
class SetInfo:
    """A column: the set's group (benchmark or ood), and what stands in for it."""

    group: str
    label: str = ""


@dataclass(frozen=True)
class Plan:
    """What was asked for, in the order of the tables."""

    sets: Mapping[str, SetInfo]
    dependent: Sequence[str]  # tasks that the second turn of a set is the mean of
    free: Sequence[str]  # tasks with a column of their own: the mean over the benchmark sets
    drafters: Sequence[str]
    methods: Sequence[str]

    def of_group(self, group: str) -> list[str]:
        """Names of the sets in `group` ("benchmark" or "ood")."""
        return [name for name, info in self.sets.items() if info.group == group]

    def column(self, name: str, group: str = "") -> Column:
        """The column of the set `name`, under the heading `group`, with its substitute's label in brackets."""
        label = self.sets[name].label
        return Column(f"{name} ({label})" if label else name, group=group)


def tabed_section(folder: Path, rows: Sequence[Row], plan: Plan, *, notes: Sequence[str] = ()) -> ReportSection:
    """The tables of a suite, and a picture of them (`suite.png`).

    Args:
        rows: of any benchmarks; those of the plan's sets count.
        notes: what else is to be said.
    """
    suite_tables = tables(rows, plan)
    draw_tables(folder / "suite.png", suite_tables)
    remarks = [*notes, *_notes(rows, plan)]
    listed = ["\n".join(f"- {note}" for note in remarks)] if remarks else []
    return ReportSection("TABED's suite", (*suite_tables, NOTE, *listed, Figure("suite.png", "The tables.")), "suite")


def tables(rows: Sequence[Row], plan: Plan) -> list[Table]:
    """First turns, second turns where they were asked for, and averages."""
    mine = [row for row in rows if row.turn and row.benchmark in plan.sets and row.method != PLAIN]
    lines = {key: some for key, some in grouped(mine, "drafter", "method").items() if key[1] in plan.methods}
    order = [(d, m) for d in plan.drafters for m in plan.methods if (d, m) in lines]
    taus = {key: _taus(lines[key]) for key in order}
    first = _first_turns(plan, taus)
    second = _second_turns(plan, taus) if plan.dependent or plan.free else None
    turns = [first] if second is None else [first, second]
    return [*turns, _averages(plan, turns, {key: lines[key] for key in order})]


def _taus(rows: Sequence[Row]) -> Tau:
    taus = {key: tau_of(some) for key, some in grouped(rows, "benchmark", "turn").items()}
    return lambda name, turn: taus.get((name, turn))


def _first_turns(plan: Plan, taus: Mapping[tuple[str, str], Tau]) -> Table:
    benchmark, ood = plan.of_group("benchmark"), plan.of_group("ood")
    columns = [*(plan.column(name) for name in benchmark), Column(AVERAGE), *(plan.column(o, "OOD") for o in ood)]
    lines = []
    for (drafter, method), tau in taus.items():
        values = [tau(name, FIRST) for name in benchmark]
        lines.append((drafter, method, *values, mean(values), *(tau(name, FIRST) for name in ood)))
    return _table("First turn", columns, lines, "TABED, tables 1 and 10 to 14")


def _second_turns(plan: Plan, taus: Mapping[tuple[str, str], Tau]) -> Table:
    benchmark = plan.of_group("benchmark")
    columns = [
        *(plan.column(name) for name in benchmark),
        Column(AVERAGE),
        *(Column(t, group="NLP") for t in plan.free),
    ]
    lines = []
    for (drafter, method), tau in taus.items():
        values = [mean([tau(name, task) for task in plan.dependent]) for name in benchmark]
        free = [mean([tau(name, task) for name in benchmark]) for task in plan.free]
        lines.append((drafter, method, *values, mean(values), *free))
    return _table("Second turn", columns, lines, "TABED, tables 1 and 10 to 14")


def _averages(plan: Plan, turns: Sequence[Table], lines: Mapping[tuple[str, str], Sequence[Row]]) -> Table:
    """Averages alone (table 2), and speedups over all first turns: expected by equation 1, by the loop, measured."""
    columns = [*(Column(table.title) for table in turns), Column("OOD"), Column("T_q/T_p", ranked=False),
               *(Column(name, unit="x", ranked=name == "DSR") for name in ("Eq. 1", "expected", "DSR"))]  # fmt: skip
    averages = [table.column(AVERAGE) for table in turns]
    ood = [column.heading for column in turns[0].columns if column.group == "OOD"]
    out_of_domain = zip(*(turns[0].column(name) for name in ood), strict=True) if ood else [()] * len(lines)
    rows: list[tuple[Value, ...]] = []
    for (key, some), *values, far in zip(lines.items(), *averages, out_of_domain, strict=True):
        speeds: tuple[Value, ...] = (None,) * 4
        if first := [row for row in some if row.turn == FIRST]:
            s = summarize(first)
            speeds = (s.T_q_over_T_p, s.expected_speedup_tabed, s.expected_speedup, s.DSR)
        rows.append((*key, *values, mean(far), *speeds))
    return _table("Averages", columns, rows, "TABED, table 2", SPEED_NOTE)


def _table(
    title: str, columns: Sequence[Column], lines: Sequence[tuple[Value, ...]], source: str, note: str = ""
) -> Table:
    return Table(title, (text("draft"), text("method"), *columns), tuple(lines), source, note, compared=("draft",))


def _notes(rows: Sequence[Row], plan: Plan) -> list[str]:
    far: dict[str, list[str]] = {}
    for row in rows:
        if row.turn and row.details.get("beyond_positions"):
            far.setdefault(row.method, []).append(f"{row.benchmark} ({row.turn})")
    notes = [
        f"**Requests beyond the draft's positions** in {method}: {', '.join(dict.fromkeys(places))}. The "
        "draft was not trained for such lengths."
        for method, places in far.items()
    ]
    substitutes = [f"{name} by {info.label}" for name, info in plan.sets.items() if info.label]
    if substitutes:
        notes.append(f"Local substitutes, not the published sets: {', '.join(substitutes)}.")
    return notes


# The tables as a picture, for slides and READMEs.
_ROW, _CELL, _NAME = 0.24, 0.78, 1.5  # inches: height of a row, width of a number and of a name


@styled
def draw_tables(path: Path, tables: Sequence[Table]) -> None:
    """Tables below each other: best bold and blue, second best underlined."""
    widths = [2 * _NAME + _CELL * (len(table.columns) - 2) for table in tables]
    heights = [_ROW * (len(table.rows) + 4) for table in tables]
    figure, panels = panel_grid(len(tables), 1, (max(widths), sum(heights)), heights=heights)
    for panel, table, width in zip(panels[:, 0], tables, widths, strict=True):
        panel.set(xlim=(0, max(widths)), ylim=(len(table.rows) + 3, -0.5))
        panel.axis("off")
        _draw(panel, table, width)
    save(figure, path)


def _draw(panel: Panel, table: Table, width: float) -> None:
    numbers = table.columns[2:]
    panel.text(0, 0, table.title, weight="bold", fontsize=9, va="center")
    for number, column in enumerate(table.columns[:2]):
        panel.text(number * _NAME, 2, column.name, fontsize=8, va="center")
    for number, column in enumerate(numbers):
        panel.text(_x(number), 1.7, column.name.replace(" (", "\n("), fontsize=7, ha="center", va="center")
    for y in (1.0, 2.5, len(table.rows) + 2.5):
        panel.plot([0, width], [y, y], color="black", linewidth=0.8)
    shown: Value = None
    for place, (row, marks) in enumerate(zip(table.rows, table.marks(), strict=True)):
        y = place + 3
        if row[0] != shown:
            panel.text(0, y, str(row[0]), fontsize=8, va="center")
            if shown is not None:
                panel.plot([0, width], [y - 0.5, y - 0.5], color="black", linewidth=0.4)
        shown = row[0]
        panel.text(_NAME, y, str(row[1]), fontsize=8, va="center")
        for number, (value, column, mark) in enumerate(zip(row[2:], numbers, marks[2:], strict=True)):
            _number(panel, _x(number), y, value, column, mark)
    for name in dict.fromkeys(column.group for column in numbers if column.group):
        places = [number for number, column in enumerate(numbers) if column.group == name]
        panel.plot([_x(places[0]) - _CELL / 2] * 2, [1, len(table.rows) + 2.5], color="black", linewidth=0.4)
        panel.text(_x(sum(places) / len(places)), 0.55, name, fontsize=8, ha="center", va="center")


def _number(panel: Panel, x: float, y: float, value: Value, column: Column, mark: Mark) -> None:
    if value is None:
        return
    best = mark == "best"
    panel.text(x, y, column.shown(value), fontsize=8, ha="center", va="center",
               weight="bold" if best else "normal", color=BLUE if best else "black")  # fmt: skip
    if mark == "second":
        panel.plot([x - 0.15, x + 0.15], [y + 0.36, y + 0.36], color="black", linewidth=0.7)


def _x(number: float) -> float:
    return 2 * _NAME + _CELL * (number + 0.5)
