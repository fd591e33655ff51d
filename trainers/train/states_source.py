"""Where a head's training finds the target's states: computed as it goes, read, or computed once and then read.

All three give the same steps of the same samples, and the loop asks them for the states of each micro-batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from ...core import ranks
from ...core.batch import Batch
from ...core.fields import Place
from ...core.json_types import JsonObject, listed
from ...core.section import Section
from ...core.states import TargetStates
from ...data.loader import Collate, Loader, Samples, StepBatches, prefetched
from ...data.order import rows_of_rank
from ...data.records.skipped import SkippedLog
from ...data.shards.shards import Sample, claim, finish, finished, shard_path
from ...data.states.identity import Acceptable
from ...data.states.reader import CachedCollate, CachedSamples, StatesReader
from ...data.states.samples import Chosen
from ...data.states.storage import check_disk, shown
from ..run.stopping import Stop
from ..serve.engines import EngineSection
from ..serve.states_builder import Builder, Measured, StatesStore, looked_ahead
from ..serve.target_engine import TransformersEngine


class OnlineStates(Section):
    """The target runs on each batch: nothing is kept. Cheaper than a terabyte for most."""

    kind: Literal["online"] = "online"
    # The program that runs the target: transformers in this process, or vLLM (kind: vllm) in a separate process that
    # works some batches ahead. Fingerprints leave it out if it is not set.
    engine: EngineSection = Field(TransformersEngine(), exclude_if=lambda value: value == TransformersEngine())


class CachedStates(Section):
    """States that `cache` stages wrote."""

    kind: Literal["cached"]
    # The stages that wrote them, which are read as one; null with path null: the latest that did.
    from_stage: str | list[str] | None = Field(None, alias="from")
    # Folders of shards from elsewhere.
    path: Place | list[Place] | None = None
    # Fields in which they may differ from what would be computed now (transformers, image_backend, ...). The states
    # then differ from the target's, by an amount that you must judge.
    accept: list[Acceptable] = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_place(self) -> CachedStates:
        if self.from_stage is not None and self.path is not None:
            raise ValueError("give from or path, not both")
        return self

    @property
    def stages(self) -> list[str | None]:
        """Names of the stages that are read; [None]: the latest."""
        if self.path is not None:
            return []
        return [None] if self.from_stage is None else listed(self.from_stage)

    @property
    def folders(self) -> list[Path]:
        """From elsewhere."""
        return [Path(path) for path in listed(self.path)]


class FirstEpochStates(Section):
    """Computed and written while the first epoch trains, read from the second on."""

    kind: Literal["cached_on_first_epoch"]
    states: StatesStore = StatesStore()


StatesSource = Annotated[OnlineStates | CachedStates | FirstEpochStates, Field(discriminator="kind")]

# samples, collate, first step, last step -> what this rank reads
MakeLoader = Callable[[Samples, Collate, int, int], Loader]


@dataclass(frozen=True)
class Steps:
    """Stands where a `Loader` does: its numbers, and steps that `iterate` makes."""

    batch_size: int
    accumulation: int
    iterate: Callable[[], Iterator[StepBatches]]

    def __iter__(self) -> Iterator[StepBatches]:
        return self.iterate()


class Online:
    """States of `builder`'s samples, computed in each epoch anew. `lengths` [n] are negative without pictures, `draws`
    [n] are of the samples' names, `supervised` [n] tokens.
    """

    def __init__(self, builder: Builder):
        self.builder = builder
        self.lengths, self.draws = builder.counts.signed, builder.samples.draws()
        self.supervised, self.left_out = builder.counts.supervised, builder.samples.dataset.log.summary
        self._begun: deque[tuple[Batch, Callable[[], TargetStates]]] = deque()

    def steps(
        self, indices: np.ndarray, make_loader: MakeLoader, first: int, last: int, *, trains: bool
    ) -> Loader | Steps:
        """Steps `first` to `last` over these samples; of held-out ones (not `trains`) nothing is kept."""
        loader, ahead = self.loader(indices, make_loader, first, last), self.builder.ahead
        if not trains or not ahead:
            return Steps(loader.batch_size, loader.accumulation, lambda: iter(loader))

        def begun() -> Iterator[StepBatches]:
            for step in loader:
                self._begun.extend((batch, self.builder.begin(batch)) for batch in step.micro)
                yield step

        # Begun steps, each of `accumulation` batches; the loop itself looks one step ahead.
        accumulation = loader.accumulation
        return Steps(loader.batch_size, accumulation, lambda: looked_ahead(begun(), ahead // accumulation))

    def __call__(self, batch: Batch) -> TargetStates:
        """The target's states for the next micro-batch of the training, on its device."""
        if not self._begun:
            return self.held_out(batch)
        begun, states = self._begun.popleft()
        assert begun.sample_ids == batch.sample_ids, "batches are read in the order in which they were begun"
        return states()

    def held_out(self, batch: Batch) -> TargetStates:
        """The same for a held-out micro-batch: nothing of it is kept."""
        return self.builder.states(batch.to("cpu") if self.builder.served else batch)

    def loader(self, indices: np.ndarray, make_loader: MakeLoader, first: int, last: int) -> Loader:
        """Steps `first` to `last` over these samples, with the builder's collate and without states."""
        samples, lengths = self.builder.samples, self.builder.counts.signed[indices]
        return make_loader(Chosen(samples, indices, lengths), self.builder.collate, first, last)

    def supervised_ids(self, index: int) -> Tensor:
        """[n] int64 of one sample."""
        outline = self.builder.samples.outline(index)
        return torch.tensor(outline.ids)[torch.tensor(outline.loss_mask)]


class Cached:
    """States of shards; what is public is as in `Online`."""

    def __init__(self, reader: StatesReader, seed: int):
        self.reader, self.seed, self.supervised_ids = reader, seed, reader.supervised_ids
        self.lengths, self.draws = CachedSamples.of(reader).lengths, reader.column("draw")
        self.supervised = reader.column("supervised")

    def left_out(self) -> str:
        """How many records are left out, and why; empty: none is."""
        count = int((self.supervised == 0).sum())
        silent = f"{count:,} cached record(s) supervise nothing" if count else ""
        logs = (SkippedLog(shards.folder.parent / "skipped.jsonl") for shards in self.reader.shards)
        return "; ".join(filter(None, [silent, *(log.summary() for log in logs)]))

    def steps(
        self, indices: np.ndarray, make_loader: MakeLoader, first: int, last: int, *, trains: bool
    ) -> Loader | Steps:
        collate = CachedCollate(self.reader, self.seed)
        loader = make_loader(CachedSamples.of(self.reader, indices), collate, first, last)
        # A thread reads ahead: batches of processes come in new shared memory, which costs more than reading them.
        loader = replace(loader, num_workers=0)
        return Steps(loader.batch_size, loader.accumulation, lambda: prefetched(loader))

    def __call__(self, batch: Batch) -> TargetStates:
        assert batch.states is not None
        return batch.states

    held_out = __call__


class FirstEpoch:
    """Online in the first epoch and the step after it, which is fetched before the epoch's last states are there; read
    from the shards from then on. A run that comes back goes on as it would have: what it does again in the first epoch
    is computed again, and a shard that it begins in the middle of is completed when the epoch ends. `measured` says in
    the manifest what keeping states in the store's dtype costs.
    """

    def __init__(self, builder: Builder, known: JsonObject, measured: Measured, say: Callable[[str], None]):
        self.online, self.builder, self.say = Online(builder), builder, say
        self.lengths, self.draws, self.supervised = self.online.lengths, self.online.draws, self.online.supervised
        self.left_out = self.online.left_out
        self.known, self.measured = known, measured
        self.supervised_ids, self.held_out = self.online.supervised_ids, self.online.held_out

    def steps(
        self, indices: np.ndarray, make_loader: MakeLoader, first: int, last: int, *, trains: bool
    ) -> Loader | Steps:
        if not trains:
            return self.online.steps(indices, make_loader, first, last, trains=False)
        whole = self.online.loader(indices, make_loader, 0, last)
        writing = self._writing = _EpochShards(self, whole, indices)
        self._next, epoch = first * whole.accumulation, writing.num_steps

        def iterate() -> Iterator[StepBatches]:
            if first <= epoch:
                writing.claim()
                yield from self.online.loader(indices, make_loader, first, min(last, epoch + 1))
            if last > epoch + 1:
                reader = writing.finish()
                assert len(reader) == len(indices), f"{len(reader)} records of {len(indices)} samples"
                cached, every = Cached(reader, self.builder.collate.seed), np.arange(len(reader))
                yield from cached.steps(every, make_loader, max(first, epoch + 1), last, trains=True)

        return Steps(whole.batch_size, whole.accumulation, iterate)

    def __call__(self, batch: Batch) -> TargetStates:
        """Computed, and kept in the first epoch; read with the batch from the shards later."""
        step, micro = divmod(self._next, self._writing.loader.accumulation)
        self._next += 1
        if batch.states is not None:
            return batch.states
        states = self.online(batch)
        if step < self._writing.num_steps:
            self._writing.keep(step, micro, batch, states)
        return states


States = Online | Cached | FirstEpoch


class _EpochShards:
    """Shards of the first epoch, each of some consecutive steps of one rank."""

    def __init__(self, source: FirstEpoch, loader: Loader, indices: np.ndarray):
        self.source, self.builder, self.loader, self.indices = source, source.builder, loader, indices
        self.num_steps = loader.steps_per_epoch
        self.size = self.builder.size(indices, source.measured.width)
        rows = -(-loader.batch_size // loader.world_size)  # of a step on one rank
        per_step = self.size.sample_bytes * rows
        self.steps_per_shard = max(1, round(self.builder.store.shard_bytes / per_step))
        self.num_shards = -(-self.num_steps // self.steps_per_shard) * loader.world_size
        self._samples: list[Sample] | None = None  # of the shard that is being collected
        grouping = {"world_size": loader.world_size, "steps_per_shard": self.steps_per_shard, "seed": loader.seed}
        self.identity = self.builder.identity(source.known, source.measured, grouping)

    def claim(self) -> None:
        """Before the first shard: say what is coming, look at the disk, take the folder."""
        folder, store = self.builder.folder, self.builder.store
        done = [index for index in range(self.num_shards) if finished(folder, index)]
        self.source.say(f"states in {store.dtype} of the first epoch: {self.size}, {len(done)} shards are there")
        num_bytes = sum(shard_path(folder, index).stat().st_size for index in done)
        ranks.on_main(check_disk, self.builder.folder, self.size.total_bytes - num_bytes)
        claim(folder, self.identity)

    def keep(self, step: int, micro: int, batch: Batch, states: TargetStates) -> None:
        """Write the states of micro-batch `micro` of `step`."""
        group, within = divmod(step, self.steps_per_shard)
        index = group * self.loader.world_size + self.loader.rank
        if within == 0 and micro == 0:
            self._samples = None if finished(self.builder.folder, index) else []
        if self._samples is None:
            return  # it is there, or this run began in the middle of it
        self._samples += self.builder.writing.samples(batch, states, batch.numbers)
        last_step = within == self.steps_per_shard - 1 or step == self.num_steps - 1
        if last_step and micro == self.loader.accumulation - 1:
            self.builder.writing.write(index, self._samples)
            self._samples = None

    def finish(self) -> StatesReader:
        """Complete what is missing, and read (all ranks call at the same step)."""
        folder, world_size = self.builder.folder, self.loader.world_size
        self._samples = None
        for index in range(self.loader.rank, self.num_shards, world_size):
            if not finished(folder, index):
                # Not to be stopped inside a step: at most one for each rank, and the next step saves a checkpoint.
                self.builder.write(index, self._numbers(index), Stop())
        ranks.barrier()
        if ranks.is_main():
            measured = {"head distribution": self.source.measured.loss}
            finish(folder, self.identity, num_shards=self.num_shards, measured=measured)
            self.source.say(f"states of the first epoch are kept: {shown(self.size.total_bytes)}; read from now on")
        ranks.barrier()
        return StatesReader([folder])

    def _numbers(self, index: int) -> np.ndarray:
        """Of the samples whose states shard `index` holds."""
        loader = self.loader
        assert loader.order is not None
        group, rank = divmod(index, loader.world_size)
        order, lengths = loader.order(0), loader.samples.lengths
        steps = range(group * self.steps_per_shard, min((group + 1) * self.steps_per_shard, self.num_steps))
        size = loader.batch_size
        batches = [order[step * size : (step + 1) * size] for step in steps]
        return self.indices[np.concatenate([rows_of_rank(b, lengths, rank, loader.world_size) for b in batches])]
