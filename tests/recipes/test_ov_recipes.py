"""The OneVision recipes: TABED's table 8, the vision tower at one fifth, mixtures counted before a run."""

import json
import re

import pytest
from command_line import prints
from draftsmith.data.pictures.tiles import Tiling, onevision_resolutions, tiled_picture
from draftsmith.data.pictures.videos import write_clip
from draftsmith.recipes.commands.cli import main
from draftsmith.recipes.config.files import recipe_names
from draftsmith.recipes.config.load import load
from draftsmith.trainers.stages.train import TrainRecords
from PIL import Image
from small_records import talk

REAL = ["llava-ov-68m", "llava-ov-160m", "llava-ov-68m-anyres"]
PHASES = ["align", "knowledge", "single_image", "onevision"]


def loaded(*arguments: str):
    return load(list(arguments))


@pytest.mark.parametrize("name", REAL)
def test_four_phases_with_the_numbers_of_table_8(name):
    recipe = loaded(f"recipe={name}").recipe
    assert list(recipe.stages) == [*PHASES, "evaluate"]
    for phase in PHASES:
        stage = recipe.stages[phase]
        optim = stage.optim
        assert (stage.batch_size, stage.epochs, optim.schedule) == (512, 1, "cosine")
        assert (optim.warmup_ratio, optim.weight_decay) == (0.03, 0)
        assert optim.lr == (1e-3 if phase == "align" else 1e-5)
        assert stage.trainable == (
            ["projector"] if phase == "align" else ["vision_tower", "projector", "language_model"]
        )
        assert stage.format.template == ("plain" if phase == "align" else "v1")
        assert stage.expected is not None and stage.expected.samples >= 558128
        assert stage.data.over_length == (None if phase == "align" else "drop_images")
        assert stage.micro <= stage.batch_size
    for phase in PHASES[1:]:
        assert recipe.stages[phase].data.path.endswith(".yaml"), "users point these at their copies"
        assert recipe.stages[phase].format.image_rule == "next", "several pictures keep their marks"


def test_the_vision_tower_trains_at_one_fifth_wherever_it_trains():
    checked = 0
    for name in recipe_names():
        recipe = loaded(f"recipe={name}").recipe
        if recipe.drafter is None or recipe.drafter.kind != "lvlm":
            continue
        for stage in recipe.stages.values():
            if isinstance(stage, TrainRecords) and stage.model == "drafter" and "vision_tower" in stage.trainable:
                assert stage.optim.lr_by_part == {"vision_tower": pytest.approx(stage.optim.lr / 5)}, name
                checked += 1
    assert checked >= 3 * len(REAL) + 6


def test_more_than_the_positions_needs_scaled_ones(capsys):
    unscaled = ["recipe=llava-ov-68m-anyres", "dry_run=true", "drafter.rope_scaling=null"]
    told = prints(capsys, unscaled, 2)
    assert "8192 and the language model has 2048 positions" in told and "drafter.rope_scaling" in told
    assert main([*unscaled, "stages.knowledge.positions=8192"]) == 0, "later phases have those of the phase before"


def record(number: int, pictures: int, words: int = 3) -> dict:
    turns = talk("<image> " * pictures + "what", "cat " * words)
    return {"id": str(number), "conversations": turns, "image": [f"{n}.png" for n in range(pictures)]}


def test_a_mixture_on_disk_is_counted_with_what_is_too_long(tmp_path, capsys):
    """Three pictures of 576 fit 2,048 ids, four do not; nor do 2,100 words."""
    rows = [record(n, 1 + n % 4) for n in range(8)] + [record(8, 0, words=2100)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(record(n, 1)) + "\n" for n in range(10)))
    mixture = tmp_path / "mix.yaml"
    mixture.write_text("datasets:\n- json_path: a.json\n- {json_path: b.jsonl, sampling_strategy: 'first:25%'}\n")
    assert main(["recipe=llava-ov-68m", "dry_run=true", f"stages.onevision.data.path={mixture}"]) == 0
    shown = capsys.readouterr().out.split("stage onevision")[1]
    assert "samples 12 (measured)" in shown and "2 data files, 1 of them in part: 12 of 19 records" in shown
    assert re.search(r"words of text and 13,248 visual tokens", shown), "23 pictures of 576"
    assert "longer than max_length 2,048 in words and pictures alone: 3 samples (drop_images)" in shown
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.jsonl", "mix.yaml"]


@pytest.fixture
def tiled(tmp_path):
    """Six records for anyres_max_9: tiles of 384 pixels, 729 patches each."""
    for name, size in (("square", (384, 384)), ("wide", (640, 480)), ("tall", (833, 1428))):
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    write_clip(tmp_path / "clip.mp4", [Image.new("RGB", (32, 32))] * 4, fps=1)

    def of(number: int, *files: str, words: int = 3) -> dict:
        return record(number, len(files), words) | {"image": list(files)}

    rows = [
        of(0, "square.png"), of(1, "wide.png"), of(2, "tall.png", words=600), of(3, "square.png", "tall.png"), of(4),
        of(5, "clip.mp4") | {"image": [], "video": ["clip.mp4"]},
    ]  # fmt: skip
    path = tmp_path / "mix.json"
    path.write_text(json.dumps(rows))

    def measured(capsys) -> str:
        settings = [f"stages.onevision.data.path={path}", f"stages.onevision.data.images={tmp_path}"]
        assert main(["recipe=llava-ov-68m-anyres", "dry_run=true", *settings]) == 0
        return capsys.readouterr().out.split("stage onevision")[1].split("stage evaluate")[0]

    return measured


def test_tiles_and_clips_are_counted_by_their_layout(tiled, capsys):
    """A picture that stands alone has a grid after its first tile, two have a tile and a newline each (the numbers
    are recorded ones: 1,485 of 384 x 384, 2,929 of 640 x 480), a clip 196 for each frame and a newline."""
    tall = tiled_picture((833, 1428), Tiling(384, 27, onevision_resolutions(384), max_tiles=9)).num_tokens
    expected = 1485 + 2929 + tall + 2 * 730 + 4 * 196 + 1
    shown = tiled(capsys)
    assert f"and {expected:,} visual tokens, of 1 clips among them (measured)" in shown
    assert 7600 < tall < 8192 - 400
    assert "longer than max_length 8,192 in words and pictures alone: 1 samples (drop_images)" in shown
