"""Tables of sets of conversations (MMSpec, SPEED-Bench): results by category, sub category, difficulty and turn.

MAT and walltime ratio are as MMSpec's released code logs them (its paper: arXiv 2603.14989, section on metrics); beside
them stand tau and ESR, which weigh otherwise. See docs/decisions/departures.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from .measured_rows import PLAIN, Frame, Row, frame
from .summary import speedups, summarize
from .tables import Column, ReportSection, Table, Value, text

NOTE = (
    "n: turns. tau: tokens emitted after the prefill divided by verification passes, bonus token included. MAT: "
    "drafted tokens accepted in a verification pass, without the bonus token. DSR and ESR: speedup of decoding alone "
    "and end to end, of all seconds and tokens together, so that long answers weigh more. Walltime ratio: the mean "
    "over turns of each turn's own end-to-end speedup, so that each weighs the same. Every method goes on from the "
    "target's answers."
)
_TITLES = {"category": "By category", "sub_category": "By sub category", "difficulty": "By difficulty",
           "turn": "By turn"}  # fmt: skip


def turns_section(rows: Sequence[Row], notes: Sequence[str] = ()) -> ReportSection | None:
    """The tables, each of the labels in which some set's rows differ; None: there are no conversations."""
    answers = frame(row for row in rows if row.method != PLAIN and "turn" in row.details)
    tables = [table for label in _TITLES if (table := _table(label, answers)) is not None]
    tables += [table for table in [lengths_table(rows)] if table is not None]
    return ReportSection("Sets of conversations", (*notes, *tables), name="turns") if len(answers) else None


def _table(label: str, answers: Frame) -> Table | None:
    answers = answers.assign(label=[details.get(label) for details in answers.details])
    answers = answers[answers.groupby("benchmark").label.transform("nunique") > 1].dropna(subset="label")
    if answers.empty:
        return None
    answers = answers.assign(label=answers.label.astype(str))
    hot, long = answers.temperature.nunique() > 1, answers.max_new_tokens.nunique() > 1
    columns = (
        text("benchmark"), text(label.replace("_", " ")), *([Column("temperature", "g")] if hot else []),
        *([Column("new", "d")] if long else []), text("method"), Column("n", "d"), Column("tau"), Column("MAT"),
        Column("DSR", unit="x"), Column("ESR", unit="x"), Column("walltime ratio", unit="x"),
    )  # fmt: skip
    lines: list[tuple[Value, ...]] = []
    methods = answers.method.astype("category").cat.set_categories(answers.method.unique())  # in their order
    places = ["benchmark", "label", "temperature", "max_new_tokens", methods]
    for (benchmark, value, temperature, new, method), some in answers.groupby(places, observed=True):
        summary = summarize(some)
        lines.append((
            benchmark, value, *([temperature] if hot else []), *([new] if long else []), method,
            summary.requests, summary.tau, summary.num_accepted, summary.DSR, summary.ESR,
            speedups(some)[1].mean(skipna=False),
        ))  # fmt: skip
    return Table(_TITLES[label], columns, tuple(lines), note=NOTE if label == "category" else "")


def lengths_table(rows: Sequence[Row]) -> Table | None:
    """SPEED-Bench's table: acceptance lengths of each category (lines) by method and temperature, where chains of K
    tokens are methods of their own. As it counts, a length is the mean over turns of each turn's tau. None: no set of
    several categories was measured by several methods or temperatures.
    """
    answers = frame(row for row in rows if row.method != PLAIN and "turn" in row.details and row.num_cycles)
    if not len(answers):
        return None
    answers = answers.assign(category=[details.get("category") for details in answers.details],
                             length=answers.num_emitted / answers.num_cycles)  # fmt: skip
    means = answers.dropna(subset="category").pivot_table(
        "length", ["benchmark", "category"], ["method", "temperature"], sort=False
    )
    if min(means.shape) < 2:
        return None
    columns = [Column(f"{method}, T = {temperature:g}") for method, temperature in means.columns]
    lines = [(*labels, *values) for labels, values in zip(means.index, means.to_numpy().tolist(), strict=True)]
    note = "Acceptance length as SPEED-Bench counts it: the mean over turns of each turn's tau."
    return Table("Lengths by category", (text("benchmark"), text("category"), *columns), tuple(lines), note=note)
