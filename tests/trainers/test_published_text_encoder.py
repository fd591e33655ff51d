"""A float32 LlamaGen beside a T5 encoder from a directory, which is held in bfloat16 as published."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from draftsmith.data.shards.shards import ShardReader
from draftsmith.models.decoding.batched import draw_pictures
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.eagle import EagleConfig
from draftsmith.models.targets.llamagen.section import TEXT_ENCODER
from draftsmith.trainers.stages.encode import EncodeStage
from draftsmith.trainers.stages.train import TrainCodes
from visual_run import context, pictures, translators

OPTIM = {"lr": 1e-3, "warmup_steps": 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> SimpleNamespace:
    """Codes and features of twelve pictures, and the section that names the encoder's directory."""
    folder = tmp_path_factory.mktemp("made")
    parts = translators(folder)
    target = parts.target.model_copy(update={"text_encoder": str(folder / TEXT_ENCODER)})
    inputs = {"vq": parts.inputs["vq"]}
    source = {"kind": "folder", "folder": str(pictures(folder / "in", 12))}
    EncodeStage(kind="encode", source=source).run(context(folder / "codes", target, inputs))
    return SimpleNamespace(folder=folder, target=target, inputs=inputs | {"codes": folder / "codes"})


def train(made, folder: Path, inputs=None, **changes) -> Path:
    data = {"kind": "codes", "from": "codes"}
    stage = TrainCodes(kind="train", data=data, steps=2, batch_size=4, optim=OPTIM, log_every=1, **changes)
    stage.run(context(folder, made.target, inputs or made.inputs, drafter=EagleConfig(kind="eagle")))
    return folder


def test_features_lie_in_the_shards_as_the_encoder_gives_them(made):
    assert ShardReader(made.folder / "codes" / "shards")[0][1]["features"].dtype == torch.bfloat16


def test_a_float32_target_and_its_head_are_trained_and_decode(made, tmp_path):
    target = train(made, tmp_path / "target", model="target")
    inputs = made.inputs | {"target": target}
    head = train(made, tmp_path / "head", inputs)
    assert (head / "model.safetensors").is_file()
    generator = made.target.generator(inputs, device=torch.device("cpu"))
    assert generator.target.embedding.dtype == torch.float32
    requests = [generator.request(caption, None, "") for caption in ("a picture", "a picture with many words in it")]
    assert {r.condition.dtype for r in requests} == {torch.bfloat16}
    assert [len(tokens) for tokens in draw_pictures(generator.target, requests, Warp(1.0), seeds=[0, 1])] == [16, 16]
