"""Stage kind `regenerate`: the target draws the training pictures itself (LANTERN, appendix B.2: 118k for Anole).

An answer depends on its number, the seed and the target alone: ranks write side by side, and a killed run goes on
behind the shards that it finished.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from pydantic import Field

from ....core import ranks
from ....core.section import Section
from ....data.answers import Answer
from ....data.prompts import PromptSource, read_prompts
from ....data.shards import claim, finish, finished, write_shard
from ....eval.loop import Decoding, generate
from ....eval.policies import Chain, Draw
from ....eval.rules import RULES
from ....models.decoding.warp import Warp
from ....models.generators import Generator, check_labels, load_generator
from ...context import Context
from ...engine import init_distributed
from .encode import SHARDS, summary
from .generate import WORLD


class RegenerateStage(Section):
    kind: Literal["regenerate"]
    prompts: PromptSource
    # Pictures of each prompt.
    repeats: int = Field(1, ge=1)
    # The target's own sampling; 0 is greedy. Guidance is the target's.
    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    # Pictures of one output shard: what a killed run does again at most, on each rank.
    samples_per_shard: int = Field(100, ge=1)

    def makes(self) -> set[str]:
        return {"codes"}

    def needs(self) -> dict[str, str | None]:
        wanted: dict[str, str | None] = {"target": None, "text": None, "vq": None}
        return wanted | ({"data": self.prompts.from_stage} if self.prompts.from_stage is not None else {})


def run(stage: RegenerateStage, context: Context) -> None:
    init_distributed()
    world = None if stage.prompts.from_stage is None else context.inputs["data"] / WORLD
    prompts = read_prompts(stage.prompts.resolved(world))
    check_labels(context.target, [(p.caption, p.label) for p in prompts])
    total = len(prompts) * stage.repeats
    num_shards = -(-total // stage.samples_per_shard)
    folder = context.folder / SHARDS
    identity = {"stage": context.fingerprint, "write": ["ids", "codes", "features"]}
    claim(folder, identity)
    generator = load_generator(context.target, context.inputs, device=context.device())
    for index in range(ranks.rank(), num_shards, ranks.world_size()):
        if finished(folder, index):
            continue
        start = index * stage.samples_per_shard
        numbers = range(start, min(start + stage.samples_per_shard, total))
        write_shard(folder, index, (a.sample() for a in _answers(stage, context, generator, prompts, numbers)), {})
        context.say(f"shard {index + 1} of {num_shards}")
    ranks.barrier()
    if ranks.is_main():
        finish(folder, identity, num_shards=num_shards)
        context.say(summary(folder))
    ranks.barrier()


def _answers(
    stage: RegenerateStage, context: Context, generator: Generator, prompts: list[Any], numbers: range
) -> Iterator[Answer]:
    target = generator.target
    rule = RULES["sampling" if stage.temperature else "greedy"]
    warp = Warp(stage.temperature, stage.top_k, stage.top_p)
    # Plain decoding: the tree policy is there and never asked.
    decoding = Decoding(Chain(1), rule, Draw("top-k"), warp, target.num_codes, ())
    # The commit of weights from the Hub, which a branch's name does not tell; of others the stage's fingerprint.
    commit = getattr(target.config, "_commit_hash", None) or context.target.revision or context.fingerprint[:12]
    name = f"{context.target.path or 'inline'}@{commit}"
    for number in numbers:
        prompt = prompts[number // stage.repeats]
        request = generator.request(prompt.caption, prompt.label, prompt.key)
        seed = context.seed * 1_000_003 + number
        result = generate(target, None, request, decoding, torch.Generator().manual_seed(seed))
        tensors = {"codes": target.codes(result.tokens).to(torch.int32)}
        if request.condition.is_floating_point():
            tensors["features"] = request.condition.cpu()
        asked = {"name": prompt.key, "caption": prompt.caption, "label": prompt.label}
        yield Answer(number, asked, result.tokens, result.stop, seed, name, tensors)
