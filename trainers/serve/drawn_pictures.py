"""Pictures that a target draws itself (LANTERN, appendix B.2: 118k for Anole)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from ...core.json_types import JsonObject
from ...data.answers import Answer
from ...data.captioned.prompts import ImagePrompt, PromptSource, read_prompts
from ...data.shards.shards import ShardReader, summary
from ...data.stage_folders import DATASET_FOLDER
from ...models.decoding.batched import draw_pictures, even_batches
from ...models.decoding.warp import Warp
from ...models.families.generators import Generator, image_section, load_generator
from ...models.hub import config_value
from ..run.context import Context


class AsksPictures(Protocol):
    """What is read of the stage's section."""

    @property
    def prompts(self) -> PromptSource | None: ...
    @property
    def repeats(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def sampling_temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...


class Pictures:
    """Draws the pictures of a `regenerate` stage, `repeats` of each prompt.

    Args:
        stage: its section.
    """

    per_shard = 100  # where the recipe names no number

    def __init__(self, stage: AsksPictures, context: Context):
        self.stage, self.context = stage, context
        assert stage.prompts is not None
        folder = None if stage.prompts.from_stage is None else context.inputs["data"] / DATASET_FOLDER
        self.prompts = read_prompts(stage.prompts.resolved(folder))
        image_section(context.target).check_labels([(p.caption, p.label) for p in self.prompts])
        self.generator = load_generator(image_section(context.target), context.inputs, device=context.device())

    def __len__(self) -> int:
        return len(self.prompts) * self.stage.repeats

    def identity(self) -> JsonObject:
        """What the shards depend on besides the stage's fingerprint."""
        return {"write": ["ids", "codes", "features"]}

    def answers(self, numbers: range) -> Iterator[Answer]:
        """The pictures with these numbers, in order."""
        return draw(self.stage, self.context, self.generator, self.prompts, numbers)

    def finish(self, reader: ShardReader) -> str:
        """A line about the finished shards."""
        return summary(reader.folder)


def draw(
    stage: AsksPictures, context: Context, generator: Generator, prompts: Sequence[ImagePrompt], numbers: range
) -> Iterator[Answer]:
    """Pictures by their numbers, `batch_size` side by side; each depends on its number, the run's seed and the target
    alone.
    """
    target = generator.target
    warp = Warp(stage.sampling_temperature, stage.top_k, stage.top_p)
    # The commit of weights from the Hub, which a branch's name does not tell; of others the stage's fingerprint.
    commit = config_value(target.config, "_commit_hash") or context.target.revision or context.fingerprint[:12]
    name = f"{context.target.path or 'inline'}@{commit}"
    line = context.progress
    for some in context.stop.watch(even_batches(numbers, stage.batch_size), "inside a shard; finished ones are kept"):
        asked = [prompts[number // stage.repeats] for number in some]
        requests = [generator.request(prompt.caption, prompt.label, prompt.key) for prompt in asked]
        seeds = [context.seed * 1_000_003 + number for number in some]
        drawn = draw_pictures(target, requests, warp, seeds=seeds)
        for number, prompt, request, seed, tokens in zip(some, asked, requests, seeds, drawn, strict=True):
            tensors = {"codes": target.codes(tokens).to(torch.int32)}
            if request.condition.is_floating_point():
                tensors["features"] = request.condition.cpu()
            about = {"name": prompt.key, "caption": prompt.caption, "label": prompt.label}
            yield Answer(number, about, tokens, "length", seed, name, tensors)
        line.add(len(some))
