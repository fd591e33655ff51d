"""Texts that a target writes: answers to the questions of a data section, in batches.

Prompts are rendered as in evaluation, so that training sees what decoding sees.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from ...core.batch import Request
from ...core.errors import UserError
from ...core.json_types import JsonObject, list_at, with_each
from ...data.conversations import PromptFormat, end_ids
from ...data.dataset import ConversationData
from ...data.shards.shards import ShardReader
from ...data.sources import SKIPPED, Answer, kept_tensors, text_ids
from ...models.decoding.batched import Written, write_answers
from ...models.decoding.warp import Warp
from ...models.drafters.distillation import keep_scores
from ...models.folders import shipped_name
from ..run.context import Context
from ..run.stage_records import check_fit, open_records
from .states_builder import open_target
from .target_engine import TargetEngine


class Texts:
    """Writes the answers of a `regenerate` stage, one for each record of its data.

    Args:
        form: how prompts are rendered.
        max_new_tokens: of an answer.
        top: log-probabilities that are kept at each token; 0: none are.
        batch_size: requests that are answered together.
        in_words: the target reads the record's text for each picture; stored is the picture's own prompt.
    """

    def __init__(
        self,
        data: ConversationData,
        form: PromptFormat,
        context: Context,
        engine: TargetEngine,
        *,
        warp: Warp,
        max_new_tokens: int,
        top: int,
        batch_size: int,
        in_words: bool = False,
    ):
        self.in_words = in_words
        self.context, self.warp, self.max_new_tokens, self.top = context, warp, max_new_tokens, top
        self.processor = context.processor()
        self.ends = end_ids(self.processor, form)
        self.dataset = open_records(data, form, context, self.processor, learned=False)
        self.target = open_target(context, self.processor, tables_only=engine.is_served)
        check_fit(context, self.dataset, self.target.decoder, as_cut=False)
        if top > (most := self.processor.num_token_ids - 2):
            problem = f"keep_logprobs is {top}: of {most + 2} ids the image's never comes, and one is left to the rest"
            raise UserError(problem, hint=f"keep {most} or fewer: 64 already hold nearly all of the mass")
        self.engine = engine.installed_identity(f"stages.{context.name}.engine")
        self.batch_size = batch_size
        self.served = engine.open_answers(context, self.dataset, self.target, warp, self.ends)
        # Where the recipe names no number: what a killed process loses. An engine is handed a whole shard at once.
        self.per_shard = 512 if self.served else max(64, batch_size)
        self._ends: Counter[str] = Counter()  # why the answers of this process stopped -> how many
        self._tokens, self._since = 0, time.monotonic()
        self.name = (
            f"{shipped_name(context.target.path or 'inline')}@{context.target.revision or context.fingerprint[:12]}"
        )

    def __len__(self) -> int:
        return len(self.dataset)

    def identity(self) -> JsonObject:
        """What the shards depend on besides the stage's fingerprint."""
        known = {"tokenizer": self.processor.tokenizer_hash, "kept": self.top}
        return known if self.engine is None else known | {"engine": self.engine}

    def answers(self, numbers: range) -> list[Answer]:
        """The answers to these records, in order."""
        # Of like lengths together: padding costs as much as text. It changes no answer.
        alike = sorted(numbers, key=lambda n: (int(self.dataset.lengths[n]), n))
        parts = [alike[start : start + self.batch_size] for start in range(0, len(alike), self.batch_size)]
        # An engine has all of them at once, and goes from one to the next.
        batches = [self._batch(part) for part in parts] if self.served else map(self._batch, parts)
        answers: list[Answer] = []
        for finish, part in zip(self.context.stop.watch(batches, "inside a shard of answers"), parts, strict=True):
            answers += (written := [*finish()])
            self._ends.update(answer.stop for answer in written)
            if self.served:
                self._wrote(sum(len(answer.ids) for answer in written))
            self.context.progress.advance(len(part))
        return sorted(answers, key=lambda a: a.number)

    def _wrote(self, tokens: int) -> None:
        """Show what this process has written so far."""
        self._tokens += tokens
        rate = self._tokens / max(time.monotonic() - self._since, 1e-3)
        ended = f"{self._ends['eos']:,} ended, {self._ends['length']:,} cut"
        self.context.progress.note(f"{self._tokens:,} tokens", ended, f"{rate:,.0f} tokens/s")

    def finish(self, reader: ShardReader) -> str:
        """A line about the finished shards. Raises `UserError` where no record was answered."""
        if reader.refused.get(SKIPPED) == len(reader):
            raise UserError(
                "every record was left out, and none answered", where=str(self.context.folder / "skipped.jsonl"),
                hint=f"fix what it names, then restart={self.context.name}",
            )  # fmt: skip
        stops = Counter(reader[i][2]["stop"] for i in range(min(len(reader), 1000)))
        shown = ", ".join(f"{count} {stop}" for stop, count in sorted(stops.items()))
        reasons = ", ".join(f"{count} left out: {reason}" for reason, count in reader.refused.items())
        return (
            f"{len(reader):,} answers in {reader.folder} ({reasons or 'none left out'}); how the first ended: {shown}"
        )

    def _batch(self, numbers: list[int]) -> Callable[[], Iterator[Answer]]:
        """Ask for the answers to these records, and return what gives them."""
        requests = {number: self._request(number) for number in numbers}
        usable = {number: request for number, request in requests.items() if request is not None}
        seeds = [self.context.seed * 1_000_003 + number for number in usable]
        written = self._write([request for request, _ in usable.values()], seeds)

        def finish() -> Iterator[Answer]:
            for number in requests.keys() - usable.keys():
                yield Answer(number, {"name": self.dataset.sample_id(number)}, [], SKIPPED, 0, self.name)
            for (number, (_, prompt)), seed, answer in zip(usable.items(), seeds, written(), strict=True):
                tensors = {"prompt": prompt, **kept_tensors(answer.top_log_probs)}
                yield Answer(number, self._about(number, answer.ids), answer.ids, answer.stop, seed, self.name, tensors)

        return finish

    def _write(self, requests: list[Request], seeds: list[int]) -> Callable[[], Sequence[Written]]:
        limits = [min(self.max_new_tokens, self.dataset.config.max_length - len(r.ids)) for r in requests]
        if not requests:
            return lambda: []
        if self.served is not None:
            return self.served(requests, limits, seeds)
        keep = functools.partial(keep_scores, count=self.top) if self.top else None
        return functools.partial(
            write_answers, self.target.decoder, requests, self.warp, limits=limits, seeds=seeds,
            eos_ids=self.ends, keep=keep, prefill_chunk=self.target.prefill_chunk, watch=self._wrote,
        )  # fmt: skip

    def _request(self, number: int) -> tuple[Request, Tensor] | None:
        """The request, and the prompt that its answer is stored under, or None where the record cannot be used and is
        left out.
        """
        try:
            most = self.dataset.config.max_length
            own = self.dataset.request(number, most=most, pixels=not self.in_words)[0]
            request = self.target.view(self.dataset.request(number, most=most, words=True)[0] if self.in_words else own)
            if len(request.ids) >= self.dataset.config.max_length:
                raise self.dataset.too_long(len(request.ids) + 1)
            return request, text_ids(own)
        except UserError as error:
            self.dataset.leave_out(number, error)
            return None

    def _about(self, number: int, ids: list[int]) -> JsonObject:
        """What was asked, and the answer as text for people: training reads the ids."""
        record = self.dataset.record(number)
        turns = record["conversations"]
        turns = turns[:-1] if turns[-1]["from"] == "gpt" else turns
        text = self.processor.tokenizer.decode(ids, skip_special_tokens=True)
        about = {"name": self.dataset.sample_id(number), "conversations": turns, "text": text}
        about |= {"id": record["id"]} if "id" in record else {}
        if "image" in record:  # bytes inside a table or a tar by their place
            several = list_at(image := record["image"])
            about["image"] = image if several is None else [str(one) for one in several]
        # An id of a table may be NaN, and no JSON holds one.
        return with_each(about, float, lambda number: number if math.isfinite(number) else str(number))
