"""Sentences on a report's numbers: what is missing, what cannot be, and what is not to be relied on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..core.json_types import JsonMapping
from .cells import PLACE, Cell
from .measured_rows import PLAIN, Frame
from .summary import quartiles

# Bound on the third quartile over the first, of times of equal work. In 106 lines of five recorded runs whose cycles'
# parts add up to 0.89 of the cycle or more (dflash seed 0, visual-ar-blocks seeds 1 and 2, two more; 12 to 72 requests,
# two CPU cores) it is 1.35 at most for the verification and 1.05 for plain steps. Beside other work it is 1.6 to 14.
STEADY = 1.5
LEAST_REQUESTS = 4


def findings(cells: Sequence[Cell]) -> list[str]:
    """What is missing, whether greedy outputs are plain decoding's, and which numbers should not be relied on."""
    return [*_nothing(cells), *_exactness(cells), *_cautions(cells)]


def headline(cells: Sequence[Cell]) -> str:
    """The best tau of one drafter's cells, by an exact rule where one decoded with it, and the best speedup there."""
    exact = [cell for cell in cells if not cell.relaxed]
    measured = [cell for cell in exact or cells if cell.is_measured]
    if not measured:
        return _nothing(cells)[0]
    cold = [cell for cell in measured if cell.temperature == min(cell.temperature for cell in measured)]
    best = max(cold, key=lambda cell: cell.tau)
    line = f"Best tau: {best.tau:.2f} ({best.method}, {best.where})."
    if timed := [cell for cell in cold if not math.isnan(cell.DSR)]:
        fastest = max(timed, key=lambda cell: cell.DSR)
        line += f" Best measured speedup of decoding: {fastest.DSR:.2f}x ({fastest.method}, {fastest.where})."
    return line


def _nothing(cells: Sequence[Cell]) -> list[str]:
    """Cells that were decoded without a single cycle: their ratios are dashes."""
    empty = [cell for cell in cells if not cell.is_measured]
    if not empty:
        return []
    if all(cell.max_new_tokens == 1 for cell in empty):
        why = "the first token comes from the prefill, and `max_new_tokens: 1` asks for no other"
    else:
        why = "every answer was empty: the target ended it with its first token. Is the template right?"
    places = "" if len(empty) == len(cells) else " on " + "; ".join(dict.fromkeys(cell.where for cell in empty))
    return [f"**Nothing was measured{places}**: {why}"]


def _exactness(cells: Sequence[Cell]) -> list[str]:
    """Differences at near ties of scores are reported as rounding, and all others as faults."""
    greedy = [cell for cell in cells if cell.exact]
    different = [cell for cell in greedy if cell.identical < cell.answers]
    if not different:
        count = sum(cell.answers for cell in greedy if cell.is_measured)
        same = f"Greedy outputs are identical to plain decoding, token by token, in all {count} decoded requests."
        return [same] if count else []
    requests = sum(cell.answers - cell.identical for cell in different)
    ties = sum(cell.ties for cell in different)
    if requests == ties:
        widest = max((d for cell in different for d in cell.differences), key=lambda d: d["ulps"])
        return [f"Greedy outputs differ from plain decoding in {requests} requests. Each first difference is at a near "
                f"tie: the two scores are at most {_gap(widest)} apart, "
                "and passes over one token and over several tokens round differently."]  # fmt: skip
    first = next(cell for cell in different if cell.ties < cell.answers - cell.identical)
    fault = next((d for d in first.differences if not d["tie"]), None)
    where = f"first at {first.first_different}"
    if fault is not None and fault["ulps"] is not None:
        where = f"at {fault['request']}, token {fault['place']}, by {_gap(fault)}, which is no tie"
    elif fault is not None:
        where = f"at {fault['request']}, where one answer ends at token {fault['place']}"
    at_ties = f" Of {requests} requests, {ties} differ at near ties of scores." if ties else ""
    return [f"**Outputs differ** from plain decoding in {len(different)} of {len(greedy)} greedy cells: "
            f"{first.method}, {first.where}, {where}.{at_ties}"]  # fmt: skip


def _gap(difference: JsonMapping) -> str:
    return f"{difference['gap']:.3g} ({difference['ulps']:.1f} units in the last place)"


def _cautions(cells: Sequence[Cell]) -> list[str]:
    lines = []
    for method in dict.fromkeys(cell.method for cell in cells):
        far = [cell for cell in cells if cell.method == method and cell.beyond_positions]
        if far:
            count, total = sum(c.beyond_positions for c in far), sum(c.answers for c in far)
            lines.append(
                f"**{count} of {total} requests of {', '.join(c.where for c in far)} exceed the draft's positions** in "
                f"{method}: the draft was not trained for such lengths. Prompts in modes T and P are shorter."
            )
    vacuous = [f"{c.method}, {c.where}" for c in cells
               if c.is_measured and not (c.num_accepted and c.rejected_somewhere)]  # fmt: skip
    if vacuous:
        more = f" and {len(vacuous) - 6} more" if len(vacuous) > 6 else ""
        lines.append(f"No drafted token was accepted, or none was rejected, in: {'; '.join(vacuous[:6])}{more}. There "
                     "equal outputs say nothing about the acceptance rule.")  # fmt: skip
    return lines


def unsteady(rows: Frame) -> list[str]:
    """A warning where times of passes lie further apart than on a quiet machine with requests of like sizes.

    Args:
        rows: with a column `place`.
    """
    lines = []  # (third quartile over the first, of which times, where), of each line of the tables
    ours = rows[(rows.method != PLAIN) & (rows.engine == "")]
    for _, some in ours.groupby([*PLACE, "method"], sort=False):
        nodes = some.num_nodes / np.maximum(1, some.num_cycles)
        same = some[abs(nodes - nodes.median()) <= 0.1 * nodes.median()]  # trees of about one size
        timed = (("the target's verification", same.verify_s), ("plain decoding's steps", some.plain_cycle_s))
        for what, times in timed:
            if len(times := times[times > 0]) >= LEAST_REQUESTS:
                low, high = quartiles(times.tolist())
                lines.append((high / low, what, f"{some.method.iloc[0]}, {some.place.iloc[0]}"))
    far = [line for line in lines if line[0] > STEADY]
    if not far:
        return []
    apart, what, where = max(far)
    places = len({where for *_, where in far})
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
