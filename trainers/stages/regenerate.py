"""Stage kind `regenerate`: the target answers for its drafter to learn from, in texts (`data`) or pictures (`prompts`).

An answer depends on its number, the seed and the target alone: ranks write side by side, and a killed run goes on
after the shards that it finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator

from ...core import ranks
from ...core.errors import Refused
from ...core.fields import MOST_ANSWER, TopK, TopP
from ...core.json_types import JsonObject
from ...core.results import CODES, DATASET_FOLDER
from ...data.captioned.prompts import PromptSource, read_prompts
from ...data.conversations import PromptFormat
from ...data.dataset import ConversationData
from ...data.shards.shards import SAMPLE_BYTES, ShardReader, claim, finish, summary, unfinished, write_shard
from ...data.sources import SHARDS as ANSWERS
from ...data.sources import SKIPPED, Answer
from ...models.decoding.batched import draw_pictures, even_batches
from ...models.decoding.warp import Warp
from ...models.drafters.base import DrafterConfig
from ...models.hub import config_value
from ...models.targets.table import AnyTarget, image_section
from ..estimate.data import on_disk, samples
from ..run.context import Context
from ..run.progress import of_shards
from ..run.stage import Planned, Stage
from ..serve.engines import EngineSection
from ..serve.target_engine import TransformersEngine
from ..serve.written_texts import Texts
from ..train.engine import init_distributed
from ..train.fit import Expected

TEXTS = {"data", "pictures", "format", "max_new_tokens", "keep_logprobs", "engine", "expected"}
PICTURES = {"prompts", "repeats"}


class RegenerateStage(Stage):
    loads_target: ClassVar[bool] = True
    reads_drafter: ClassVar[bool] = False  # answers and pictures are the target's alone
    usual_purpose: ClassVar[str] = "the target writes the answers"

    kind: Literal["regenerate"]
    # Texts: the questions are each record's conversation up to its last answer.
    data: ConversationData | None = None
    # Texts: told asks the target with the record's text for each picture (key `told`, one for each) in the place of the
    # picture, as a teacher of a target that is to see; the answers are to the pictures' own prompts.
    pictures: Literal["seen", "told"] = Field("seen", exclude_if=lambda value: value == "seen")
    # Pictures: what they are of.
    prompts: PromptSource | None = None
    # null: 0 for texts, which is greedy and the right one where evaluation is greedy; 1 for pictures. Guidance is the
    # target's.
    temperature: float | None = Field(None, ge=0)
    top_k: TopK = 0
    top_p: TopP = 1.0
    # Answers of one output shard: what a killed run does again at most, on each rank. null: 64 texts, or batch_size if
    # that is more; 512 with an engine; 100 pictures.
    samples_per_shard: int | None = Field(None, ge=1)

    # Requests that each rank answers side by side: memory for speed. The cache of a guided picture takes 1.1 GB with
    # Anole 7B, 0.14 GB with LlamaGen-XL at 256 pixels. No answer depends on it, but for the last bits of a sum.
    batch_size: int = Field(16, ge=1)

    # Texts: how prompts are rendered.
    format: PromptFormat = PromptFormat()
    # Tokens of an answer; prompt and answer together stay within data.max_length.
    max_new_tokens: int = Field(256, ge=1, le=MOST_ANSWER)
    # Log-probabilities kept at each token, with the mass of all others; null: none. 64 take 512 bytes a token, the
    # whole vocabulary of a Llama 128 kB.
    keep_logprobs: int | None = Field(None, ge=1)
    # The program that runs the target: transformers in this process, or vLLM (kind: vllm) in a separate process.
    # Fingerprints leave it out if it is not set.
    engine: EngineSection = Field(TransformersEngine(), exclude_if=lambda value: value == TransformersEngine())
    expected: Expected | None = None

    # Pictures: how many of each prompt.
    repeats: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _one_of_both(self) -> RegenerateStage:
        if (self.data is None) == (self.prompts is None):
            raise ValueError("give data, whose questions are answered, or prompts, of which pictures are drawn")
        return self

    def unread(self) -> dict[str, str]:
        if self.data is None:
            return dict.fromkeys(TEXTS, "pictures have none")
        return dict.fromkeys(PICTURES, "texts have none")

    def harmless(self) -> set[str]:
        """Fields that change no result and stay out of the fingerprint: a run may go on with other values."""
        # Pictures alone, whose fingerprints never had it; those of texts stay as they were.
        return {"batch_size"} if self.data is None else set()

    @property
    def answer_format(self) -> PromptFormat | None:
        return None if self.data is None else self.format

    @property
    def sampling_temperature(self) -> float:
        """`temperature`; unset, it is 1 for pictures and 0 (greedy) for texts."""
        if self.temperature is not None:
            return self.temperature
        return 1.0 if self.data is None else 0.0

    def check(self, target: AnyTarget, drafter: DrafterConfig | None) -> None:
        """Refuses `data` for a target that draws, and `prompts` for one that writes text."""
        if target.draws_images and self.prompts is None:
            raise Refused("data", f"target {target.kind} draws pictures and answers no questions", "give prompts")
        if not target.draws_images and self.data is None:
            raise Refused("prompts", f"target {target.kind} answers questions and draws no pictures", "give data")
        if self.data is not None:
            self.engine.check(target, states=False, aspect=self.data.aspect)
            if self.engine.is_served and self.keep_logprobs is not None:
                raise Refused("keep_logprobs", f"{self.engine.name}'s log-probabilities count ids that never come",
                              "leave it out, or engine: {kind: transformers}")  # fmt: skip

    @property
    def shards(self) -> str:
        return CODES if self.data is None else ANSWERS

    def makes(self) -> set[str]:
        return {"codes" if self.data is None else "answers"}

    @property
    def tensors(self) -> Sequence[str]:
        """What each sample of its shards of pictures holds."""
        return ("codes", "features")

    def needs(self) -> dict[str, str | None]:
        wanted: dict[str, str | None] = {"target": None}
        wanted |= {"text": None, "vq": None} if self.data is None else {"processor": None}
        source = self.data or self.prompts
        return wanted | ({"data": source.from_stage} if source is not None and source.from_stage is not None else {})

    def run(self, context: Context) -> None:
        """Writes the shards that are not there yet; ranks take turns."""
        init_distributed()
        with context.in_step():
            self._write(context)

    def _write(self, context: Context) -> None:
        warp = Warp(self.sampling_temperature, self.top_k, self.top_p)
        source: Pictures | Texts
        if self.prompts is not None:
            source = Pictures(self.prompts, context, warp=warp, repeats=self.repeats, batch_size=self.batch_size)
        else:
            assert self.data is not None
            source = Texts(
                self.data, self.format, context, self.engine, warp=warp, max_new_tokens=self.max_new_tokens,
                top=self.keep_logprobs or 0, batch_size=self.batch_size, in_words=self.pictures == "told",
            )  # fmt: skip
        per_shard = self.samples_per_shard or source.per_shard
        folder = context.folder / self.shards
        identity = {"stage": context.fingerprint, **source.identity()}
        claim(folder, identity)
        num_shards = -(-len(source) // per_shard)
        left = unfinished(folder, num_shards, in_step=context.is_in_step)
        mine = ranks.share(num_shards, in_step=context.is_in_step)
        counts = of_shards(len(source), per_shard, mine, left)
        context.progress.count(
            "answer" if self.prompts is None else "picture", *counts, is_share=not context.is_in_step
        )
        with context.stop.together():
            for index in left:
                answers = list(source.answers(range(index * per_shard, min((index + 1) * per_shard, len(source)))))
                if context.is_in_step and not ranks.is_main():
                    continue
                skipped = sum(answer.stop == SKIPPED for answer in answers)
                write_shard(folder, index, (a.sample() for a in answers), {SKIPPED: skipped} if skipped else {})
                context.say(f"shard {index + 1} of {num_shards}")
        if ranks.is_main():
            finish(folder, identity, num_shards=num_shards)
            context.say(source.finish(ShardReader(folder)))
        ranks.barrier()

    def describe(self, plan: Planned) -> list[str]:
        if self.prompts is not None:
            pictures = f"{self.prompts.max_samples or '?'} prompts x {self.repeats} pictures"
            return [f"  up to {pictures}, in batches of {self.batch_size}"]
        assert self.data is not None
        number, how = samples(plan, on_disk(self))
        shown = "unknown: the data is not on disk" if number is None else f"{number:,} ({how})"
        note = "" if self.keep_logprobs is None else f"; {self.keep_logprobs} log-probabilities kept at each token"
        by = f" by {self.engine.name}" if self.engine.is_served else ""
        lines = [f"  answers {shown}{by}, each of up to {self.max_new_tokens} tokens{note}"]
        if number is not None:
            lines[0] += f", at most {number * self.max_new_tokens:,} in all"
            most = number * (self.max_new_tokens * (4 + 8 * (self.keep_logprobs or 0)) + SAMPLE_BYTES)
            lines.append(f"  disk at most {most / 2**30:.1f} GiB of ids" + (" and log-probabilities" if note else ""))
        return lines


class Pictures:
    """Pictures that a target draws itself (LANTERN, appendix B.2: 118k for Anole)."""

    per_shard = 100  # where the recipe names no number

    def __init__(self, source: PromptSource, context: Context, *, warp: Warp, repeats: int, batch_size: int):
        self.context, self.warp, self.repeats, self.batch_size = context, warp, repeats, batch_size
        folder = None if source.from_stage is None else context.inputs["data"] / DATASET_FOLDER
        self.prompts = read_prompts(source.resolved(folder))
        image_section(context.target).check_labels([(p.caption, p.label) for p in self.prompts])
        self.generator = image_section(context.target).generator(context.inputs, device=context.device())

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
            prompts = [self.prompts[number // self.repeats] for number in some]
            requests = [generator.request(prompt.caption, prompt.label, prompt.key) for prompt in prompts]
            seeds = [context.seed * 1_000_003 + number for number in some]
            drawn = draw_pictures(target, requests, self.warp, seeds=seeds)
            for number, prompt, request, seed, tokens in zip(some, prompts, requests, seeds, drawn, strict=True):
                tensors = {"codes": target.codes(tokens).to(torch.int32)}
                if request.condition.is_floating_point():
                    tensors["features"] = request.condition.cpu()
                about = {"name": prompt.key, "caption": prompt.caption, "label": prompt.label}
                yield Answer(number, about, tokens, "length", seed, name, tensors)
            context.progress.advance(len(some))

    def finish(self, reader: ShardReader) -> str:
        """A line about the finished shards."""
        return summary(reader.folder)
