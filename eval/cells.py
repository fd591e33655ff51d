"""A cell is one method on one set of requests, and the tables of cells that every report has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import Refused
from ..core.json_types import JsonMapping
from ..models.drafters.ensemble import preset
from ..models.drafters.modes import SHOWN
from .measured_rows import PLAIN, Frame, frame
from .summary import AnyRows, Summary, summarize
from .tables import Column, Table, Value, text

RELAXED = "Relaxed acceptance: outputs are not distributed as the target's."
OF_ENGINES = (
    "Lines of an engine: its own times of each request, against its plain decoding with as many requests at once; it "
    "does not tell what drafting and verification take."
)
Quality = Mapping[float, Mapping[str, JsonMapping]]  # temperature -> method -> metric -> {value, n, what, ...}

_EXACT = ("exact", "block")
PLACE = ("temperature", "max_new_tokens", "benchmark", "turn", "budget", "engine", "concurrency")


@dataclass(frozen=True)
class MethodInfo:
    """How a method decodes, in the words of its recipe."""

    drafter: str = ""
    mode: str = ""
    tree: str = ""
    levels: int = 0  # at most; gamma of a chain
    rule: str = "exact"
    draw: str = "top-k"
    temperatures: tuple[float, ...] | None = None  # None: all of the stage
    adaptive: bool = False  # the tree's shape follows the drafter's confidence (SAGE)
    parts: Mapping[str, bool] | None = None  # of a hidden-state head: which of Sparrow's parts are on
    visual_skip: float | None = None  # ViSkip's threshold
    is_exact: bool = False  # its rule claims it (`RuleSection`); ours are known by name, in reports of before as well

    @property
    def relaxed(self) -> bool:
        """Outputs are not distributed as the target's."""
        return not self.is_exact and self.rule not in _EXACT


def modes_line(names: Iterable[str]) -> str:
    """A sentence on what each of these modes of a draft LVLM, and each mode that they mix, sees; "" without one."""
    mixed, members = [], dict[str, None]()
    for name in filter(None, dict.fromkeys(names)):
        try:
            ensemble = preset(name)
        except Refused:  # a name that the recipe gave its own ensemble
            continue
        members |= dict.fromkeys(ensemble.members)
        if len(ensemble.members) > 1:
            how = "equally" if ensemble.weights.kind == "fixed" else "by weights that follow what was accepted"
            mixed.append(f"{name} mixes {', '.join(ensemble.members)} {how}")
    said = [*(f"{mode} {what}" for mode, what in SHOWN.items() if mode in members), *mixed]
    return f"Modes of a draft LVLM: {'; '.join(said)}." if said else ""


class Cell(Summary):
    """One method on one set of requests: what it was measured on (`PLACE`; `where`: the same in words, as far as a
    report's cells differ in it), `medium`, `method` and its `drafters`, and the numbers of `summarize`.

    `exact`: outputs are compared with plain decoding's. `relaxed`: by its `rule` they are not distributed as the
    target's.
    """


def set_name(place: Any) -> str:
    """The set that a row or cell is of, with its turn and its visual tokens: "clips at 25k"."""
    turn, budget = place.turn and f" ({place.turn})", place.budget and f" at {place.budget}"
    return f"{place.benchmark}{turn}{budget}"


def labels(places: Sequence[Any]) -> Callable[[Any], str]:
    """What rows or cells were measured on, with as much as tells `places` apart: "clips at 25k, T = 1"."""
    settings = ("temperature", "max_new_tokens", "engine", "concurrency")
    hot, long, *served = (len({getattr(place, name) for place in places}) > 1 for name in settings)

    def label(place: Any) -> str:
        loop = f"{place.engine}, {place.concurrency} at once" if place.engine else "our loop"
        more = [hot and f"T = {place.temperature:g}", long and f"{place.max_new_tokens} new", any(served) and loop]
        return ", ".join([set_name(place), *(part for part in more if part)])

    return label


def placed(rows: Frame) -> Frame:
    """The rows with a column `place`: the label of what each was measured on."""
    places = [*rows[[*PLACE]].itertuples()]
    return rows.assign(place=[*map(labels(places), places)])


def cells_of(rows: AnyRows, methods: Mapping[str, MethodInfo]) -> tuple[Cell, ...]:
    """Every method on every set of requests, in the order of the tables. Plain decoding is not listed as a method."""
    rows = placed(frame(rows))
    order = {name: number for number, name in enumerate(methods)}
    cells = []
    for (*place, method), some in rows[rows.method != PLAIN].groupby([*PLACE, "method"], sort=False):
        info = methods.get(method, MethodInfo())
        cells.append(Cell(
            **dict(zip(PLACE, place, strict=True)), where=some.place.iloc[0], medium=some.medium.iloc[0],
            method=method, drafters=tuple(sorted(some.drafter.unique())),
            exact=not info.relaxed and not some.temperature.any(), relaxed=info.relaxed, rule=info.rule,
            **vars(summarize(some)),
        ))  # fmt: skip
    places = list(dict.fromkeys(cell.where for cell in cells))
    return tuple(sorted(cells, key=lambda cell: (places.index(cell.where), order.get(cell.method, -1))))


def tables_of(cells: Sequence[Cell], methods: Mapping[str, MethodInfo], quality: Quality) -> list[Table | None]:
    """The tables of a report that are of its cells."""
    tables = [methods_table(cells), common_table(cells, methods), cycles_table(cells)]
    if any(scores for by_method in quality.values() for scores in by_method.values()):
        speed = {(cell.temperature, cell.method): (cell.tau, cell.DSR) for cell in cells}
        tables.append(quality_table(quality, (Column("tau"), Column("DSR", unit="x")), speed))
    return tables


# A column, and what stands in it.
Measure = tuple[Column, Callable[[Cell], Value]]


def _place_columns(cells: Sequence[Cell]) -> list[Measure]:
    """The first columns of a table of cells: the settings in which the cells differ."""
    columns: list[Measure] = [(text("benchmark"), lambda c: c.benchmark)]
    if any(cell.turn for cell in cells):
        columns.append((text("turn"), lambda c: c.turn))
    if any(cell.budget for cell in cells):
        columns.append((Column("visual tokens", ",.0f"), lambda c: c.visual_tokens))
    if len({cell.temperature for cell in cells}) > 1:
        columns.append((Column("temperature", "g"), lambda c: c.temperature))
    if len({cell.max_new_tokens for cell in cells}) > 1:
        columns.append((Column("new", "d"), lambda c: c.max_new_tokens))
    if any(cell.engine for cell in cells):
        columns.append((text("engine"), lambda c: c.engine or "our loop"))
        columns.append((Column("at once", "d"), lambda c: c.concurrency))
    return [*columns, (text("method"), lambda c: c.method), *rule_column(cells)]


def rule_column(cells: Sequence[Cell]) -> list[Measure]:
    """The rule of each row where some are relaxed: sampled rows show no difference elsewhere."""
    column: Measure = text("rule"), lambda c: f"{c.rule} (relaxed)".strip() if c.relaxed else c.rule
    return [column] if any(cell.relaxed for cell in cells) else []


def methods_table(cells: Sequence[Cell]) -> Table | None:
    """One line per method with tau and DSR on every set: the main comparison of methods.

    None if there is one method or one set: the table of all results then says the same.
    """
    methods, places = (list(dict.fromkeys(getattr(cell, name) for cell in cells)) for name in ("method", "where"))
    if min(len(methods), len(places)) < 2:
        return None
    by_place = {(cell.method, cell.where): cell for cell in cells}
    # What says whether the speed may be believed stands before it, and is seen however many sets there are.
    rules = rule_column(cells)
    columns, lines = [text("method"), *(column for column, _ in rules)], []
    columns.append(Column("identical", kind="count", ranked=False))
    for place in places:
        columns += [Column("tau", group=place), Column("DSR", unit="x", group=place)]
    for method in methods:
        exact = [cell for cell in cells if cell.method == method and cell.exact]
        same = (sum(s.identical for s in exact), sum(s.answers for s in exact)) if exact else None
        one = next(cell for cell in cells if cell.method == method)
        line: list[Value] = [method, *(value(one) for _, value in rules), same]
        for place in places:
            cell = by_place.get((method, place))
            line += [None, None] if cell is None else [cell.tau, cell.DSR]
        lines.append(tuple(line))
    note = "Identical: greedy requests whose output equals plain decoding's in every token."
    return Table("Methods", tuple(columns), tuple(lines), note=note, compared=())


def common_table(cells: Sequence[Cell], methods: Mapping[str, MethodInfo]) -> Table:
    """Every cell with its spread."""
    columns: list[Measure] = [
        *_place_columns(cells),
        (Column("n", "d"), lambda c: c.requests),
        (Column("identical", kind="count"), lambda c: (c.identical, c.answers) if c.exact else None),
        (Column("tau [95%]", kind="interval"), lambda c: (c.tau, *c.tau_interval)),
        (Column("tau per request"), lambda c: c.tau_mean_of_requests),
        (Column("accepted/cycle"), lambda c: c.num_accepted),
        (Column("T_q/T_p"), lambda c: c.T_q_over_T_p),
        (Column("expected", unit="x"), lambda c: c.expected_speedup),
        (Column("TABED's Eq. 1", unit="x"), lambda c: c.expected_speedup_tabed),
        (Column("DSR [IQR]", unit="x", kind="interval"), lambda c: (c.DSR, *c.DSR_spread)),
        (Column("ESR [IQR]", unit="x", kind="interval"), lambda c: (c.ESR, *c.ESR_spread)),
        (Column("prefill", ".0%"), lambda c: c.prefill_share),
    ]
    footnotes = [modes_line(methods[cell.method].mode for cell in cells if cell.method in methods),
                 RELAXED if any(cell.relaxed for cell in cells) else "",
                 OF_ENGINES if any(cell.engine for cell in cells) else ""]  # fmt: skip
    return _table("All results", columns, cells, NOTE, tuple(filter(None, footnotes)))


def _table(
    title: str, columns: Sequence[Measure], cells: Sequence[Cell], note: str, footnotes: tuple[str, ...] = ()
) -> Table:
    lines = tuple(tuple(value(cell) for _, value in columns) for cell in cells)
    return Table(title, tuple(column for column, _ in columns), lines, note=note, footnotes=footnotes)


def quality_table(
    quality: Quality, beside: Sequence[Column], numbers: Mapping[tuple[float, str], Sequence[Value]], note: str = ""
) -> Table:
    """A line for each method that drew pictures at a temperature, plain decoding's too.

    Args:
        beside: the columns before those of the metrics.
        numbers: (temperature, method) -> its values in them; a method that is missing was not measured.
    """
    scores = {m: score for methods in quality.values() for of in methods.values() for m, score in of.items()}
    metrics, missing = sorted(scores), [None] * len(beside)
    columns = (Column("T", "g", ranked=False), text("method"), *beside, *(Column(m, ".4g") for m in metrics))
    lines = tuple(
        (t, method, *numbers.get((t, method), missing), *(float(of[m]["value"]) if m in of else None for m in metrics))
        for t, methods in quality.items() for method, of in methods.items()
    )  # fmt: skip
    footnotes = [f"{m}: {scores[m]['what']}, n = {scores[m]['n']}" + (f" ({why})" if (why := scores[m].get("caution"))
                 else "") for m in metrics]  # fmt: skip
    return Table("Pictures", columns, lines, note=note, footnotes=tuple(footnotes))


NOTE = (
    "tau: tokens emitted after the prefill divided by verification passes, bonus token included; plain decoding has 1. "
    "Expected: tau / (levels x T_q/T_p + T_verify/T_p), where levels is the kept depth. TABED's Eq. 1 sets "
    "T_verify/T_p to 1 and takes the planned depth (gamma of a chain) for levels. DSR and ESR: speedup of decoding "
    "alone and end to end, as seconds per token, against plain decoding of the same target at the same temperature in "
    "the same run; quartiles are over requests. Times are of PyTorch in eager mode, except where `graphs` is on. A "
    "serving engine's plain step takes less time, so its T_q/T_p is larger, and drafting gains less there than these "
    "speedups say."
)


def cycles_table(cells: Sequence[Cell]) -> Table:
    """The trees of the cycles and the times of their parts."""
    columns: list[Measure] = [
        *_place_columns(cells),
        (Column("planned depth"), lambda c: c.planned_depth),
        (Column("kept depth"), lambda c: c.kept_depth),
        (Column("tau / planned depth"), lambda c: c.tau_over_depth),
        (Column("nodes", ".1f"), lambda c: c.mean_nodes),
        (Column("cycles with an accepted draft", ".1%"), lambda c: c.first_accepted),
        (Column("accepted of drafted levels", ".1%"), lambda c: c.acceptance_rate),
        (Column("plain step, ms"), lambda c: c.T_p_ms),
        (Column("target, ms"), lambda c: c.target_ms),
        (Column("rule, ms"), lambda c: c.rule_ms),
        (Column("drafter, ms"), lambda c: c.drafter_ms),
        (Column("whole cycle, ms"), lambda c: c.cycle_ms),
    ]
    if any(cell.skipped is not None for cell in cells):
        columns.append((Column("skipped by ViSkip", ".1%"), lambda c: c.skipped))
    note = (
        "Depths and nodes are means over cycles, times are medians of a cycle. Planned depth: the levels that a tree "
        "was planned with (ADT-Tree's d). Kept depth: the levels that were verified, after reranking and up to an end "
        "token (chains and static trees on a GPU go on behind it) or the answer's end. tau / planned depth is "
        "ADT-Tree's alpha."
    )
    return _table("Cycles: trees and times", columns, cells, note)
