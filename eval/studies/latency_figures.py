"""The figures of `scripts/measure_latency.py`: TABED's Figs. 5, 6 and 9, and the captioners of its Table 4.

Medians with quartiles; all axes of times begin at 0, so that what stays constant looks constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..style import BLUE, COLORS, GREY, INK, ORANGE, SKY, one_panel, save, styled
from ..summary import quartiles
from .latency import Measured

MARKERS = ("o", "s", "^", "D", "v", "P")


@styled
def by_length(path: Path, measured: Sequence[Measured], *, lines: str) -> None:
    """T(B, S, gamma) in ms over S, one line for each value of `lines` ("B": Fig. 5, "gamma": Fig. 6).

    Args:
        measured: of one model; what is neither S nor `lines` does not vary.
    """
    figure, panel = one_panel((5.2, 3.2))
    values = sorted({m.at[lines] for m in measured})
    for value, color, marker in zip(values, COLORS, MARKERS, strict=False):
        mine = sorted((m for m in measured if m.at[lines] == value), key=lambda m: m.at["S"])
        lengths = [m.at["S"] for m in mine]
        low, high = zip(*((1e3 * q for q in quartiles(m.seconds)) for m in mine), strict=True)
        panel.fill_between(lengths, low, high, color=color, alpha=0.18, linewidth=0)
        panel.plot(lengths, [1e3 * m.median for m in mine], marker=marker, color=color, label=f"{value}", markersize=4)
    fixed = [f"{k} = {v}" for k, v in measured[0].at.items() if k not in ("S", lines)]
    panel.set(xlabel="S, positions in the cache", ylabel="ms of a pass", xticks=sorted({m.at["S"] for m in measured}))
    panel.set_ylim(bottom=0)
    panel.set_title(", ".join([measured[0].what, *fixed]))
    panel.legend(title=lines, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)


@styled
def stages(path: Path, measured: Sequence[Measured]) -> None:
    """Stacked bars of a request's stages by the number of images (Fig. 9)."""
    names = list(dict.fromkeys(m.what for m in measured))
    images = list(dict.fromkeys(m.at["images"] for m in measured))
    figure, panel = one_panel((5.6, 0.5 * len(images) + 1.3))
    by = {(m.what, m.at["images"]): 1e3 * m.median for m in measured}
    widest = max(sum(by[name, count] for name in names) for count in images)
    for place, count in enumerate(images):
        left = 0.0
        for name, color in zip(names, (ORANGE, SKY, BLUE), strict=False):
            width = by[name, count]
            panel.barh(place, width, left=left, color=color, label=name if place == 0 else None, height=0.6)
            if width > 0.08 * widest:
                panel.text(left + width / 2, place, f"{width:.0f}", ha="center", va="center", fontsize=8,
                           color="white" if color == BLUE else INK)  # fmt: skip
            left += width
    panel.set_yticks(range(len(images)), [f"{n} image{'s' if n > 1 else ''}" for n in images])
    panel.invert_yaxis()
    panel.set_xlabel("ms")
    panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(names))
    save(figure, path)


@styled
def captioners(path: Path, measured: Sequence[Measured]) -> None:
    """Each captioner's time beside the target's prefill, by the number of images (Table 4)."""
    figure, panel = one_panel((5.6, 3.2))
    images = list(dict.fromkeys(m.at["images"] for m in measured))
    names = list(dict.fromkeys(m.what for m in measured))
    width = 0.8 / len(names)
    for number, (name, color) in enumerate(zip(names, (GREY, *COLORS), strict=False)):
        mine = [next(m for m in measured if m.what == name and m.at["images"] == count) for count in images]
        middle = [1e3 * m.median for m in mine]
        low, high = zip(*((1e3 * q for q in quartiles(m.seconds)) for m in mine), strict=True)
        errors = [[m - q for m, q in zip(middle, low, strict=True)], [q - m for m, q in zip(middle, high, strict=True)]]
        places = [place + (number - (len(names) - 1) / 2) * width for place in range(len(images))]
        label = "target's prefill" if name == "prefill" else name
        panel.bar(places, middle, 0.92 * width, yerr=errors, color=color, label=label,
                  error_kw={"elinewidth": 1, "ecolor": INK})  # fmt: skip
    panel.set_xticks(range(len(images)), [f"{n} image{'s' if n > 1 else ''}" for n in images])
    panel.set_ylabel("ms")
    panel.legend(loc="upper left")
    save(figure, path)
