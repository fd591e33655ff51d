"""Each figure is a file that shows something, at a README's size, and leaves matplotlib as it was."""

from pathlib import Path
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
import torch
from draftsmith.eval.studies.drawn import map_figures, method_figures, share_figures
from draftsmith.eval.studies.drawn import report_section as section
from draftsmith.eval.studies.drawn.map_figures import SHOWN_TOKENS
from draftsmith.eval.studies.drawn.maps import cell_map, depth_map, length_map
from draftsmith.eval.style import PALE
from draftsmith.eval.summary import summarize
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

from ..rows import random_rows

GRID = 4
PICTURE = torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
ACCEPTED = [0, 3, 1, 0, 2, 3]
GENERATOR = torch.Generator().manual_seed(1)
P = (3 * torch.randn(16, 50, generator=GENERATOR)).softmax(-1)
Q = (3 * torch.randn(15, 50, generator=GENERATOR)).softmax(-1)
METHODS = {
    name: summarize(random_rows(9, seed=seed, verify_s=0.0304, rule_s=0.0004, draft_cycle_s=0.008 * seed,
                                plain_cycle_s=0.025))
    for seed, name in enumerate(("EAGLE-2", "ADT-Tree"), 1)
}  # fmt: skip
SETTINGS = [method_figures.TradeOff(k, d, 1 + d * k / 300, 15 + 5 * d) for k in (100, 300) for d in (0.1, 0.4)]


FIGURES = {
    "one depth": lambda path: map_figures.picture_maps(path, [PICTURE], [depth_map(ACCEPTED, GRID)], "depth"),
    "five depths": lambda path: map_figures.picture_maps(
        path,
        [PICTURE] * 5,
        [depth_map(ACCEPTED, GRID)] * 5,
        "depth",
        ["a caption that is too long for its picture " * 3] * 5,
    ),
    "lengths": lambda path: map_figures.picture_maps(
        path, [PICTURE] * 2, [length_map(ACCEPTED, GRID)] * 2, "", ["a", "b"]
    ),
    "mean lengths": lambda path: map_figures.picture_maps(
        path, (), [length_map(ACCEPTED, GRID) / 3] * 3, "", list("abc")
    ),
    "equal cells": lambda path: map_figures.picture_maps(path, [PICTURE], [torch.ones(GRID, GRID)], ""),
    "top-1": lambda path: map_figures.picture_maps(
        path, [PICTURE] * 3, [cell_map(P.amax(-1), GRID)] * 3, "probability", limits=(0.0, 1.0)
    ),
    "distributions": lambda path: map_figures.distributions_at(path, PICTURE, P, Q, [0, 7, 15], grid=GRID),
    "certain": lambda path: map_figures.distributions_at(path, PICTURE, torch.eye(16), None, [3], grid=GRID),
    "sizes": lambda path: map_figures.set_size_grid(
        path, {f"delta = {d}": cell_map(torch.arange(15) * d, GRID) for d in (1, 2)}
    ),
    "accepted": lambda path: share_figures.accepted_histogram(path, {"T = 0": [0.5, 0.25, 0.25], "T = 1": [1.0]}),
    "ranks": lambda path: share_figures.rank_histogram(
        path, {"T = 0": torch.tensor([[1, 2], [4, 9000]]), "T = 1": torch.tensor([1, 30])}
    ),
    "few ranks": lambda path: share_figures.rank_histogram(path, {"T = 0": torch.tensor([1, 1, 2])}),
    "accuracy": lambda path: share_figures.share_bars(path, {"training": {"top-1": 0.4, "top-3": 0.6}}, ""),
    "probability": lambda path: share_figures.share_bars(path, {t: {"top-1": 0.1, "top-10": 0.5} for t in "ab"}, "p"),
    "acceptance": lambda path: method_figures.acceptance_grid(
        path, torch.tensor([[0.07, 0.2], [0.08, 0.3]]), [100, 1000], [0.05, 0.4], exact=0.04
    ),
    "no gain": lambda path: method_figures.acceptance_grid(path, torch.tensor([[0.5]]), [1], [0.1], exact=0.5),
    "initialisations": lambda path: method_figures.initialisations(path, METHODS),
    "trade-off": lambda path: method_figures.trade_off(
        path, SETTINGS, quality="FID", higher_is_better=False, references={"plain": (1, 15)}
    ),
    "latency": lambda path: method_figures.latency_bars(path, METHODS),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_shows_something_at_the_size_of_a_readme(tmp_path, name):
    path, before = tmp_path / "new" / "figure.png", dict(matplotlib.rcParams)
    FIGURES[name](path)
    pixels = np.asarray(Image.open(path).convert("RGB"))
    height, width, _ = pixels.shape
    assert 200 <= width <= 1100 and 150 <= height <= 1000, (width, height)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20
    assert 0.02 < (pixels.min(-1) < 250).mean() < 0.95  # neither empty nor full of ink
    assert dict(matplotlib.rcParams) == before and not plt.get_fignums()


def drawn(monkeypatch, draw, *args, **kwargs):
    """The figure instead of its file."""
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: kept.append(figure))
    draw(Path("unwritten.png"), *args, **kwargs)
    return kept[0]


def test_every_depth_has_its_own_colour(monkeypatch):
    """Whole numbers are classes: their colours differ, and the bar names each."""
    figure = drawn(monkeypatch, map_figures.picture_maps, [PICTURE], [depth_map(ACCEPTED, GRID)], "")
    image = figure.axes[1].images[0]
    colors = image.to_rgba(torch.tensor([[0.0, 1.0, 2.0, 3.0]]).numpy())[0]
    assert len({tuple(color) for color in colors}) == 4
    assert figure.axes[2].get_xticks().tolist() == [0, 1, 2, 3]


def test_a_missing_cell_is_grey_and_not_a_value(monkeypatch):
    figure = drawn(monkeypatch, map_figures.picture_maps, [PICTURE], [length_map(ACCEPTED, GRID)], "")
    image = figure.axes[1].images[0]
    corner = image.to_rgba(image.get_array())[0, 0]
    assert np.allclose(corner[:3], matplotlib.colors.to_rgb(PALE), atol=0.01)


def test_distributions_are_sorted_by_the_target_and_the_head_follows(monkeypatch):
    figure = drawn(monkeypatch, map_figures.distributions_at, PICTURE, P, Q, [0, 6], grid=GRID)
    first, second = figure.axes[1:3]
    mass, order = P[6].sort(descending=True)
    assert [bar.get_height() for bar in second.patches] == pytest.approx(mass[:SHOWN_TOKENS].tolist())
    assert second.lines[0].get_ydata() == pytest.approx(Q[5][order[:SHOWN_TOKENS]].numpy())
    assert not first.lines  # nothing is drafted for the first cell
    assert second.get_title() == "b: row 2, column 3"


def test_shares_of_ranks_are_whole(monkeypatch):
    ranks = torch.tensor([1, 2, 3, 4, 5, 6, 10, 11, 50, 51, 300, 1000, 1001, 16384])
    figure = drawn(monkeypatch, share_figures.rank_histogram, {"T": ranks})
    panel = figure.axes[0]
    assert sum(bar.get_height() for bar in panel.patches) == pytest.approx(1.0)
    labels = [label.get_text() for label in panel.get_xticklabels()]
    assert labels[:5] == ["1", "2", "3", "4–5", "6–10"] and labels[-1] == ">1000"


def test_latency_adds_up_under_plain_decoding(monkeypatch):
    panel = drawn(monkeypatch, method_figures.latency_bars, METHODS).axes[0]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["plain decoding", *METHODS]
    ends: dict[float, float] = {}
    for bar in panel.patches:
        ends[round(bar.get_y(), 2)] = max(ends.get(round(bar.get_y(), 2), 0), bar.get_x() + bar.get_width())
    expected = [25.0, *(m.target_ms + m.drafter_ms + m.rule_ms for m in METHODS.values())]
    assert list(ends.values()) == pytest.approx(expected)


def test_trade_off_draws_a_line_for_each_k_in_order_of_delta(monkeypatch):
    figure = drawn(
        monkeypatch, method_figures.trade_off, SETTINGS[::-1], quality="FID", higher_is_better=False,
        references={"plain": (1.0, 15.0)},
    )  # fmt: skip
    (star,) = (line for line in figure.axes[0].lines if line.get_marker() == "*")
    assert star.get_xydata().tolist() == [[1.0, 15.0]]
    lines = [line for line in figure.axes[0].lines if line.get_linestyle() == "-"]
    assert [line.get_xdata().tolist() for line in map(_arrays, lines)] == [
        [p.tau for p in SETTINGS if p.k == k] for k in (100, 300)
    ]
    assert figure.axes[0].get_ylabel() == "FID (lower is better)"


def test_bars_are_the_shares_that_are_written_above_them(monkeypatch):
    """LANTERN's figures 2b and 2c, ADT-Tree's figure 1: a colour for each of top-1 and top-3, or top-10."""
    groups = {"training": {"top-1": 0.4, "top-3": 0.6}, "held-out": {"top-1": 0.3, "top-3": 0.5}}
    panel = drawn(monkeypatch, share_figures.share_bars, groups, "accuracy").axes[0]
    assert [bar.get_height() for bar in panel.patches] == [0.4, 0.3, 0.6, 0.5]
    assert [text.get_text() for text in panel.texts] == ["40.0%", "30.0%", "60.0%", "50.0%"]
    assert [label.get_text() for label in panel.get_xticklabels()] == [*groups]
    assert panel.get_ylabel() == "accuracy"


def test_every_cell_of_table_1_has_its_acceptance(monkeypatch):
    accept = torch.tensor([[0.0759, 0.3267], [0.0786, 0.3657]])  # two of its rows
    draw = method_figures.acceptance_grid
    panel = drawn(monkeypatch, draw, accept, [300, 1000], [0.05, 0.4], exact=0.0402).axes[0]
    assert [text.get_text() for text in panel.texts] == ["0.076", "0.327", "0.079", "0.366"]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["0.05", "0.4"]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["300", "1000"] and "0.040" in panel.get_title()


def test_initialisations_are_compared_by_tau_planned_depth_and_speedup(monkeypatch):
    """ADT-Tree's figure 8, in its order."""
    methods = {name: type(s)(**vars(s) | {"planned_depth": 5.0, "kept_depth": 3.9}) for name, s in METHODS.items()}
    panels = drawn(monkeypatch, method_figures.initialisations, methods).axes
    expected = [[getattr(s, name) for s in methods.values()] for name in ("tau", "planned_depth", "ESR")]
    assert [[bar.get_width() for bar in panel.patches] for panel in panels] == expected


def test_a_map_has_each_cells_probability_at_its_place(monkeypatch):
    """ADT-Tree's figures 4 and 9: likeliest probabilities, whatever their range on one scale from 0 to 1."""
    values = cell_map(P.amax(-1), GRID)
    image = drawn(monkeypatch, map_figures.picture_maps, [PICTURE], [values], "", limits=(0.0, 1.0)).axes[1].images[0]
    assert np.asarray(image.get_array()) == pytest.approx(values.numpy()) and image.get_clim() == (0.0, 1.0)


def _arrays(line):
    line.set_xdata(np.asarray(line.get_xdata()))
    return line


def test_more_groups_than_colours_are_refused(tmp_path):
    many = {str(n): [1.0] for n in range(8)}
    with pytest.raises(AssertionError):
        share_figures.accepted_histogram(tmp_path / "x.png", many)
    with pytest.raises(AssertionError):
        map_figures.picture_maps(tmp_path / "x.png", [PICTURE] * 6, [depth_map(ACCEPTED, GRID)] * 6, "")


def test_every_figure_is_drawn_in_one_style():
    modules = (map_figures, method_figures, share_figures)
    public = {f for module in modules for name, f in vars(module).items() if not name.startswith("_")}
    figures = [f for f in public if "path" in getattr(f, "__annotations__", ()) and f.__name__ != "save"]
    assert len(figures) == 10 and all(hasattr(f, "__wrapped__") for f in figures)


def test_a_first_drafts_chance_has_a_name_of_its_own():
    statistics = SimpleNamespace(bounds=(), summary=lambda: {
        "pictures": 2, "accuracy_top1": 0.1, "accuracy_top3": 0.2, "target_top1": 0.3, "target_top10": 0.4,
        "expected_acceptance": 0.5, "first_draft_exact": 0.334, "first_draft_lantern": [[0.6]],
    })  # fmt: skip
    settings = SimpleNamespace(k=[4], delta=[0.2])
    cells, _ = section._numbers(settings, {0.0: statistics})
    assert cells.column("first draft's chance, exact") == [0.334]
    assert cells.column("first draft's chance, LANTERN k=4, delta=0.2") == [0.6]
