"""Tables of long visual inputs in the shapes of Sparrow and SAGE, from the rows of any evaluation.

Sources: Sparrow, tables 2 to 6 and 8; SAGE, tables 1 to 6 and figure 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...data.pictures.videos import visual_tokens
from ..cells import MethodInfo
from ..measured_rows import PLAIN, Frame, frame
from ..summary import AnyRows, Summary, mean, ratio, seconds_of_parts, summarize
from ..tables import Column, Table, Value, text

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
# A column: its heading, its unit, the number of a summary, and the same of plain decoding ("": it has none).
Number = tuple[str, str, str, str]
TAU, ESR, DSR = ("tau", "", "tau", ""), ("ESR", "x", "ESR", ""), ("DSR", "x", "DSR", "")
TOKENS = ("tokens/s", "", "tokens_per_s", "plain_tokens_per_s")  # end to end
SAGE_TAU = ("tau (no bonus)", "", "num_accepted", "")
SAGE_TOKENS, SAGE_SPEEDUP = ("tokens/s", "", "decoded_per_s", "plain_decoded_per_s"), ("speedup", "x", "DSR", "")


def tables(rows: AnyRows, methods: Mapping[str, MethodInfo]) -> list[Table]:
    """Those of the papers' tables that were measured; all but one are of the longest answers."""
    answers = frame(rows)
    answers = answers[(answers.method != PLAIN) & (answers.turn == "") & (answers.medium != "drawn")]
    whole, named = answers[answers.max_new_tokens == answers.max_new_tokens.max()], {name: [name] for name in methods}
    clips, images, texts = (whole[whole.medium == medium] for medium in ("video", "image", "text"))
    budgets = {name: list(in_order(some).budget.unique()) for name, some in clips.groupby("benchmark", sort=False)}
    at_most = clips.loc[[row.budget == budgets[row.benchmark][-1] for row in clips.itertuples()]]
    rising = clips.loc[[len(budgets[name]) > 1 for name in clips.benchmark]]
    results = []
    if len(clips):
        lengths_of = {name: budget[-1] for name, budget in budgets.items() if budget[-1]}
        each = [*dict.fromkeys(lengths_of.values())]
        each = each if len(each) < 2 else [f"{length} ({name})" for name, length in lengths_of.items()]
        note = TAU_NOTE + (f" Clips at {', '.join(each)} visual tokens." if lengths_of else "")
        results.append(methods_by(at_most, "benchmark", (TAU, ESR, DSR), named, title="Sets of videos",
                                  source="Sparrow, tables 2 and 3", note=note, average=True))  # fmt: skip
    if len(rising):
        results.append(methods_by(in_order(rising), "budget", (TAU, DSR), named, title="By visual tokens",
                                  source="Sparrow, table 4"))  # fmt: skip
    if len(clips) and len(images):
        note = TAU_NOTE + " Tokens/s are end to end."
        results.append(methods_by(images, "benchmark", (TAU, TOKENS, ESR), named, title="Sets of pictures",
                                  source="Sparrow, table 8", note=note, average=True))  # fmt: skip
    switches = {name: info.parts for name, info in methods.items() if info.parts is not None}
    if len({tuple(parts.values()) for parts in switches.values()}) > 1:
        shown = whole[whole.medium.isin(["video", "image"])] if len(clips) or len(images) else whole
        results.append(ablation(shown[shown.method.isin(switches)], switches))
    if any(info.adaptive for info in methods.values()):
        some = whole.loc[[*at_most.index, *images.index, *texts.index]]
        results.append(methods_by(some, "benchmark", (SAGE_TAU, SAGE_TOKENS, SAGE_SPEEDUP), named, note=SAGE_NOTE,
                                  title="Sets, as SAGE counts", source="SAGE, tables 1 to 5", plain=True))  # fmt: skip
    if answers.max_new_tokens.nunique() > 1:
        results.append(by_generated(answers, named))
    cold = rising[rising.temperature == rising.temperature.min()]
    results += [breakdown(cold[cold.method == name], name) for name in methods if (cold.method == name).any()]
    return [*results, time_shares(whole, [*methods])] if results else []


def methods_by(
    rows: Frame,
    key: Any,
    numbers: Sequence[Number],
    methods: Mapping[str, Sequence[str]],
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
        key: what a request's group is, as of `groupby`; groups stand in the order in which they first come up.
        methods: what stands in the first columns of each, under `labels`, in the order of the lines.
        average: a last group, the unweighted mean over groups.
        plain: a first line of plain decoding for each temperature, whose values each row holds beside its method's.
    """
    names = [name for name, _ in rows.groupby(key, sort=False)]
    cells = {name: summarize(some) for name, some in rows.groupby(["temperature", "method", key], sort=False)}
    once = rows.drop_duplicates(["temperature", "request", "benchmark", "budget", "max_new_tokens"])
    plainly = {name: summarize(some) for name, some in once.groupby(["temperature", key], sort=False)} if plain else {}
    assert {*rows.method} <= {*methods}, f"methods that the table has no line for, beside {[*methods]}"

    def line(summaries: Sequence[Summary | None], wanted: Sequence[str]) -> list[float | None]:
        values = [[getattr(s, name) if s and name else None for name in wanted] for s in summaries]
        values += [[mean(column) for column in zip(*values, strict=True)]] if average else []
        return [value for group in values for value in group]

    temperatures = sorted(rows.temperature.unique())
    lines: list[tuple[Value, ...]] = []
    for t in temperatures:
        first = (f"{t:g}",) if len(temperatures) > 1 else ()
        if plain:
            values = line([plainly.get((t, name)) for name in names], [name for *_, name in numbers])
            lines.append((*first, PLAIN, *[""] * (len(labels) - 1), *values))
        for method, shown in methods.items():
            if any(its := [cells.get((t, method, name)) for name in names]):
                lines.append((*first, *shown, *line(its, [name for *_, name, _ in numbers])))
    several = ("T",) if len(temperatures) > 1 else ()
    columns = [*map(text, several), *map(text, labels)]
    columns += [Column(name, unit=unit, group=group)
                for group in (*names, *(["Avg."] if average else [])) for name, unit, *_ in numbers]  # fmt: skip
    return Table(title, tuple(columns), tuple(lines), source, note, several, _footnotes(rows))


def ablation(rows: Frame, parts: Mapping[str, Mapping[str, bool]]) -> Table:
    """tau with Sparrow's parts (MTP, IVSB, VATA) on and off, by set and visual tokens.

    Args:
        parts: method -> part -> whether it is on; heads of other kinds may agree in all.
    """
    names = list(next(iter(parts.values())))
    assert all(list(switches) == names for switches in parts.values()), parts
    shown = {name: [name, *("yes" if on else "no" for on in switches.values())] for name, switches in parts.items()}
    sets = list(rows.benchmark.unique())
    rows = in_order(rows).sort_values("benchmark", key=lambda column: column.map(sets.index), kind="stable")
    key = (rows.benchmark + " " + rows.budget).str.strip()
    return methods_by(rows, key, (TAU,), shown, title="Ablation", source="Sparrow, table 6", labels=("method", *names))


def by_generated(rows: Frame, methods: Mapping[str, Sequence[str]]) -> Table:
    """tau, as ours and as SAGE's, and tokens/s at 512, 1024, 2048 or other numbers of generated tokens.

    Requests whose answers end before count nowhere, so that the same ones stand at every number.
    """
    ended = {*rows.request[rows.stop != "length"]}
    whole = rows[~rows.request.isin(ended)].sort_values("max_new_tokens", kind="stable")
    note = TAU_NOTE + " tau (no bonus) is SAGE's tau. Tokens/s are of decoding, without the prefill."
    table = methods_by(whole, whole.max_new_tokens.astype(str), (TAU, SAGE_TAU, SAGE_TOKENS), methods, note=note,
                       title="By generated tokens", source="SAGE, figure 3")  # fmt: skip
    if not ended:
        return table
    footnote = (
        f"Answers to {len(ended)} of {rows.request.nunique()} requests ended earlier and are left out. With "
        "`stop_at_end: false` none ends."
    )
    return replace(table, footnotes=(*table.footnotes, footnote))


_BREAKDOWN = {
    "tau": ("tau", 1.0), "generated tokens": ("generated", 1.0), "target calls": ("calls", 1.0),
    "end to end (s)": ("total_s", 1.0), "decoding (s)": ("decode_s", 1.0), "prefill (s)": ("prefill_s", 1.0),
    "prefill share (%)": ("prefill_share", 100.0), "one decoding step (ms)": ("step_s", 1e3),
    "visual tokens, mean": ("visual_tokens", 1.0),
}  # fmt: skip


def breakdown(rows: Frame, method: str) -> Table:
    """What one method's requests cost, by visual tokens, as means over requests."""
    lengths = {budget: summarize(some) for budget, some in in_order(rows).groupby("budget", sort=False)}
    lines = tuple((shown, *(scale * getattr(summary, name) for summary in lengths.values()))
                  for shown, (name, scale) in _BREAKDOWN.items())  # fmt: skip
    note = "Generated tokens include the first one, which comes from the prefill and does not count in tau."
    columns = (text("per request"), *map(Column, lengths))
    return Table(f"Breakdown: {method}", columns, lines, "Sparrow, table 5", note)


# Operation of SAGE's table 6 -> key of a row's `parts_s`.
OPERATIONS = {
    "target prefill": "target_prefill", "target verification": "verification", "draft prefill": "draft_prefill",
    "draft decoding": "drafting", "token pruning": "token_pruning", "captioning": "captioning",
    "tree update": "tree_update", "others": "others",
}  # fmt: skip


def time_shares(rows: Frame, methods: Sequence[str]) -> Table:
    """Share of the total time that each operation takes."""
    lines = []
    for name in (name for name in methods if (rows.method == name).any()):
        seconds = seconds_of_parts(rows[rows.method == name])
        sums = [seconds.get(key, 0.0) for key in OPERATIONS.values()]
        lines.append((name, *(ratio(part, sum(sums)) for part in sums), 1.0 if sum(sums) else None))
    note = (
        "Verification is the target's pass and the acceptance rule. Draft decoding includes growing a tree level by "
        "level; the tree update is the work after verification that prepares the next tree."
    )
    columns = (text("method"), *(Column(name, ".2%") for name in (*OPERATIONS, "total")))
    return Table("Time by operation", columns, tuple(lines), "SAGE, table 6", note)


def in_order(rows: Frame) -> Frame:
    """Rows by the visual tokens that they had, the budgets of fewest tokens first."""
    means = rows.groupby("budget").visual_tokens.transform("mean")
    return rows.loc[means.sort_values(kind="stable").index]


def _footnotes(rows: Frame) -> tuple[str, ...]:
    greedy = rows[rows.temperature == 0]
    different = greedy[~greedy.identical]
    footnotes = []
    if len(different):
        first = f"first {different.method.iloc[0]} in {different.request.iloc[0]}"
        footnotes.append(
            f"**Outputs differ** from plain decoding in {len(different)} of {len(greedy)} requests, {first}."
        )
    elif count := len(greedy):
        footnotes.append(f"Outputs are identical to plain decoding in all {count} greedy requests, token by token.")
    short = sum(bool(r.budget) and r.visual_tokens < 0.9 * visual_tokens(r.budget) for r in rows.itertuples())
    if short:
        why = "short clips, or small frames"
        footnotes.append(f"{short} of {len(rows)} requests have fewer visual tokens than asked for: {why}.")
    return tuple(footnotes)
