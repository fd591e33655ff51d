"""What was required before measuring, beside what was measured: the tables of docs/benchmarks.md."""

from __future__ import annotations

import re
from collections.abc import Callable

from . import benchmarks
from .clips import FACTS
from .recorded import Cell, Rows, all_same, evaluations, ratio_of_run, table
from .tales import dflash_bounds


def _fastest(recipe: str, wanted: Callable[[Cell], bool], least: float, *, exact: bool = True) -> list[str]:
    """Bound and measured speedup of a recipe's fastest method in each run; runs below the bound are counted."""
    best = [
        max((cell for cell in run["cells"] if bool(cell["relaxed"]) != exact and wanted(cell)), key=lambda c: c["DSR"])
        for run in evaluations(recipe).values()
    ]
    missed = sum(cell["DSR"] < least or cell["DSR_spread"][0] <= 1.1 for cell in best)
    said = ", ".join(map(ratio_of_run, best)) + f" ({'; '.join(dict.fromkeys(cell['method'] for cell in best))})"
    return [
        f"{least:g}x, lower quartile above 1.1",
        f"{said}: **missed** by {missed} of {len(best)}" if missed else said,
    ]


FIRST = "lvlm-from-nothing"  # the first demo with its target, recorded with the others


@table
def demo_bounds() -> Rows:
    """Bounds of the demos, each with a value for every seed."""
    rows = [["demo", "what", "bound", "measured, seed by seed"]]
    for recipe in (FIRST, "compare", "video"):
        rows.append([f"`demo/{recipe}`", "greedy outputs identical to plain decoding", "all", all_same(recipe)])
    for key, what, bound in (("accuracy", "with", "at least 75%"), ("blind_accuracy", "without", "at most 25%")):
        values = ", ".join(f"{run['binding'][key]:.1%}" for run in evaluations(FIRST).values())
        rows.append([f"`demo/{FIRST}`", f"the target names the right attribute {what} the picture", bound, values])
    for recipe, name, least in (
        (FIRST, "text", 2), (FIRST, "pictures", 2), ("compare", "single", 2), ("compare", "pairs", 2),
        ("compare", "clips", 1.5),
    ):  # fmt: skip
        found = _fastest(recipe, lambda cell, name=name: cell["benchmark"] == name, least)  # type: ignore[misc]
        rows.append([f"`demo/{recipe}`", f"fastest exact method on {name}", *found])
    for name, facts in FACTS.items():
        found = _fastest("video", lambda cell, name=name: (cell["benchmark"], cell["budget"]) == (name, "1998"), 1.5)  # type: ignore[misc]
        rows.append(["`demo/video`", f"fastest exact method at 1,998 visual tokens, {facts}", *found])
    for recipe, t, exact, least in (
        ("visual-ar", 0.0, True, 1.3), ("visual-ar", 1.0, True, 1.3), ("visual-ar", 0.0, False, 1.6),
        ("visual-ar", 1.0, False, 1.6), ("visual-ar-textures", 1.0, False, 1.6),
    ):  # fmt: skip
        found = _fastest(recipe, lambda cell, t=t: cell["temperature"] == t, least, exact=exact)  # type: ignore[misc]
        rows.append([f"`demo/{recipe}`", f"fastest {'exact' if exact else 'relaxed'} method, T = {t:g}", *found])
    return rows + [["`demo/dflash`", *line] for line in dflash_bounds()[1:]]


@table
def benchmark_bounds() -> Rows:
    """Every line of the benchmark scripts that has a bound."""
    shown = {
        "benchmark_loop": (benchmarks.printed("loop"), 1, 2),
        "benchmark_visual": (benchmarks.visual(), 1, 3),
        "benchmark_ensemble": (benchmarks.printed("ensemble")[1:] + benchmarks.printed("ensemble", 1)[1:], 2, 3),
        "benchmark_starting": (benchmarks.printed("starting"), 1, 2),
    }  # fmt: skip
    names = {"MTCP": "a draft step of MTCP over one of M", "MT*": "choosing the weights of MT*, of a cycle"}
    rows = [["script", "what", "bound", "median [quartiles]"]]
    for script, (lines, bound, measured) in shown.items():
        rows += [[f"`{script}`", names.get(line[0], line[0]), line[bound], line[measured]]
                 for line in lines if re.search(r"\d", line[bound])]  # fmt: skip
    cold, warm = (line[2] for line in benchmarks.printed("data")[1:])
    rows.append(["`benchmark_data`", "opening 665,000 records for the first time, and again", "at most 10 s",
                 f"{cold}, {warm}"])  # fmt: skip
    share = benchmarks.states_reading()[3]
    rows.append(["`benchmark_states`", "reading cached states over a plain read: cold, warm", "at least 80%",
                 f"{share[2]}, {share[4]}"])  # fmt: skip
    for name, what in (
        ("peers", "cycles, demo size"), ("peers-512", "cycles, width 512"),
        ("peers-blocks", "DFlash's and DSpark's cycles"), ("peers-training", "EAGLE's training step of EAGLE-3"),
        ("peers-speculators-eagle3", "speculators' training step of EAGLE-3"),
        ("peers-specforge", "SpecForge's training step of EAGLE-3"),
        ("peers-specforge-dflash", "SpecForge's training step of DFlash"),
        ("peers-speculators", "speculators' training steps of DFlash and DSpark"),
    ):  # fmt: skip
        lines = benchmarks.printed(name)
        medians = [float(line[1].split()[0]) for line in lines[1:]]
        missed = sum("missed" in line[2] for line in lines[1:])
        goals = sorted({line[2].split(",")[0] for line in lines[1:]})  # of each row, or at the head
        each = f"at most {' to '.join(dict.fromkeys((goals[0], goals[-1])))}"
        goal = each if lines[0][2] == "goal" else lines[0][2]
        rows.append([
            "`benchmark_peers`", f"over peers: {what}, {len(medians)} rows", goal,
            f"{min(medians):.2f} to {max(medians):.2f}: **missed** by {missed} of {len(medians)}",
        ])  # fmt: skip
    return rows
