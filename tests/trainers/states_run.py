"""A tiny LLaVA on disk, a few conversations about pictures, and stages that keep or read its states, run by hand."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from draftsmith.core.tracking import TrackingConfig
from draftsmith.data.families.llava import LLAVA
from draftsmith.data.shapes.tokenizer import train_tokenizer
from draftsmith.models.drafters.sparrow import SparrowConfig
from draftsmith.models.parts import TokenIds
from draftsmith.models.targets.llava.model import assemble, llava_config
from draftsmith.models.targets.llava.section import LlavaTargetConfig
from draftsmith.trainers.run.context import Context, EngineConfig
from draftsmith.trainers.stages.cache import CacheStage
from draftsmith.trainers.stages.train import AnyTrain, TrainStage, TrainStates, chosen
from PIL import Image
from pydantic import TypeAdapter
from transformers import CLIPVisionConfig, LlamaConfig

RECORDS = 20
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "red", "green", "blue"]
OPTIM = {"lr": 3e-3, "warmup_steps": 1, "clip_norm": 1.0}


def synthetic(folder: Path) -> SimpleNamespace:
    """`folder` with a target and data; every third record is text alone."""
    folder.mkdir(parents=True, exist_ok=True)
    said = [f"USER: Which? ASSISTANT: {' '.join(WORDS[i:] + WORDS[:i])}." for i in range(len(WORDS))]
    tokenizer = train_tokenizer(["USER: ASSISTANT:\n", *said] * 3, 400)
    processor = LLAVA.new(
        tokenizer, image_size=24, patch_size=8, image_mean=(0.5, 0.5, 0.5), image_std=(0.25, 0.25, 0.25)
    )
    torch.manual_seed(0)
    text = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=24, patch_size=8
    )
    ids = TokenIds(
        len(tokenizer), processor.image_token_id, processor.bos_id, processor.eos_id, processor.pad_id,
        processor.video_token_id,
    )  # fmt: skip
    model = assemble(llava_config(text, vision, ids))
    model.model.multi_modal_projector.linear_2.weight.data *= 20
    model.save_pretrained(folder / "target")
    processor.save(folder / "target")
    (folder / "images").mkdir(exist_ok=True)
    records = []
    for number in range(RECORDS):
        turns = [
            {"from": "human", "value": ("" if number % 3 == 0 else "<image>\n") + "Which?"},
            {"from": "gpt", "value": " ".join(WORDS[(number + i) % len(WORDS)] for i in range(2 + number % 5))},
        ]
        record = {"id": str(number), "conversations": turns}
        if number % 3:
            Image.new("RGB", (30, 20), (12 * number, 255 - 9 * number, 40)).save(folder / "images" / f"{number}.png")
            record["image"] = f"images/{number}.png"
        records.append(record)
    (folder / "data.json").write_text(json.dumps(records))
    return SimpleNamespace(folder=folder, data={"path": str(folder / "data.json"), "max_length": 256})


def context(made: SimpleNamespace, folder: Path, drafter=None, inputs=None, seed: int = 0) -> Context:
    """What it says is in `say.lines`; of another family `made.target` is the section."""
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)

    say.lines = lines
    folder.mkdir(parents=True, exist_ok=True)
    return Context(
        name=folder.name, folder=folder, seed=seed, fingerprint="f",
        target=getattr(made, "target", None) or LlavaTargetConfig(kind="llava", path=str(made.folder / "target")),
        drafter=drafter or SparrowConfig(kind="sparrow", gap_share=0.0), engine=EngineConfig(),
        tracking=TrackingConfig(), inputs=inputs or {}, say=say,
    )  # fmt: skip


def cached(made: SimpleNamespace, folder: Path, drafter=None, **settings) -> Context:
    """Run a `cache` stage; small shards, so that there are several."""
    stage = CacheStage(
        kind="cache", data=made.data, batch_size=3,
        **({"states": {"shard_bytes": 20_000, "measured_samples": 4}} | settings),
    )  # fmt: skip
    asked = context(made, folder, drafter)
    stage.run(asked)
    return asked


def section(made: SimpleNamespace, **settings) -> dict:
    known = {"data": made.data} if settings.get("source", {}).get("kind") != "cached" else {}
    known |= {"batch_size": 4, "micro_batch_size": 2, "optim": OPTIM, "log_every": 1, "held_out": 0.2, "window": 2}
    known |= {} if "steps" in settings else {"epochs": 2}
    return {"kind": "train", **(known | settings)}


def stage(made: SimpleNamespace, **settings) -> TrainStates:
    return TrainStates(**section(made, **settings))


def parsed(target: Any, drafter: Any, section: dict) -> TrainStage:
    """A stage as the recipe parses it, beside a target and a drafter."""
    stage = TypeAdapter(AnyTrain).validate_python(chosen(section, target, drafter))
    stage.check(target, drafter)
    return stage


def losses(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}
