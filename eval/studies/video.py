"""Tables of long visual inputs in the shapes of Sparrow and SAGE, from the rows of any evaluation.

Sources: Sparrow, tables 2 to 6 and 8; SAGE, tables 1 to 6 and figure 3.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from ...data.pictures.videos import visual_tokens
from ..cells import MethodInfo
from ..intervals import ratio
from ..measured_rows import PLAIN, Row, grouped
from ..summary import Summary, mean, summarize
from ..tables import Column, ReportSection, Table, Value, text

TAU_NOTE = (
    "tau: tokens emitted after the prefill divided by verification passes, bonus token included; plain decoding has 1. "
    "DSR and ESR: speedup of decoding alone and end to end, as seconds per token, against plain decoding of the same "
    "target in the same run. Both are measured in eager PyTorch; in a serving engine drafting gains less."
)
SAGE_NOTE = (
    "tau as SAGE counts it: drafted tokens accepted in a verification pass, **without the bonus token**, so one less "
    "than in all other tables here. Tokens/s and speedup are of decoding, without the prefill, measured in eager "
    "PyTorch; in a serving engine drafting gains less."
)


@dataclass(frozen=True)
class Number:
    """One number of a summary, as a column of a table."""

    of: Callable[[Summary], float]
    name: str
    unit: str = ""
    plain: Callable[[Summary], float] | None = None  # the same of plain decoding; None: it has none


TAU, ESR = Number(lambda s: s.tau, "tau"), Number(lambda s: s.ESR, "ESR", "x")
DSR, SAGE_SPEEDUP = Number(lambda s: s.DSR, "DSR", "x"), Number(lambda s: s.DSR, "speedup", "x")
TOKENS = Number(lambda s: s.tokens_per_s, "tokens/s", plain=lambda s: s.plain_tokens_per_s)  # end to end
SAGE_TAU = Number(lambda s: s.num_accepted, "tau (no bonus)")
SAGE_TOKENS = Number(lambda s: s.decoded_per_s, "tokens/s", plain=lambda s: s.plain_decoded_per_s)
_BENCHMARK: Callable[[Row], str] = attrgetter("benchmark")


def video_sections(rows: Sequence[Row], methods: Mapping[str, MethodInfo]) -> list[ReportSection]:
    """Those of the papers' tables that were measured."""
    rows = [row for row in rows if row.method != PLAIN and not row.turn and row.medium != "drawn"]
    content = tables(rows, methods) if rows else []
    return [ReportSection("Tables of Sparrow and SAGE", tuple(content))] if content else []


def tables(rows: Sequence[Row], methods: Mapping[str, MethodInfo]) -> list[Table]:
    """Those of the papers' tables that were measured; all but one are of the longest answers."""
    names, longest = list(methods), max(row.max_new_tokens for row in rows)
    whole = [row for row in rows if row.max_new_tokens == longest]
    clips, images, texts = ([row for row in whole if row.medium == medium] for medium in ("video", "image", "text"))
    budgets = {name: list(dict.fromkeys(row.budget for row in in_order(some)))
               for (name,), some in grouped(clips, "benchmark").items()}  # fmt: skip
    at_most = [row for row in clips if row.budget == budgets[row.benchmark][-1]]
    rising = [row for row in clips if len(budgets[row.benchmark]) > 1]
    results = []
    if clips:
        results.append(sparrow_sets(at_most, names))
    if rising:
        results.append(by_length(rising, names))
    if clips and images:
        results.append(image_sets(images, names))
    switches = {name: info.parts for name, info in methods.items() if info.parts is not None}
    if len({tuple(parts.values()) for parts in switches.values()}) > 1:
        results.append(ablation([row for row in clips + images or whole if row.method in switches], switches))
    if any(info.adaptive for info in methods.values()):
        results.append(sage_sets(at_most + images + texts, names))
    if longest > min(row.max_new_tokens for row in rows):
        results.append(by_generated(rows, names))
    if rising:
        coldest = min(row.temperature for row in rising)
        cold = [row for row in rising if row.temperature == coldest]
        measured = {row.method for row in cold}
        results += [breakdown(cold, name) for name in names if name in measured]
    return [*results, time_shares(whole, names)] if results else []


def methods_by(
    rows: Sequence[Row],
    key: Callable[[Row], str],
    numbers: Sequence[Number],
    methods: Mapping[str, Sequence[str]] | Sequence[str],
    *,
    title: str,
    source: str,
    note: str = TAU_NOTE,
    labels: Sequence[str] = ("method",),
    average: bool = False,
    plain: bool = False,
) -> Table:
    """Methods by groups of requests; lines of one temperature are compared with one another.

    Args:
        key: what a request's group is; groups stand in the order in which they first come up.
        methods: in the order of the lines; a mapping says what stands in their first columns.
        average: a last group, the unweighted mean over groups.
        plain: a first line of plain decoding for each temperature.
    """
    groups = list(dict.fromkeys(key(row) for row in rows))
    by_cell: dict[tuple[float, str, str], list[Row]] = {}
    for row in rows:
        by_cell.setdefault((row.temperature, row.method, key(row)), []).append(row)
    named = methods if isinstance(methods, Mapping) else {name: (name,) for name in methods}
    assert {row.method for row in rows} <= set(named), f"methods that the table has no line for, beside {[*named]}"
    temperatures = sorted({row.temperature for row in rows})
    lines: list[tuple[Value, ...]] = []
    for temperature in temperatures:
        first = (f"{temperature:g}",) if len(temperatures) > 1 else ()
        if plain:
            others = [[r for name in named for r in by_cell.get((temperature, name, group), ())] for group in groups]
            values = [_plain_values(some, numbers) for some in others]
            lines.append((*first, PLAIN, *[""] * (len(labels) - 1), *_line(values, average)))
        for name, shown in named.items():
            cells = [by_cell.get((temperature, name, group)) for group in groups]
            if any(cells):
                values = [_values(summarize(some), numbers) if some else [None] * len(numbers) for some in cells]
                lines.append((*first, *shown, *_line(values, average)))
    headed = [*groups, "Avg."] if average else groups
    columns = [*map(text, ["T"] if len(temperatures) > 1 else []), *map(text, labels)]
    columns += [Column(number.name, unit=number.unit, group=group) for group in headed for number in numbers]
    compared = ("T",) if len(temperatures) > 1 else ()
    return Table(title, tuple(columns), tuple(lines), source, note, compared, _footnotes(rows))


def _values(summary: Summary, numbers: Sequence[Number]) -> list[float | None]:
    return [float(number.of(summary)) for number in numbers]


def _plain_values(rows: Sequence[Row], numbers: Sequence[Number]) -> list[float | None]:
    """Values of plain decoding, which each row holds beside its method's: each request counts once."""
    if not rows:
        return [None] * len(numbers)
    once = summarize({(row.request, row.benchmark, row.budget, row.max_new_tokens): row for row in rows}.values())
    return [float(number.plain(once)) if number.plain else None for number in numbers]


def _line(groups: Sequence[Sequence[float | None]], average: bool) -> list[float | None]:
    values = [value for group in groups for value in group]
    return values + [mean(column) for column in zip(*groups, strict=True)] if average else values


def sparrow_sets(rows: Sequence[Row], methods: Sequence[str]) -> Table:
    """tau, ESR and DSR of each set of videos (Sparrow's table 3 leaves ESR out)."""
    asked = {row.benchmark: row.budget for row in rows if row.budget}
    lengths = [*dict.fromkeys(asked.values())]
    each = lengths if len(lengths) < 2 else [f"{length} ({name})" for name, length in asked.items()]
    note = TAU_NOTE + (f" Clips at {', '.join(each)} visual tokens." if asked else "")
    return methods_by(rows, _BENCHMARK, (TAU, ESR, DSR), methods, title="Sets of videos",
                      source="Sparrow, tables 2 and 3", note=note, average=True)  # fmt: skip


def by_length(rows: Sequence[Row], methods: Sequence[str]) -> Table:
    """tau and DSR by visual tokens."""
    return methods_by(in_order(rows), lambda row: row.budget, (TAU, DSR), methods, title="By visual tokens",
                      source="Sparrow, table 4")  # fmt: skip


def ablation(rows: Sequence[Row], parts: Mapping[str, Mapping[str, bool]]) -> Table:
    """tau with Sparrow's parts (MTP, IVSB, VATA) on and off, by set and visual tokens.

    Args:
        parts: method -> part -> whether it is on; heads of other kinds may agree in all.
    """
    names = list(next(iter(parts.values())))
    assert all(list(switches) == names for switches in parts.values()), parts
    shown = {name: [name, *("yes" if on else "no" for on in switches.values())] for name, switches in parts.items()}
    sets = list(dict.fromkeys(row.benchmark for row in rows))
    ordered = sorted(in_order(rows), key=lambda row: sets.index(row.benchmark))
    return methods_by(ordered, lambda row: f"{row.benchmark} {row.budget}".strip(), (TAU,), shown, title="Ablation",
                      source="Sparrow, table 6", labels=("method", *names))  # fmt: skip


def image_sets(rows: Sequence[Row], methods: Sequence[str]) -> Table:
    """tau, tokens/s and ESR of each set of pictures."""
    note = TAU_NOTE + " Tokens/s are end to end."
    return methods_by(rows, _BENCHMARK, (TAU, TOKENS, ESR), methods, title="Sets of pictures",
                      source="Sparrow, table 8", note=note, average=True)  # fmt: skip


def sage_sets(rows: Sequence[Row], methods: Sequence[str]) -> Table:
    """tau without the bonus, tokens/s and speedup, under plain decoding."""
    numbers = (SAGE_TAU, SAGE_TOKENS, SAGE_SPEEDUP)
    return methods_by(rows, _BENCHMARK, numbers, methods, title="Sets, as SAGE counts",
                      source="SAGE, tables 1 to 5", note=SAGE_NOTE, plain=True)  # fmt: skip


def by_generated(rows: Sequence[Row], methods: Sequence[str]) -> Table:
    """tau, as ours and as SAGE's, and tokens/s at 512, 1024, 2048 or other numbers of generated tokens.

    Requests whose answers end before count nowhere, so that the same ones stand at every number.
    """
    ended = {row.request for row in rows if row.stop != "length"}
    whole = sorted((row for row in rows if row.request not in ended), key=lambda row: row.max_new_tokens)
    table = methods_by(
        whole, lambda row: str(row.max_new_tokens), (TAU, SAGE_TAU, SAGE_TOKENS), methods, title="By generated tokens",
        source="SAGE, figure 3",
        note=TAU_NOTE + " tau (no bonus) is SAGE's tau. Tokens/s are of decoding, without the prefill.",
    )  # fmt: skip
    if not ended:
        return table
    count = len({row.request for row in rows})
    footnote = (
        f"Answers to {len(ended)} of {count} requests ended earlier and are left out. With `stop_at_end: false` none "
        "ends."
    )
    return replace(table, footnotes=(*table.footnotes, footnote))


_BREAKDOWN: Mapping[str, Callable[[Summary], float]] = {
    "tau": lambda s: s.tau,
    "generated tokens": lambda s: s.generated,
    "target calls": lambda s: s.calls,
    "end to end (s)": lambda s: s.total_s,
    "decoding (s)": lambda s: s.decode_s,
    "prefill (s)": lambda s: s.prefill_s,
    "prefill share (%)": lambda s: 100.0 * s.prefill_share,
    "one decoding step (ms)": lambda s: 1e3 * s.step_s,
    "visual tokens, mean": lambda s: s.visual_tokens,
}


def breakdown(rows: Sequence[Row], method: str) -> Table:
    """What one method's requests cost, by visual tokens, as means over requests."""
    mine = in_order([row for row in rows if row.method == method])
    lengths = {budget: summarize(some) for (budget,), some in grouped(mine, "budget").items()}
    lines: list[tuple[Value, ...]] = [
        (name, *(float(of(summary)) for summary in lengths.values())) for name, of in _BREAKDOWN.items()
    ]
    note = "Generated tokens include the first one, which comes from the prefill and does not count in tau."
    columns = (text("per request"), *(Column(length) for length in lengths))
    return Table(f"Breakdown: {method}", columns, tuple(lines), "Sparrow, table 5", note)


# Operation of SAGE's table 6 -> key of a row's `parts_s`.
OPERATIONS = {
    "target prefill": "target_prefill",
    "target verification": "verification",
    "draft prefill": "draft_prefill",
    "draft decoding": "drafting",
    "token pruning": "token_pruning",
    "captioning": "captioning",
    "tree update": "tree_update",
    "others": "others",
}


def time_shares(rows: Sequence[Row], methods: Sequence[str]) -> Table:
    """Share of the total time that each operation takes."""
    lines = []
    for (name,), some in grouped(sorted(rows, key=lambda row: list(methods).index(row.method)), "method").items():
        sums = [sum(row.parts_s.get(key, 0.0) for row in some) for key in OPERATIONS.values()]
        lines.append((name, *(ratio(part, sum(sums)) for part in sums), 1.0 if sum(sums) else None))
    note = (
        "Verification is the target's pass and the acceptance rule. Draft decoding includes growing a tree level by "
        "level; the tree update is the work after verification that prepares the next tree."
    )
    columns = (text("method"), *(Column(name, ".2%") for name in (*OPERATIONS, "total")))
    return Table("Time by operation", columns, tuple(lines), "SAGE, table 6", note)


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Rows by the visual tokens that they had, the budgets of fewest tokens first."""
    means = {
        budget: statistics.fmean(r.visual_tokens for r in some) for (budget,), some in grouped(rows, "budget").items()
    }
    return sorted(rows, key=lambda row: means[row.budget])


def _footnotes(rows: Sequence[Row]) -> tuple[str, ...]:
    greedy = [row for row in rows if not row.temperature]
    different = [row for row in greedy if not row.identical]
    footnotes = []
    if different:
        first = f"first {different[0].method} in {different[0].request}"
        footnotes.append(
            f"**Outputs differ** from plain decoding in {len(different)} of {len(greedy)} requests, {first}."
        )
    elif greedy:
        count = len(greedy)
        footnotes.append(f"Outputs are identical to plain decoding in all {count} greedy requests, token by token.")
    short = [row for row in rows if row.budget and row.visual_tokens < 0.9 * visual_tokens(row.budget)]
    if short:
        why = "short clips, or small frames"
        footnotes.append(f"{len(short)} of {len(rows)} requests have fewer visual tokens than asked for: {why}.")
    return tuple(footnotes)
