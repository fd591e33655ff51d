"""A head of a language model while it trains: its weights, held-out scores, measured tau, and what is saved."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

from ....core import ranks
from ....core.errors import UserError
from ....core.section import Section
from ....data.dataset import ConversationData, ConversationDataset
from ....data.processor import Processor
from ....eval.loop import Decoding, generate
from ....eval.policies import Draw
from ....eval.rules import RULES
from ....models.decoding.warp import Warp
from ....models.drafters.reading import (
    build_reading_head,
    find_reading_head,
    load_reading_head,
    reading_head_like,
    reading_manifest,
    reading_proposal,
    reading_training,
    save_reading_head,
)
from ...context import Context
from ...engine import Engine
from ...fit import SCRATCH
from ..best import Best
from ..train import data_files
from .methods import MethodTree


class TextDecodingCheck(Section):
    """A real decoding run on a few requests: tau."""

    # Optimizer steps between two of them (a multiple of validation.every); the last step always has one.
    every: int = Field(ge=1)
    # Its prompts, each up to its last answer; max_samples keeps them few.
    data: ConversationData
    tree: MethodTree
    max_new_tokens: int = Field(64, ge=1)
    temperatures: list[float] = Field([0.0], min_length=1)


class ReadingHeads:
    """Of one `train` stage. `module` is what the engine trains.

    Args:
        draft_ids: of EAGLE-3's reduced vocabulary; None: the config names none.
    """

    def __init__(self, stage: Any, context: Context, processor: Processor, target: Any, draft_ids: torch.Tensor | None):
        assert context.drafter is not None
        self.stage, self.context, self.processor, self.target = stage, context, processor, target
        self.config = context.drafter
        # An earlier stage's head, or the one that the recipe names; `from: scratch` takes neither.
        made = context.inputs.get("drafter")
        if made is None and self.config.path is not None and stage.from_stage != SCRATCH:
            made = find_reading_head(self.config)
            context.say(f"{context.name}: starts from {self.config.path}")
        if made is not None:
            head = self._load(made)
        else:
            head = build_reading_head(self.config, target.config, draft_ids=draft_ids)
        self.module: Any = reading_training(head, target, self.config, stage.objective)
        self._best = Best(
            context.folder, lambda head, folder, step: save_reading_head(head, folder, self._manifest(step))
        )
        self._requests = self._open_requests() if stage.decoding is not None else None

    def decode(self, engine: Engine) -> dict[str, float]:
        """tau at each temperature over the requests, which the ranks share."""
        settings, requests = self.stage.decoding, self._requests
        assert requests is not None
        proposal = reading_proposal(self._copy(engine), self.target, self.config)
        found: dict[str, float] = {}
        for temperature in settings.temperatures:
            decoding = Decoding(
                settings.tree.build(grid=None, seed=self.context.seed),
                RULES["greedy" if temperature == 0 else "sampling"],
                Draw("top-k"),
                Warp(temperature),
                settings.max_new_tokens,
                (self.processor.eos_id,),
            )
            mine = [0, 0]
            for number in range(ranks.rank(), len(requests), ranks.world_size()):
                uniforms = torch.Generator().manual_seed(self.context.seed * 1_000_003 + number)
                cycles = generate(self.target, proposal, requests.request(number)[0], decoding, uniforms).cycles
                mine = [mine[0] + len(cycles), mine[1] + sum(cycle.num_emitted for cycle in cycles)]
            passes, emitted = (sum(counts) for counts in zip(*ranks.gather(mine), strict=True))
            found[f"tau_T{temperature:g}"] = emitted / max(1, passes)
        return found

    def keep_best(self, engine: Engine, found: dict[str, float], step: int) -> None:
        """Keep these weights beside the stage's result where a held-out accuracy or tau is the best so far."""
        taus = [value for name, value in found.items() if name.startswith("tau_")]
        scores = {name: found.get(f"val_{name}") for name in ("top1", "top3")}
        scores["tau"] = sum(taus) / len(taus) if taus else None
        self._best.keep(scores, step, lambda: self._copy(engine))

    def finish(self, engine: Engine, total: int, seed: int) -> None:
        """The stage's result: the last weights, or the best by the recipe's choice."""
        head = self._copy(engine)
        step, chosen = total, self.stage.select
        if chosen != "last":
            folder, score, step = self._best.of(chosen)
            head = self._load(folder)
            self.context.say(f"{self.context.name}: weights of step {step}, best {chosen} {score:.4f}")
        if ranks.is_main():
            save_reading_head(head, self.context.folder, self._manifest(step, seed=seed, selected=chosen))
        ranks.barrier()

    def _load(self, folder: Any) -> Any:
        return load_reading_head(
            self.config,
            folder,
            self.target,
            torch.float32,
            named=self.context.target.model_dump(mode="json"),
            tokenizer_sha256=self.processor.tokenizer_hash,
        )

    def _manifest(self, step: int, **more: Any) -> dict[str, Any]:
        context = self.context
        return reading_manifest(
            self.config,
            self.target.config,
            target=context.target.model_dump(mode="json"),
            drafter=self.config.model_dump(mode="json"),
            tokenizer_sha256=self.processor.tokenizer_hash,
            training={"stage": context.name, "step": step, "fingerprint": context.fingerprint},
            format=self.stage.format.model_dump(mode="json"),
            command=context.command,
            **more,
        )

    def _copy(self, engine: Engine) -> Any:
        """The head as it is now, whole on every rank and outside the engine."""
        with engine.full_weights():
            state = {name: value.detach().clone() for name, value in engine.module.head.state_dict().items()}
        # The copy's first weights are drawn and thrown away; training must not notice, a resumed run makes fewer.
        with torch.random.fork_rng(devices=[]):
            copy = reading_head_like(engine.module.head, state)
        embedding = self.target.embedding
        return copy.to(embedding.device, embedding.dtype).requires_grad_(False)

    def _open_requests(self) -> ConversationDataset:
        data = self.stage.decoding.data
        found = ConversationDataset(
            data,
            self.stage.format,
            self.processor,
            files=data_files(data, self.context),
            skipped_log=self.context.folder / "skipped-decoding.jsonl",
            cache=self.context.folder / "cache",
        )
        if not len(found):
            raise UserError("no request to decode", where=str(data.path), cure="check decoding.data")
        return found
