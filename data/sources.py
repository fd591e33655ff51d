"""Source of the answers that a draft is trained on: the records, the target, or the draft itself.

What a target wrote or drew is kept in shards, a record for each answer: the request, the generated ids, why it stopped,
the seed of its draws and the target's revision, so that it can be made again. Image generators add their codes (and the
features that they were asked by), language models their prompt and, where asked for, the likeliest tokens at each
place. The source is drawn for each sample in each epoch from (seed, epoch, sample), so that any rank and any resume
agrees.
Letters: T prompt tokens, n tokens of an answer.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..core.batch import TEXT, Batch, Request
from ..core.errors import UserError
from ..core.fields import MOST_ANSWER, Place, Temperature, TopK, TopP
from ..core.json_types import JsonObject
from ..core.section import Section
from ..core.states import TargetStates, TopLogProbs
from .collate import Sample, collate, empty_sample
from .dataset import ConversationData, ConversationDataset
from .shards.shards import ShardReader

Source = Literal["data", "target", "draft"]
_NEVER = -1e30  # a log-probability; finite, since 0 times it is taken


class DraftWriting(Section):
    """How the draft writes its own answers, with its weights as they are before each optimizer step."""

    max_new_tokens: int = Field(64, ge=1, le=MOST_ANSWER)
    # 0 is greedy; 1 samples from the draft, so that the target corrects what sampled drafting would propose.
    temperature: Temperature = 1.0
    top_k: TopK = 0
    top_p: TopP = 1.0


class AnswersConfig(Section):
    """Whose answers to the records of `data`. Target and draft answer the last question of each, after the record's
    own turns before it; of the record's own answers all are learned, as without this section.
    """

    # The regenerate stage that wrote the target's; null with path null: the latest.
    from_stage: str | None = Field(None, alias="from")
    # A folder of such answers to the same questions from elsewhere: they depend on the target alone, not on the draft.
    path: Place | None = None
    # Share of the samples with the record's own answers (data), the target's and the draft's; they add up to 1.
    # Answers of the draft are useful only with a target that corrects them (objective: distill).
    shares: dict[Source, float] = Field({"target": 1.0}, min_length=1)
    draft: DraftWriting = DraftWriting()
    # own: records behind the last that the target was asked keep their own answers, as captions beside its sentences.
    others: Literal["refuse", "own"] = Field("refuse", exclude_if=lambda value: value == "refuse")
    # skip: answers of the target in which three words follow each other twice are left out.
    loops: Literal["learn", "skip"] = Field("learn", exclude_if=lambda value: value == "learn")
    # Answers of the target that may begin with the same three words; further ones are left out. null: all.
    openings: int | None = Field(None, ge=1, exclude_if=lambda value: value is None)
    # Tokens, the end token among them: longer answers of the target, and cut ones as long, are left out. null: none.
    longest: int | None = Field(None, ge=1, exclude_if=lambda value: value is None)
    # Words in the singular: answers of the target that hold one, or its plural, are left out.
    without: tuple[Annotated[str, Field(pattern="^[a-z0-9]+$")], ...] = Field((), exclude_if=lambda value: not value)

    @model_validator(mode="after")
    def _whole(self) -> AnswersConfig:
        if self.from_stage is not None and self.path is not None:
            raise ValueError("give from or path, not both")
        if min(self.shares.values()) < 0 or abs(sum(self.shares.values()) - 1) > 1e-6:
            raise ValueError(f"shares {self.shares} do not add up to 1")
        return self

    def share(self, source: Source) -> float:
        """Share in [0, 1] of the samples whose answers come from `source`."""
        return self.shares.get(source, 0.0)

    def source(self, seed: int, epoch: int, name: str) -> Source:
        """The source of a sample's answer in an epoch."""
        draw = random.Random(f"answers/{seed}/{epoch}/{name}").random()
        for source in ("data", "target"):
            draw -= self.share(source)
            if draw < 0:
                return source
        return "draft" if self.share("draft") else max(self.shares, key=self.share)


def learns_records(answers: AnswersConfig | None, data: ConversationData | None) -> bool:
    """Whether a record without an answer is unusable; of mixed sources that skip it keeps its place."""
    own = 1.0 if answers is None else answers.share("data")
    return own == 1 or (own > 0 and data is not None and data.on_error == "strict")


class LearnsRecords:
    """What sections have in common whose `answers` to records of `data` are learned."""

    @property
    def learns_answers(self: Any) -> bool:
        """Whether each record has to bring an answer of its own."""
        return learns_records(self.answers, self.data)


@dataclass(frozen=True)
class Row:
    """A sample. It holds only the prompt if the draft still has to write the answer."""

    sample: Sample
    top_log_probs: TopLogProbs | None = None  # at each supervised token
    request: Request | None = None  # to be answered by the draft


class AnsweredSamples:
    """Samples with answers by source; an item is a number, since its answer depends on the epoch."""

    def __init__(self, dataset: ConversationDataset, config: AnswersConfig, answers: Answers | None, *, seed: int):
        self.dataset, self.config, self.answers, self.seed = dataset, config, answers, seed
        self.lengths = dataset.lengths
        self._unwanted = {} if answers is None else answers.unwanted(config)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> int:
        return index

    def row(self, index: int, epoch: int, *, pixels: bool = True) -> Row:
        """Sample `index` as `epoch` has it; without `pixels` it can only be counted."""
        source = self.config.source(self.seed, epoch, self.dataset.sample_id(index))
        unasked = source == "target" and self.answers is not None and index >= len(self.answers)
        if source == "data" or unasked:
            sample = self.dataset[index] if pixels else self.dataset.counted(index)
            count = 0 if self.answers is None else self.answers.num_kept
            return Row(sample, certain(sample, count) if count else None)
        if source == "target" and index in self._unwanted:
            self.dataset.list_as_left_out(index, self._unwanted[index])
            return self._without(index)
        try:
            request, _ = self.dataset.request(index, pixels=pixels, most=self.dataset.config.max_length)
            # The drafter's own tiles, where its image processor is not the target's.
            own = request.drafter_view or request
            if self.limit(own) < 1:
                raise self.dataset.too_long(len(own.ids) + 1)
        except UserError as error:
            return self._left_out(index, error)
        if source == "draft":
            return Row(answered(own, [], request.name), request=own)
        assert self.answers is not None
        ids, kept = self.answers.read(index, request)
        if not ids:
            self.dataset.list_as_left_out(index, "the target has not answered it")
        if len(own.ids) + len(ids) > self.dataset.config.max_length:
            return self._left_out(index, self.dataset.too_long(len(own.ids) + len(ids)))
        return Row(answered(own, ids, request.name), kept)

    def limit(self, request: Request) -> int:
        """Tokens that the draft may write."""
        return min(self.config.draft.max_new_tokens, self.dataset.config.max_length - len(request.ids))

    def _left_out(self, index: int, error: UserError) -> Row:
        """An unusable record keeps its place with nothing to learn from, where it does not end the run."""
        self.dataset.leave_out(index, error)
        return self._without(index)

    def _without(self, index: int) -> Row:
        empty = empty_sample(self.dataset.processor.pad_id)
        return Row(replace(empty, sample_id=self.dataset.sample_id(index)))


def answered(request: Request, ids: Sequence[int], name: str) -> Sample:
    """A prompt and the ids [n] that follow it, which are supervised; nothing is tokenized again."""
    prompt = request.ids.tolist()
    return Sample(
        [*prompt, *ids],
        [False] * len(prompt) + [True] * len(ids),
        [*request.modality.tolist(), *[TEXT] * len(ids)],
        request.pixels,
        name,
        request.pictures,
    )


def certain(sample: Sample, count: int) -> TopLogProbs:
    """Kept scores [n,count] of a target that is sure of each of the sample's n supervised tokens: KL to it is
    cross-entropy.
    """
    labels = torch.tensor(sample.ids)[torch.tensor(sample.loss_mask)][:, None]
    others = torch.arange(count - 1)[None]
    logs = torch.full((len(labels), count), _NEVER)
    logs[:, 0] = 0.0
    return TopLogProbs(torch.cat([labels, others + (others >= labels)], 1), logs, logs.new_full((len(labels),), _NEVER))


@dataclass(frozen=True)
class OpenBatch:
    """A micro-batch in which the draft still has to write some answers."""

    rows: tuple[Row, ...]
    pad_id: int
    image_size: int

    @property
    def requests(self) -> list[Request]:
        """The requests that the draft has to answer, in row order."""
        return [row.request for row in self.rows if row.request is not None]

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """[B] names of the records."""
        return tuple(row.sample.sample_id for row in self.rows)

    @property
    def num_supervised(self) -> int:
        """Supervised tokens of the answers that are there."""
        return sum(sum(row.sample.loss_mask) for row in self.rows)

    def filled(self, answers: Sequence[Sequence[int]]) -> Batch:
        """Return the batch with an answer to each of the requests, in row order."""
        own = iter(answers)
        samples = [
            row.sample if row.request is None else answered(row.request, next(own), row.sample.sample_id)
            for row in self.rows
        ]
        return collate(samples, pad_id=self.pad_id, image_size=self.image_size)


@dataclass(frozen=True)
class AnswerCollate:
    """Reads the samples of a micro-batch: a `Batch`, or an `OpenBatch` where the draft has yet to answer some of them.
    With `num_kept` above 0 the batch brings the target's kept scores at each supervised token.
    """

    samples: AnsweredSamples
    pad_id: int
    image_size: int
    num_kept: int = 0

    def __call__(self, samples: Sequence[int], *, epoch: int) -> Batch | OpenBatch:
        rows = [self.samples.row(index, epoch) for index in samples] or [Row(empty_sample(self.pad_id))]
        if self.samples.config.share("draft"):
            return OpenBatch(tuple(rows), self.pad_id, self.image_size)
        batch = collate([row.sample for row in rows], pad_id=self.pad_id, image_size=self.image_size)
        if not self.num_kept:
            return batch
        nothing = TopLogProbs(
            torch.zeros(0, self.num_kept, dtype=torch.int64), torch.zeros(0, self.num_kept), torch.zeros(0)
        )
        kept = [nothing, *(row.top_log_probs for row in rows if row.top_log_probs is not None)]
        joined = TopLogProbs(*(torch.cat([vars(k)[f.name] for k in kept]) for f in fields(TopLogProbs)))
        return replace(batch, states=TargetStates(top_log_probs=joined))


def words_of(text: str) -> list[str]:
    """The words of an answer, as they are compared."""
    return re.findall(r"[\w']+", text.casefold())


def is_loop(words: Sequence[str]) -> bool:
    """Whether three words follow each other twice."""
    threes = [*zip(words, words[1:], words[2:], strict=False)]
    return len({*threes}) < len(threes)


SHARDS = "answers"  # folder of them inside a stage's
SKIPPED = "skipped"  # why an unusable record has no answer


@dataclass(frozen=True)
class Answer:
    """One answer of a target."""

    number: int  # of the request and repeat, from 0
    request: JsonObject  # what was asked, as JSON: caption, label, conversation, ...
    ids: list[int]  # generated, the end token included
    stop: str  # eos or length
    seed: int  # of this answer's draws
    target: str  # name and revision
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def sample(self) -> tuple[str, dict[str, Tensor], JsonObject]:
        """Return the answer as shards hold it: key, tensors, info."""
        info = {**self.request, "stop": self.stop, "seed": self.seed, "target": self.target}
        return f"{self.number:09d}", {"ids": torch.tensor(self.ids, dtype=torch.int32), **self.tensors}, info


def text_ids(request: Request) -> Tensor:
    """[n] int32: the prompt without its runs of image tokens, which depend on the image processor."""
    return request.ids[request.modality == TEXT].to(torch.int32)


def kept_tensors(kept: TopLogProbs | None) -> dict[str, Tensor]:
    """Return the tensors of an answer's record, [n,K], [n,K] and [n] for its n tokens; none without kept scores."""
    if kept is None:
        return {}
    return {"top_ids": kept.ids.to(torch.int32), "top_log_probs": kept.log_probs, "log_rest": kept.log_rest}


class Answers:
    """A `regenerate` stage's answers, in the order of their records. Raises `UserError`: they are of other data."""

    def __init__(self, folder: Path, dataset: ConversationDataset, *, others: Literal["refuse", "own"] = "refuse"):
        self.folder, self.dataset, self.reader = folder, dataset, ShardReader(folder)
        if len(self.reader) != len(dataset) and (others == "refuse" or len(self.reader) > len(dataset)):
            raise self._other(f"{len(self.reader)} answers for {len(dataset)} records")

    def __len__(self) -> int:
        return len(self.reader)

    @property
    def num_kept(self) -> int:
        """Tokens kept at each place; 0: none."""
        return int(self.reader.identity["kept"])

    def unwanted(self, config: AnswersConfig) -> dict[int, str]:
        """Numbers of the answers that the section leaves out, and why."""
        reasons, begun = dict[int, str](), Counter[tuple[str, ...]]()
        barred = {word + ending for word in config.without for ending in ("", "s", "es")}
        barred |= {f"{word[:-1]}ies" for word in config.without if word.endswith("y")}
        asked = config.loops == "skip" or config.openings or config.longest or barred
        for number in range(len(self.reader) if asked else 0):
            _, tensors, info = self.reader[number]
            words = words_of(info.get("text", ""))
            if config.longest is not None and len(tensors["ids"]) > config.longest:
                reasons[number] = f"the target's answer has more than {config.longest} tokens (answers.longest)"
            elif config.loops == "skip" and is_loop(words):
                reasons[number] = "three words of the target's answer follow each other twice (answers.loops)"
            elif not barred.isdisjoint(re.findall("[a-z0-9]+", " ".join(words))):
                reasons[number] = "the target's answer holds a word that it should not (answers.without)"
            elif words and config.openings is not None and begun[tuple(words[:3])] >= config.openings:
                reasons[number] = f"{config.openings} answers begin with the same three words (answers.openings)"
            else:
                begun[tuple(words[:3])] += 1
        return reasons

    def read(self, index: int, request: Request) -> tuple[list[int], TopLogProbs | None]:
        """The target's answer to `request`, which is record `index` of the data. Empty if the record was skipped.
        Raises `UserError`: the stored request differs from `request`.
        """
        _, tensors, info = self.reader[index]
        if info["name"] != request.name:
            raise self._other(f"answer {index} is to {info['name']}, the data has {request.name} there")
        if info["stop"] == SKIPPED:
            return [], None
        if not torch.equal(tensors["prompt"], text_ids(request)):
            raise self._other(f"the prompt of {request.name} is rendered otherwise than when the target answered it")
        kept = None
        if self.num_kept:
            kept = TopLogProbs(tensors["top_ids"].long(), tensors["top_log_probs"], tensors["log_rest"])
        return tensors["ids"].tolist(), kept

    def _other(self, problem: str) -> UserError:
        return UserError(
            problem, where=str(self.folder),
            hint="give the stage the data and format of the regenerate stage, or write the answers anew",
        )  # fmt: skip
