"""The OneVision recipes: TABED's table 8, the vision tower at one fifth, mixtures counted before a run."""

import json
import re
from unittest.mock import patch

import pytest
import torch
from command_line import prints
from draftsmith.data.pictures.tiles import Tiling, onevision_resolutions, tiled_picture
from draftsmith.data.pictures.videos import write_clip
from draftsmith.recipes.commands.cli import main
from draftsmith.recipes.config.load import load, recipe_names
from draftsmith.recipes.config.plan import plan
from draftsmith.trainers.estimate.counted import META, _attend
from draftsmith.trainers.estimate.train_memory import lvlm_parts
from draftsmith.trainers.estimate.train_stage import _lvlm_of
from draftsmith.trainers.stages.train_records import TrainRecords
from PIL import Image
from small_records import talk
from torch.nn import functional as F
from transformers import SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

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
    most = memory_with(37)
    assert f"activations {most / 2**30:.1f}," in shown, "the tower reads up to 37 tiles, shrunk only behind it"
    more = 2 * (37 - 7) * 26 * kept_by_a_layer()  # of two rows; the last of the tower's 27 layers is not run
    assert more < most - memory_with(7) < 1.05 * more, "5 tiles are of the row's own pictures"


def memory_with(tiles: int) -> float:
    """Bytes of the last phase's activations where a row has so many tiles of 729 patches."""
    result = loaded("recipe=llava-ov-68m-anyres")
    phase = next(one for one in plan(result.recipe, result.path) if one.name == "onevision")
    return lvlm_parts(phase.stage, phase.recipe, _lvlm_of(phase)[0], 1, tiles * 729)["activations"]


def kept_by_a_layer() -> int:
    """Bytes that transformers' layer of this tower keeps of a tile for its backward pass."""
    config = SiglipVisionConfig(hidden_size=1152, intermediate_size=4304, num_attention_heads=16)
    config._attn_implementation = "sdpa"
    layer = SiglipEncoderLayer(config).to(META, torch.bfloat16)
    weights, kept = {weight.untyped_storage()._cdata for weight in layer.parameters()}, {}

    def keep(tensor):
        if tensor.untyped_storage()._cdata not in weights:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    tile = torch.empty(1, 729, 1152, dtype=torch.bfloat16, device=META, requires_grad=True)
    with (torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
          patch.object(F, "scaled_dot_product_attention", _attend)):  # fmt: skip
        layer(tile, None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_fingerprints_cover_a_mixture_and_its_files(tmp_path):
    (tmp_path / "a.json").write_text("[]")
    mixture = tmp_path / "mix.yaml"
    mixture.write_text("datasets:\n- {json_path: a.json}\n")

    def prints() -> dict[str, str]:
        result = loaded("recipe=llava-ov-68m", f"stages.single_image.data.path={mixture}")
        return {p.name: p.fingerprint for p in plan(result.recipe, result.path)}

    base = prints()
    (tmp_path / "a.json").write_text("[{}]")
    after_data = prints()
    mixture.write_text("datasets:\n- {json_path: a.json, sampling_strategy: 'end:1'}\n")
    after_mixture = prints()
    for before, after in ((base, after_data), (after_data, after_mixture)):
        assert {n for n in base if before[n] != after[n]} == {"single_image", "onevision", "evaluate"}
