"""What a recipe says of the disk before anything runs."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from draftsmith.data.conversations import PromptFormat
from draftsmith.data.pictures.tiles import Tiling, tiled_picture
from draftsmith.data.pictures.videos import write_clip
from draftsmith.models.drafters import HivisConfig, SparrowConfig
from draftsmith.models.hub import read_config
from draftsmith.models.targets.llava.section import LlavaTargetConfig
from draftsmith.trainers.estimate import data as estimated
from draftsmith.trainers.run.run import Planned
from draftsmith.trainers.stages.cache import CacheStage
from draftsmith.trainers.stages.train import TrainStates
from PIL import Image
from small_records import talk
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

SAMPLES = 68_000
# Without torchvision there is the PIL one alone.
Qwen2VLImageProcessor = getattr(transformers, "Qwen2VLImageProcessorPil", None) or transformers.Qwen2VLImageProcessor
TARGET = LlavaConfig(
    text_config=LlamaConfig(hidden_size=3584, num_attention_heads=28, num_hidden_layers=28).to_dict(),
    vision_config=CLIPVisionConfig(image_size=336, patch_size=14).to_dict(),
)  # fmt: skip


SECTION = LlavaTargetConfig(kind="llava", path="not/on/disk")


def stage(text: int, visual: int, **settings) -> CacheStage:
    expected = {"samples": SAMPLES, "text_tokens": SAMPLES * text, "visual_tokens": SAMPLES * visual}
    return CacheStage(kind="cache", data={"path": "not/on/disk.json"}, expected=expected, **settings)


def lines(stage, drafter, target=TARGET) -> str:
    recipe = SimpleNamespace(target=SECTION, drafter=drafter, output=".")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimated, "target_shape", lambda recipe: target)
        return "\n".join(estimated.describe_states(Planned("cache", stage, {}, "f", recipe)))


def gigabytes(text: str) -> float:
    size, unit = re.search(r"([0-9.]+) (GB|TB) in all", text).groups()
    return float(size) * {"GB": 1, "TB": 1000}[unit]


def test_the_papers_data_takes_what_it_is_known_to_take():
    sparrow = SparrowConfig(kind="sparrow")
    assert gigabytes(lines(stage(1328, 0), sparrow)) == pytest.approx(650, abs=5)
    assert gigabytes(lines(stage(960, 280), sparrow)) == pytest.approx(600, abs=6)
    assert gigabytes(lines(stage(960, 1900), sparrow)) == pytest.approx(1390, abs=14)
    assert gigabytes(lines(stage(960, 280), HivisConfig(kind="hivis"))) == pytest.approx(470, abs=5)
    assert "68,000 (declared), 65,280,000 text and 19,040,000 visual" in lines(stage(960, 280), sparrow)
    assert "9.53 MB a sample" in lines(stage(1328, 0), sparrow)


def test_a_disk_that_cannot_hold_it_is_said_beforehand(monkeypatch):
    for free, warned in ((640e9, True), (660e9, False)):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=int(free)))
        told = lines(stage(1328, 0), SparrowConfig(kind="sparrow"))
        assert ("warning: the states take 648 GB and the disk has 640 GB free under ." in told) == warned


def test_a_first_epoch_that_caches_is_estimated_as_well():
    train = TrainStates(
        kind="train", data={"path": "not/on/disk.json"}, epochs=2, batch_size=16, optim={"lr": 1e-5},
        source={"kind": "cached_on_first_epoch"}, format=PromptFormat(),
        expected={"samples": SAMPLES, "text_tokens": SAMPLES * 1328},
    )  # fmt: skip
    assert gigabytes(lines(train, SparrowConfig(kind="sparrow"))) == pytest.approx(650, abs=5)


SIZES = [(640, 480), (1000, 300), (30, 30), (2000, 1500), (336, 336)]


@pytest.mark.parametrize(("target", "settings"), [
    ("Qwen/Qwen2.5-VL-7B-Instruct", {}),
    ("Qwen/Qwen2.5-VL-7B-Instruct", {"min_pixels": 200704, "max_pixels": 1003520}),
    ("Qwen/Qwen3-VL-8B-Instruct", {}),
    ("llava-hf/llava-onevision-qwen2-7b-ov-hf", {"aspect": "anyres_max_9"}),
    ("llava-hf/llava-1.5-7b-hf", {}),
], ids=["qwen2.5", "qwen2.5-limits", "qwen3", "onevision", "llava"])  # fmt: skip
def test_pictures_and_clips_on_disk_are_counted_as_the_family_reads_them(tmp_path, target, settings):
    """Against transformers' own image processors, and the frames of a clip by hand."""
    config = read_config(target, key="target.path", network=False)
    records = []
    for number, size in enumerate(SIZES):
        Image.new("RGB", size).save(tmp_path / f"{number}.png")
        records.append(said("<image>\nWhich?") | {"image": f"{number}.png"})
    frames = [Image.new("RGB", (308, 196), (n, 0, 0)) for n in range(8)]
    write_clip(tmp_path / "a.mp4", frames, fps=1)
    with_clip = [*records, said("<video>\nWhich?") | {"video": "a.mp4"}]
    wanted = [published_tokens(config, size, settings) for size in SIZES]
    video = {"num_frames": 8, "fps": None}
    if config.model_type == "llava":
        with_clip, clip = records, 0
    elif config.model_type == "llava_onevision":
        clip = 8 * 196 + 1
    else:  # two frames in one, each at least 128 tokens' worth of pixels: 308 x 196 grows
        unit = config.vision_config.patch_size * config.vision_config.spatial_merge_size
        grow = (128 * unit**2 / (308 * 196)) ** 0.5
        side = [math.ceil(pixels * grow / unit) if grow > 1 else round(pixels / unit) for pixels in (308, 196)]
        clip = 4 * side[0] * side[1]
    (tmp_path / "data.json").write_text(json.dumps(with_clip))
    cached = CacheStage(kind="cache", data={"path": str(tmp_path / "data.json"), "video": video, **settings})
    text = lines(cached, SparrowConfig(kind="sparrow"), config)
    counted = int(re.search(r"([\d,]+) visual tokens", text)[1].replace(",", ""))
    assert counted == sum(wanted) + clip, (wanted, clip)


def said(question: str) -> dict:
    return {"conversations": talk(question, "This.")}


def published_tokens(config, size: tuple[int, int], settings: dict) -> int:
    """Of one picture, by transformers' processor with its published limits."""
    if config.model_type == "llava":
        return 576
    if config.model_type == "llava_onevision":
        pinpoints = tuple((a, b) for a, b in config.image_grid_pinpoints)
        return tiled_picture(size, Tiling(384, 27, pinpoints, "hf", 9)).num_tokens
    vision = config.vision_config
    least, most = (65536, 16777216) if config.model_type == "qwen3_vl" else (3136, 12845056)
    limits = {"shortest_edge": settings.get("min_pixels", least), "longest_edge": settings.get("max_pixels", most)}
    made = Qwen2VLImageProcessor(patch_size=vision.patch_size, merge_size=2, size=limits)
    shape = torch.from_numpy(made(images=[Image.new("RGB", size)], return_tensors="np")["image_grid_thw"])
    return int(shape.prod()) // 4
