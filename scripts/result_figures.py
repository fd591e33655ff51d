"""The figures of `results.py`: what `result_tables` says in numbers, with the spread of the runs."""

from __future__ import annotations

import html
import re
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path

from draftsmith.core.errors import UserError
from draftsmith.core.files import LOG_BYTES, read_text
from draftsmith.eval.style import COLORS, GREY, MARKERS, WIDEST, errors, from_zero, one_panel, panel_grid, save, styled
from draftsmith.eval.tables import GAP
from PIL import Image
from result_tables.clips import FACTS, HEADS, LENGTHS, clips
from result_tables.compared import SETS, SOME, compared
from result_tables.recorded import cells_of, student

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"


@styled
def compare(path: Path, names: Sequence[str]) -> None:
    """demo/compare: a line for each method, a colour for each set; means of the runs with their intervals."""
    figure, panels = panel_grid(1, 2, (WIDEST, 0.3 * len(names) + 1.2), sharey=True)
    for panel, key, title in zip(
        panels[0], ("tau", "DSR"), ("tau, 95% interval", "speedup of decoding, range"), strict=True
    ):
        for place, (name, color) in enumerate(zip(SETS, COLORS, strict=False)):
            values = [[cell[key] for cell in cells_of("compare", method, name)] for method in names]
            means = [statistics.fmean(some) for some in values]
            spreads = [_interval_of_tau(some) if key == "tau" else (min(some), max(some)) for some in values]
            rows = [row + 0.22 * (place - 1) for row in range(len(names))]
            panel.errorbar(means, rows, xerr=errors(means, spreads), fmt="o", color=color, markersize=4, elinewidth=1,
                           label=name)  # fmt: skip
        panel.set(xlabel=title)
        panel.grid(axis="both", alpha=0.25)
        panel.axvline(1.0, color=GREY, linewidth=1, linestyle="--")
    panels[0][0].set_yticks(range(len(names)), names)
    panels[0][0].set_ylim(len(names) - 0.5, -0.5)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncol=len(SETS))
    save(figure, path)


def _interval_of_tau(values: Sequence[float]) -> tuple[float, float]:
    """Student's, without what lies below 1: it knows nothing of this bound, and a cycle emits one token at least."""
    _, low, high = student(values)
    return max(1.0, low), high


@styled
def video(path: Path) -> None:
    """demo/video: tau against the clip's length, means of the runs with their range, and the time of a draft step."""
    figure, panels = panel_grid(1, 3, (WIDEST * 1.3, 3.6))
    visual_tokens = [int(length) for length in LENGTHS]
    for number, (facts, title) in enumerate(FACTS.items()):
        panel = panels[0][number]
        for method, color, marker in zip(HEADS, COLORS, MARKERS, strict=False):
            values = [[cell["tau"] for cell in cells] for cells in clips(method, [facts])]
            panel.fill_between(visual_tokens, [min(some) for some in values], [max(some) for some in values],
                               color=color, alpha=0.12, linewidth=0)  # fmt: skip
            panel.plot(visual_tokens, [statistics.fmean(some) for some in values], color=color, marker=marker,
                       markeredgecolor="white", label=", ".join(HEADS[method]))  # fmt: skip
        panel.set(title=title, xlabel="visual tokens", ylabel="tau (tokens a target pass)" if not number else "")
        panel.set_ylim(0, 6)
        panel.axhline(1.0, color=GREY, linewidth=1, linestyle="--")
    panel = panels[0][2]
    for method, color, marker in zip(HEADS, COLORS, MARKERS, strict=False):
        times = [[cell["T_q_ms"] for cell in cells] for cells in clips(method)]
        ratios = [
            statistics.fmean(
                long / short for i in (0, 3) for long, short in zip(times[i + place], times[i], strict=True)
            )
            for place in range(3)
        ]
        panel.plot(visual_tokens, ratios, color=color, marker=marker, markeredgecolor="white")
    panel.set(title="time of a draft step", xlabel="visual tokens", ylabel="over that at 36 visual tokens")
    from_zero(panel)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncol=3)
    save(figure, path)


@styled
def label_sheet(sheet: Path, names: Sequence[str], prompts: Sequence[str], path: Path) -> None:
    """A sheet of pictures, as an evaluation writes it, with the method of each row beside it and the prompt of each
    column above.
    """
    with Image.open(sheet) as opened:
        pictures = opened.convert("RGB")
    height = (pictures.height + GAP) / len(names)
    if (pictures.width + GAP) % height:
        raise UserError(f"{len(names)} methods do not divide its height into rows of square pictures",
                        where=str(sheet), hint="give the sheet of this recipe and temperature")  # fmt: skip
    columns = round((pictures.width + GAP) / height)
    if len(prompts) < columns:
        raise UserError(f"{len(prompts)} prompts are known of its {columns} columns", where=str(sheet),
                        hint="take the sheet and its report.html from one evaluation")  # fmt: skip
    figure, panel = one_panel((WIDEST, WIDEST * pictures.height / pictures.width))
    panel.imshow(pictures, interpolation="nearest")
    panel.set_yticks([height * (row + 0.5) for row in range(len(names))], names)
    panel.set_xticks([height * (column + 0.5) for column in range(columns)])
    panel.set_xticklabels([textwrap.fill(prompt, 12) for prompt in prompts[:columns]], fontsize=7)
    panel.xaxis.tick_top()
    panel.tick_params(length=0)
    for spine in panel.spines.values():
        spine.set_visible(False)
    save(figure, path)


def prompts_of(sheet: Path, row: str) -> list[str]:
    """The prompts of a sheet's columns, from `report.html` beside it, where each picture of a row names its own; again
    for each temperature.

    Args:
        row: the method of any row.

    Raises:
        UserError: there is no such page.
    """
    page = read_text(
        sheet.with_name("report.html"), hint="take the sheet where its evaluation wrote it", max_bytes=LOG_BYTES
    )
    return [html.unescape(prompt) for prompt in re.findall(f'alt="{re.escape(html.escape(row))}: ([^"]*)"', page)]


def draw() -> None:
    """Every figure, into docs/images."""
    compare(IMAGES / "compare.png", compared())
    compare(IMAGES / "compare-some.png", SOME)
    video(IMAGES / "video-tau.png")
