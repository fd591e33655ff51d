"""What an evaluation measures on: files of one's own, prompts of image generators, published sets, TABED's suite."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, model_validator

from ...core.fields import MOST_ANSWER, Place, shorthand
from ...core.section import Section
from ...data.captioned.prompts import PromptSource
from ...data.dataset import ConversationData
from ...data.suites.benchmark_sets import SAMPLES, TURN_SETS, names_of, set_name, turn_set
from ...data.suites.suite import BENCHMARK, INDEX, OOD, QUALITY, TASKS, Convention, Task, read_index
from ...data.suites.suite_hub import PUBLISHED
from ...eval.quality.measure import QualityConfig

HUB = "hub"

B = TypeVar("B", bound="Benchmark")


class Benchmark(Section):
    """What every kind of benchmark answers."""

    kind: str
    # Whether it asks for pictures, of image generators.
    draws: ClassVar[bool] = False
    # Whether each request is a conversation up to its last answer, which `opened` reads.
    asks_conversations: ClassVar[bool] = False

    def opened(self, name: str, opens: Any) -> Iterable[Any]:
        """Its conversations up to their last answers, as `files` or `sets` of `opens` read them; none: something else
        reads it.
        """
        return ()

    def set_names(self, name: str) -> list[str] | None:
        """What tables call its sets, where the recipe calls it `name`; None: those that its directory has."""
        return [name]

    def check(self, key: str, *, template: str) -> None:
        """Raise `ValueError` for settings that contradict each other, or the stage's prompt template."""

    def lines(self) -> list[str]:
        """Its lines of a dry run, where its name does not say enough."""
        return []


class DataBenchmark(Benchmark):
    """Benchmarks with a data section."""

    data: ConversationData


class FilesBenchmark(DataBenchmark):
    """Records of one's own: each conversation up to its last answer is a request."""

    kind: Literal["files"] = "files"
    asks_conversations: ClassVar[bool] = True

    def opened(self, name: str, opens: Any) -> Iterable[Any]:
        return opens.files(name, self.data)


class Untimed(Section):
    """Pictures for their quality alone. Nothing is timed, and the report has no speed."""

    # Pictures of plain decoding that each rank draws side by side; memory as in a regenerate stage. Methods draw theirs
    # one by one.
    batch_size: int = Field(16, ge=1)
    # Also draw the pictures of exact methods. They have plain decoding's distribution (at temperature 0 they are the
    # same pictures), so a table of quality does not need them.
    exact_methods: bool = False


class PromptsBenchmark(Benchmark):
    """Prompts of an image generator."""

    kind: Literal["prompts"] = "prompts"
    draws: ClassVar[bool] = True
    prompts: PromptSource
    # Metrics on every picture that was drawn; null: none.
    quality: QualityConfig | None = None
    # Score the pictures with the reader of a synthetic dataset (a stage with model: reader).
    reader: bool = False
    # Draw for quality alone, in batches; null: every method's pictures are drawn one by one, and timed.
    # Fingerprints leave it out if it is not set, so that older evaluations can continue.
    untimed: Untimed | None = Field(None, exclude_if=lambda value: value is None)
    # Pictures of each method in the report's grids.
    shown: int = Field(8, ge=1)

    @model_validator(mode="after")
    def _judged(self) -> PromptsBenchmark:
        if self.untimed is not None and self.quality is None and not self.reader:
            raise ValueError("untimed draws pictures for their quality: give quality or reader, which judge it")
        return self

    def lines(self) -> list[str]:
        where = self.prompts.path or f"{self.prompts.classes} classes"
        return [f"  {self.prompts.max_samples or 'all'} prompts of {where}"]


class SuiteBenchmark(DataBenchmark):
    """A directory of sets, or the published ones."""

    @property
    def names(self) -> list[str] | None:
        """Names of the sets; None: those of the directory."""
        raise NotImplementedError

    def set_names(self, name: str) -> list[str] | None:
        return self.names

    def check(self, key: str, *, template: str) -> None:
        if not isinstance(self.data.path, str):
            raise ValueError(f"{key}.data.path names one directory (or {HUB}), found a list")
        if self.data.kinds is not None:
            raise ValueError(f"{key}.data.kinds: sets are chosen by `sets`")

    @property
    def on_hub(self) -> bool:
        """Whether the published sets are read: `path: hub`, and no stage that wrote a suite."""
        return self.data.from_stage is None and self.data.path == HUB


class SetsBenchmark(SuiteBenchmark):
    """Published sets of videos, pictures and texts, or a directory in their layout."""

    kind: Literal["sets"]
    asks_conversations: ClassVar[bool] = True
    # How pictures and clips are read; max_samples limits the rows of each set (100 as drawn with seed 42 of `hub`).
    # `path` is `hub` (the published sets), a directory with suite.json, with `from` the folder of one in a generated
    # world (video_suite), or of MMSpec and SPEED-Bench the folder or file of the set as its authors publish it.
    data: ConversationData
    # null: those that the directory has; of `hub` all sets of clips.
    sets: list[str] | None = Field(None, min_length=1)
    # describe: long answers, to measure speed on; stock: the sets' own questions; verbatim: a directory's own words.
    convention: Literal["describe", "stock", "verbatim"] = "describe"
    # Of `hub`: the folder in which each set's archives of clips are unpacked, in a folder of the set's name.
    media: Place | None = None

    def opened(self, name: str, opens: Any) -> Iterable[Any]:
        return opens.sets(self)

    @property
    def names(self) -> list[str] | None:
        """Names of the sets, as tables have them: published ones have other names, too. None: those of the directory.

        Raises:
            UserError: no published set is called so.
        """
        if not self.on_hub:
            return self.sets if self.published is None else [self.published]
        if self.sets is None:
            return names_of("video")
        return [turn_set(called) or set_name(called) for called in self.sets]

    @property
    def published(self) -> str | None:
        """The set of conversations whose own files `path` has; None: it is a directory of sets, or `hub`."""
        if self.on_hub or self.data.from_stage is not None or (Path(str(self.data.path)) / INDEX).is_file():
            return None
        return turn_set(self.sets[0]) if self.sets is not None and len(self.sets) == 1 else None

    def lines(self) -> list[str]:
        names = ", ".join(self.names or ["the sets that it has"])
        rows = self.data.max_samples or (f"all (papers: {SAMPLES})" if self.on_hub else "all")
        talks = [f"{name} ({TURN_SETS[name].size})" for name in self.names or () if name in TURN_SETS]
        if talks and len(talks) == len(self.names or ()):
            return [f"  {' and '.join(talks)} of {self.data.path}; {rows} rows; each turn after the target's answers"]
        return [f"  suite {self.data.path}: {names}; {rows} rows of each set; {self.convention} prompts"]


class QualitySection(Section):
    """Answers of target and drafts, each with the pictures and without (TABED, tables 5 and 9, figure 7)."""

    # OCRBench (accuracy), TextCaps (METEOR, ROUGE-L), Spot and MB (ROUGE-L); all but accuracy need the extra [metrics].
    sets: list[str] = Field(list(QUALITY), min_length=1)
    max_new_tokens: int = Field(128, ge=1, le=MOST_ANSWER)
    # Rows of each set; null: as many as it has (OCRBench 1000, TextCaps 3166).
    max_samples: int | None = Field(None, ge=1)
    # Records of each set whose answers the report shows.
    samples: int = Field(3, ge=0)


class TabedBenchmark(SuiteBenchmark):
    """TABED's sets in first and second turns, with tables of their own in the report, and a picture of them."""

    kind: Literal["tabed"]
    # How pictures are cut; max_samples limits the rows of each set. `path` is `hub` (the published sets), a directory
    # with suite.json, or with `from` the folder of one in a synthetic dataset (suite).
    data: ConversationData
    # null: the nine of the article, or those that the directory has.
    sets: list[str] | None = Field(None, min_length=1)
    # 1: first turns alone.
    turns: Literal[1, 2] = 2
    # Second turns of benchmark sets. Those on the first turn count as one number, NQ and GSM8K have their own columns.
    tasks: list[Task] = Field(list(TASKS), min_length=1)
    # Prompts: paper (appendix I), released (TABED's code), or verbatim (the data's own words).
    convention: Convention = "released"
    # How a second turn's prompt holds the first: released, without the end token after the answer; training, with it.
    transcript: Literal["released", "training"] = "released"
    quality: QualitySection | None = None

    @property
    def names(self) -> list[str] | None:
        """Names of the sets; None: those of the directory."""
        return [*BENCHMARK, *OOD] if self.sets is None and self.on_hub else self.sets

    def check(self, key: str, *, template: str) -> None:
        super().check(key, template=template)
        if self.transcript == "released" and template != "v1":
            raise ValueError(f"{key}.transcript: released is of template v1; set it to training")

    def lines(self) -> list[str]:
        """Each request is decoded plainly and once by every method with each of its drafters."""
        limit, path, names = self.data.max_samples, Path(str(self.data.path)), self.names
        if names is None and self.data.from_stage is None and (path / INDEX).is_file():
            names = list(read_index(path).sets)
        turns = f"{self.convention} prompts, {self.turns} turn(s)"
        if self.turns == 2:
            turns += f" ({', '.join(self.tasks)}; {self.transcript} transcripts)"
        lines = [f"  suite {self.data.path}: {', '.join(names) if names else 'the sets that it has'}; {turns}"]
        if self.on_hub and names and all(name in PUBLISHED for name in names):
            counts = {name: min(n for n in (PUBLISHED[name].rows, limit) if n is not None) for name in names}
            first = sum(counts.values())
            second = sum(counts[name] for name in names if name in BENCHMARK) * len(self.tasks) * (self.turns == 2)
            lines.append(f"  requests {first:,} of the first turn and {second:,} of the second")
        if self.quality is not None:
            lines.append(f"  quality of answers on {', '.join(self.quality.sets)}")
        return lines


AnyBenchmark = Annotated[
    Annotated[FilesBenchmark | PromptsBenchmark | SetsBenchmark | TabedBenchmark, Field(discriminator="kind")],
    shorthand(dict, lambda value: {"kind": "prompts" if "prompts" in value else "files", **value}),
]


def _by_name(section: list[Any]) -> object:
    """A list of sections with a name each, too. Raises `ValueError` where two have one name."""
    entries: dict[str, object] = {}
    for entry in section:
        if not isinstance(entry, dict):
            return section
        name = str(entry.get("name") or entry.get("kind"))
        if name in entries:
            raise ValueError(f"two benchmarks are called {name!r}")
        entries[name] = {key: value for key, value in entry.items() if key != "name"}
    return entries


# Name in the tables -> section; of `sets` and `tabed` the tables have the sets' names.
Benchmarks = Annotated[dict[str, AnyBenchmark], shorthand(list, _by_name)]


def of_class(benchmarks: Mapping[str, Benchmark], kind: type[B]) -> list[B]:
    """The benchmarks of one class, for what only that kind has."""
    return [benchmark for benchmark in benchmarks.values() if isinstance(benchmark, kind)]


def clip_sets(benchmarks: Mapping[str, Benchmark]) -> set[str]:
    """Names of the sets that may hold clips. Raises `ValueError` where a directory's sets are not named."""
    names: set[str] = set()
    for name, benchmark in benchmarks.items():
        if benchmark.asks_conversations:
            if (of_it := benchmark.set_names(name)) is None:
                raise ValueError(f"lengths by set: benchmarks.{name} names no sets; give its `sets`")
            names |= {*of_it}
    return names


def check_benchmarks(benchmarks: Mapping[str, Benchmark], *, template: str) -> None:
    """Raises `ValueError` for names that are no files' names or stand twice, and for sections that contradict."""
    names: list[str] = []
    for name, benchmark in benchmarks.items():
        names += benchmark.set_names(name) or []
        benchmark.check(f"benchmarks.{name}", template=template)
    if odd := [name for name in names if re.fullmatch(r"[\w.+ -]+", name) is None]:
        raise ValueError(f"names of benchmarks become names of files: letters, digits, blanks and . + - _, found {odd}")
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two benchmarks are called {', '.join(sorted(twice))}")
