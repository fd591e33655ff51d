"""Stage kind `prompts`: the target writes users' turns, for those who have no prompts of their own (Magpie,
arXiv 2406.08464, section 2).

Its shards keep what was tried; the records of a split are its first prompts that ended and that no split had before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints, model_validator

from ...core import ranks
from ...core.errors import Refused, UserError, counted
from ...core.fields import MOST_ANSWER, FileName, Place, TopK, TopP
from ...core.files import read_json, write_whole
from ...core.json_types import JsonMapping, JsonObject
from ...core.results import DATASET_FOLDER
from ...core.section import Section
from ...data.conversations import PromptFormat
from ...data.pictures.picture_files import SUFFIXES
from ...data.pictures.tiles import Aspect
from ...data.shards.shards import claim
from ...models.decoding.warp import Warp
from ...models.drafters.base import DrafterConfig
from ...models.targets.generators import AnyTarget
from ...models.targets.language import LanguageTarget
from ..run.context import Context
from ..run.stage import Planned, Stage
from ..serve.states_builder import open_target
from ..serve.written_prompts import Begun, Prompts
from ..train.engine import init_distributed

_TRIED = "tried"  # folder of the shards of each split
_TOPIC = "{topic}"
_MOST_TRIES = 4  # for each prompt that is wanted
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
            own = [*(f"topic {topic.casefold()!r}" for topic in split.topics), f"folder {split.pictures}"]
            for what in own if split.pictures else own[:-1] or ["no topic"]:
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
            target, seen = open_target(context, context.processor()), set[str]()
            for name, split in self.splits.items():
                self._write(name, split, context, target, seen)

    def _write(self, name: str, split: PromptSplit, context: Context, target: LanguageTarget, seen: set[str]) -> None:
        source = Prompts(
            name, self._begun(name, split), context, target, form=self.format,
            warp=Warp(self.temperature, self.top_k, self.top_p), max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size, pictures=split.pictures, aspect=self.aspect,
        )  # fmt: skip
        folder, size = context.folder / _TRIED / name, self.samples_per_shard
        claim(folder, {"stage": context.fingerprint, "tokenizer": source.processor.tokenizer_hash})
        texts: list[str | None] = []
        # What is tried next follows from the texts so far, so that it is the same for any number of ranks.
        while len(kept := _kept(name, source.begun, texts, seen)) < split.count and len(texts) < len(source.begun):
            came = max(len(kept) / len(texts), 1 / _MOST_TRIES) if texts else 1.0
            last = min(len(texts) + math.ceil((split.count - len(kept)) / came), len(source.begun))
            shards = range(len(texts) // size, -(-last // size))
            self._try(source, shards, folder, context)
            for shard in shards:
                texts += read_json(_file(folder, shard), list[str | None], hint="run the stage again")
        if len(kept) < split.count:
            raise UserError(
                f"{len(texts)} tries gave {len(kept)} of {split.count} prompts: the others did not end within "
                f"{self.max_new_tokens} tokens, or came twice", key=f"stages.{context.name}.splits.{name}",
                hint="ask for fewer, give more topics, or set max_new_tokens higher",
            )  # fmt: skip
        kept = kept[: split.count]
        seen |= {_key(record) for record in kept}
        if ranks.is_main():
            (context.folder / DATASET_FOLDER).mkdir(exist_ok=True)
            write_whole(context.folder / DATASET_FOLDER / f"{name}.json", json.dumps(kept, indent=1).encode())
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


def _file(folder: Path, shard: int) -> Path:
    return folder / f"{shard:05d}.json"


def _pictures(folder: str, key: str) -> list[str | None]:
    found = sorted(
        str(file.relative_to(folder)) for file in Path(folder).rglob("*")
        if file.suffix.lower().removeprefix(".") in SUFFIXES
    )  # fmt: skip
    if not found:
        raise UserError(f"no picture in {folder}", key=key, hint=f"files of {', '.join(sorted(SUFFIXES))}")
    return [*found]


def _kept(name: str, begun: Sequence[Begun], texts: Sequence[str | None], seen: Collection[str]) -> list[JsonObject]:
    """Records of the tries that ended, each text once and none that is `seen`."""
    kept: dict[str, JsonObject] = {}
    for number, text in enumerate(texts):
        if text is not None:
            record = begun[number].record(f"{name}-{number}", text)
            if (key := _key(record)) not in seen:
                kept.setdefault(key, record)
    return [*kept.values()]


def _key(record: JsonMapping) -> str:
    """Equal for prompts of one picture that differ by case and blanks alone."""
    return f"{record.get('image')} {' '.join(record['conversations'][0]['value'].casefold().split())}"
