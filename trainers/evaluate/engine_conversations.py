"""The conversations of records and sets as a server is asked them: it has its own chat template and image processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...core.errors import UserError
from ...core.tracking import TrackingConfig
from ...data.conversations import PromptFormat
from ...data.dataset import ConversationData
from ...data.records.logged_pictures import Conversation
from ...data.records.skipped import Listed, SkippedLog
from ...data.suites.suite import INDEX
from ...data.suites.turn_files import set_at
from ..run.context import Context, EngineConfig
from ..run.stage_records import data_files
from .benchmarks import Benchmark, FilesBenchmark, SetsBenchmark
from .requests import Opening


def conversations(
    path: Path, images: str | None, on_error: Literal["strict", "skip"], folder: Path, *, limit: int | None,
    say: Callable[[str], None],
) -> list[Conversation]:  # fmt: skip
    """The conversations of what lies at `path`: a set as its authors publish it, a directory of sets, or records.
    Raises `UserError`: a record cannot be read.

    Args:
        images: folder of the records' pictures; None: the file's own.
        on_error: of a record that cannot be read.
        folder: for indices.
        limit: conversations of a set.
    """
    data = ConversationData(path=str(path), images=images, on_error=on_error, max_samples=limit)
    name = set_at(path)
    benchmark: Benchmark = FilesBenchmark(data=data)
    if name is not None or (path / INDEX).is_file():
        benchmark = SetsBenchmark(kind="sets", data=data, sets=None if name is None else [name])
    of_the_server: Any = None  # target and processor
    context = Context(
        name="audit", folder=folder / "audit", seed=0, fingerprint="", target=of_the_server, drafter=None,
        engine=EngineConfig(), tracking=TrackingConfig(), inputs={}, say=say,
    )  # fmt: skip
    reader = _Questions(Opening(context, of_the_server, PromptFormat(), []), say)
    found = [one for _, some in benchmark.opened(path.stem, reader) for one in some]
    if (listed := SkippedLog(context.folder / "skipped.jsonl").listed()) != Listed():
        say(str(listed))
    return found


@dataclass(frozen=True)
class _Questions:
    """Reads benchmarks as (set, its conversations)."""

    opening: Opening
    say: Callable[[str], None]

    def files(self, name: str, data: ConversationData) -> Iterator[tuple[str, list[Conversation]]]:
        dataset = self.opening.dataset(data, data_files(data, self.opening.context))
        images = [dataset.folders(file)[0] for file in range(len(dataset.records))]
        talks = [  # each record up to its last answer
            Conversation(dataset.sample_id(n), dataset.record(n), images[dataset.places[n, 0]], data.allow_outside)
            for n in range(len(dataset))
        ]
        yield name, list(_readable(name, talks, data, self.say))

    def sets(self, section: SetsBenchmark) -> Iterator[tuple[str, list[Conversation]]]:
        data = section.data
        suite = self.opening.suite(section)
        for name in section.names or list(suite.about.sets):
            rows = suite.first_turns(name, section.convention, data.max_samples)
            talks = [Conversation(row["id"], row, suite.folder) for row in rows]
            yield name, list(_readable(name, talks, data, self.say))


def _readable(
    name: str, talks: Sequence[Conversation], data: ConversationData, say: Callable[[str], None]
) -> Iterator[Conversation]:
    """Those whose pictures can be read, which is seen before anything is timed."""
    count = 0
    for talk in talks:
        try:
            talk.messages()
        except UserError as error:
            if data.on_error == "strict":
                raise
            say(f"left out {talk.name}: {error.problem}")
            continue
        count += 1
        yield talk
    if not count:
        raise UserError(f"no conversation of {name} can be read", hint="check its folder of pictures")
