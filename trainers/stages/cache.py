"""Stage kind `cache`: the target's states that the recipe's head reads, computed once and kept in shards.

The size is printed before anything is written. Shards depend on the data and the target alone: ranks write side
by side, and a killed build goes on after those that it finished.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, SerializationInfo, SerializerFunctionWrapHandler, field_serializer, model_validator

from ...core import ranks
from ...core.errors import Refused, counted
from ...core.json_types import JsonObject
from ...core.results import STATES
from ...core.section import FINGERPRINT
from ...data.conversations import PromptFormat
from ...data.dataset import ConversationData
from ...data.shards.shards import ShardReader, claim, finish, finished, shard_path, unfinished
from ...data.sources import AnswersConfig, LearnsRecords
from ...data.states.records import Deal
from ...data.states.samples import SeededCollate
from ...data.states.storage import check_disk, samples_per_shard, shown
from ...models.drafters import AnyDrafter
from ...models.drafters.base import DrafterConfig, states_settings
from ...models.targets.table import AnyTarget
from ..estimate.data import describe_states
from ..run.context import Context
from ..run.stage import Planned, Stage
from ..run.stage_records import check_fit
from ..serve.engines import EngineSection
from ..serve.states_builder import (
    Builder,
    StatesStore,
    check_answers,
    count_samples,
    identity_of,
    open_samples,
    open_target,
    readers_of,
    sample_needs,
    wanted_taps,
)
from ..serve.target_engine import TransformersEngine
from ..train.engine import init_distributed
from ..train.fit import Expected


class CacheStage(LearnsRecords, Stage):
    loads_target: ClassVar[bool] = True
    usual_purpose: ClassVar[str] = "the target's hidden states, computed once"

    kind: Literal["cache"]
    format: PromptFormat = PromptFormat()
    data: ConversationData
    # Whose answers to these records the states are of; null: the records' own.
    answers: AnswersConfig | None = None
    # Heads that will read these states as well: what each of them needs is kept.
    drafters: list[AnyDrafter] = Field(default_factory=list)
    states: StatesStore = StatesStore()
    # Sequences that the target runs together on each rank.
    batch_size: int = Field(8, ge=1)
    # The program that runs the target: transformers in this process, or vLLM (kind: vllm) in a separate process.
    # Fingerprints leave it out if it is not set.
    engine: EngineSection = Field(TransformersEngine(), exclude_if=lambda value: value == TransformersEngine())
    expected: Expected | None = None

    @model_validator(mode="after")
    def _one_source(self) -> CacheStage:
        check_answers(self.answers)
        return self

    def reads_of_drafter(self, drafter: DrafterConfig | None) -> JsonObject | None:
        """Which states it reads."""
        return None if drafter is None or drafter.trains_on != "states" else states_settings(drafter)

    @field_serializer("drafters", mode="wrap")
    def _reads(self, drafters: list[Any], write: SerializerFunctionWrapHandler, info: SerializationInfo) -> Any:
        return [*map(states_settings, drafters)] if info.context == FINGERPRINT else write(drafters)

    @property
    def shards(self) -> str:
        return STATES

    def makes(self) -> set[str]:
        return {"states"}

    def needs(self) -> dict[str, str | None]:
        return sample_needs(self.data, self.answers) | {"target": None, "processor": None}

    @classmethod
    def unsuited(cls, target: AnyTarget, drafter: DrafterConfig | None) -> str | None:
        return f"cache keeps hidden states of text, and a {target.kind} draws images" if target.draws_images else None

    def check(self, target: AnyTarget, drafter: DrafterConfig | None) -> None:
        """Refuses a recipe none of whose drafters reads states, and an entry of `drafters` that does not."""
        if not readers_of([drafter, *self.drafters]):
            of = "none" if drafter is None else drafter.kind
            raise Refused("kind", f"cache keeps hidden states, which drafter {of} of a {target.kind} does not read")
        self.engine.check(target, states=True, aspect=self.data.aspect)
        for number, other in enumerate(self.drafters):
            if other.trains_on != "states":
                raise Refused(f"drafters.{number}.kind", f"{other.kind} reads no hidden states", "name heads")
            try:
                other.check_settings(draws_images=False)
            except Refused as refused:
                raise refused.under(f"drafters.{number}") from None

    def run(self, context: Context) -> None:
        """Writes the shards that are not there yet; ranks take turns."""
        init_distributed()
        with context.in_step():
            self._write(context)

    def _write(self, context: Context) -> None:
        processor = context.processor()
        samples = open_samples(self.data, self.format, self.answers, context, processor)
        counts = count_samples(samples, context)
        target = open_target(context, processor, tables_only=self.engine.is_served)
        check_fit(context, samples.dataset, target.decoder, as_cut=True)
        folder, store = context.folder / STATES, self.states
        wanted = wanted_taps([context.drafter, *self.drafters], target.shape)
        builder = Builder(
            samples, counts, target, wanted, store, folder,
            SeededCollate(processor.pad_id, processor.image_size, seed=0), self.batch_size,
            self.engine.open_states(context, samples, target, wanted, key="engine"),
        )  # fmt: skip
        size = builder.size(np.arange(len(samples)), target.config.hidden_size)
        deal = Deal(len(samples), samples_per_shard(size, store.shard_bytes))
        context.say(
            f"states in {store.dtype}: {size}, in {counted(len(deal), 'shard')} of about {shown(store.shard_bytes)}"
        )
        done = [shard_path(folder, index) for index in range(len(deal)) if finished(folder, index)]
        ranks.on_main(check_disk, folder, size.total_bytes - sum(shard.stat().st_size for shard in done))
        in_step = context.is_in_step
        measured = ranks.broadcast(builder.measure() if ranks.is_main() or in_step else None)
        known = identity_of(context, processor, self.format, self.data, wanted, store.dtype, self.engine)
        identity = builder.identity(known, measured, {"samples_per_shard": deal.per_shard})
        claim(folder, identity)
        for dtype, loss in measured.loss.items():
            kl, agreement = loss["kl"], loss["agreement"]
            context.say(f"  {dtype}: KL {kl:.2e} to the exact distribution, {agreement:.2%} of likeliest tokens stay")
        left, line = unfinished(folder, len(deal), in_step=in_step), context.progress
        sizes = {index: len(deal[index]) for index in ranks.share(len(deal), in_step=in_step)}
        before = sum(size for index, size in sizes.items() if index not in left)
        line.count("sample", sum(sizes.values()), before, is_share=not in_step)
        with context.stop.together():
            for index in left:
                if in_step and not ranks.is_main():
                    builder.run(deal[index], context.stop)
                    continue
                builder.write(index, deal[index], context.stop, line.advance)
                context.say(f"shard {index + 1} of {len(deal)}")
        if ranks.is_main():
            finish(folder, identity, num_shards=len(deal), measured={"head distribution": measured.loss})
            reader = ShardReader(folder)
            num_bytes = sum(shard.bytes for shard in reader.shards)
            context.say(f"{len(reader):,} samples, {shown(num_bytes / len(reader))} each, {shown(num_bytes)} in all")
        ranks.barrier()

    def describe(self, plan: Planned) -> list[str]:
        return describe_states(plan)
