"""The synthetic shapes dataset: a function of its seed, true in every sentence, and drawn as it is described."""

import json
import math
import random
from pathlib import Path

import pytest
from draftsmith.data.conversations import PromptFormat
from draftsmith.data.pictures.videos import Clip, VideoSettings
from draftsmith.data.shapes.scenarios import (
    FACTS,
    KINDS,
    TEXT_ONLY,
    WORDS,
)
from draftsmith.data.shapes.scene import BACKGROUND, COLORS, COLUMNS, ROWS, SHAPES, Object, Scene, draw, sample_scene
from draftsmith.data.shapes.write import sample, write_dataset
from draftsmith.trainers.publish import folder as published
from fails import raising
from PIL import Image, ImageChops, ImageStat

SIZE, CELL = 48, 16
ALL = dict.fromkeys(KINDS, 6)
COLOR, SHAPE = f"(?:{'|'.join(COLORS)})", f"(?:{'|'.join(SHAPES)})"


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shapes") / "world"
    write_dataset(folder, seed=5, image_size=SIZE, splits={"train": ALL, "test": ALL})
    return folder


def test_the_scene_that_publishing_stores_is_one_of_these():
    drawn = draw(sample(0, "published", "caption", 0).scenes[0], 336)
    with Image.open(Path(published.__file__).with_name("picture.png")) as stored:
        assert ImageChops.difference(stored, drawn).getbbox() is None


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_synthetic_dataset_is_a_function_of_its_seed(synthetic, tmp_path):
    """To the last byte, in any process: the seed is a string, whose hash Python draws anew each time."""
    splits = {"train": ALL, "test": ALL}
    assert write_dataset(tmp_path / "same", seed=5, image_size=SIZE, splits=splits)["sha256"]
    assert content(tmp_path / "same") == content(synthetic)
    write_dataset(tmp_path / "other", seed=6, image_size=SIZE, splits=splits)
    assert read(tmp_path / "other", "train") != read(synthetic, "train")
    # Pinned: whatever changes these lines changes every synthetic dataset that was ever made from a seed.
    assert sample(0, "train", "name", 0).turns == [("What is in the picture?", "A pink cross.")]


def read(folder: Path, split: str) -> list[dict]:
    return json.loads((folder / f"{split}.json").read_text())


def test_a_record_depends_on_no_other(synthetic, tmp_path):
    """More of one kind, none of another, another order of kinds and splits: the rest stays."""
    counts = {kind: 9 if kind == "caption" else 2 for kind in reversed(KINDS) if kind != "probe"}
    write_dataset(tmp_path / "other", seed=5, image_size=SIZE, splits={"test": {"name": 1}, "train": counts})
    ours = {r["id"]: r for r in read(synthetic, "train")}
    theirs = {r["id"]: r for r in read(tmp_path / "other", "train")}
    both = ours.keys() & theirs.keys()
    assert len(both) == 6 + 2 * (len(KINDS) - 2)
    for name in both:
        assert ours[name] == theirs[name]
        for image in pictures(ours[name]):
            assert (synthetic / image).read_bytes() == (tmp_path / "other" / image).read_bytes()


def test_splits_share_no_scenes_by_construction():
    """Scenes of the same number in two splits are as unlike as any two; chance alone repeats the small ones."""
    for kind in ("caption", "attribute", "colors", "count", "difference", "place"):
        a, b = ([sample(5, split, kind, n).scenes for n in range(200)] for split in ("train", "test"))
        assert sum(x == y for x, y in zip(a, b, strict=True)) <= 4
        assert len(set(a)) > 100, "the world does not repeat itself either"
    large = [sample(5, split, "colors", n).scenes for split in ("train", "test") for n in range(300)]
    threes = [scenes for scenes in large if len(scenes[0].objects) == 3]
    assert len(threes) > 200 and len(set(threes)) == len(threes)


def test_colours_are_drawn_independently_of_shapes_and_places():
    """Without the picture no answer is guessed better than one in `len(COLORS)`."""
    rng, seen = random.Random(0), {}
    for _ in range(4000):
        for item in sample_scene(rng, 3).objects:
            for key in (item.shape, item.place):
                seen.setdefault(key, []).append(item.color)
    for colors in seen.values():
        most = max(colors.count(color) for color in COLORS)
        assert most / len(colors) < 1 / len(COLORS) + 4 * (0.11 / len(colors)) ** 0.5


def pictures(record: dict) -> list[str]:
    image = record.get("image", [])
    return [image] if isinstance(image, str) else image


def seen(image: Image.Image) -> dict[str, str]:
    """place -> colour, from the pixel in the middle of each place."""
    names = {rgb: name for name, rgb in COLORS.items()}
    result = {}
    for row, down in enumerate(ROWS):
        for column, across in enumerate(COLUMNS):
            pixel = image.getpixel((column * CELL + CELL // 2, row * CELL + CELL // 2))
            if pixel != BACKGROUND:
                result[f"{down} {across}"] = names[pixel]
    return result


def recognised(image: Image.Image) -> list[tuple[str, str, str]]:
    """(place, colour, shape): the shape is the one whose drawing in that place and colour is what stands there."""
    result = []
    for place, color in seen(image).items():
        row, column = ROWS.index(place.split()[0]), COLUMNS.index(place.split()[1])
        # Smoothing lets a neighbour reach less than two pixels into a place.
        box = (column * CELL + 2, row * CELL + 2, (column + 1) * CELL - 2, (row + 1) * CELL - 2)
        for shape in SHAPES:
            alone = draw(Scene((Object(shape, color, row, column),)), SIZE)
            if ImageChops.difference(alone.crop(box), image.crop(box)).getbbox() is None:
                result.append((place, color, shape))
    return result


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_told_apart(shape):
    """Each is drawn in its place alone, around the middle, in its colour, and unlike every other."""
    image = draw(Scene((Object(shape, "green", 1, 2),)), SIZE)
    assert recognised(image) == [("middle right", "green", shape)]
    left, top, right, bottom = ImageChops.difference(image, Image.new("RGB", image.size, BACKGROUND)).getbbox()
    assert 2 * CELL <= left < right <= 3 * CELL and CELL <= top < bottom <= 2 * CELL
    assert right - left > 10 and bottom - top > 10


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"word"}))
def test_pictures_and_frames_show_their_scenes(kind):
    """Read back from the pixels alone: where something stands, its colour, its shape."""
    for index in range(40):
        scenario = sample(11, "train", kind, index)
        for scene in (*scenario.scenes, *scenario.frames):
            assert recognised(draw(scene, SIZE)) == [(o.place, o.color, o.shape) for o in scene.objects]


def test_facts_are_true_of_the_drawings():
    """Those that speak of how the synthetic dataset is drawn."""
    facts = dict(FACTS)
    assert "white" in facts["Which color is the background?"] and BACKGROUND == (255, 255, 255)
    assert "three rows and three columns" in facts["What is the board of a scene?"] and len(ROWS) == len(COLUMNS) == 3
    assert "five points" in facts["How many points does the star have?"]
    star = draw(Scene((Object("star", "black", 0, 0),)), 480).convert("L").crop((0, 0, 160, 160))
    center = (80, 84)
    ring = [star.getpixel((center[0] + round(62 * math.sin(a)), center[1] - round(62 * math.cos(a)))) < 128
            for a in (math.tau * step / 720 for step in range(720))]  # fmt: skip
    assert sum(now and not before for before, now in zip(ring, ring[1:] + ring[:1], strict=True)) == 5


def test_words_are_legible_and_differ():
    """Drawn in black on white, each unlike the others, and wide enough to be read."""
    drawn = {word: draw(Scene((), word), SIZE) for word in WORDS}
    assert len({image.tobytes() for image in drawn.values()}) == len(WORDS)
    for image in drawn.values():
        left, top, right, bottom = ImageChops.difference(image, Image.new("RGB", image.size, BACKGROUND)).getbbox()
        assert right - left > 30 and bottom - top > 8
        assert image.getextrema()[0][0] < 40


def test_records_load_in_strict_mode(synthetic, open_data):
    """The synthetic dataset's files are real data: the reader of LLaVA JSON finds nothing to complain about."""
    records = read(synthetic, "train")
    form = PromptFormat(system="", image_rule="verbatim")
    dataset = open_data(synthetic / "train.json", form=form, aspect="square", max_length=1024)
    assert len(dataset) == len(records) == 6 * len(KINDS)
    for index, record in enumerate(records):
        sample = dataset[index]
        assert any(sample.loss_mask)
        tiles = len(pictures(record)) + (4 if "video" in record else 0)
        assert (0 if sample.pixels is None else len(sample.pixels)) == tiles
        assert record["id"].startswith(f"train-{record['kind']}-")
        assert record["picture_dependent"] == (record["kind"] not in TEXT_ONLY)
    attributes = open_data(synthetic / "train.json", aspect="square", kinds=["attribute", "fact"], max_length=1024)
    assert {attributes.record(i)["kind"] for i in range(len(attributes))} == {"attribute", "fact"}


def test_the_pictures_on_disk_are_those_of_the_scenes(synthetic):
    for record in read(synthetic, "train"):
        _, kind, number = record["id"].split("-")
        scenario = sample(5, "train", kind, int(number))
        assert [a for turn in scenario.turns for a in turn[1:]] == [t["value"] for t in record["conversations"][1::2]]
        for path, scene in zip(pictures(record), scenario.scenes, strict=True):
            assert Image.open(synthetic / path).tobytes() == draw(scene, SIZE).tobytes()


def test_a_clip_on_disk_is_read_back_frame_by_frame(synthetic):
    """As lossy as MPEG-4 is, every frame still shows what stands where."""
    for record in read(synthetic, "train"):
        if record["kind"] != "clip":
            continue
        scenario = sample(5, "train", "clip", int(record["id"].split("-")[2]))
        clip = Clip(synthetic / record["video"], VideoSettings())
        assert clip.numbers == [0, 1, 2, 3], "one frame a second"
        for frame, scene in zip(clip.frames(), scenario.frames, strict=True):
            drawn = draw(scene, SIZE)
            assert max(ImageStat.Stat(ImageChops.difference(frame, drawn)).mean) < 3, "colours blur at edges alone"
            (item,) = scene.objects
            place = (item.column * CELL + CELL // 2, item.row * CELL + CELL // 2)
            assert all(abs(a - b) < 16 for a, b in zip(frame.getpixel(place), COLORS[item.color], strict=True))


def test_mixtures_of_the_synthetic_dataset_are_read_like_any_other(tmp_path, open_data):
    synthetic = tmp_path / "world"
    splits = {"single": {"name": 6}, "pairs": {"difference": 4}, "clips": {"clip": 2}}
    parts = {"single": "first:50%", "pairs": "all", "clips": "end:1"}
    write_dataset(synthetic, seed=0, image_size=SIZE, splits=splits, mixtures={"mix": parts})
    form = PromptFormat(system="", image_rule="verbatim")
    dataset = open_data(synthetic / "mix.yaml", form=form, aspect="square", max_length=1024)
    kinds = [dataset.record(index)["kind"] for index in range(len(dataset))]
    assert kinds == ["name"] * 3 + ["difference"] * 4 + ["clip"]
    assert [len(dataset[index].pixels) for index in range(len(dataset))] == [1] * 3 + [2] * 4 + [4]


def test_an_interrupted_write_is_never_taken_for_a_whole_one(tmp_path, monkeypatch):
    from draftsmith.data.shapes import write

    monkeypatch.setattr(write, "draw", raising(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_dataset(tmp_path / "world", seed=0, image_size=SIZE, splits={"train": {"name": 1}})
    assert not (tmp_path / "world").exists()
    monkeypatch.undo()
    write_dataset(tmp_path / "world", seed=0, image_size=SIZE, splits={"train": {"name": 1}})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["world"]
