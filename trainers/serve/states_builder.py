"""Computing a target's hidden states and writing them: what the `cache` stage and a first epoch that caches share."""

from __future__ import annotations

import functools
import math
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ...core import ranks
from ...core.batch import Batch
from ...core.errors import Refused, UserError
from ...core.fields import PLACES
from ...core.finite import check_states
from ...core.json_types import JsonMapping, JsonObject
from ...core.section import Section
from ...core.states import Taps, TargetStates
from ...data.conversations import PromptFormat
from ...data.dataset import ConversationData
from ...data.families.processor import Processor
from ...data.shards.shards import Sample
from ...data.sources import SHARDS as ANSWERS
from ...data.sources import AnsweredSamples, Answers, AnswersConfig, learns_records
from ...data.states.identity import states_identity, target_identity
from ...data.states.records import StatesWriting, batches
from ...data.states.samples import Counts, SeededCollate, StatesSamples
from ...data.states.storage import DTYPES, Size, StatesDtype, decode, encode, record_bytes
from ...models.drafters.base import DrafterConfig
from ...models.losses import log_probs
from ...models.targets.base import TargetShape
from ...models.targets.language import LanguageTarget
from ...models.targets.load import load_target
from ...models.targets.table import language_section
from ..run.context import Context
from ..run.stage_records import open_records
from ..run.stopping import Stop
from .target_engine import StatesElsewhere, TargetEngine

_Item = TypeVar("_Item")


class StatesStore(Section):
    """How states are kept."""

    # bf16 loses nothing that a head notices; int8 (a scale for each 64 channels, loud channels apart) and fp8 halve
    # the disk. What each does to the LM head's distribution is measured and stands in the manifest.
    dtype: StatesDtype = "bf16"
    # Of one shard, about. Each rank holds one in memory until it is whole; a killed build does that one again.
    shard_bytes: int = Field(1_500_000_000, ge=1)
    # Samples that the loss of each dtype is measured on.
    measured_samples: int = Field(16, ge=1)


def check_answers(answers: AnswersConfig | None) -> None:
    """States are of one text: whose it is must not change from epoch to epoch."""
    if answers is not None and max(answers.share("data"), answers.share("target")) < 1:
        raise Refused("answers.shares", "those of a head's stage name one source alone, data or target")


def sample_needs(data: ConversationData | None, answers: AnswersConfig | None) -> dict[str, str | None]:
    """What a stage that reads samples takes from earlier ones."""
    wanted: dict[str, str | None] = {}
    if data is not None and data.from_stage is not None:
        wanted["data"] = data.from_stage
    if answers is not None and answers.share("target") and answers.path is None:
        wanted["answers"] = answers.from_stage
    return wanted


def open_samples(
    data: ConversationData,
    form: PromptFormat,
    answers: AnswersConfig | None,
    context: Context,
    processor: Processor,
) -> StatesSamples:
    """The sequences of a data section, with the answers that are asked for."""
    dataset = open_records(data, form, context, processor, learned=learns_records(answers, data))
    if answers is None or not answers.share("target"):
        return StatesSamples(dataset, None)
    folder = Path(answers.path) if answers.path else context.inputs["answers"] / ANSWERS
    written = Answers(folder, dataset, others=answers.others)
    return StatesSamples(dataset, AnsweredSamples(dataset, answers, written, seed=0))


def count_samples(samples: StatesSamples, context: Context) -> Counts:
    """Counts all samples; each rank counts its share."""
    path = context.folder / "cache" / "counts"
    line = context.progress
    line.count("sample counted", len(ranks.share(len(samples))), is_share=True)
    mine = samples.count_all(path, rank=ranks.rank(), world_size=ranks.world_size(), watch=line.counted)
    return Counts.of_ranks(ranks.gather(mine))


def open_target(context: Context, processor: Processor, *, tables_only: bool = False) -> LanguageTarget:
    """The frozen target, as it decodes; `tables_only` where its states are read: embedding, LM head and config."""
    return load_target(
        language_section(context.target),
        context.target_source(),
        num_token_ids=processor.num_token_ids,
        image_token_id=processor.image_token_id,
        device=context.device(),
        tables_only=tables_only,
    )


def readers_of(drafters: Iterable[DrafterConfig | None]) -> list[DrafterConfig]:
    """Those that learn the target's states."""
    return [config for config in drafters if config is not None and config.trains_on == "states"]


def wanted_taps(drafters: Iterable[DrafterConfig | None], shape: TargetShape) -> Taps:
    """What drafters read of the target in training."""
    readers = readers_of(drafters)
    return functools.reduce(operator.or_, (config.taps_for(shape, training=True) for config in readers))


def identity_of(
    context: Context,
    processor: Processor,
    form: PromptFormat | None,
    data: ConversationData | None,
    wanted: Taps,
    dtype: StatesDtype | None,
    engine: TargetEngine | None = None,
) -> JsonObject:
    """What the states depend on, as `states_identity` has it; what only says where things lie is left out. `engine`:
    that computes them; None: it is not known, and compared with nothing.
    """
    section, target = context.target, context.target.model_dump(mode="json")
    settings = {k: v for k, v in target.items() if k not in ("path", "revision", *PLACES, "prefill_chunk")}
    weights = target_identity(context.target_source(), path=section.path, revision=section.revision)
    return states_identity(
        target=settings | weights, processor=processor, form=form, data=data, wanted=wanted, dtype=dtype,
        engine=None if engine is None else engine.installed_identity(f"stages.{context.name}.engine"),
    )  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """What the first samples say before the rest is computed."""

    position_rows: int
    computed_in: str  # type of the target's states
    width: int
    loss: dict[str, dict[str, float]]  # dtype -> kl, agreement


@dataclass(frozen=True)
class Builder:
    """Samples to shards of states; the target, or an engine in its place, runs `batch_size` sequences together."""

    samples: StatesSamples
    counts: Counts
    target: LanguageTarget
    wanted: Taps
    store: StatesStore
    folder: Path
    collate: SeededCollate
    batch_size: int
    served: StatesElsewhere | None = None

    @property
    def writing(self) -> StatesWriting:
        """How the target's states become samples of this folder's shards."""
        return StatesWriting(self.folder, self.wanted, self.store.dtype, self.counts)

    def states(self, batch: Batch) -> TargetStates:
        """The target's states for the taps `wanted`: one teacher-forced pass over the batch, without gradients."""
        return self.begin(batch)()

    def begin(self, batch: Batch) -> Callable[[], TargetStates]:
        """What gives the batch's states; an engine begins with them now."""
        if self.served is not None:
            return self.served.begin(batch)
        return functools.partial(self.target.states, batch, self.wanted)

    @property
    def ahead(self) -> int:
        """Batches that are begun before the first one's states are read."""
        return 0 if self.served is None else self.served.ahead

    def write(
        self, index: int, numbers: np.ndarray, stop: Stop, done: Callable[[int], None] = lambda count: None
    ) -> None:
        """Shard `index` with the states of these samples; it is whole or not there. `done`: told how many samples each
        batch had. Raises `Stopped`: on this rank alone, between two batches.
        """
        writing = self.writing

        def samples() -> Iterator[Sample]:
            for part, batch, states in self._computed(self._watched(numbers, stop)):
                yield from writing.samples(batch, states, part)
                done(len(part))

        writing.write(index, samples())

    def run(self, numbers: np.ndarray, stop: Stop) -> None:
        """Compute the states of these samples and keep none: of ranks in step, rank 0 alone writes."""
        for _ in self._computed(self._watched(numbers, stop)):
            pass

    def _watched(self, numbers: np.ndarray, stop: Stop) -> Iterator[list[int]]:
        return stop.watch(batches(numbers, self.counts, self.batch_size), "inside a shard")

    def size(self, indices: np.ndarray, width: int) -> Size:
        """The size of these samples' records; exact but for a few hundred bytes of each."""
        dtype, counts = self.store.dtype, self.counts
        # Three rows of positions at the most.
        each = (
            record_bytes(self.wanted, width, dtype, text=int(t), visual=int(v), position_rows=3)
            for t, v in zip(counts.text[indices], counts.visual[indices], strict=True)
        )
        return Size(len(indices), math.fsum(each))

    def measure(self) -> Measured:
        """Run the first samples that teach anything."""
        numbers = np.flatnonzero(self.counts.supervised)[: self.store.measured_samples]
        parts = batches(numbers, self.counts, self.batch_size)
        if not parts:
            raise UserError("no sample to compute states of", where=str(self.folder), hint="see skipped.jsonl")
        computed = ((batch, states) for _, batch, states in self._computed(parts))
        first = next(computed)
        states = first[1]
        check_states(states, first[0].sample_ids)
        assert states.feature is not None and states.positions is not None, "all heads read the feature"
        loss = dtype_loss(chain([first], computed), self.target.scores)
        dtype = str(states.feature.dtype).removeprefix("torch.")
        return Measured(len(states.positions), dtype, states.feature.shape[-1], loss)

    def _computed(self, parts: Iterable[list[int]]) -> Iterator[tuple[list[int], Batch, TargetStates]]:
        """Each part's samples as a batch, with its states."""

        def begun() -> Iterator[tuple[list[int], Batch, Callable[[], TargetStates]]]:
            for part in parts:
                batch = self.collate([(n, self.samples[n]) for n in part], epoch=0)
                yield part, batch, self.begin(batch)

        for part, batch, states in looked_ahead(begun(), self.ahead):
            yield part, batch, states()

    def identity(self, known: JsonMapping, measured: Measured, grouping: JsonMapping) -> JsonObject:
        """The shards' identity: `known` of `identity_of`, and what makes these records these."""
        answered = self.samples.answered
        return {
            **known,
            "samples": {
                "data": self.samples.dataset.identity(),
                "answers": None if answered is None or answered.answers is None else answered.answers.reader.identity,
                "pad_id": self.collate.pad_id,
                "position_rows": measured.position_rows,
                "computed_in": measured.computed_in,
                "width": measured.width,
            },
            "grouping": dict(grouping),
        }


def looked_ahead(items: Iterable[_Item], count: int) -> Iterator[_Item]:
    """The items, of which `count` more have been taken whenever one is given out."""
    waiting: deque[_Item] = deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


_PLACES = 128  # whose scores are compared at once: five copies of 152,000 of them for each


@torch.no_grad()
def dtype_loss(
    batches: Iterable[tuple[Batch, TargetStates]], scores: Callable[[Tensor], Tensor]
) -> dict[str, dict[str, float]]:
    """What each dtype does to the LM head's distribution: mean KL in nats from the exact one, and how often the
    likeliest token stays. At the places whose next token is supervised; each record is encoded as in a cache.
    """
    sums = {dtype: [0.0, 0.0] for dtype in DTYPES}
    places = 0
    for batch, states in batches:
        assert states.feature is not None
        for row, mask in enumerate(batch.loss_mask[:, 1:].to(states.feature.device)):
            exact = states.feature[row, :-1][mask]
            if not len(exact):
                continue
            places += len(exact)
            decoded = {dtype: decode(encode(exact, dtype), dtype, exact.dtype) for dtype in DTYPES}
            for start in range(0, len(exact), _PLACES):
                some = slice(start, start + _PLACES)
                goal = log_probs(scores(exact[some]))
                for dtype in DTYPES:
                    log_q = log_probs(scores(decoded[dtype][some]))
                    sums[dtype][0] += float((goal.double().exp() * (goal.double() - log_q.double())).sum(-1).sum())
                    sums[dtype][1] += float((goal.argmax(-1) == log_q.argmax(-1)).sum())
    return {d: {"kl": kl / max(1, places), "agreement": agreed / max(1, places)} for d, (kl, agreed) in sums.items()}
