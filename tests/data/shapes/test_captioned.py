"""The synthetic dataset: the same bytes for a seed, figures that are kept back, and captions that say what is drawn."""

import io
import itertools
import json
import random
import tarfile

import numpy as np
import pytest
import webdataset
from draftsmith.data.shapes.captioned import (
    COLORS,
    KINDS,
    PLACES,
    SHAPES,
    Figure,
    Textures,
    caption_of,
    draw_figures,
    draw_ground,
    figures_of,
    places_of,
    sample_figures,
    write_captioned,
)
from fails import fails_with, raising
from PIL import Image

FIGURES = [Figure(*names) for names in itertools.product(sorted(COLORS), SHAPES, PLACES)]
SETTINGS = {"seed": 3, "image_size": 16, "grain": 10.0, "pairs": 0.25}


def write(folder, **changes):
    splits = changes.pop("splits", {"train": 40, "held_out": 12})
    write_captioned(folder, **(SETTINGS | changes), splits=splits)
    return folder


def members(path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {entry.name: tar.extractfile(entry).read() for entry in tar}


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_seed_writes_the_same_bytes(tmp_path):
    first = files(write(tmp_path / "a"))
    assert sorted(first) == ["held_out-00000.tar", "train-00000.tar"]
    assert files(write(tmp_path / "b")) == first
    other = files(write(tmp_path / "c", seed=4))
    assert all(other[name] != first[name] for name in first)


def test_more_pictures_and_more_splits_change_none(tmp_path):
    few = members(write(tmp_path / "few", splits={"train": 5}) / "train-00000.tar")
    many = write(tmp_path / "many", splits={"extra": 3, "train": 50, "held_out": 2})
    more = members(many / "train-00000.tar")
    assert len(few) == 15 and len(more) == 150
    assert {name: more[name] for name in few} == few
    # Another split with the same numbers has other pictures.
    assert members(many / "extra-00000.tar")["extra-000000.png"] != few["train-000000.png"]


def test_held_out_figures_stand_in_no_other_split(tmp_path):
    folder = write(tmp_path / "world", splits={"train": 400, "other": 100, "held_out": 200}, pairs=0.5)
    seen = {}
    for path in folder.iterdir():
        captions = [data.decode() for name, data in members(path).items() if name.endswith(".txt")]
        figures = [figures_of(caption) for caption in captions]
        assert {len(f) for f in figures} == {1, 2}
        seen[path.name.split("-")[0]] = {figure for row in figures for figure in row}
    assert seen["held_out"] and not seen["held_out"] & (seen["train"] | seen["other"])
    # Together they are nearly all that there are: nothing is kept out of both.
    kept_back = {figure for figure in FIGURES if figure.held_out}
    assert seen["held_out"] == kept_back and len(seen["train"]) > 0.9 * (len(FIGURES) - len(kept_back))
    # About every fifth, and at each place some of both, so that any scene can be drawn for any split.
    assert 0.1 < len(kept_back) / len(FIGURES) < 0.3
    for place in PLACES:
        assert {figure.held_out for figure in FIGURES if figure.place == place} == {True, False}


def test_captions_and_figures_are_each_others_inverse():
    captions = set()
    for figure in FIGURES:
        assert figures_of(figure.caption) == (figure,)
        captions.add(figure.caption)
    assert len(captions) == len(FIGURES) == 6 * 4 * 4
    assert "a black cross at the top left" in captions and "a red circle at the top left" in captions
    rng = random.Random(0)
    for held_out in (False, True):
        for _ in range(200):
            figures = sample_figures(rng, 2, held_out=held_out)
            assert figures_of(caption_of(figures)) == figures
            assert [f.held_out for f in figures] == [held_out] * 2
            first, second = (PLACES.index(f.place) for f in figures)
            assert first < second, "in reading order, at two places"


def test_places_name_what_stands_where():
    figures = figures_of("a black circle at the top right and a red cross at the bottom left")
    assert places_of(figures) == [[0, 0], [1, 1], [5, 4], [0, 0]]
    assert sorted(COLORS)[5 - 1] == "red" and SHAPES[4 - 1] == "cross"


@pytest.mark.parametrize("caption", [
    "", "a cat on a mat", "a red circle", "a red circle at the middle", "a mauve circle at the top left",
    "a red hexagon at the top left", "a red circle at the top left and a dog",
    "a red circle at the top left and a blue cross at the top left",
])  # fmt: skip
def test_captions_of_elsewhere_are_refused_in_words(caption):
    assert repr(caption) in str(fails_with("caption", figures_of, caption))


def test_webdataset_reads_it(tmp_path):
    folder = write(tmp_path / "world")
    result = list(webdataset.WebDataset(str(folder / "train-00000.tar"), shardshuffle=False).decode("rgb8"))
    assert [sample["__key__"] for sample in result] == [f"train-{n:06d}" for n in range(40)]
    for sample in result:
        assert sample["png"].shape == (16, 16, 3) and sample["png"].dtype == np.uint8
        figures = tuple(Figure(**figure) for figure in sample["json"]["figures"])
        assert caption_of(figures) == sample["txt"]


def test_a_caption_says_what_is_drawn(tmp_path):
    """Without grain, the middle of each quarter has the named colour, and empty quarters are paper."""
    folder = write(tmp_path / "world", grain=0.0, image_size=48, pairs=0.5)
    for name, data in (result := members(folder / "train-00000.tar")).items():
        if not name.endswith(".png"):
            continue
        figures = figures_of(result[name.replace(".png", ".txt")].decode())
        assert json.loads(result[name.replace(".png", ".json")]) == {"figures": [f.__dict__ for f in figures]}
        pixels = np.asarray(Image.open(io.BytesIO(data)))
        colors = {figure.place: COLORS[figure.color] for figure in figures}
        for index, place in enumerate(PLACES):
            row, column = divmod(index, 2)
            assert np.abs(pixels[12 + 24 * row, 12 + 24 * column] - np.array(colors.get(place, (255,) * 3))).max() < 6


def test_an_interrupted_write_leaves_no_half_dataset_and_can_be_done_again(tmp_path, monkeypatch):
    from draftsmith.data.shapes import captioned

    with monkeypatch.context() as patch:
        patch.setattr(captioned, "draw_figures", raising(KeyboardInterrupt))
        fails_with("", write, tmp_path / "world", error=KeyboardInterrupt)
    assert not (tmp_path / "world").exists()
    whole = files(write(tmp_path / "world"))
    # Killed after the synthetic dataset was there, and before its stage was marked as done: the stage writes it again.
    assert files(write(tmp_path / "world")) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["world"]


# ---- textured grounds


def ground(kind, seed, **changes):
    settings = Textures(kinds=[kind], **({"half_plain": 0.0} | changes))
    return draw_ground(settings, 32, np.random.default_rng(seed)).astype(float)


def cells_of(picture):
    """[S,S,3] -> [S/4,S/4,4,4] grey values of what one code stands for, of 4 x 4 pixels."""
    side = len(picture) // 4
    return picture.mean(-1).reshape(side, 4, side, 4).swapaxes(1, 2)


def test_textures_come_from_the_seed(tmp_path):
    textures = Textures()
    first, again = (files(write(tmp_path / name, textures=textures, image_size=32)) for name in "ab")
    assert first == again
    assert first != files(write(tmp_path / "c", textures=textures, image_size=32, seed=4))
    assert first != files(write(tmp_path / "d", image_size=32))
    # Captions are those of plain pictures: a texture is nothing that a caption asks for.
    plain, textured = (members(tmp_path / name / "train-00000.tar") for name in "da")
    assert {n: d for n, d in plain.items() if n.endswith(".txt")} == {
        n: d for n, d in textured.items() if n.endswith(".txt")
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_texture_has_the_asked_contrast_and_no_two_are_alike(kind):
    pictures = [ground(kind, seed, contrast=20.0) for seed in range(30)]
    assert np.mean([picture.mean() for picture in pictures]) == pytest.approx(190, abs=8)
    assert np.mean([picture.std() for picture in pictures]) == pytest.approx(20, rel=0.15)
    assert len({picture.tobytes() for picture in pictures}) == 30


@pytest.mark.parametrize("kind", KINDS)
def test_the_cells_of_a_texture_differ_from_each_other(kind):
    """What makes codes uncertain: many cells are about equally likely."""
    cells = np.concatenate([cells_of(ground(kind, seed)).reshape(-1, 4, 4) for seed in range(10)])
    shares = np.unique(cells, axis=0, return_counts=True)[1] / len(cells)
    # As many cells as are drawn equally often: speckle has sixteen in all, other kinds hardly any cell twice.
    assert np.exp(-(shares * np.log(shares)).sum()) > (8 if kind == "speckle" else 0.5 * len(cells))
    assert np.median(cells.std((1, 2))) > 10


def test_patterns_go_on_and_noise_does_not():
    """Cells a period apart are alike in patterns alone."""

    def repeats(kind):
        pictures = [ground(kind, seed).mean(-1) for seed in range(40)]
        # Both periods of the shortest kinds divide 32 pixels: half a picture apart for two and for four of them.
        return np.mean([np.corrcoef(p[:, :16].ravel(), p[:, 16:].ravel())[0, 1] for p in pictures])

    assert abs(repeats("grain")) < 0.1 and abs(repeats("speckle")) < 0.1
    assert repeats("stripes") > 0.2 and repeats("checks") > 0.2


def test_figures_stand_before_the_texture():
    """Cells inside a figure have its colour, whatever the ground; those on its edge have the highest contrast."""
    figure = Figure("red", "square", "top left")
    settings = Textures(kinds=["grain"], half_plain=0.0)
    for seed in range(5):
        picture = draw_figures((figure,), 32, grain=0.0, rng=np.random.default_rng(seed), textures=settings)
        pixels = np.asarray(picture).astype(float)
        assert np.abs(pixels[5:12, 5:12] - np.array(COLORS["red"])).max() < 8
        contrast = cells_of(pixels).std((2, 3))
        assert contrast[1:3, 1:3].max() < 3 < 10 < np.median(contrast[4:])
        assert np.median([contrast[0, 0], contrast[0, 3], contrast[3, 0]]) > np.median(contrast[4:])
