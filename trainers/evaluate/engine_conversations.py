"""The conversations of benchmarks as a server is asked them: its own chat template and image processor read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

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
from .benchmarks import Benchmark, DataBenchmark, FilesBenchmark, SetsBenchmark
from .requests import Opening


def benchmark_at(path: Path, images: str | None, on_error: Literal["strict", "skip"]) -> dict[str, Benchmark]:
    """The benchmark of what lies at `path`: a set as its authors publish it, a directory of sets, or records. `images`:
    folder of the records' pictures; None: the file's own. `on_error`: of a record that cannot be read.
    """
    data = ConversationData(path=str(path), images=images, on_error=on_error)
    name = set_at(path)
    if name is None and not (path / INDEX).is_file():
        return {path.stem: FilesBenchmark(data=data)}
    return {path.stem: SetsBenchmark(kind="sets", data=data, sets=None if name is None else [name])}


def conversations(
    benchmarks: Mapping[str, Benchmark], folder: Path, *, run: Path, limit: int | None, say: Callable[[str], None]
) -> dict[str, list[Conversation]]:
    """The conversations of each set. Raises `UserError`: a benchmark is no set of conversations, or a record cannot be
    read.

    Args:
        folder: for indices, and for sets that are fetched.
        run: whose stages wrote the data that sections take `from` them.
        limit: conversations of a set; None: as the sections say.
    """
    of_the_server: Any = None  # target and processor
    context = Context(
        name="bench", folder=folder / "bench", seed=0, fingerprint="", target=of_the_server, drafter=None,
        engine=EngineConfig(), tracking=TrackingConfig(), inputs={}, say=say,
    )  # fmt: skip
    reader = _Questions(Opening(context, of_the_server, PromptFormat(), []), say)
    found: dict[str, list[Conversation]] = {}
    for name, benchmark in benchmarks.items():
        if not benchmark.asks_conversations:
            raise UserError(f"a server is asked conversations, and benchmark {name} is of kind {benchmark.kind}",
                            hint="name a recipe with benchmarks of kind files or sets, or a file")  # fmt: skip
        data = cast(DataBenchmark, benchmark).data
        if data.from_stage is not None:
            context.inputs["data"] = run / data.from_stage
        if limit is not None:
            data = data.model_copy(update={"max_samples": min(limit, data.max_samples or limit)})
        found |= dict(benchmark.model_copy(update={"data": data}).opened(name, reader))
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
