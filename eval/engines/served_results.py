"""What an engine's rows say: throughput and waiting by requests at once, and whether its tau is our own loop's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.json_types import JsonMapping, JsonObject
from ..figures import COLORS, MARKERS, PLAIN_LINE, WIDEST, drawing, lines_legend
from ..measured_rows import PLAIN, Frame, Row, frame, grouped
from ..summary import ratio, summarize, tau_of
from ..tables import Column, Figure, ReportSection, Table, Value, text

APART = 0.02  # of tau at temperature 0, beyond which both loops are said to differ
FIGURE = "served.png"
_MOST_PANELS = 6
_PLACE = ("temperature", "max_new_tokens", "benchmark", "turn", "budget")

NOTE = (
    "Tokens/s: of all requests together, from the first one's begin to the last one's end; its speedup is over plain "
    "decoding in the same engine with as many requests at once. TTFT: a request's time to its first token, from its "
    "arrival. Between tokens: of a request, its time after the first token for each further one. p50 and p95 are over "
    "requests. Accepted at n: of the passes that drafted n tokens, the share that accepted the n-th."
)


def served_section(rows: Sequence[Row], device: str) -> tuple[ReportSection, Callable[[Path], None]]:
    """The section of an engine's rows, and what draws its figure into the report's folder."""
    cells, engine = _cells(rows), rows[0].engine
    depth = max((len(cell["accepted"]) for cell in cells), default=0)
    places = list(dict.fromkeys(cell["place"] for cell in cells))
    columns = [
        text("benchmark"), text("method"), Column("at once", "d", ranked=False), Column("n", "d", ranked=False),
        Column("identical", kind="count", ranked=False), Column("tau"),
        *(Column(f"accepted at {n}", ".0%", ranked=False) for n in range(1, depth + 1)),
        Column("tokens/s", ",.1f"), Column("speedup", unit="x"),
        *(Column(f"{what}, ms", ",.1f", ranked=False)
          for what in ("TTFT p50", "TTFT p95", "between tokens p50", "between tokens p95")),
    ]  # fmt: skip
    body = tuple(_line(cell, depth) for cell in cells)
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {place: {} for place in places}
    for cell in cells:
        if cell["method"] != PLAIN and not math.isnan(cell["speedup"]):
            curves[cell["place"]].setdefault(cell["method"], []).append((cell["concurrency"], cell["speedup"]))
    shown = {place: dict(list(of.items())[: len(COLORS)]) for place, of in list(curves.items())[:_MOST_PANELS] if of}
    caption = f"Speedup of tokens/s over plain decoding in {engine}, by requests at once, on {device}."
    content: list[Any] = [Table("", tuple(columns), body, note=NOTE, compared=("benchmark", "at once"))]
    if shown:
        content.insert(0, Figure(FIGURE, caption))
    section = ReportSection(f"Served by {engine}", tuple(content), "served", {"device": device, "cells": cells})

    def draw(folder: Path) -> None:
        if shown:
            draw_speedups(folder / FIGURE, shown, f"{engine} on {device}")

    return section, draw


def _line(cell: JsonMapping, depth: int) -> tuple[Value, ...]:
    plain = cell["method"] == PLAIN
    accepted = [*cell["accepted"], *[None] * (depth - len(cell["accepted"]))]
    same = None if plain or cell["identical"] is None else (cell["identical"], cell["requests"])
    return (
        cell["place"], cell["method"], cell["concurrency"], cell["requests"], same, cell["tau"], *accepted,
        cell["tokens_per_s"], None if plain else cell["speedup"],
        *(1e3 * cell[name] for name in ("ttft_p50_s", "ttft_p95_s", "between_p50_s", "between_p95_s")),
    )  # fmt: skip


def _cells(rows: Sequence[Row]) -> list[JsonObject]:
    """The numbers of each method on each set at each number of requests at once, plain decoding's first."""
    answers = frame(rows)
    many_t, many_new = answers.temperature.nunique() > 1, answers.max_new_tokens.nunique() > 1
    cells = []
    for place, mine in answers.groupby([*_PLACE], sort=False):
        temperature, new, benchmark, turn, budget = place
        named = [benchmark, turn, budget, many_t and f"T = {temperature:g}", many_new and f"{new} new"]
        plain: dict[int, float] = {}
        for (method, concurrency), some in mine.groupby(["method", "concurrency"], sort=False):
            rate = _tokens_per_s(some)
            if method == PLAIN:
                plain[concurrency] = rate
            drafts = summarize(some).accepted_by_depth if method != PLAIN else ()
            further = some[some.num_emitted > 0]  # with a second token
            waited, between = some.prefill_s.to_numpy(), (further.decode_s / further.num_emitted).to_numpy()
            cells.append({
                "place": ", ".join(part for part in named if part), "method": method, "concurrency": concurrency,
                "requests": len(some), "tau": tau_of(some), "accepted": [depth.share for depth in drafts],
                "identical": int(some.identical.sum()) if temperature == 0 else None, "tokens_per_s": rate,
                "speedup": ratio(rate, plain[concurrency]) if rate > 0 else math.nan,
                "ttft_p50_s": _quantile(waited, 0.5), "ttft_p95_s": _quantile(waited, 0.95),
                "between_p50_s": _quantile(between, 0.5), "between_p95_s": _quantile(between, 0.95),
            })  # fmt: skip
    return cells


def _tokens_per_s(rows: Frame) -> float:
    """Return tokens/s of a cell. Seconds of drafters of several seeds add up: they ran one after the other."""
    seconds = 0.0
    for _, some in rows.groupby("drafter", sort=False):
        seconds += max(d["ended_s"] for d in some.details) - min(d["began_s"] for d in some.details)
    return float(ratio(float(rows.generated.sum()), seconds))


def _quantile(values: np.ndarray, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else math.nan


def draw_speedups(path: Path, places: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], title: str) -> None:
    """A panel for each set, a line for each method: speedup over plain decoding by requests at once. `places`: set ->
    method -> (requests at once, speedup). `title`: engine and device, without which the numbers say nothing.
    """
    width = min(4.2, WIDEST / min(len(places), 3))
    with drawing(path, len(places), width, 3.1, sharey=True) as (figure, panels):
        for panel, (place, methods) in zip(panels.flat, places.items(), strict=False):
            for color, marker, (name, points) in zip(COLORS, MARKERS, methods.items(), strict=False):
                panel.plot(*zip(*sorted(points), strict=True), "-", color=color, marker=marker, label=name)
            counts = sorted({count for points in methods.values() for count, _ in points})
            panel.axhline(1.0, **PLAIN_LINE)
            panel.set_xscale("log", base=2)
            panel.set_xticks(counts, [str(count) for count in counts])
            panel.set(title=place, xlabel="requests at once")
        for row in panels:
            row[0].set_ylabel("speedup of tokens/s")
        figure.suptitle(title)
        lines_legend(figure, panels)


def disagreements(rows: Sequence[Row], ours: Sequence[Row]) -> tuple[list[str], str]:
    """Where an engine's tau at temperature 0 is not our own loop's on the same requests: sentences, and a summary."""
    apart, widest, count = [], 0.0, 0
    cold = [row for row in rows if row.temperature == 0 and row.method != PLAIN]
    of_ours = grouped(ours, *_PLACE, "method", "drafter")
    for place, of_engine in grouped(cold, *_PLACE, "method", "drafter", "concurrency").items():
        beside = of_ours.get(place[:-1], [])
        names = {row.request for row in beside} & {row.request for row in of_engine}
        theirs, mine = (tau_of(row for row in some if row.request in names) for some in (of_engine, beside))
        if math.isnan(theirs) or math.isnan(mine):
            continue
        count += 1
        difference = theirs / mine - 1
        widest = max(widest, abs(difference))
        if abs(difference) > APART:
            first = of_engine[0]
            apart.append(
                f"tau of {first.method} on {first.benchmark}, {first.concurrency} at once, is {theirs:.2f} in "
                f"{first.engine} and {mine:.2f} in our own loop ({difference:+.1%}, {len(names)} requests): "
                "`draftsmith verify-engine` compares the chains and names the cause"
            )
    said = f"tau at temperature 0 within {APART:.0%} of it in {count - len(apart)} of {count} cells"
    return apart, said + (f", at most {widest:.1%} apart" if count else "")
