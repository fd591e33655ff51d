"""What an `evaluate` stage of this track decodes: files of one's own and sets of a suite, clips at several lengths."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from ....core import ranks
from ....core.errors import UserError
from ....core.nouns import Request
from ....core.section import Section
from ....data.benchmark_hub import fetch_benchmarks
from ....data.benchmark_sets import SEED, names_of, set_name
from ....data.conversations import PromptFormat
from ....data.dataset import ConversationData, ConversationDataset
from ....data.processor import Processor
from ....data.suite import Suite, write_records
from ....data.videos import VideoSettings
from ....data.visual_budget import FrameTokens, label, llava_frames, visual_tokens
from ...context import Context
from ...records import data_files

HUB = "hub"
# A number of frames; or, as text, a number of visual tokens ("25k", "700").
Length = int | str
Medium = Literal["video", "image", "text"]


class VideoSuite(Section):
    """Published sets of videos, pictures and texts, or a directory in their layout."""

    # How pictures and clips are read; max_samples limits the rows of each set (100 as drawn with seed 42 of `hub`).
    # `path` is `hub` (the published sets), a directory with suite.json, or with `from` the folder of one in a generated
    # world (video_suite).
    data: ConversationData
    # null: those that the directory has; of `hub` all sets of clips.
    sets: list[str] | None = Field(None, min_length=1)
    # describe: long answers, to measure speed on; stock: the sets' own questions; verbatim: a directory's own words.
    convention: Literal["describe", "stock", "verbatim"] = "describe"
    # Of `hub`: the folder in which each set's archives of clips are unpacked, in a folder of the set's name.
    media: str | None = None

    @property
    def on_hub(self) -> bool:
        return self.data.from_stage is None and self.data.path == HUB

    @property
    def names(self) -> list[str] | None:
        """Of the sets, as tables have them: published ones answer to other names, too. None: those of the directory.

        Raises:
            UserError: no published set is called so.
        """
        if not self.on_hub:
            return self.sets
        return names_of("video") if self.sets is None else [set_name(called) for called in self.sets]


@dataclass(frozen=True)
class Asked:
    """Requests of one set at one length."""

    set: str
    medium: Medium
    budget: str  # visual tokens asked for, as `visual_budget.label` has them; "": the set has no clips, or as they come
    dataset: ConversationDataset

    @property
    def name(self) -> str:
        return f"{self.set} at {self.budget}" if self.budget else self.set

    @property
    def file(self) -> str:
        return f"{self.set}-{self.budget}" if self.budget else self.set

    def request(self, index: int, target: Any) -> Request | None:
        """Request `index` as the target reads it, or None where its files cannot be read and `on_error: skip` leaves it
        out (it is then listed). Raises `UserError` otherwise, and where pictures are cut for another target.
        """
        try:
            found = self.dataset.request(index)[0]
        except UserError as error:
            self.dataset.leave_out(index, error)
            return None
        return target.view(found)


@dataclass(frozen=True)
class Opening:
    """Opens the requests of a stage."""

    context: Context
    processor: Processor
    form: PromptFormat
    lengths: Sequence[Length]

    def benchmark(self, name: str, data: ConversationData) -> list[Asked]:
        return self._at_lengths(name, data, data_files(data, self.context))

    def suite(self, section: VideoSuite) -> Iterator[Asked]:
        suite = self._open(section)
        for name in section.names or list(suite.about.sets):
            records = suite.first_turns(name, section.convention, section.data.max_samples)
            file = self.context.folder / "suite" / f"{name}.json"
            if ranks.is_main():
                write_records(file, records)
            ranks.barrier()
            update = {"path": str(file), "from_stage": None, "images": str(suite.folder), "max_samples": None}
            yield from self._at_lengths(name, section.data.model_copy(update=update), [file])

    def _at_lengths(self, name: str, data: ConversationData, files: list[Path]) -> list[Asked]:
        first = self._dataset(data, files)
        if not first.column("clips").any():
            return [Asked(name, "image" if first.column("images").any() else "text", "", first)]
        if not self.lengths:
            return [Asked(name, "video", "", first)]
        found: list[Asked] = []
        for length in self.lengths:
            video, budget = at_length(data.video, length, self.processor)
            if any(other.budget == budget for other in found):
                raise UserError(
                    f"lengths name {budget} visual tokens twice, the second time as {length!r}",
                    where=f"key stages.{self.context.name}.lengths",
                    cure="leave one of them out",
                )
            found.append(Asked(name, "video", budget, self._dataset(data.model_copy(update={"video": video}), files)))
        return found

    def _dataset(self, data: ConversationData, files: list[Path]) -> ConversationDataset:
        return ConversationDataset(
            data,
            self.form,
            self.processor,
            files=files,
            skipped_log=self.context.folder / "skipped.jsonl",
            cache=self.context.folder / "cache",
        )

    def _open(self, section: VideoSuite) -> Suite:
        """The suite's directory; published sets are fetched once for all stages of a run."""
        name, context = str(section.data.path), self.context
        cache = context.folder / "cache"
        if section.data.from_stage is not None:
            return Suite(context.inputs["data"] / "world" / name, cache)
        if (sets := section.names) is None or not section.on_hub:
            return Suite(Path(name), cache)
        most = section.data.max_samples
        key = hashlib.sha256(repr((sorted(sets), most, section.media)).encode()).hexdigest()[:12]
        folder, failed = context.folder.parent / f".video-suite-{key}", None
        if ranks.is_main():
            context.say(f"suite: published sets {', '.join(sets)} in {folder}")
            media = None if section.media is None else Path(section.media)
            try:
                fetch_benchmarks(folder, sets, media=media, samples=most, seed=SEED)
            except UserError as error:
                failed = error
        if (failed := ranks.agree(failed)) is not None:
            raise failed
        return Suite(folder, cache)


def frame_tokens(video: VideoSettings, processor: Processor) -> FrameTokens:
    """How the target counts a clip. Of Qwen-VL, whose frames have sides of their own, frames as large as allowed."""
    if not processor.reads_whole:
        return llava_frames(video, processor.patches)
    unit = processor.image_size
    return FrameTokens(video.pixel_limits(1, unit)[1] // unit**2, frames_per_step=2)


def at_length(video: VideoSettings, length: Length, processor: Processor) -> tuple[VideoSettings, str]:
    """Settings that take so many frames at equal distances, and what tables call the length: its visual tokens.

    Shorter clips give all the frames that they have.
    """
    tokens = frame_tokens(video, processor)
    frames = length if isinstance(length, int) else tokens.frames(length)
    settings = video.model_copy(update={"num_frames": frames, "fps": None, "min_frames": min(frames, video.min_frames)})
    return settings, label(tokens.total(frames) if isinstance(length, int) else length)


def check_length(length: Length) -> None:
    """Raises `UserError` for what is no length."""
    if isinstance(length, str):
        visual_tokens(length)
    elif length < 1:
        raise UserError(f"{length} is no number of frames", cure='give 1 or more, or visual tokens as text ("25k")')
