"""Qwen-VL through the cache: positions of three rows are kept, come back, and train a head as computed ones do."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_qwen
import torch
from draftsmith.core.pictures import TEXT, VIDEO
from draftsmith.data.pictures.videos import write_clip
from draftsmith.data.shards.shards import ShardReader
from draftsmith.models.drafters.sparrow import SparrowConfig
from draftsmith.models.targets.qwen.section import QwenTargetConfig
from draftsmith.trainers.serve import states_builder as build
from draftsmith.trainers.train.on_states import open_states
from PIL import Image
from small_records import talk
from states_run import WORDS, cached, context, losses, stage

FORM = {"template": "qwen_vl", "image_rule": "verbatim"}
# A clip of 16 frames: longer in time than its frames are wide.
RECORDS = ("", "<image>\n", "<video>\n", "<image>\n<video>\n", "", "<video>\n")


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def made(request, tmp_path_factory):
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    tiny_qwen.saved(folder, kind, WORDS, 4, min_pixels=64, max_pixels=256)
    shades = [Image.new("RGB", (16, 16), (15 * n, 255 - 15 * n, 90)) for n in range(16)]
    shades[3].save(folder / "image.png")
    write_clip(folder / "clip.mp4", shades, fps=2)
    records = []
    for number, marks in enumerate(RECORDS):
        turns = talk(f"{marks}Which?", " ".join(WORDS[number:]))
        record = {"id": str(number), "conversations": turns}
        record |= {"image": "image.png"} if "<image>" in marks else {}
        records.append(record | ({"video": "clip.mp4"} if "<video>" in marks else {}))
    (folder / "data.json").write_text(json.dumps(records))
    video = {"num_frames": 16, "fps": None, "min_pixels": 256, "max_pixels": 256}
    return SimpleNamespace(
        folder=folder, data={"path": str(folder / "data.json"), "max_length": 256, "video": video},
        target=QwenTargetConfig(kind=kind, path=str(folder / "target"), prefill_chunk=7),
    )  # fmt: skip


def test_three_rows_of_positions_are_kept_and_train_a_head(made, tmp_path):
    # Of Qwen3-VL's four layers the third is the first above those that its tower's states are added to.
    drafter = SparrowConfig(kind="sparrow", middle_layer=3, positions="mrope", gap_share=0.0)
    kept = cached(made, tmp_path / "cache", drafter, format=FORM)
    reader = ShardReader(kept.folder / "states")
    assert reader.identity["samples"]["position_rows"] == 3
    batches, result = {}, {}
    for name, source in (("online", {"kind": "online"}), ("cached", {"kind": "cached"})):
        asked = context(made, tmp_path / name, drafter, {"states": kept.folder})
        chosen = stage(made, source=source, format=FORM, steps=3, held_out=0.0)
        processor = asked.processor()
        states = open_states(chosen, asked, processor, build.open_target(asked, processor), 0)
        batches[name] = states, chosen
        chosen.run(asked)
        result[name] = losses(asked.folder)
    online = batches["online"][0].builder
    asked = online.collate([(n, online.samples[n]) for n in range(len(RECORDS))], epoch=0)
    states = online.states(asked)
    numbers = np.argsort(reader.column("number"))
    for row, number in enumerate(numbers.tolist()):
        _, tensors, info = reader[number]
        length = int(asked.attention_mask[row].sum())
        assert info["number"] == row and tensors["positions"].shape == (3, length)
        assert torch.equal(tensors["positions"].long(), states.positions[:, row, :length])
        visual = tensors["modality"] != TEXT
        assert visual.any() == bool(RECORDS[row])
        # Text has one position in all rows; a picture has three, and the text after it does not count its tokens.
        assert (tensors["positions"][:, ~visual].diff(dim=0) == 0).all()
        if visual.any():
            assert (tensors["positions"][:, visual].diff(dim=0) != 0).any()
            assert tensors["positions"].max() != length - 1
    assert (asked.modality == VIDEO).any()
    assert result["cached"].keys() == result["online"].keys() and len(result["online"]) == 3
    for step, loss in result["online"].items():
        assert result["cached"][step] == pytest.approx(loss, rel=0.02)
