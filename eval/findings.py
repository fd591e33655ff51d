"""States the results of a report in sentences, including expected results that were not confirmed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..core.json_types import JsonMapping
from .cells import Cell, Label, labels
from .intervals import quartiles
from .measured_rows import PLAIN, Row, grouped
from .row_columns import Rows
from .tables import interval

# Bound on the third quartile over the first, of times of equal work. In 106 lines of five recorded runs whose cycles'
# parts add up to 0.89 of the cycle or more (dflash seed 0, visual-ar-blocks seeds 1 and 2, two more; 12 to 72 requests,
# two CPU cores) it is 1.35 at most for the verification and 1.05 for plain steps. Beside other work it is 1.6 to 14.
STEADY = 1.5
LEAST_REQUESTS = 4


def findings(cells: Sequence[Cell], label: Label) -> list[str]:
    """Findings as sentences, including expected results that were not confirmed."""
    lines = _nothing(cells, label)
    measured = [cell for cell in cells if cell.summary.is_measured]
    for temperature in sorted({cell.temperature for cell in measured}):
        mine = [cell for cell in measured if cell.temperature == temperature]
        best = max(mine, key=lambda c: c.summary.tau)
        lines.append(f"Best tau: {best.summary.tau:.2f} ({best.method}, {label(best)}).")
        timed = [cell for cell in mine if not math.isnan(cell.summary.DSR)]
        if not timed:  # plain decoding's own answers were empty
            continue
        fastest = max(timed, key=lambda c: c.summary.DSR)
        if fastest.summary.DSR > 1:
            s = fastest.summary
            line = f"Best measured speedup of decoding: {s.DSR:.2f}x ({fastest.method}, {label(fastest)})."
            if not math.isnan(s.expected_speedup):  # an engine does not tell what a cycle's parts take
                line += f" At its tau of {s.tau:.2f} the expected speedup is {s.expected_speedup:.2f}x."
            lines.append(line)
        else:
            s = best.summary
            line = (
                f"**No wall-clock gain on this machine**: the best DSR is {fastest.summary.DSR:.2f}x, at tau "
                f"{fastest.summary.tau:.2f} ({fastest.method}, {label(fastest)})."
            )
            if not math.isnan(s.expected_speedup):
                line += (
                    f" A draft step costs T_q/T_p = {s.T_q_over_T_p:.2f} of a target step, so tau {s.tau:.2f} is "
                    f"expected to give {s.expected_speedup:.2f}x."
                )
            lines.append(line)
        by_method = {c.method: [o.summary.DSR for o in timed if o.method == c.method] for c in timed}
        if slower := [name for name, values in by_method.items() if max(values) < 1 < fastest.summary.DSR]:
            lines.append(
                f"**Slower than plain decoding** on every set at temperature {temperature:g}: {'; '.join(slower)}."
            )
    return lines + _exactness(cells, label) + _over_lengths(measured)


def own_findings(cells: Sequence[Cell]) -> list[str]:
    """Findings of one drafter's cells; the first has its best tau by an exact rule, where one decoded with it."""
    label = labels(cells)
    exact = [cell for cell in cells if not cell.relaxed]
    lines = findings(exact, label) if exact else []
    if relaxed := [cell for cell in cells if cell.relaxed and cell.summary.is_measured]:
        best = max(relaxed, key=lambda c: c.summary.tau)
        lines.append(f"Best tau with relaxed acceptance, whose outputs are not distributed as the target's: "
                     f"{best.summary.tau:.2f} ({best.method}, {label(best)}).")  # fmt: skip
    return lines + cautions(cells, label)


def _nothing(cells: Sequence[Cell], label: Label) -> list[str]:
    """Cells that were decoded without a single cycle: their ratios are dashes."""
    empty = [cell for cell in cells if not cell.summary.is_measured]
    if not empty:
        return []
    if all(cell.max_new_tokens == 1 for cell in empty):
        why = "the first token comes from the prefill, and `max_new_tokens: 1` asks for no other"
    else:
        why = "every answer was empty: the target ended it with its first token. Is the template right?"
    if len(empty) == len(cells):
        return [f"**Nothing was measured**: {why}"]
    places = "; ".join(dict.fromkeys(label(cell) for cell in empty))
    return [f"**Nothing was measured on {places}**: {why}"]


def _exactness(cells: Sequence[Cell], label: Label) -> list[str]:
    greedy = [cell for cell in cells if cell.exact]
    different = [cell for cell in greedy if cell.summary.identical < cell.summary.requests]
    if different:
        return _differences(different, len(greedy), label)
    if count := sum(cell.summary.requests for cell in greedy if cell.summary.is_measured):
        return [f"Greedy outputs are identical to plain decoding, token by token, in all {count} decoded requests."]
    return []


def _differences(different: Sequence[Cell], count: int, label: Label) -> list[str]:
    """Differences at near ties of scores are reported as rounding, and all others as faults."""
    requests = sum(cell.summary.requests - cell.summary.identical for cell in different)
    ties = sum(cell.summary.ties for cell in different)
    if requests == ties:
        widest = max((d for cell in different for d in cell.summary.differences), key=lambda d: d["ulps"])
        return [f"Greedy outputs differ from plain decoding in {requests} requests. Each first difference is at a near "
                f"tie: the two scores are at most {_gap(widest)} apart, "
                "and passes over one token and over several tokens round differently."]  # fmt: skip
    first = next(cell for cell in different if cell.summary.ties < cell.summary.requests - cell.summary.identical)
    fault = next((d for d in first.summary.differences if not d["tie"]), None)
    where = f"first at {first.summary.first_different}"
    if fault is not None and fault["ulps"] is not None:
        where = f"at {fault['request']}, token {fault['place']}, by {_gap(fault)}, which is no tie"
    elif fault is not None:
        where = f"at {fault['request']}, where one answer ends at token {fault['place']}"
    line = f"**Outputs differ** from plain decoding in {len(different)} of {count} greedy cells: {first.method}, "
    told = f" Of {requests} requests, {ties} differ at near ties of scores." if ties else ""
    return [f"{line}{label(first)}, {where}.{told}"]


def _gap(difference: JsonMapping) -> str:
    return f"{difference['gap']:.3g} ({difference['ulps']:.1f} units in the last place)"


def _over_lengths(cells: Sequence[Cell]) -> list[str]:
    """How tau changes from the fewest to the most visual tokens of a set, in the longest answers."""
    longest = max((cell.max_new_tokens for cell in cells), default=0)
    some = [cell for cell in cells if cell.budget and cell.max_new_tokens == longest]
    lines = []
    for (temperature, name, method), group in grouped(some, "temperature", "benchmark", "method").items():
        if len(group) > 1:
            rising = sorted((cell.summary for cell in group), key=lambda s: s.visual_tokens)
            shown = [f"{s.tau:.2f} {interval(s.tau_interval)}" for s in (rising[0], rising[-1])]
            lines.append(
                f"{method}, {name}, T = {temperature:g}: tau {shown[0]} at {rising[0].visual_tokens:,.0f} visual "
                f"tokens, {shown[1]} at {rising[-1].visual_tokens:,.0f}."
            )
    return lines


def cautions(cells: Sequence[Cell], label: Label) -> list[str]:
    """Warnings about numbers that should not be relied on."""
    lines = []
    for method in dict.fromkeys(cell.method for cell in cells):
        far = [cell for cell in cells if cell.method == method and cell.summary.beyond_positions]
        if far:
            count, total = sum(c.summary.beyond_positions for c in far), sum(c.summary.requests for c in far)
            lines.append(
                f"**{count} of {total} requests of {', '.join(map(label, far))} exceed the draft's positions** in "
                f"{method}: the draft was not trained for such lengths. Prompts in modes T and P are shorter."
            )
    vacuous = [f"{c.method}, {label(c)}" for c in cells if c.summary.is_measured and not
               (c.summary.num_accepted and c.summary.rejected_somewhere)]  # fmt: skip
    if vacuous:
        more = f" and {len(vacuous) - 6} more" if len(vacuous) > 6 else ""
        lines.append(f"No drafted token was accepted, or none was rejected, in: {'; '.join(vacuous[:6])}{more}. There "
                     "equal outputs say nothing about the acceptance rule.")  # fmt: skip
    return lines


def unsteady(rows: Sequence[Row], label: Label) -> list[str]:
    """A warning where times of passes lie further apart than on a quiet machine with requests of like sizes."""
    lines = []  # (third quartile over the first, of which times, where), of each line of the tables
    rows = Rows(rows)
    rows = rows.where(~rows.has("method", PLAIN) & rows.has("engine", ""))
    for some in rows.grouped("temperature", "max_new_tokens", "benchmark", "turn", "budget", "method").values():
        where = f"{some[0].method}, {label(some[0])}"
        nodes = some.sums("nodes") / np.maximum(1, some.num_cycles())
        same = some.where(abs(nodes - np.median(nodes)) <= 0.1 * np.median(nodes))  # trees of about one size
        timed = (("the target's verification", "verify_s", same), ("plain decoding's steps", "plain_cycle_s", some))
        for what, name, of in timed:
            times = [seconds for seconds in of.numbers(name).tolist() if seconds > 0]
            if len(times) >= LEAST_REQUESTS:
                low, high = quartiles(times)
                lines.append((high / low, what, where))
    far = [line for line in lines if line[0] > STEADY]
    if not far:
        return []
    apart, what, where = max(far)
    places = len({where for _, _, where in far})
    return [
        f"**Warning**: times are not steady. Over the requests, the quartiles of {what} lie {apart:.1f}x apart "
        f"({where}), and more than {STEADY}x in {places} of {len({where for *_, where in lines})} lines of the table. "
        "Other work on the machine does this, and so do requests of very unlike lengths. If it was other "
        "work, speedups, expected and measured, and times of a cycle's parts are not reliable: measure again while "
        "nothing else runs."
    ]


def binding_sentence(binding: Mapping[str, float] | None) -> list[str]:
    """One sentence on the questions answered right with and without the picture; empty where none were asked."""
    if not binding:
        return []
    if not binding["questions"]:
        return ["None of the held-out questions about the picture could be asked."]
    return [f"The target names the right attribute in {binding['accuracy']:.1%} of {binding['questions']} held-out "
            f"questions with the picture and in {binding['blind_accuracy']:.1%} without it."]  # fmt: skip
