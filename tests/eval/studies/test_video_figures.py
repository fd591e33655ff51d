"""Figures of the video track are drawn from rows and analyses as they come."""

from draftsmith.eval.cells import HeldVisual, MethodInfo
from draftsmith.eval.studies import video, video_figures
from draftsmith.eval.studies.video import by_visual_tokens
from PIL import Image

from ..rows import a_row

# Sparrow, table 4 (tau by visual tokens), and what its figure 1a says of drafting.
TAUS = {
    "MSD": ([4.12, 3.97, 1.11, 1.04], [1.5, 1.7, 5.5, 7.8]),
    "ViSpec": ([4.29, 4.18, 3.74, 3.42], [1.6, 1.6, 1.7, 1.8]),
    "MSD + VATA": ([4.11, 4.01, 3.94, 4.01], [1.5, 1.5, 1.5, 1.5]),
    "Sparrow": ([4.51, 4.36, 4.32, 4.37], [1.5, 1.5, 1.5, 1.6]),
}
TOKENS = {"0.5k": 500, "1.5k": 1500, "17k": 17_000, "25k": 25_089}


def rows():
    return [
        a_row(request=f"r{n}", method=method, budget=budget, visual_tokens=TOKENS[budget] + n, medium="video",
              accepted=(2,) * 100, emitted=(3,) * 99 + (round(100 * tau) + 20 * n - 297,), draft_s=ms / 1e3)
        for method, (taus, times) in TAUS.items()
        for budget, tau, ms in reversed([*zip(TOKENS, taus, times, strict=True)])
        for n in (-1, 0, 1)
    ]  # fmt: skip


def is_drawn(path) -> bool:
    with Image.open(path) as image:
        assert image.width <= 8.4 * 130
        return len(image.convert("RGB").getcolors(1 << 24)) > 50


def test_cells_by_visual_tokens():
    result = by_visual_tokens(rows())
    assert [*result] == [*TAUS]
    assert [c.tau for c in result["MSD"]] == TAUS["MSD"][0], "the shortest first, whatever came first"
    assert [c.visual_tokens for c in result["MSD"]] == [*TOKENS.values()]


def test_tau_by_the_share_that_is_held(tmp_path, monkeypatch):
    """Sparrow's figure 1b: each set and way of choosing is a line from nothing to everything."""
    held = {
        "all": HeldVisual("msd", 1.0), "none": HeldVisual("msd", 0.0),
        "half by last": HeldVisual("msd", 0.5, "last"), "half by text": HeldVisual("msd", 0.5, "text"),
        "VATA": HeldVisual("sparrow", 0.0), "chain": HeldVisual("msd", 1.0),
    }  # fmt: skip
    taus = {
        "ChartQA": {"all": 4.25, "half by last": 4.26, "half by text": 4.24, "none": 4.27},
        "VideoDetailCaption": {
            "all": 1.11,
            "half by last": 1.9,
            "half by text": 1.7,
            "none": 3.94,
            "VATA": 4.3,
            "chain": 2.0,
        },
    }
    rows = [
        a_row(request=f"r{n}", benchmark=name, method=method, medium="image" if name == "ChartQA" else "video",
              budget="" if name == "ChartQA" else "17k", visual_tokens=17_000 if name != "ChartQA" else 900,
              emitted=(3,) * 99 + (round(100 * tau) - 297,), accepted=(2,) * 100)
        for name, of in taus.items() for method, tau in of.items() for n in (0, 1)
    ]  # fmt: skip
    drawn = []
    monkeypatch.setattr(video, "tau_by_visual_share", lambda path, sets, title: drawn.append((path.name, sets, title)))
    (section,) = video.video_sections(
        tmp_path,
        rows,
        {name: MethodInfo(tree="chain of 5" if name == "chain" else "30-4-8") for name in held},
        held=held,
    )
    ((name, sets, title),) = drawn  # a head, or a tree, with no share in between has no figure
    assert (name, title) == ("visual-share.png", "msd, 30-4-8") and section.content[0].path == name
    assert [*sets] == ["ChartQA", "VideoDetailCaption at 17k"]
    for place, of in zip(sets.values(), taus.values(), strict=True):
        assert {held: s.tau for held, s in place.items()} == {
            held[m]: tau for m, tau in of.items() if m not in ("VATA", "chain")
        }
    video_figures.tau_by_visual_share(tmp_path / name, sets, title=title)
    assert is_drawn(tmp_path / name)


def test_every_figure_is_drawn_and_its_axes_are_named(tmp_path, monkeypatch):
    drawn, save = [], video_figures.save
    monkeypatch.setattr(video_figures, "save", lambda figure, path: (drawn.append(figure), save(figure, path)))
    cells = by_visual_tokens(rows())
    title = "Sparrow, table 4"
    video_figures.tau_by_visual_tokens(tmp_path / "tau.png", cells, title=title)
    shares = {
        "0.4k visual tokens": {"instruction": 0.45, "visual": 0.3, "text": 0.25},
        "3k visual tokens": {"instruction": 0.2, "visual": 0.77, "text": 0.03},
        "3k, VATA": {"instruction": 0.6, "visual": 0.0, "text": 0.4},
    }
    video_figures.attention_bars(tmp_path / "attention.png", shares)
    accuracy = {
        "AI2D": {0: 0.3, 4: 0.35, 8: 0.4, 12: 0.6, 16: 0.75, 20: 0.8, 28: 0.81},
        "VideoMME": {0: 0.35, 4: 0.35, 8: 0.38, 12: 0.45, 16: 0.55, 20: 0.6, 28: 0.6},
    }
    video_figures.importance_curve(tmp_path / "importance.png", accuracy, bridge=14)
    kept = {"visual": [0.97**n - 0.03 * n for n in range(29)], "text": [0.985**n for n in range(29)]}
    video_figures.retention_curve(tmp_path / "retention.png", kept, bridge=14)
    looks = [[0.1 + 0.02 * layer * head for head in range(28)] for layer in range(28)]
    video_figures.attention_map(tmp_path / "map.png", looks, bridge=14)
    for name, figure in zip(("tau", "attention", "importance", "retention", "map"), drawn, strict=True):
        assert is_drawn(tmp_path / f"{name}.png"), name
        assert any(panel.get_xlabel() for panel in figure.axes), name
    for panel in drawn[0].axes:
        assert panel.get_ylim()[1] >= 1.05 * max(max(line.get_ydata()) for line in panel.lines), "room for a mark"
