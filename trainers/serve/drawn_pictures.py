"""Pictures that a target draws itself (LANTERN, appendix B.2: 118k for Anole)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...core.json_types import JsonObject
from ...core.results import DATASET_FOLDER
from ...data.answers import Answer
from ...data.captioned.prompts import PromptSource, read_prompts
from ...data.shards.shards import ShardReader, summary
from ...models.decoding.batched import draw_pictures, even_batches
from ...models.decoding.warp import Warp
from ...models.hub import config_value
from ...models.targets.generators import image_section, load_generator
from ..run.context import Context


class Pictures:
    """Draws the pictures of a `regenerate` stage.

    Args:
        source: what they are of.
        repeats: pictures of each prompt.
        batch_size: that are drawn side by side.
    """

    per_shard = 100  # where the recipe names no number

    def __init__(self, source: PromptSource, context: Context, *, warp: Warp, repeats: int, batch_size: int):
        self.context, self.warp, self.repeats, self.batch_size = context, warp, repeats, batch_size
        folder = None if source.from_stage is None else context.inputs["data"] / DATASET_FOLDER
        self.prompts = read_prompts(source.resolved(folder))
        image_section(context.target).check_labels([(p.caption, p.label) for p in self.prompts])
        self.generator = load_generator(image_section(context.target), context.inputs, device=context.device())

    def __len__(self) -> int:
        return len(self.prompts) * self.repeats

    def identity(self) -> JsonObject:
        """What the shards depend on besides the stage's fingerprint."""
        return {"write": ["ids", "codes", "features"]}

    def answers(self, numbers: range) -> Iterator[Answer]:
        """These pictures, in order; each depends on its number, the run's seed and the target alone."""
        context, generator, target = self.context, self.generator, self.generator.target
        # The commit of weights from the Hub, which a branch's name does not tell; of others the stage's fingerprint.
        commit = config_value(target.config, "_commit_hash") or context.target.revision or context.fingerprint[:12]
        name = f"{context.target.path or 'inline'}@{commit}"
        batches = even_batches(numbers, self.batch_size)
        for some in context.stop.watch(batches, "inside a shard"):
            asked = [self.prompts[number // self.repeats] for number in some]
            requests = [generator.request(prompt.caption, prompt.label, prompt.key) for prompt in asked]
            seeds = [context.seed * 1_000_003 + number for number in some]
            drawn = draw_pictures(target, requests, self.warp, seeds=seeds)
            for number, prompt, request, seed, tokens in zip(some, asked, requests, seeds, drawn, strict=True):
                tensors = {"codes": target.codes(tokens).to(torch.int32)}
                if request.condition.is_floating_point():
                    tensors["features"] = request.condition.cpu()
                about = {"name": prompt.key, "caption": prompt.caption, "label": prompt.label}
                yield Answer(number, about, tokens, "length", seed, name, tensors)
            context.progress.advance(len(some))

    def finish(self, reader: ShardReader) -> str:
        """A line about the finished shards."""
        return summary(reader.folder)
