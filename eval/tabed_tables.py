"""Tables of TABED's suite: methods by sets, first and second turns, averages, expected and measured speedup.

A suite's rows have a turn: first, or the task of a second turn. Source: TABED, tables 1, 2 and 10 to 14, equation 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .figures import COLORS, drawing
from .measured_rows import Row, frame
from .summary import mean, ratio, summarize
from .tables import Column, Figure, Items, ReportSection, Table, Value, text

FIRST = "first"
AVERAGE = "Avg."

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
    substitutes = [f"{name} by {info.label}" for name, info in plan.sets.items() if info.label]
    remarks = [f"Local substitutes, not the published sets: {', '.join(substitutes)}."] if substitutes else []
    listed = Items((*notes, *remarks))
    return ReportSection("TABED's suite", (*suite_tables, NOTE, listed, Figure("suite.png", "The tables.")), "suite")


def tables(rows: Sequence[Row], plan: Plan) -> list[Table]:
    """First turns, second turns where they were asked for, and averages."""
    answers = frame(rows)
    answers = answers[(answers.turn != "") & answers.benchmark.isin([*plan.sets]) & answers.method.isin(plan.methods)]
    sums = answers.groupby(["drafter", "method", "benchmark", "turn"])[["num_emitted", "num_cycles"]].sum()
    taus = ratio(sums.num_emitted, sums.num_cycles).to_dict()
    of_line = dict(iter(answers.groupby(["drafter", "method"])))
    lines = [(d, m) for d in plan.drafters for m in plan.methods if (d, m) in of_line]
    benchmark, ood = plan.of_group("benchmark"), plan.of_group("ood")
    columns = [*(plan.column(name) for name in benchmark), Column(AVERAGE)]

    def first(line: tuple[str, str], names: Sequence[str]) -> list[float | None]:
        return [taus.get((*line, name, FIRST)) for name in names]

    body = [(*line, *(on_sets := first(line, benchmark)), mean(on_sets), *first(line, ood)) for line in lines]
    turns = [_table("First turn", [*columns, *(plan.column(name, "OOD") for name in ood)], body)]
    if plan.dependent or plan.free:
        body = []
        for line in lines:
            on_sets = [mean([taus.get((*line, name, task)) for task in plan.dependent]) for name in benchmark]
            free = [mean([taus.get((*line, name, task)) for name in benchmark]) for task in plan.free]
            body.append((*line, *on_sets, mean(on_sets), *free))
        turns.append(_table("Second turn", [*columns, *(Column(task, group="NLP") for task in plan.free)], body))

    # Averages alone (table 2), and speedups over all first turns: expected by equation 1, by the loop, measured.
    columns = [*(Column(table.title) for table in turns), Column("OOD"), Column("T_q/T_p", ranked=False),
               *(Column(name, unit="x", ranked=name == "DSR") for name in ("Eq. 1", "expected", "DSR"))]  # fmt: skip
    body = []
    for line, *averages in zip(lines, *(table.column(AVERAGE) for table in turns), strict=True):
        some, speeds = of_line[line], (None,) * 4
        if len(some := some[some.turn == FIRST]):
            s = summarize(some)
            speeds = (s.T_q_over_T_p, s.expected_speedup_tabed, s.expected_speedup, s.DSR)
        body.append((*line, *averages, mean(first(line, ood)), *speeds))
    return [*turns, _table("Averages", columns, body, "TABED, table 2", SPEED_NOTE)]


def _table(
    title: str,
    columns: Sequence[Column],
    lines: Sequence[tuple[Value, ...]],
    source: str = "TABED, tables 1 and 10 to 14",
    note: str = "",
) -> Table:
    return Table(title, (text("draft"), text("method"), *columns), tuple(lines), source, note, compared=("draft",))


def draw_tables(path: Path, tables: Sequence[Table]) -> None:
    """The tables below each other as one picture, for slides: best bold and blue, second best in italics."""
    width, heights = 3 + 0.78 * max(len(table.columns) - 2 for table in tables), [len(t.rows) + 2 for t in tables]
    height = 0.26 * sum(heights) / len(tables)
    with drawing(path, len(tables), width, height, per_row=1, height_ratios=heights) as (_, panels):
        for panel, table in zip(panels[:, 0], tables, strict=True):
            panel.axis("off")
            panel.set_title(table.title, loc="left", weight="bold")
            shown = [[c.shown(v) for c, v in zip(table.columns, row, strict=True)] for row in table.rows]
            heads = [column.heading.replace(" (", "\n(") for column in table.columns]
            drawn = panel.table(shown, colLabels=heads, cellLoc="center", bbox=(0, 0, 1, 1), edges="horizontal")
            drawn.auto_set_font_size(False)
            drawn.set_fontsize(7)
            for number, marks in enumerate(table.marks(), 1):
                for place, mark in enumerate(marks):
                    if mark == "best":
                        drawn[number, place].get_text().set(weight="bold", color=COLORS[0])
                    elif mark == "second":
                        drawn[number, place].get_text().set(style="italic")
