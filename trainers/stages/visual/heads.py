"""A head while it trains: its target, its held-out scores, a small decoding run, and which weights were best."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from ....core import ranks
from ....core.errors import UserError
from ....core.section import Section
from ....data.codes import CodeCollate, ShardSample, ShardSamples
from ....data.loader import Collate, Loader, steps_per_epoch
from ....data.prompts import PromptSource, read_prompts
from ....eval.loop import Decoding, generate
from ....eval.pictures import save_grid
from ....eval.policies import Draw, TreeConfig
from ....eval.rules import RULES
from ....models.decoding.warp import Warp
from ....models.drafters.heads import (
    build_head,
    find_head,
    head_proposal,
    head_training,
    head_with,
    load_head,
    save_head,
)
from ....models.drafters.made_for import tested_with
from ....models.generators import Generator, load_generator, load_target, sample_condition
from ...context import Context
from ...engine import Engine
from ...fit import SCRATCH
from ..best import Best, held_out_scores
from ..generate import WORLD


class DecodingCheck(Section):
    """A real decoding run on a few prompts: tau, and the pictures that come out."""

    # Optimizer steps between two of them (a multiple of validation.every); the last step always has one.
    every: int = Field(ge=1)
    prompts: PromptSource
    tree: TreeConfig
    temperatures: list[float] = Field([0.0, 1.0], min_length=1)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)


class Heads:
    """Of one `train` stage. `module` is what the engine trains."""

    def __init__(self, stage: Any, context: Context):
        if context.drafter is None:
            raise UserError("a head is trained and the recipe names none", cure="add a drafter section")
        if context.drafter.kind == "llamagen":
            raise UserError("a smaller LlamaGen drafts as it is", cure="leave out the train stage")
        self.stage, self.context, self.config = stage, context, context.drafter
        device = context.device()
        self.generator: Generator | None = None
        if stage.decoding is not None:
            self.generator = load_generator(context.target, context.inputs, device=device)
            self.target = self.generator.target
            prompts = read_prompts(stage.decoding.prompts.resolved(_world(stage.decoding.prompts, context)))
            self._requests = [self.generator.request(p.caption, p.label, p.key) for p in prompts]
        else:
            self.target = load_target(context.target, context.inputs, device=device)
        self.condition = sample_condition(context.target)
        # An earlier stage's head, or the one that the recipe names; `from: scratch` takes neither.
        made = context.inputs.get("drafter")
        if made is None and self.config.path is not None and stage.from_stage != SCRATCH:
            made = find_head(self.config)
            context.say(f"{context.name}: starts from {self.config.path}")
        if made is not None:
            head = load_head(self.config, made, self.target, torch.float32, named=context.target)
        else:
            head = build_head(self.config, self.target)
        self.module: Any = head_training(head, self.target, self.config)
        self._best = Best(context.folder, lambda head, folder, step: save_head(head, folder, self._manifest(step)))

    def score(
        self, engine: Engine, held_out: ShardSamples, collate: Collate, micro: int, limit: int | None
    ) -> dict[str, float]:
        """`val_loss` and the loss's metrics as means over held-out positions of all ranks, every condition given."""
        assert isinstance(collate, CodeCollate)
        batch_size = micro * ranks.world_size()
        count = min(len(held_out), limit or len(held_out))
        loader = Loader(
            _First(held_out, count), seed=0, batch_size=batch_size, micro_batch_size=micro,
            total_steps=steps_per_epoch(count, batch_size), collate=replace(collate, dropout=0.0),
            rank=ranks.rank(), world_size=ranks.world_size(),
        )  # fmt: skip
        return held_out_scores(engine, loader)

    def decode(self, engine: Engine, step: int) -> dict[str, float | Path]:
        """tau at each temperature over the prompts, shared by the ranks, and a grid of what was drawn."""
        settings, generator = self.stage.decoding, self.generator
        assert generator is not None
        proposal = head_proposal(self._copy(engine), self.target)
        found: dict[str, float | Path] = {}
        for temperature in settings.temperatures:
            rule = RULES["greedy" if temperature == 0 else "sampling"]
            policy = settings.tree.build(grid=self.target.grid, seed=self.context.seed)
            warp = Warp(temperature, settings.top_k, settings.top_p)
            decoding = Decoding(policy, rule, Draw("top-k"), warp, self.target.num_codes, ())
            mine = []
            for number in range(ranks.rank(), len(self._requests), ranks.world_size()):
                uniforms = torch.Generator().manual_seed(self.context.seed * 1_000_003 + number)
                result = generate(self.target, proposal, self._requests[number], decoding, uniforms)
                cycles = len(result.cycles)
                mine.append((number, cycles, sum(c.num_emitted for c in result.cycles), result.tokens))
            every = sorted(row for shard in ranks.gather(mine) for row in shard)
            name = f"T{temperature:g}"
            found[f"tau_{name}"] = sum(r[2] for r in every) / max(1, sum(r[1] for r in every))
            if ranks.is_main():
                codes = torch.stack([self.target.codes(r[3]) for r in every])
                path = self.context.folder / "samples" / f"step-{step:06d}-{name}.png"
                save_grid(path, generator.pictures(codes))
                found[f"samples_{name}"] = path
        return found

    def keep_best(self, engine: Engine, found: dict[str, Any], step: int) -> None:
        """Keep these weights beside the stage's result where their top-3 accuracy or their tau is the best so far."""
        taus = [value for name, value in found.items() if name.startswith("tau_")]
        scores = {"top3": found.get("val_top3"), "tau": sum(taus) / len(taus) if taus else None}
        self._best.keep(scores, step, lambda: self._copy(engine))

    def finish(self, engine: Engine, total: int, seed: int) -> None:
        """The stage's result: the last weights, or the best by the recipe's choice."""
        head = self._copy(engine)
        step, chosen = total, self.stage.select
        if chosen != "last":
            folder, score, step = self._best.of(chosen)
            head = load_head(self.config, folder, self.target, torch.float32)
            self.context.say(f"{self.context.name}: weights of step {step}, best {chosen} {score:.4f}")
        if ranks.is_main():
            save_head(head, self.context.folder, self._manifest(step) | {"seed": seed, "selected": chosen})
        ranks.barrier()

    def _manifest(self, step: int) -> dict[str, Any]:
        context = self.context
        return {
            "method": self.config.kind,
            "target": context.target.model_dump(mode="json"),
            "training": {"stage": context.name, "step": step, "fingerprint": context.fingerprint},
            "condition_dropout": self.stage.condition_dropout,
            "tested_with": tested_with(),
            "command": context.command,
        }

    def _copy(self, engine: Engine) -> Any:
        """The head as it is now, whole on every rank and outside the engine."""
        with engine.full_weights():
            state = {name: value.detach().clone() for name, value in engine.module.head.state_dict().items()}
        # The copy's first weights are drawn and thrown away; training must not notice, a resumed run makes fewer.
        with torch.random.fork_rng(devices=[]):
            copy = head_with(engine.module.head, state)
        dtype = self.target.embedding.dtype
        return copy.to(self.target.device, dtype).requires_grad_(False)


class _First:
    """The first `count` samples."""

    def __init__(self, samples: ShardSamples, count: int):
        self.samples, self.lengths = samples, samples.lengths[:count]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> ShardSample:
        return self.samples[index]


def _world(prompts: PromptSource, context: Context) -> Path | None:
    return None if prompts.from_stage is None else context.inputs["data"] / WORLD
