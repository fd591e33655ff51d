"""Stage kind `regenerate`: the target answers the questions of a data section itself, for drafts to learn from.

An answer depends on its number, the seed and the target alone: ranks write side by side, and a killed run goes on
behind the shards that it finished. Prompts are rendered as in evaluation, so that training sees what decoding sees.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from ...core import ranks
from ...core.errors import UserError
from ...core.nouns import Request
from ...core.section import Section
from ...data.answers import SHARDS, SKIPPED, Answer, kept_tensors, text_ids
from ...data.conversations import PromptFormat
from ...data.dataset import ConversationData, ConversationDataset
from ...data.processor import Processor
from ...data.shards import ShardReader, claim, finish, finished, write_shard
from ...models.decoding.batched import write_answers
from ...models.decoding.warp import Warp
from ...models.distillation import keep_scores
from ...models.targets.llava import LlavaTarget
from ...models.targets.load import load_target
from ..context import Context
from ..engine import init_distributed
from ..fit import Expected
from ..records import check_fit, data_files


class RegenerateAnswersStage(Section):
    kind: Literal["regenerate"]
    format: PromptFormat = PromptFormat()
    # The questions: each record's conversation up to its last answer.
    data: ConversationData
    # Tokens of an answer; prompt and answer together stay within data.max_length.
    max_new_tokens: int = Field(256, ge=1)
    # 0 is greedy: the right one where evaluation is greedy.
    temperature: float = Field(0.0, ge=0)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    # Requests that are answered together on each rank.
    batch_size: int = Field(16, ge=1)
    # Answers of one output shard: what a killed run does again at most, on each rank.
    samples_per_shard: int = Field(512, ge=1)
    # Log-probabilities kept at each token, with the mass of all others; null: none. 64 take 512 bytes a token, the
    # whole vocabulary of a Llama 128 kB.
    keep_logprobs: int | None = Field(None, ge=1)
    expected: Expected | None = None

    def makes(self) -> set[str]:
        return {"answers"}

    def needs(self) -> dict[str, str | None]:
        wanted: dict[str, str | None] = {"target": None, "processor": None}
        return wanted | ({"data": self.data.from_stage} if self.data.from_stage is not None else {})


def run(stage: RegenerateAnswersStage, context: Context) -> None:
    init_distributed()
    processor = context.processor()
    dataset = ConversationDataset(
        stage.data,
        stage.format,
        processor,
        files=data_files(stage.data, context),
        skipped_log=context.folder / "skipped.jsonl",
        cache=context.folder / "cache",
    )
    target = load_target(
        context.target,
        context.target_source(),
        num_token_ids=len(processor.tokenizer),
        image_token_id=processor.image_token_id,
        device=context.device(),
    )
    check_fit(context, dataset, target.decoder, as_cut=False)
    _check_kept(stage, context.target.num_token_ids or len(processor.tokenizer))
    folder = context.folder / SHARDS
    identity = {"stage": context.fingerprint, "tokenizer": processor.tokenizer_hash, "kept": stage.keep_logprobs or 0}
    claim(folder, identity)
    num_shards = -(-len(dataset) // stage.samples_per_shard)
    writer = _Writer(stage, context, dataset, processor, target)
    for index in range(ranks.rank(), num_shards, ranks.world_size()):
        if finished(folder, index):
            continue
        start = index * stage.samples_per_shard
        answers = writer.answers(range(start, min(start + stage.samples_per_shard, len(dataset))))
        counts = {SKIPPED: sum(a.stop == SKIPPED for a in answers)}
        write_shard(folder, index, (a.sample() for a in answers), {r: n for r, n in counts.items() if n})
        context.say(f"shard {index + 1} of {num_shards}")
    ranks.barrier()
    if ranks.is_main():
        finish(folder, identity, num_shards=num_shards)
        reader = ShardReader(folder)
        context.say(_summary(reader))
        if reader.refused.get(SKIPPED) == len(reader):
            raise UserError(
                "every record was left out, and none answered", where=str(context.folder / "skipped.jsonl"),
                cure=f"mend what it names, then restart={context.name}",
            )  # fmt: skip
    ranks.barrier()


def _check_kept(stage: RegenerateAnswersStage, num_ids: int) -> None:
    if stage.keep_logprobs is not None and stage.keep_logprobs > num_ids - 2:
        raise UserError(
            f"keep_logprobs is {stage.keep_logprobs}, and of {num_ids} ids the image's never comes and one must be "
            "left to the rest",
            cure=f"keep {num_ids - 2} or fewer: 64 already hold nearly all of the mass",
        )


class _Writer:
    def __init__(
        self,
        stage: RegenerateAnswersStage,
        context: Context,
        dataset: ConversationDataset,
        processor: Processor,
        target: LlavaTarget,
    ):
        self.stage, self.context, self.dataset = stage, context, dataset
        self.processor, self.target = processor, target
        self.name = f"{context.target.path or 'inline'}@{context.target.revision or context.fingerprint[:12]}"

    def answers(self, numbers: range) -> list[Answer]:
        """The answers to these records, in order."""
        # Of like lengths together: padding costs as much as text. It changes no answer.
        alike = sorted(numbers, key=lambda n: (int(self.dataset.lengths[n]), n))
        size = self.stage.batch_size
        found = [a for i in range(0, len(alike), size) for a in self._batch(alike[i : i + size])]
        return sorted(found, key=lambda a: a.number)

    def _batch(self, numbers: list[int]) -> Iterator[Answer]:
        asked: dict[int, Request] = {}
        for number in numbers:
            request = self._request(number)
            if request is None:
                yield Answer(number, {"name": self.dataset.sample_id(number)}, [], SKIPPED, 0, self.name)
            else:
                asked[number] = request
        if not asked:
            return
        stage = self.stage
        seeds = [self.context.seed * 1_000_003 + number for number in asked]
        limits = [min(stage.max_new_tokens, stage.data.max_length - len(r.ids)) for r in asked.values()]
        keep = functools.partial(keep_scores, count=stage.keep_logprobs) if stage.keep_logprobs else None
        written = write_answers(
            self.target.decoder, list(asked.values()), Warp(stage.temperature, stage.top_k, stage.top_p),
            limits=limits, seeds=seeds, eos_ids=(self.processor.eos_id,), keep=keep,
            prefill_chunk=self.target.prefill_chunk,
        )  # fmt: skip
        for (number, request), seed, answer in zip(asked.items(), seeds, written, strict=True):
            tensors = {"prompt": text_ids(request), **kept_tensors(answer.kept)}
            yield Answer(number, self._about(number, answer.ids), answer.ids, answer.stop, seed, self.name, tensors)

    def _request(self, number: int) -> Request | None:
        """The request, or None where the record cannot be used and is left out."""
        try:
            request = self.target.view(self.dataset.request(number)[0])
            if len(request.ids) >= self.dataset.config.max_length:
                raise self.dataset.too_long(len(request.ids) + 1)
            return request
        except UserError as error:
            self.dataset.leave_out(number, error)
            return None

    def _about(self, number: int, ids: list[int]) -> dict[str, Any]:
        """What was asked, and the answer as text for people: training reads the ids."""
        record = self.dataset.record(number)
        turns = record["conversations"]
        turns = turns[:-1] if turns[-1]["from"] == "gpt" else turns
        text = self.processor.tokenizer.decode(ids, skip_special_tokens=True)
        about = {"name": self.dataset.sample_id(number), "conversations": turns, "text": text}
        return about | {key: record[key] for key in ("id", "image") if key in record}


def _summary(reader: ShardReader) -> str:
    stops = Counter(reader[i][2]["stop"] for i in range(min(len(reader), 1000)))
    shown = ", ".join(f"{count} {stop}" for stop, count in sorted(stops.items()))
    refused = ", ".join(f"{count} left out: {reason}" for reason, count in reader.refused.items()) or "none left out"
    return f"{len(reader):,} answers in {reader.folder} ({refused}); how the first ended: {shown}"
