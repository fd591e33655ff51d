"""Stage kind `prompts`: the target writes users' turns, for those who have no prompts of their own.

The user's turn of the target's own template is begun, and the target, which was trained on conversations, goes on with
it (Magpie, arXiv 2406.08464, section 2). What it writes depends on the seed, the split and a prompt's number alone.
Shards keep what was tried; the records of a split are its first prompts that ended and that no split had before.
"""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints, model_validator

from ...core import ranks
from ...core.batch import Request
from ...core.errors import Refused, UserError, counted
from ...core.fields import MOST_ANSWER, FileName, Place, TopK, TopP
from ...core.files import read_json, write_whole
from ...core.json_types import JsonMapping, JsonObject
from ...core.results import DATASET_FOLDER
from ...core.section import Section
from ...data.conversations import PromptFormat, encode, end_ids
from ...data.dataset import ConversationData
from ...data.families.processor import Processor
from ...data.pictures.picture_files import SUFFIXES
from ...data.pictures.tiles import Aspect
from ...data.shards.shards import claim
from ...models.decoding.batched import Written, write_answers
from ...models.decoding.warp import Warp
from ...models.drafters.base import DrafterConfig
from ...models.targets.language import LanguageTarget
from ...models.targets.table import AnyTarget
from ..run.context import Context
from ..run.stage import Planned, Stage
from ..run.stage_records import check_fit, open_records
from ..serve.states_builder import open_target
from ..train.engine import init_distributed

_TRIED = "tried"  # folder of the shards of each split
_TOPIC = "{topic}"
_MOST_TRIES = 4  # for each prompt that is wanted
_ANYTHING = "Q", "7"  # two turns that differ from their first token on
Phrase = Annotated[str, StringConstraints(strip_whitespace=True, max_length=1000)]


class PromptSplit(Section):
    """Prompts that no other split has, about topics or pictures of its own."""

    # Prompts.
    count: int = Field(ge=1, le=10**7)
    # What they are about, in turn. Splits share none, so that a held-out one tells what a drafter does on other topics.
    topics: list[Phrase] = Field(default_factory=list)
    # Folder of pictures that they ask about, in turn; null: text alone. Splits share no folder.
    pictures: Place | None = None

    @model_validator(mode="after")
    def _each_once(self) -> PromptSplit:
        if len({topic.casefold() for topic in self.topics}) < len(self.topics) or "" in self.topics:
            raise ValueError("topics name one twice, or an empty one")
        return self


class PromptsStage(Stage):
    loads_target: ClassVar[bool] = True
    usual_purpose: ClassVar[str] = "the target writes prompts for itself"
    without_pictures: ClassVar[frozenset[str]] = frozenset({"text"})
    working: ClassVar[tuple[str, ...]] = (*Stage.working, _TRIED)

    kind: Literal["prompts"]
    # Name -> prompts. Other stages read them as data: {from: STAGE, path: NAME}.
    splits: dict[FileName, PromptSplit] = Field(min_length=1)
    # First words of a turn, in turn, with {topic} where a split has topics; the target goes on with them. Empty: it
    # begins by itself, and knows of no topic.
    begins: list[Phrase] = Field(default_factory=lambda: [""], min_length=1)
    format: PromptFormat = PromptFormat()
    # How pictures are read.
    aspect: Aspect = "pad"
    temperature: float = Field(1.0, ge=0)
    top_k: TopK = 0
    top_p: TopP = 0.95
    # Tokens that the target writes; a prompt that has not ended by then is dropped.
    max_new_tokens: int = Field(96, ge=1, le=MOST_ANSWER)
    # Prompts that each rank writes side by side.
    batch_size: int = Field(16, ge=1)
    # Of one shard: what a killed run does again at most, on each rank.
    samples_per_shard: int = Field(64, ge=1)

    @model_validator(mode="after")
    def _apart(self) -> PromptsStage:
        if self.temperature == 0:
            raise Refused("temperature", "a greedy target writes the same prompt each time", "set 1, or 0.8")
        about: dict[str, str] = {}
        for name, split in self.splits.items():
            words = [*(f"topic {topic.casefold()!r}" for topic in split.topics), f"folder {split.pictures}"]
            for what in words if split.pictures else words[:-1] or ["no topic"]:
                if (other := about.setdefault(what, name)) != name:
                    raise Refused(f"splits.{name}", f"{what} is of {other} as well, and splits have prompts apart",
                                  "give each its own topics or pictures")  # fmt: skip
            for begin in self.begins:
                if (_TOPIC in begin) != bool(split.topics):
                    problem = f"{begin!r} has {'a' if _TOPIC in begin else 'no'} {_TOPIC}, and splits.{name} has "
                    raise Refused("begins", problem + ("topics" if split.topics else "none"),
                                  "write {topic} where topics are meant, in each of them")  # fmt: skip
        return self

    @property
    def answer_format(self) -> PromptFormat:
        return self.format

    def check(self, target: AnyTarget, drafter: DrafterConfig | None) -> None:
        """Refuses pictures for a target that reads text alone."""
        for name, split in self.splits.items():
            if split.pictures is not None and target.reads_text_alone:
                raise Refused(f"splits.{name}.pictures", "the target reads text alone", "give topics")

    @classmethod
    def unsuited(cls, target: AnyTarget, drafter: DrafterConfig | None) -> str | None:
        return "prompts are texts, and the target draws images" if target.draws_images else None

    @property
    def records(self) -> dict[str, dict[str, int]]:
        """Split -> kind -> records, as of a `generate` stage."""
        return {name: {"text" if s.pictures is None else "pictures": s.count} for name, s in self.splits.items()}

    @property
    def mixtures(self) -> dict[str, dict[str, str]]:
        """There are none."""
        return {}

    def written(self, is_suite: bool) -> list[str]:
        return [] if is_suite else [*self.splits]

    def makes(self) -> set[str]:
        return {"data"}

    def needs(self) -> dict[str, str | None]:
        return {"target": None, "processor": None}

    def run(self, context: Context) -> None:
        """Tries prompts, ranks in turn, until each split has its own."""
        init_distributed()
        with context.in_step():
            target, keys = open_target(context, context.processor()), set[str]()
            for name, split in self.splits.items():
                self._write(name, split, context, target, keys)

    def _write(self, name: str, split: PromptSplit, context: Context, target: LanguageTarget, keys: set[str]) -> None:
        source = Prompts(
            name, self._begun(name, split), context, target, form=self.format,
            warp=Warp(self.temperature, self.top_k, self.top_p), max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size, pictures=split.pictures, aspect=self.aspect,
        )  # fmt: skip
        folder, size = context.folder / _TRIED / name, self.samples_per_shard
        claim(folder, {"stage": context.fingerprint, "tokenizer": source.processor.tokenizer_hash})
        texts: list[str | None] = []
        # What is tried next follows from the texts so far, so that it is the same for any number of ranks.
        while len(fits := _usable(name, source.begun, texts, keys)) < split.count and len(texts) < len(source.begun):
            came = max(len(fits) / len(texts), 1 / _MOST_TRIES) if texts else 1.0
            last = min(len(texts) + math.ceil((split.count - len(fits)) / came), len(source.begun))
            shards = range(len(texts) // size, -(-last // size))
            self._try(source, shards, folder, context)
            for shard in shards:
                texts += read_json(_file(folder, shard), list[str | None], hint="run the stage again")
        if len(fits) < split.count:
            raise UserError(
                f"{len(texts)} tries gave {len(fits)} of {split.count} prompts: the others did not end within "
                f"{self.max_new_tokens} tokens, or came twice", key=f"stages.{context.name}.splits.{name}",
                hint="ask for fewer, give more topics, or set max_new_tokens higher",
            )  # fmt: skip
        fits = fits[: split.count]
        keys |= {_key(record) for record in fits}
        if ranks.is_main():
            (context.folder / DATASET_FOLDER).mkdir(exist_ok=True)
            write_whole(context.folder / DATASET_FOLDER / f"{name}.json", json.dumps(fits, indent=1).encode())
            context.say(f"{name}: {split.count:,} prompts of {len(texts):,} tries")
        ranks.barrier()

    def _try(self, source: Prompts, shards: range, folder: Path, context: Context) -> None:
        """Write this rank's of these shards, where they are not there yet."""
        size, in_step = self.samples_per_shard, context.is_in_step
        mine = [shards[place] for place in ranks.share(len(shards), in_step=in_step)]
        left = [shard for shard in mine if not _file(folder, shard).is_file()]
        left = ranks.broadcast(left) if in_step else left
        context.progress.count("prompt", len(mine) * size, (len(mine) - len(left)) * size, is_share=not in_step)
        with context.stop.together():
            for shard in left:
                numbers = range(shard * size, min((shard + 1) * size, len(source.begun)))
                texts = source.texts(numbers)
                if ranks.is_main() or not in_step:
                    write_whole(_file(folder, shard), json.dumps(texts).encode())

    def _begun(self, name: str, split: PromptSplit) -> list[Begun]:
        """How each try begins: topics change fastest, then first words; pictures go round by themselves."""
        pictures: list[str | None] = (
            [None] if split.pictures is None else _pictures(split.pictures, f"splits.{name}.pictures")
        )
        topics: list[str | None] = [*split.topics] or [None]
        ways = [(begin.replace(_TOPIC, topic or ""), topic) for begin in self.begins for topic in topics]
        tries = range(split.count * _MOST_TRIES)
        return [Begun(*ways[n % len(ways)], pictures[n % len(pictures)]) for n in tries]

    def describe(self, plan: Planned) -> list[str]:
        return [
            f"  {name}: {split.count:,} prompts of up to {self.max_new_tokens} tokens"
            + (f", about {counted(len(split.topics), 'topic')}" if split.topics else "")
            + (f", on pictures of {split.pictures}" if split.pictures else "")
            for name, split in self.splits.items()
        ]


@dataclass(frozen=True)
class Begun:
    """How a user's turn begins, and what is known of it."""

    begin: str  # its first words, without a blank behind them; empty: the target begins
    topic: str | None
    picture: str | None  # a path in the split's folder; None: there is none

    def record(self, name: str, text: str) -> JsonObject:
        """A record of a user's turn `text`, without an answer."""
        known = {"id": name, "topic": self.topic, "image": self.picture}
        turns = [{"from": "human", "value": text if self.picture is None else f"<image>\n{text}"}]
        return {key: value for key, value in known.items() if value} | {"conversations": turns}


class Prompts:
    """Writes the prompts of one split.

    Args:
        split: its name.
        begun: of each prompt that is tried, in order.
        pictures: the folder of their pictures; None: there are none.
        aspect: how they are read.
    """

    def __init__(
        self,
        split: str,
        begun: Sequence[Begun],
        context: Context,
        target: LanguageTarget,
        *,
        form: PromptFormat,
        warp: Warp,
        max_new_tokens: int,
        batch_size: int,
        pictures: str | None,
        aspect: Aspect,
    ):
        self.split, self.begun, self.context, self.target, self.warp = split, begun, context, target, warp
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self.processor = context.processor()
        self.ends = end_ids(self.processor, form)
        self.special = special_ids(self.processor)
        self.behind = {one.begin: _behind(one.begin, form, self.processor) for one in begun}
        # The dataset reads pictures and renders as it does for everyone, so the turns are written as records.
        file = context.folder / "cache" / f"begun-{split}.json"
        file.parent.mkdir(exist_ok=True)
        if ranks.is_main():
            write_whole(
                file, json.dumps([one.record("", f"{one.begin} {_ANYTHING[0]}".strip()) for one in begun]).encode()
            )
        ranks.barrier()
        self.most = target.decoder.max_positions or 1 << 24
        data = ConversationData(path=str(file), images=pictures, aspect=aspect, max_length=self.most)
        self.dataset = open_records(data, form, context, self.processor, files=[file], learned=False)
        check_fit(context, self.dataset, target.decoder, as_cut=False, section="")

    def texts(self, numbers: range) -> list[str | None]:
        """The user's turn of each of these tries; None: it did not end, or says nothing."""
        parts = [range(start, min(start + self.batch_size, numbers.stop)) for start in numbers[:: self.batch_size]]
        texts: list[str | None] = []
        for part in self.context.stop.watch(parts, "inside a shard of prompts"):
            requests = [self._request(number) for number in part]
            written = write_answers(
                self.target.decoder, requests, self.warp,
                limits=[min(self.max_new_tokens, self.most - len(request.ids)) for request in requests],
                seeds=[zlib.crc32(f"{self.context.seed}/{self.split}/{number}".encode()) for number in part],
                eos_ids=self.ends, prefill_chunk=self.target.prefill_chunk,
            )  # fmt: skip
            texts += map(self._text, part, written)
            self.context.progress.advance(len(part))
        return texts

    def _request(self, number: int) -> Request:
        """The prompt up to where the user's turn goes on."""
        request = self.target.view(self.dataset.request(number)[0])
        length = len(request.ids) - self.behind[self.begun[number].begin][0]
        return replace(request, ids=request.ids[:length], modality=request.modality[:length])

    def _text(self, number: int, written: Written) -> str | None:
        begin = self.begun[number].begin
        ids = [token for token in written.ids if token not in self.ends]
        text = str(self.processor.tokenizer.decode(ids))
        ended, behind = written.stop == "eos", self.behind[begin][1]
        if not ended and behind in text:
            # A template whose turns have no end token: this one ends where the answer would begin.
            text, ended = text.partition(behind)[0], True
        elif any(token in self.special for token in ids):
            return None
        return f"{begin} {text.strip()}".strip() if ended and text.strip() else None


def special_ids(processor: Processor) -> set[int]:
    """Ids that stand for no text: a turn with one of them is not what a user writes."""
    added = processor.tokenizer.added_tokens_decoder
    return {*processor.tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)}


def _behind(begin: str, form: PromptFormat, processor: Processor) -> tuple[int, str]:
    """How many ids follow the begin of a user's turn, and the text behind the turn, where `_ANYTHING` goes on with it.
    Raises `UserError`: the template has no user's turn that can be gone on with.
    """
    turns = ([{"from": "human", "value": f"{begin} {text}".strip()}] for text in _ANYTHING)
    one, other = (encode(turn, form, processor, open_ended=True) for turn in turns)
    same = _num_same(one.ids, other.ids)
    behind = one.text[len(one.text) - _num_same(one.text[::-1], other.text[::-1]) :].strip()
    cut = str(processor.tokenizer.decode(one.ids[same:])).strip()
    if not behind or not cut.startswith(_ANYTHING[0]):
        raise UserError(f"template {form.template} writes no user's turn that a target can go on with",
                        hint="name a template with turns: format: {template: chat}, v1, qwen, ...")  # fmt: skip
    return len(one.ids) - same, behind


def _num_same(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _file(folder: Path, shard: int) -> Path:
    return folder / f"{shard:05d}.json"


def _pictures(folder: str, key: str) -> list[str | None]:
    paths = sorted(
        str(file.relative_to(folder)) for file in Path(folder).rglob("*")
        if file.suffix.lower().removeprefix(".") in SUFFIXES
    )  # fmt: skip
    if not paths:
        raise UserError(f"no picture in {folder}", key=key, hint=f"files of {', '.join(sorted(SUFFIXES))}")
    return [*paths]


def _usable(name: str, begun: Sequence[Begun], texts: Sequence[str | None], keys: Collection[str]) -> list[JsonObject]:
    """Records of the tries that ended, each text once, without those whose key is in `keys`."""
    fits: dict[str, JsonObject] = {}
    for number, text in enumerate(texts):
        if text is not None:
            record = begun[number].record(f"{name}-{number}", text)
            if (key := _key(record)) not in keys:
                fits.setdefault(key, record)
    return [*fits.values()]


def _key(record: JsonMapping) -> str:
    """Equal for prompts of one picture that differ by case and blanks alone."""
    return f"{record.get('image')} {' '.join(record['conversations'][0]['value'].casefold().split())}"
