"""The report of an evaluation of the video track: every cell with its spread, the papers' tables, and the figures.

A row is one request decoded by one method, as `video_tables` has it, with `medium` (video, image, text) beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import video_tables
from .measure import Row, summarize
from .studies.video import by_visual_tokens
from .studies.video_figures import tau_by_visual_tokens
from .style import COLORS
from .tables import interval, markdown_table
from .video_tables import Table, in_order
from .visual_analysis import row_of

Cell = tuple[float, int, str, str, str]  # temperature, generated tokens, set, budget, method


def build(
    rows: Sequence[Row],
    *,
    levels: Mapping[str, int],
    parts: Mapping[str, Mapping[str, bool]],
    adaptive: Sequence[str],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """The report as data.

    Args:
        levels: method -> levels of its tree, in the order of the tables.
        parts: head's method -> which parts of Sparrow are on.
        adaptive: methods whose tree adapts, and which SAGE's tables are of.
    """
    grouped: dict[Cell, list[Row]] = {}
    for row in rows:
        place = row["temperature"], row["max_new_tokens"], row["set"], row["budget"], row["drafter"]
        grouped.setdefault(place, []).append(row)
    cells = [
        {"temperature": t, "max_new_tokens": n, "set": name, "budget": budget, "method": method,
         "visual_tokens": sum(r["visual_tokens"] for r in some) / len(some),
         **_summary(some, levels[method])}
        for (t, n, name, budget, method), some in grouped.items()
    ]  # fmt: skip
    report = {"about": dict(about), "cells": cells}
    return report | {"tables": tables(rows, list(levels), parts, adaptive), "findings": findings(cells)}


def _summary(rows: Sequence[Row], levels: int) -> dict[str, Any]:
    """A cell's numbers; what is expected goes by the levels that were drafted, which an adaptive tree has fewer of."""
    found = summarize(rows, gamma=levels)
    drafted = sum(sum(r["drafted"]) for r in rows) / max(1, sum(r["cycles"] for r in rows))
    cycle_ms = drafted * found["T_q_ms"] + found["T_verify_ms"]
    return found | {"expected_speedup": found["tau"] * found["T_p_ms"] / cycle_ms if cycle_ms else 1.0}


def tables(
    rows: Sequence[Row], methods: Sequence[str], parts: Mapping[str, Mapping[str, bool]], adaptive: Sequence[str]
) -> list[Table]:
    """Those of the papers' tables that were measured; all but one are of the longest answers."""
    longest = max(row["max_new_tokens"] for row in rows)
    whole = [row for row in rows if row["max_new_tokens"] == longest]
    clips, images, texts = ([r for r in whole if r["medium"] == medium] for medium in ("video", "image", "text"))
    budgets = list(dict.fromkeys(row["budget"] for row in in_order(clips)))
    at_most = [row for row in clips if row["budget"] == budgets[-1]]
    found = []
    if clips:
        found.append(video_tables.sparrow_sets(at_most, methods))
    if len(budgets) > 1:
        found.append(video_tables.by_length(clips, methods))
    if images:
        found.append(video_tables.image_sets(images, methods))
    if texts:
        found.append(
            video_tables.methods_by(
                texts, "set", (video_tables.TAU, video_tables.ESR, video_tables.DSR), methods, title="Sets of texts"
            )
        )
    switches = {name: list(on.values()) for name, on in parts.items()}
    if len({*map(tuple, switches.values())}) > 1:
        heads = [row for row in clips + images or whole if row["drafter"] in switches]
        found.append(video_tables.ablation(heads, switches, list(next(iter(parts.values())))))
    if adaptive:
        found.append(video_tables.sage_sets(at_most + images + texts, methods))
    if longest > min(row["max_new_tokens"] for row in rows):
        found.append(video_tables.by_generated(rows, methods))
    if len(budgets) > 1:
        coldest = min(row["temperature"] for row in clips)
        cold = [row for row in clips if row["temperature"] == coldest]
        measured = {row["drafter"] for row in cold}
        found += [video_tables.breakdown(cold, method) for method in methods if method in measured]
    found.append(video_tables.time_shares(whole, methods))
    return found


def findings(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the numbers say, in sentences; what did not hold is said as plainly."""
    best, fastest = (max(cells, key=lambda c: c[key]) for key in ("tau", "DSR"))
    lines = [f"- Best tau: {best['tau']:.2f} ({_place(best)})."]
    greedy = [c for c in cells if not c["temperature"]]
    different = [c for c in greedy if c["identical"] < c["requests"]]
    if different:
        first = different[0]
        lines.append(
            f"- **Outputs differ** from plain decoding in {len(different)} of {len(greedy)} greedy cells: "
            f"{_place(first)}, first at {first['first_different']}."
        )
    elif greedy:
        count = sum(c["requests"] for c in greedy)
        lines.append(f"- Greedy outputs are identical to plain decoding, every token of {count} decoded requests.")
    if fastest["DSR"] > 1:
        lines.append(f"- Best measured speedup of decoding: {fastest['DSR']:.2f}x ({_place(fastest)}).")
    else:
        lines.append(
            f"- **No wall-clock gain on this machine**: the best DSR is {fastest['DSR']:.2f}x ({_place(fastest)}); a "
            f"draft step costs {fastest['T_q_over_T_p']:.2f} of a target step."
        )
    return lines + _over_lengths(cells)


def _over_lengths(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """How tau changes from the fewest to the most visual tokens of a set, in the longest answers."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    longest = max(cell["max_new_tokens"] for cell in cells)
    for cell in cells:
        if cell["budget"] and cell["max_new_tokens"] == longest:
            groups.setdefault((cell["temperature"], cell["set"], cell["method"]), []).append(cell)
    lines = []
    for (temperature, name, method), some in groups.items():
        if len(some) > 1:
            ordered = sorted(some, key=lambda c: float(c["visual_tokens"]))
            shown = [f"{c['tau']:.2f} {interval(c['tau_interval'])}" for c in (ordered[0], ordered[-1])]
            lines.append(
                f"- {method}, {name}, T = {temperature:g}: tau {shown[0]} at {ordered[0]['visual_tokens']:,.0f} visual "
                f"tokens, {shown[1]} at {ordered[-1]['visual_tokens']:,.0f}."
            )
    return lines


def _place(cell: Mapping[str, Any]) -> str:
    at = f" at {cell['budget']}" if cell["budget"] else ""
    return f"{cell['method']}, {cell['set']}{at}, T = {cell['temperature']:g}"


def write(folder: Path, report: Mapping[str, Any], rows: Sequence[Row], more: Sequence[str] = ()) -> None:
    """`report.json`, `report.md` and the figures.

    Args:
        more: lines of the page that stand behind the tables.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = _draw(folder, rows, [*dict.fromkeys(cell["method"] for cell in report["cells"])])
    values = {**report, "tables": [asdict(table) for table in report["tables"]], "figures": figures}
    (folder / "report.json").write_text(json.dumps(values, indent=1))
    (folder / "report.md").write_text(markdown(report, figures, more))


def _draw(folder: Path, rows: Sequence[Row], methods: Sequence[str]) -> list[str]:
    """tau against visual tokens, for each temperature; as many methods in one figure as there are colours."""
    longest = max(row["max_new_tokens"] for row in rows)
    clips = [r for r in rows if r["medium"] == "video" and r["budget"] and r["max_new_tokens"] == longest]
    if len({row["budget"] for row in clips}) < 2:
        return []
    names = []
    for temperature in sorted({row["temperature"] for row in clips}):
        lines = by_visual_tokens([row_of(row) for row in clips if row["temperature"] == temperature])
        ordered = [method for method in methods if method in lines]
        for start in range(0, len(ordered), len(COLORS)):
            name = f"tau-T{temperature:g}" + (f"-{start // len(COLORS) + 1}" if start else "") + ".png"
            shown = {method: lines[method] for method in ordered[start : start + len(COLORS)]}
            tau_by_visual_tokens(folder / name, shown, title=f"T = {temperature:g}")
            names.append(name)
    return names


def markdown(report: Mapping[str, Any], figures: Sequence[str], more: Sequence[str] = ()) -> str:
    lines = ["# Speculative decoding of long visual inputs", "", *report["findings"], ""]
    lines += [line for name in figures for line in (f"![tau against visual tokens]({name})", "")]
    for table in report["tables"]:
        lines += [*video_tables.markdown(table), ""]
    lines += more
    lines += ["## Every cell", "", *_cells(report["cells"]), "", video_tables.TAU_NOTE, ""]
    lines += ["## How it was measured", "", *(f"- {key}: {value}" for key, value in report["about"].items()), ""]
    return "\n".join(lines)


def _cells(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    head = ["T", "set", "visual tokens", "new", "method", "n", "tau [95%]", "accepted/cycle", "T_q/T_p", "expected",
            "DSR [IQR]", "ESR [IQR]", "prefill", "identical"]  # fmt: skip
    return markdown_table(
        head,
        [
            [f"{c['temperature']:g}", c["set"], f"{c['visual_tokens']:,.0f}", str(c["max_new_tokens"]), c["method"],
             str(c["requests"]), f"{c['tau']:.2f} {interval(c['tau_interval'])}", f"{c['num_accepted']:.2f}",
             f"{c['T_q_over_T_p']:.2f}", f"{c['expected_speedup']:.2f}x",
             f"{c['DSR']:.2f}x {interval(c['DSR_spread'])}", f"{c['ESR']:.2f}x {interval(c['ESR_spread'])}",
             f"{c['prefill_share']:.0%}",
             f"{c['identical']}/{c['requests']}" if not c["temperature"] else "-"]
            for c in cells
        ],
    )  # fmt: skip
