"""The report of an evaluation of image generators: the papers' tables, pictures, and what did not hold.

tau counts the bonus token (plain decoding has 1: LANTERN's mean accepted length, ADT-Tree's tau); SR is wall clock of
decoding with its prefill; depth is the mean number of levels of a cycle's tree (ADT-Tree's d).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from .figures import save_grid
from .measure import Row, bootstrap, quartiles
from .tables import interval, markdown_table

Results = dict[float, dict[str, list[Row]]]  # temperature -> method -> rows
PLAIN = "plain decoding"


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """The numbers of one method at one temperature."""
    emitted, cycles = [r["emitted"] for r in rows], [r["cycles"] for r in rows]
    levels = [d for r in rows for d in r["drafted"]]
    nodes = [n for r in rows for n in r["nodes"]]
    accepted = [a for r in rows for a in r["accepted"]]
    speedups = [r["plain_total_s"] / r["total_s"] for r in rows]
    median = {
        key: statistics.median(r[key] for r in rows) for key in ("verify_s", "rule_s", "draft_cycle_s", "cycle_s")
    }
    return {
        "requests": len(rows),
        "rule": rows[0]["rule"],
        "SR": sum(r["plain_total_s"] for r in rows) / sum(r["total_s"] for r in rows),
        "SR_spread": quartiles(speedups),
        "ESR": sum(r["plain_total_s"] for r in rows) / sum(r["total_s"] for r in rows),
        "ESR_spread": quartiles(speedups),
        "tau": sum(emitted) / max(1, sum(cycles)),
        "tau_interval": bootstrap(emitted, cycles),
        "tau_mean_of_requests": statistics.fmean(e / max(1, c) for e, c in zip(emitted, cycles, strict=True)),
        "mean_levels": statistics.fmean(levels),
        "mean_nodes": statistics.fmean(nodes),
        "accepted_histogram": [accepted.count(n) for n in range(max(accepted, default=0) + 1)],
        "first_accepted": sum(a > 0 for a in accepted) / max(1, len(accepted)),
        "target_ms": 1e3 * (median["verify_s"] - median["rule_s"]),
        "drafter_ms": 1e3 * median["draft_cycle_s"],
        "rule_ms": 1e3 * median["rule_s"],
        "cycle_ms": 1e3 * median["cycle_s"],
        "plain_ms": 1e3 * statistics.median(r["plain_cycle_s"] for r in rows),
        "identical": sum(r["identical"] for r in rows),
        "first_different": next((r["request"] for r in rows if not r["identical"]), None),
    }


def build(
    results: Results, quality: Mapping[float, Mapping[str, Any]], *, about: dict[str, Any], grid: int
) -> dict[str, Any]:
    """The report as data.

    Args:
        quality: temperature -> method (plain decoding too) -> metric -> {value, n, what, spread}.
        about: command, device, date, seed, settings: what a number is worth nothing without.
    """
    tables = {t: {m: summarize(rows) for m, rows in methods.items()} for t, methods in results.items()}
    return {"about": about, "grid": grid, "tables": tables, "quality": {t: dict(q) for t, q in quality.items()}}


def write(
    folder: Path,
    report: dict[str, Any],
    results: Results,
    pictures: Mapping[float, Mapping[str, Tensor]],
    explained: Sequence[str] = (),
) -> None:
    """`report.json`, `report.md`, `rows.jsonl` (every request), and the pictures side by side."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    with open(folder / "rows.jsonl", "w") as file:
        for temperature, methods in results.items():
            for method, rows in methods.items():
                for row in rows:
                    file.write(json.dumps({"temperature": temperature, "method": method, **row}) + "\n")
    import torch

    for temperature, by_method in pictures.items():
        shown = torch.cat(list(by_method.values()))
        columns = len(next(iter(by_method.values())))
        save_grid(folder / f"pictures-T{temperature:g}.png", shown, columns=columns)
    (folder / "report.md").write_text(markdown(report, {t: list(p) for t, p in pictures.items()}, explained))


def markdown(report: dict[str, Any], shown: Mapping[float, Sequence[str]], explained: Sequence[str] = ()) -> str:
    lines = ["# Drawing with drafts, measured", "", *findings(report), ""]
    for temperature, methods in report["tables"].items():
        quality = report["quality"].get(temperature, {})
        metrics = sorted({name for found in quality.values() for name in found})
        lines += [f"## Temperature {temperature:g}", ""]
        lines += markdown_table(
            ["method", "n", "SR [IQR]", "tau [95%]", "tau per request", "mean depth", "nodes", *metrics],
            [
                [PLAIN, str(_n(methods)), "1.00x", *["1.00"] * 3, "0", *_cells(quality.get(PLAIN, {}), metrics)],
                *(
                    [m, str(t["requests"]), f"{t['SR']:.2f}x {interval(t['SR_spread'])}",
                     f"{t['tau']:.2f} {interval(t['tau_interval'])}",
                     f"{t['tau_mean_of_requests']:.2f}", f"{t['mean_levels']:.2f}", f"{t['mean_nodes']:.0f}",
                     *_cells(quality.get(m, {}), metrics)]
                    for m, t in methods.items()
                ),
            ],
        )  # fmt: skip
        lines += ["", "Where a cycle's time goes (medians, ms; plain decoding takes "
                  f"{next(iter(methods.values()))['plain_ms']:.2f} a token):", ""]  # fmt: skip
        lines += markdown_table(
            ["method", "target", "drafter", "rule", "whole cycle", "first draft accepted"],
            [
                [m, f"{t['target_ms']:.2f}", f"{t['drafter_ms']:.2f}", f"{t['rule_ms']:.2f}", f"{t['cycle_ms']:.2f}",
                 f"{t['first_accepted']:.1%}"]
                for m, t in methods.items()
            ],
        )  # fmt: skip
        notes = {name: found[name] for found in quality.values() for name in found}
        lines += [""] + [f"- {name}: {m['what']}" + (f" ({m['caution']})" if m.get("caution") else "") for name, m in
                         sorted(notes.items())]  # fmt: skip
        rows = ", ".join(shown.get(temperature, ()))
        lines += ["", f"![pictures](pictures-T{temperature:g}.png)", "", f"Rows: {rows}.", ""]
    lines += explained
    lines += [
        "tau: tokens emitted after the prefill over verification passes, bonus token included. SR: wall clock against "
        "plain decoding of the same target at the same temperature, in the same run. LANTERN relaxes acceptance: what "
        "it draws is not distributed as the target's.",
        "",
        "## How it was measured",
        "",
        *(f"- {key}: {value}" for key, value in report["about"].items()),
        "",
    ]
    return "\n".join(lines)


def findings(report: dict[str, Any]) -> list[str]:
    """What the numbers say, in sentences; what did not hold is said as plainly."""
    lines = []
    for temperature, methods in report["tables"].items():
        best = max(methods.items(), key=lambda item: item[1]["tau"])
        fastest = max(methods.items(), key=lambda item: item[1]["SR"])
        lines.append(
            f"- Temperature {temperature:g}: best tau {best[1]['tau']:.2f} ({best[0]}), best speedup "
            f"{fastest[1]['SR']:.2f}x ({fastest[0]})."
        )
        slower = [name for name, table in methods.items() if table["SR"] < 1]
        if slower:
            lines.append(f"- **Slower than plain decoding** at temperature {temperature:g}: {', '.join(slower)}.")
        if temperature == 0:
            exact = {name: t for name, t in methods.items() if t["rule"] != "lantern"}
            different = [name for name, t in exact.items() if t["identical"] < t["requests"]]
            if different:
                lines.append(f"- **Tokens differ** from plain decoding: {', '.join(different)}.")
            elif exact:
                lines.append("- Exact methods drew every token as plain decoding did at temperature 0.")
    return lines


def _n(methods: Mapping[str, Mapping[str, Any]]) -> int:
    return next(iter(methods.values()))["requests"]


def _cells(found: Mapping[str, Any], metrics: Sequence[str]) -> list[str]:
    return [f"{found[m]['value']:.4g} (n={found[m]['n']})" if m in found else "-" for m in metrics]
