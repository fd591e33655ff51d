"""Training curves of several runs, one panel for each stage and metric."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PER_ROW = 3


def draw_curves(path: Path, panels: Sequence[tuple[str, dict[str, list[tuple[int, float]]]]]) -> None:
    """`panels`: title, run -> (step, value); a run has the same colour in all of them."""
    names = list(dict.fromkeys(name for _, lines in panels for name in lines))
    rows, columns = -(-len(panels) // PER_ROW), min(PER_ROW, len(panels))
    figure, axes = plt.subplots(rows, columns, figsize=(4.4 * columns, 3.2 * rows), squeeze=False)
    for panel in axes.flat[len(panels) :]:
        panel.set_visible(False)
    for panel, (title, lines) in zip(axes.flat, panels, strict=False):
        for name, points in lines.items():
            steps, values = zip(*points, strict=True)
            style = {"marker": "o", "markersize": 3} if len(points) < 12 else {}
            place = names.index(name)
            # Wider below: runs that agree are both seen.
            width = 1.2 + 1.6 * (len(names) - 1 - place) / len(names)
            panel.plot(steps, values, color=f"C{place % 10}", label=name, linewidth=width, **style)
        panel.set(title=title, xlabel="optimizer step")
        panel.grid(alpha=0.3)
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
