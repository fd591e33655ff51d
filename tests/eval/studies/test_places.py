"""Kinds of places in pictures against pictures whose places are known, and numbers by place against brute force."""

import numpy as np
import pytest
import torch
from draftsmith.data.shapes.captioned import Figure, Textures, draw_figures
from draftsmith.eval.studies.drawn_cells import CellStatistics
from draftsmith.eval.studies.drawn_tables import by_place, contrasts, kinds_of, places_table

FLAT, TEXTURE, EDGE = range(3)


def picture(figures, seed=0, **changes):
    """uint8 [1,3,32,32] on a texture, or on plain paper where `half_plain` and seed say so."""
    rng = np.random.default_rng(seed)
    image = draw_figures(figures, 32, grain=1.0, rng=rng, textures=Textures(**changes))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]


def test_contrast_is_the_deviation_of_a_cells_pixels():
    pictures = torch.randint(0, 256, (2, 3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    values = contrasts(pictures, 3)
    assert values.shape == (2, 9)
    for number in range(9):
        row, column = divmod(number, 3)
        cell = pictures[1, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].numpy().astype(float)
        assert values[1, number] == pytest.approx(np.sqrt((cell.reshape(3, -1).std(1) ** 2).mean()), rel=1e-5)
    assert (contrasts(torch.full((1, 3, 8, 8), 7, dtype=torch.uint8), 2) == 0).all()


def test_figures_textures_and_plain_paper_are_told_apart():
    figure = Figure("red", "square", "top left")
    for seed in range(6):
        kinds = kinds_of(contrasts(picture((figure,), seed, kinds=["grain"], half_plain=0.0), 8)).view(8, 8)
        assert (kinds[1:3, 1:3] == FLAT).all(), "inside the square"
        assert (kinds[0, 1:3] == EDGE).all() and (kinds[1:3, 0] == EDGE).all()
        assert (kinds[4:] == TEXTURE).float().mean() > 0.8
        halves = kinds_of(contrasts(picture((), seed, kinds=["grain"], half_plain=1.0), 8)).view(8, 8)
        plain, other = (halves[:4], halves[4:]) if (halves[0] == FLAT).all() else (halves[4:], halves[:4])
        assert (plain == FLAT).all() and (other == TEXTURE).float().mean() > 0.7


def test_means_by_place_are_those_of_its_cells():
    generator = torch.Generator().manual_seed(0)
    kinds = torch.randint(0, 2, (3, 9), generator=generator)  # no edges
    contrast = torch.tensor([1.0, 20.0])[kinds]
    statistics = CellStatistics(
        top1=torch.rand(3, 9, generator=generator), top10=torch.rand(3, 9, generator=generator),
        rank_best=torch.randint(1, 4, (3, 8), generator=generator), exact=torch.rand(3, 8, generator=generator),
        accept=torch.rand(3, 2, 2, 8, generator=generator), size=torch.ones(3, 2, 2, 8), overlap=torch.ones(3, 8),
        rank_drawn=torch.ones(3, 8), bounds=(), first=None,
    )  # fmt: skip
    places = by_place(statistics, contrast)
    assert set(places) == {"flat", "texture"}
    for number, name in ((FLAT, "flat"), (TEXTURE, "texture")):
        cells = [(i, c) for i in range(3) for c in range(9) if kinds[i, c] == number]
        drafted = [(i, c - 1) for i, c in cells if c > 0]
        assert places[name]["share"] == pytest.approx(len(cells) / 27)
        assert places[name]["target_top1"] == pytest.approx(np.mean([float(statistics.top1[c]) for c in cells]))
        exact, lantern = (
            [float(v[i, c]) for i, c in drafted] for v in (statistics.exact, statistics.accept[:, -1, -1])
        )
        assert places[name]["first_draft_exact"] == pytest.approx(np.mean(exact))
        assert places[name]["first_draft_lantern"][-1][-1] == pytest.approx(np.mean(lantern))
        ranked = [int(statistics.rank_best[i, c]) == 1 for i, c in drafted]
        assert places[name]["head_top1"] == pytest.approx(np.mean(ranked))
    table = places_table({1.0: places}, "k=4, delta=0.4")
    assert [row[:2] for row in table.rows] == [(1.0, "flat"), (1.0, "texture")]
