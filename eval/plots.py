"""The report's pictures. The only door to matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLORS = ("#2a6fbb", "#d9822b", "#3f9b5f", "#8e5aa8")


def acceptance_by_depth(path: Path, tables: dict[str, dict[str, dict[str, Any]]]) -> None:
    """One panel per benchmark, one line per mode: share of drafted tokens accepted at each depth."""
    figure, panels = plt.subplots(1, len(tables), figsize=(4.2 * len(tables), 3.4), sharey=True, squeeze=False)
    for panel, (benchmark, modes) in zip(panels[0], tables.items(), strict=True):
        for color, (mode, table) in zip(COLORS, modes.items(), strict=False):
            depths = table["accepted_by_depth"]
            xs = [d["depth"] for d in depths]
            panel.plot(xs, [d["share"] for d in depths], "o-", color=color, label=f"{mode} (tau {table['tau']:.2f})")
        panel.set(title=benchmark, xlabel="depth of the drafted token", ylim=(0, 1.02), xticks=xs)
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
    panels[0][0].set_ylabel("share accepted")
    _save(figure, path)


def speedups(path: Path, tables: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Measured against expected speedup of decoding; the line at 1 is plain decoding."""
    names = [f"{b}\n{m}" for b, modes in tables.items() for m in modes]
    rows = [t for modes in tables.values() for t in modes.values()]
    figure, panel = plt.subplots(figsize=(max(4.2, 1.3 * len(rows) + 1), 3.4))
    places = range(len(rows))
    panel.bar([p - 0.2 for p in places], [t["expected_speedup"] for t in rows], 0.38, color=COLORS[1], label="expected")
    measured = [t["DSR"] for t in rows]
    low = [max(0.0, t["DSR"] - t["DSR_spread"][0]) for t in rows]
    high = [max(0.0, t["DSR_spread"][1] - t["DSR"]) for t in rows]
    panel.bar(
        [p + 0.2 for p in places], measured, 0.38, yerr=(low, high), color=COLORS[0], capsize=3, label="measured (DSR)"
    )
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.set(xticks=list(places), ylabel="speedup over plain decoding")
    panel.set_xticklabels(names)
    panel.legend(framealpha=1.0, edgecolor="none")  # over the line of plain decoding
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
