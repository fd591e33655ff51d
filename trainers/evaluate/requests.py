"""The requests of an evaluation: each set at each length, opened before a large target is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core import ranks
from ...core.batch import ImageRequest, Request
from ...core.errors import UserError
from ...core.json_types import JsonMapping, JsonObject
from ...core.pictures import TEXT
from ...core.results import DATASET_FOLDER
from ...data.captioned.prompts import ImagePrompt
from ...data.conversations import PromptFormat
from ...data.dataset import ConversationData, ConversationDataset
from ...data.families.processor import Processor
from ...data.pictures.tiles import Size
from ...data.pictures.videos import VideoSettings, label, visual_tokens
from ...data.records.mixture import Name
from ...data.records.records import file_identity
from ...data.suites.benchmark_hub import fetch_benchmarks, read_published
from ...data.suites.benchmark_sets import LABELS, SEED
from ...data.suites.suite import Suite, write_records
from ...data.suites.turn_files import published_files
from ...eval.measured_rows import Medium
from ...models.targets.drawing import Generator
from ..run.context import Context
from ..run.stage_records import data_files, open_records
from .benchmarks import Benchmark, SetsBenchmark

# A number of frames; or, as text, a number of visual tokens ("25k", "700").
Length = int | str
# Of every set of clips, or set -> its own; sets that are not named are decoded as they come.
Lengths = list[Length] | dict[str, list[Length]]
SIZED = 32  # clips of a set whose sides say how many tokens its frames have


@dataclass(frozen=True)
class Opened:
    """One request, ready to be decoded."""

    request: Request | ImageRequest
    answer: str | None = None  # that the data has
    prompt_tokens: int = 0
    visual_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class RequestSet:
    """What the measuring loop goes over: one benchmark at one length.

    Args:
        budget: visual tokens that the language model sees, as `visual_budget.label` has them; "": no clips, or as they
            come.
    """

    benchmark: str
    medium: Medium
    budget: str = ""
    turn: str = ""  # of suites: first, or the task of the second turn
    part: str = ""  # of a set of conversations: its turn after the first, whose rows stand with those of the first

    @property
    def name(self) -> str:
        """The name in messages."""
        at, turn = (f" at {self.budget}" if self.budget else ""), self.turn or self.part
        return f"{self.benchmark}{at}" + (f" ({turn})" if turn else "")

    def __len__(self) -> int:
        raise NotImplementedError

    def open(self, index: int, target: Any) -> Opened | None:
        """Request `index`; None: it is left out."""
        raise NotImplementedError

    def labels(self, index: int) -> JsonObject:
        """What tables group the rows of request `index` by: details of its rows."""
        return {}

    def expected(self, index: int) -> float:
        """How long a request takes beside others, in any unit."""
        return 0.0

    def of_row(self, opened: Opened, temperature: float, max_new_tokens: int) -> JsonObject:
        """What a request's rows say of it."""
        return {
            "benchmark": self.benchmark, "request": opened.request.name, "temperature": temperature,
            "max_new_tokens": max_new_tokens, "medium": self.medium, "budget": self.budget, "turn": self.turn,
            "prompt_tokens": opened.prompt_tokens, "visual_tokens": opened.visual_tokens,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ConversationSet(RequestSet):
    """Conversations up to their last answers."""

    dataset: ConversationDataset
    originals: bool = False  # with the pictures as they are on disk, for a captioner
    records: Sequence[JsonMapping] = ()  # of a set of conversations, whose labels go into its rows

    def labels(self, index: int) -> JsonObject:
        record = self.records[index] if self.records else {}
        turn = {"turn": int(self.part.removeprefix("turn-") or 1)} if self.records else {}
        return {label: record[label] for label in ("row_id", *LABELS) if label in record} | turn

    def __len__(self) -> int:
        return len(self.dataset)

    def expected(self, index: int) -> float:
        """The words of its conversation, the data's own answer among them."""
        return abs(int(self.dataset.lengths[index]))

    def open(self, index: int, target: Any) -> Opened | None:
        """Request `index`, or None where its files cannot be read and `on_error: skip` leaves it out (and lists it).

        Raises:
            UserError: it cannot be read, or its pictures are cut for another target.
        """
        try:
            request, answer = self.dataset.request(index, originals=self.originals)
        except UserError as error:
            self.dataset.leave_out(index, error)
            return None
        view = target.view(request)
        return Opened(request, answer, len(view.ids), int((view.modality != TEXT).sum()))

    def request(self, index: int, target: Any) -> Request | None:
        """The request as the target reads it."""
        opened = self.open(index, target)
        return None if opened is None else target.view(opened.request)


@dataclass(frozen=True, kw_only=True)
class PromptSet(RequestSet):
    """Prompts of an image generator."""

    medium: Medium = "drawn"
    prompts: Sequence[ImagePrompt]
    generator: Generator

    def __len__(self) -> int:
        return len(self.prompts)

    def open(self, index: int, target: object) -> Opened:
        """Prompt `index` as a request. It is never left out, and `target` is not read."""
        prompt = self.prompts[index]
        return Opened(self.generator.request(prompt.caption, prompt.label, prompt.key))


@dataclass(frozen=True)
class Opening:
    """Opens the conversations of a stage."""

    context: Context
    processor: Processor
    form: PromptFormat
    lengths: Lengths
    originals: bool = False

    def all(self, benchmarks: Mapping[str, Benchmark]) -> list[ConversationSet]:
        """The conversations of all benchmarks but TABED's. Raises `UserError` where two have one name."""
        sets: list[ConversationSet] = []
        for name, benchmark in benchmarks.items():
            more = list(benchmark.opened(name, self))
            if twice := {part.benchmark for part in more} & {part.benchmark for part in sets}:
                raise UserError(f"two benchmarks are called {', '.join(sorted(twice))}",
                                key=f"stages.{self.context.name}.benchmarks.{name}",
                                hint="name the sets that are wanted with `sets`")  # fmt: skip
            sets += more
        return sets

    def files(self, name: str, data: ConversationData) -> list[ConversationSet]:
        """The conversations of `data`: one set, or one for each of `lengths` where there are clips."""
        return self._at_lengths(name, data, data_files(data, self.context))

    def sets(self, section: SetsBenchmark) -> Iterator[ConversationSet]:
        """The suite's sets that the section names (all without names), each at every length where it has clips."""
        suite = self.suite(section)
        for name in section.names or list(suite.about.sets):
            if suite.has_turns(name):
                continue  # `turns.py` measures it
            records = suite.first_turns(name, section.convention, section.data.max_samples)
            file = self.context.folder / "suite" / f"{name}.json"
            yield from self._at_lengths(name, written(section.data, records, suite, file), [file])

    def dataset(
        self, data: ConversationData, files: Sequence[Name], form: PromptFormat | None = None
    ) -> ConversationDataset:
        """The records of `files` in `form` (None: the stage's), with the draft's own image processor if it has one."""
        form, eyes = form or self.form, self.context.own_image_processor()
        return open_records(
            data, form, self.context, self.processor, files=files, drafter_processor=eyes, learned=False
        )

    def requests(
        self, name: str, data: ConversationData, files: Sequence[Name], form: PromptFormat | None = None, **more: Any
    ) -> ConversationSet:
        """The records of `files` as one set; `more` as of `ConversationSet`."""
        dataset = self.dataset(data, files, form)
        clips, images = (dataset.column(column).any() for column in ("clips", "images"))
        medium: Medium = "video" if clips else "image" if images else "text"
        return ConversationSet(benchmark=name, medium=medium, dataset=dataset, originals=self.originals, **more)

    def _at_lengths(self, name: str, data: ConversationData, files: Sequence[Name]) -> list[ConversationSet]:
        first = self.requests(name, data, files)
        lengths = self.lengths.get(name, []) if isinstance(self.lengths, dict) else self.lengths
        if first.medium != "video" or not lengths:
            return [first]
        sets: list[ConversationSet] = []
        sizes = first.dataset.clip_sizes(SIZED) if self.processor.reads_whole else []
        for length in lengths:
            video, budget = at_length(data.video, length, self.processor, sizes)
            if any(other.budget == budget for other in sets):
                raise UserError(f"lengths name {budget} visual tokens twice, the second time as {length!r}",
                                key=f"stages.{self.context.name}.lengths", hint="leave one of them out")  # fmt: skip
            sets.append(self.requests(name, data.model_copy(update={"video": video}), files, budget=budget))
        return sets

    def suite(self, section: SetsBenchmark) -> Suite:
        """The suite's directory; published sets are written into one, once for all stages of a run."""
        names, most = section.names, section.data.max_samples
        if (published := section.published) is not None:
            path = Path(str(section.data.path))
            key = digest(published, most, *map(file_identity, published_files(published, path)))
            return made_suite(self.context, f"turns-{key}", [published],
                              lambda folder: read_published(folder, published, path, samples=most))  # fmt: skip
        media = None if section.media is None else Path(section.media)
        key = f"video-suite-{digest(sorted(names or ()), most, section.media)}"
        return open_suite(section, self.context, key, names or (), lambda folder: fetch_benchmarks(
            folder, names or (), media=media, samples=most, seed=SEED))  # fmt: skip


def open_suite(
    section: Any, context: Context, key: str, names: Sequence[str], fetch: Callable[[Path], object]
) -> Suite:
    """A suite's directory.

    Args:
        section: with `data` and `on_hub`.
        key: what a folder of published sets is called; all stages of a run share it.
        fetch: writes published sets into a folder; rank 0 calls it once.
    """
    cache, name = context.folder / "cache", str(section.data.path)
    if section.data.from_stage is not None:
        return Suite(context.inputs["data"] / DATASET_FOLDER / name, cache)
    return made_suite(context, key, names, fetch) if section.on_hub else Suite(Path(name), cache)


def made_suite(context: Context, key: str, names: Sequence[str], fetch: Callable[[Path], object]) -> Suite:
    """A suite's directory that `fetch` writes; arguments as of `open_suite`."""
    folder = context.folder.parent / f".{key}"

    def fill() -> None:
        context.say(f"suite: published sets {', '.join(names)} in {folder}")
        fetch(folder)

    ranks.on_main(fill)
    return Suite(folder, context.folder / "cache")


def written(data: ConversationData, records: Sequence[JsonObject], suite: Suite, file: Path) -> ConversationData:
    """Records with pictures of the suite's directory, written to `file`, as a data section."""
    if ranks.is_main():
        write_records(file, records)
    ranks.barrier()
    update = {"path": str(file), "from_stage": None, "images": str(suite.folder), "max_samples": None}
    return data.model_copy(update=update)


def digest(*values: object) -> str:
    """A digest of what a folder of published sets holds, for its name."""
    return hashlib.sha256(repr(values).encode()).hexdigest()[:12]


def at_length(
    video: VideoSettings, length: Length, processor: Processor, sizes: Sequence[Size]
) -> tuple[VideoSettings, str]:
    """Settings that take so many frames at equal distances, and what tables call the length: its visual tokens.

    Shorter clips give all the frames that they have.

    Args:
        sizes: width and height of the set's clips, read where frames keep sides of their own.
    """
    num_frames = length if isinstance(length, int) else None
    tokens = processor.picture_family.frame_tokens(video, processor, sizes, num_frames or 1)
    frames = tokens.frames(str(length)) if num_frames is None else num_frames
    settings = video.model_copy(update={"num_frames": frames, "fps": None, "min_frames": min(frames, video.min_frames)})
    return settings, label(str(length) if num_frames is None else tokens.total(frames))


def check_length(length: Length) -> None:
    """Raises `UserError` for what is no length."""
    if isinstance(length, str):
        visual_tokens(length)
    elif length < 1:
        raise UserError(f"{length} is no number of frames", hint='give 1 or more, or visual tokens as text ("25k")')
