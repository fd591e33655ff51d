"""The figures of `scripts/papers/measure_latency.py`: TABED's Figs. 5, 6 and 9, and the captioners of its Table 4.

Medians with quartiles; all axes of times begin at 0, so that what stays constant looks constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftsmith.eval.intervals import quartiles
from draftsmith.eval.style import BLUE, COLORS, GREY, INK, ORANGE, SKY, errors, lines, one_panel, save, stacked, styled
from draftsmith.scripts.papers.latency import Measured


@styled
def by_length(path: Path, measured: Sequence[Measured], *, lines_of: str) -> None:
    """T(B, S, gamma) in ms over S, one line for each value of `lines_of` ("B": Fig. 5, "gamma": Fig. 6).

    Args:
        measured: of one model; what is neither S nor `lines_of` does not vary.
    """
    figure, panel = one_panel((5.2, 3.2))
    values = sorted({m.at[lines_of] for m in measured})
    curves = {}
    for value, color in zip(values, COLORS, strict=False):
        mine = sorted((m for m in measured if m.at[lines_of] == value), key=lambda m: m.at["S"])
        lengths = [m.at["S"] for m in mine]
        low, high = zip(*((1e3 * q for q in quartiles(m.seconds)) for m in mine), strict=True)
        panel.fill_between(lengths, low, high, color=color, alpha=0.18, linewidth=0)
        curves[f"{value}"] = lengths, [1e3 * m.median for m in mine]
    lines(panel, curves, markersize=5)
    fixed = [f"{k} = {v}" for k, v in measured[0].at.items() if k not in ("S", lines_of)]
    panel.set(xlabel="S, positions in the cache", ylabel="ms of a pass", xticks=sorted({m.at["S"] for m in measured}))
    panel.set_ylim(bottom=0)
    panel.set_title(", ".join([measured[0].what, *fixed]))
    panel.legend(title=lines_of, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)


@styled
def stages(path: Path, measured: Sequence[Measured]) -> None:
    """Stacked bars of a request's stages by the number of images (Fig. 9)."""
    names = list(dict.fromkeys(m.what for m in measured))
    images = list(dict.fromkeys(m.at["images"] for m in measured))
    figure, panel = one_panel((5.6, 0.5 * len(images) + 1.3))
    by = {(m.what, m.at["images"]): 1e3 * m.median for m in measured}
    bars = {label: [by[name, n] for name in names] for label, n in zip(counted(images), images, strict=True)}
    handles = stacked(panel, bars, (ORANGE, SKY, BLUE), shown=".0f", least=0.08)
    panel.set_xlabel("ms")
    panel.legend(handles, names, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(names))
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
        spread = errors(middle, [[1e3 * q for q in quartiles(m.seconds)] for m in mine])
        places = [place + (number - (len(names) - 1) / 2) * width for place in range(len(images))]
        label = "target's prefill" if name == "prefill" else name
        panel.bar(places, middle, 0.92 * width, yerr=spread, color=color, label=label,
                  error_kw={"elinewidth": 1, "ecolor": INK})  # fmt: skip
    panel.set_xticks(range(len(images)), counted(images))
    panel.set_ylabel("ms")
    panel.legend(loc="upper left")
    save(figure, path)


def counted(images: Sequence[int]) -> list[str]:
    """ "1 image", "2 images"."""
    return [f"{n} image{'s' if n > 1 else ''}" for n in images]
