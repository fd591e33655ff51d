"""Stage kind `generate`: write the shapes world and the tokenizer and processor that belong to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from ...core import ranks
from ...core.errors import did_you_mean
from ...core.section import Section
from ...data.conversations import SYSTEM
from ...data.mixture import STRATEGIES, is_strategy
from ...data.processor import QWEN, Processor, build_processor, build_qwen_processor
from ...data.shapes.scenarios import KINDS
from ...data.shapes.scene import IMAGE_MEAN, IMAGE_STD
from ...data.shapes.tokenizer import train_tokenizer
from ...data.shapes.write import write_world
from ..context import Context


class GenerateStage(Section):
    kind: Literal["generate"]
    # Side of the pictures in pixels, and of a vision patch: a patch should hold one of the board's nine places.
    image_size: int = Field(48, ge=24)
    patch_size: int = Field(16, ge=4)
    vocab_size: int = Field(640, ge=400)
    # split -> kind of scenario -> number of records.
    splits: dict[str, dict[str, int]]
    # mixture -> split -> how much of it (all, first:10%, end:5, random:20%): OneVision's YAML files, named NAME.yaml.
    mixtures: dict[str, dict[str, str]] = Field(default_factory=dict)
    # Records of each set of the benchmark suite's stand-in (evaluate reads it as suite.data.path: suite); 0: none.
    suite: int = Field(0, ge=0)
    # split -> frames of its clips, where they are not four: as many visual tokens as a longer clip has.
    clip_frames: dict[str, int] = Field(default_factory=dict)
    # Records of each set of videos, pictures and texts (evaluate reads them as suite.data.path: video_suite); 0: none.
    video_suite: int = Field(0, ge=0)
    # Frames of that suite's clips, one set of clips for each.
    clip_lengths: list[int] = Field([4, 16, 64], min_length=1)

    @model_validator(mode="after")
    def _known(self) -> GenerateStage:
        for split, counts in self.splits.items():
            for kind, count in counts.items():
                if kind not in KINDS:
                    raise ValueError(f"splits.{split} names scenario {kind!r}; {did_you_mean(kind, KINDS)}")
                if count < 0:
                    raise ValueError(f"splits.{split}.{kind} is {count}, below 0")
        for split, frames in self.clip_frames.items():
            if split not in self.splits:
                raise ValueError(f"clip_frames names split {split!r}; {did_you_mean(split, self.splits)}")
            if frames < 2:
                raise ValueError(f"clip_frames.{split} is {frames}, and an object that moves needs 2")
        if min(self.clip_lengths) < 2 or len(set(self.clip_lengths)) < len(self.clip_lengths):
            raise ValueError(f"clip_lengths are different numbers of frames from 2, found {self.clip_lengths}")
        for mixture, parts in self.mixtures.items():
            for split, strategy in parts.items():
                if split not in self.splits:
                    raise ValueError(f"mixtures.{mixture} names split {split!r}; {did_you_mean(split, self.splits)}")
                if not is_strategy(strategy):
                    raise ValueError(f"mixtures.{mixture}.{split} is {strategy!r}; {STRATEGIES}")
        return self

    def makes(self) -> set[str]:
        return {"data", "processor"}

    def needs(self) -> dict[str, str | None]:
        return {}


def run(stage: GenerateStage, context: Context) -> None:
    """Rank 0 writes; the tokenizer is trained on the text of the first split."""
    if ranks.is_main():
        world = context.folder / "world"
        manifest = write_world(
            world,
            seed=context.seed,
            image_size=stage.image_size,
            splits=stage.splits,
            mixtures=stage.mixtures,
            suite=stage.suite,
            clip_frames=stage.clip_frames,
            video_suite=stage.video_suite,
            lengths=stage.clip_lengths,
        )
        first = next(iter(stage.splits))
        tokenizer = train_tokenizer(_texts(world / f"{first}.json"), stage.vocab_size)
        _processor(stage, context.target.kind, tokenizer).save(context.folder)
        total = sum(sum(counts.values()) for counts in manifest["splits"].values())
        context.say(f"wrote {total} records in {len(stage.splits)} splits, {len(tokenizer)} token ids")
    ranks.barrier()


def _processor(stage: GenerateStage, kind: str, tokenizer: Any) -> Processor:
    """As the recipe's target reads: a Qwen-VL the world's pictures whole, at most as large as they are."""
    pixels: dict[str, Any] = {"image_mean": IMAGE_MEAN, "image_std": IMAGE_STD}
    if kind in QWEN:
        least = (2 * stage.patch_size) ** 2
        limits = {"min_pixels": least, "max_pixels": max(least, stage.image_size**2)}
        return build_qwen_processor(tokenizer, kind, patch_size=stage.patch_size, **limits, **pixels)
    return build_processor(tokenizer, image_size=stage.image_size, patch_size=stage.patch_size, **pixels)


def _texts(path: Path) -> list[str]:
    texts = [SYSTEM, "USER: ASSISTANT:", "\n"]
    for record in json.loads(path.read_text()):
        for question, answer in zip(record["conversations"][::2], record["conversations"][1::2], strict=True):
            texts.append(f"USER: {question['value'].replace('<image>', '')} ASSISTANT: {answer['value']}")
    return texts
