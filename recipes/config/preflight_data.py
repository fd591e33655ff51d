"""The data sections of a recipe's stages, and what `check` finds in each: is it on disk, and can it be read."""

from __future__ import annotations

import functools
import hashlib
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from ...core.errors import NotFound, UserError, counted, first_line, page
from ...core.results import DATASET_FOLDER
from ...core.section import Section, parts
from ...data.captioned import Captioned, CaptionedSource, Refused, class_labels, read
from ...data.captioned.items import Source
from ...data.captioned.prompts import ImagePrompt, PromptSource, read_prompts
from ...data.dataset import ConversationData
from ...data.families.processor import Processor
from ...data.records.mixture import Name, Selection, are_present, missing_files, missing_hint
from ...data.records.table_records import TableRecords
from ...data.suites.benchmark_sets import TURN_SETS
from ...data.suites.suite import INDEX, read_index
from ...data.suites.turn_files import PUBLISHED, published_files, published_records
from ...models.targets.generators import AnyTarget, image_section
from ...trainers.estimate.data import learns_answers
from ...trainers.evaluate.benchmarks import HUB, SetsBenchmark, TabedBenchmark
from ...trainers.run.context import Context
from ...trainers.run.stage import Planned, Stage
from ...trainers.run.stage_records import data_files
from ...trainers.stages.encode import EncodeStage, resolved
from .finding import Finding, Level, fault, ok, tried, warning
from .preflight_samples import DataSection, sample_findings

SMALL = ["*.json", "*.jinja", "*.model", "*.txt"]  # files of a target that say how records are encoded
TOLERANCE = 0.05  # of the declared number of records


@dataclass(frozen=True)
class Found(DataSection):
    """Records of conversations."""

    is_suite: ClassVar[bool] = False  # a directory of benchmark sets

    def missing(self, subject: str, context: Context) -> Finding | None:
        """None: it is on disk, or the stage itself will fetch it or say what it lacks."""
        files = data_files(self.section, context)
        return None if are_present(files) else absent_records(subject, files, context)

    def look(self, subject: str, plan: Planned, context: Context, finished: set[str], count: int) -> list[Finding]:
        """Reads `count` records of data that is there, as the stage would."""
        files = data_files(self.section, context)
        processor = _processor(plan.stage, context, finished)
        if self.form is None or isinstance(processor, str):
            why = "no prompt format is around it" if self.form is None else str(processor)
            usable, findings = _indexed(subject, self, files, why)
        else:
            usable, findings = sample_findings(subject, self, files, plan, processor, count)
        expected = dict(plan.stage).get("expected") if self.key == "data" else None
        if not usable or expected is None or abs(usable - expected.samples) <= TOLERANCE * expected.samples:
            return findings
        key = subject.removesuffix("data") + "expected.samples"
        problem = f"the recipe declares {expected.samples:,} records, and the data has {usable:,}"
        hint = f"look whether its files are whole; for other data set {key}={usable}"
        return [*findings, warning(key, problem, hint)]

    def written(self, context: Context) -> Path | None:
        """The folder of the data that a stage of the run writes."""
        return None if self.maker is None else context.inputs["data"] / DATASET_FOLDER


@dataclass(frozen=True)
class FoundItems(Found):
    """Captioned pictures."""

    def missing(self, subject: str, context: Context) -> None:
        """`look` says it."""

    def look(self, subject: str, plan: Planned, context: Context, finished: set[str], count: int) -> list[Finding]:
        source = resolved(self.section, None if self.maker is None else context.inputs["data"])
        return _captioned(subject, source, plan.stage, count, context)  # type: ignore[arg-type]


@dataclass(frozen=True)
class FoundPrompts(Found):
    """Prompts of pictures."""

    def missing(self, subject: str, context: Context) -> Finding | None:
        path = self.section.resolved(self.written(context)).path
        return None if path is None or Path(path).is_file() else absent(subject, [str(path)], context)

    def look(self, subject: str, plan: Planned, context: Context, finished: set[str], count: int) -> list[Finding]:
        prompts = prompts_of(self.section.resolved(self.written(context)), context.target)
        return [ok(subject, f"{len(prompts):,} prompts")]


@dataclass(frozen=True)
class FoundSuite(Found):
    """A directory of benchmark sets, or the published ones.

    Args:
        published: the set of conversations whose own files stand in its place.
    """

    published: str | None = None

    is_suite: ClassVar[bool] = True

    def missing(self, subject: str, context: Context) -> Finding | None:
        if self.published is None:
            index = self._folder(context) / INDEX
            return None if self._on_hub or index.is_file() else absent(subject, [str(index)], context)
        try:
            published_files(self.published, Path(self.section.path))
        except UserError as error:
            return absent(subject, [str(error.where)], context, error.hint)
        return None

    def look(self, subject: str, plan: Planned, context: Context, finished: set[str], count: int) -> list[Finding]:
        from huggingface_hub import constants

        layout = page("evaluation.md")
        if self.published is not None:
            name = self.published
            return [tried(subject, lambda: _published(name, Path(self.section.path)), f"{layout} has it")]
        if self._on_hub and constants.HF_HUB_OFFLINE:
            return [warning(subject, "its sets are fetched from the Hub, and HF_HUB_OFFLINE is set",
                            f"name a directory of sets with this key ({layout})")]  # fmt: skip
        if self._on_hub:
            return [ok(subject, "its sets will be fetched from the Hub")]
        names = list(read_index(self._folder(context)).sets)
        return [ok(subject, f"{len(names)} sets: {', '.join(names)}")]

    @property
    def _on_hub(self) -> bool:
        return self.maker is None and self.section.path == HUB

    def _folder(self, context: Context) -> Path:
        return (self.written(context) or Path()) / self.section.path


def sections(
    section: object, key: str = "", form: object = None, maker: str | None = None, learned: bool = False
) -> Iterator[Found]:
    """Every data section inside a stage."""
    match section:
        case Source():
            yield FoundItems(key, section, maker=maker)
        case PromptSource():
            yield FoundPrompts(key, section, maker=section.from_stage)
        case ConversationData():
            yield Found(key, section, form, section.from_stage, learned)
        case SetsBenchmark():
            yield FoundSuite(f"{key}.data", section.data, form, section.data.from_stage, published=section.published)
        case TabedBenchmark():
            yield FoundSuite(f"{key}.data", section.data, form, section.data.from_stage)
        case _:
            if isinstance(section, Section):
                values = dict(section)
                form, maker = values.get("format", form), values.get("from_stage")
            for name, value in parts(section):
                yield from sections(value, f"{key}.{name}".lstrip("."), form, maker, learns_answers(section))


def data_findings(plan: Planned, context: Context, *, finished: set[str], count: int) -> list[Finding]:
    """Findings about one stage's data.

    Args:
        context: of the stage; its `inputs` are folders of stages that may not have run.
        finished: things whose stage has finished.
        count: records of each data section that are read.
    """
    findings: list[Finding] = []
    for data in sections(plan.stage):
        subject = f"stages.{plan.name}.{data.key}"
        if data.maker is not None and "data" not in finished:
            findings.append(ok(subject, f"written by stage {data.maker}, which has not run"))
            continue
        try:
            missing = data.missing(subject, context)
            findings += data.look(subject, plan, context, finished, count) if missing is None else [missing]
        except UserError as error:
            where = f", {error.found_at}" if error.found_at else ""
            findings.append(fault(subject, f"{error.problem}{where}", error.hint or "fix or replace the file"))
    return findings


def missing_data(name: str, stage: Stage, context: Context) -> list[Finding]:
    """Faults of one stage's data: files that nothing brings and that are not on disk. Only mixtures are opened."""
    findings = (data.missing(f"stages.{name}.{data.key}", context) for data in sections(stage) if data.maker is None)
    return [finding for finding in findings if finding is not None and finding.level == "fault"]


def absent(
    subject: str, paths: Sequence[str], context: Context, cure: str | None = None, *, is_fetched: bool = False
) -> Finding:
    """A fault, which stops a run before its first stage; a warning where a stage may fetch or write what is missing."""
    is_ours = all(_is_ours(path, context) for path in paths)
    place, fetch = f"name another place: {subject}.path=...", "fetch it before the run"
    level: Level = "warning" if is_fetched or is_ours else "fault"
    what = f"not on disk: {', '.join(paths)}"
    hint = f"{place}, or {fetch}: {cure}" if cure else f"{fetch}, or {place}"
    return Finding(level, subject, what, hint, is_absent=True)


def absent_records(subject: str, files: Sequence[Name], context: Context) -> Finding:
    """Of a section's files, some of which are missing."""
    missing = missing_files(files)
    folders = [path for path in missing if Path(path).is_dir() and not _is_ours(path, context)]
    if folders:
        what = "; ".join(f"{path} is a folder, and a file of records is expected" for path in folders)
        return fault(subject, what, f"name a file: {subject}.path={folders[0]}/...")
    is_fetched = any(isinstance(file, TableRecords) for file in files)  # a table may be a Hub id
    return absent(subject, missing, context, missing_hint(files), is_fetched=is_fetched)


def _is_ours(path: str, context: Context) -> bool:
    """Whether it lies in the run's own output."""
    return Path(path).resolve().is_relative_to(context.folder.parent.resolve())


def _indexed(subject: str, data: Found, files: list[Name], why: str) -> tuple[int, list[Finding]]:
    """How many records can be used, by their files' indices alone."""
    with tempfile.TemporaryDirectory() as cache:
        chosen = Selection(files, cache=Path(cache), seed=data.section.mixture_seed, learned=data.learned)
        problems = list(chosen.problems())
    usable = len(chosen.places()[: data.section.max_samples])
    about = f"{counted(usable, 'usable record')}, not read ({why})"
    if problems:
        file, number, problem = problems[0]
        about += f"; {len(problems)} unusable, the first: {file.file_of(number)}, record {number}: {problem}"
    if not usable or (problems and data.section.on_error == "strict"):
        return usable, [fault(subject, about, "fix these records, or set on_error: skip")]
    return usable, [warning(subject, about, "they are left out and listed") if problems else ok(subject, about)]


def prompts_of(source: PromptSource, target: AnyTarget) -> list[ImagePrompt]:
    """The prompts. Raises `UserError` where they cannot be read, or the target cannot be asked by them."""
    prompts = read_prompts(source)
    if target.draws_images:
        target.check_labels((prompt.caption, prompt.label) for prompt in prompts)
    return prompts


def _captioned(
    subject: str, source: CaptionedSource, stage: EncodeStage, count: int, context: Context
) -> list[Finding]:
    """The first items, read and decoded as the stage does it."""
    first = source.model_copy(update={"max_samples": min(count, source.max_samples or count)})
    refused: Counter[str] = Counter()
    example, seen, looked = "", set(), 0
    target = image_section(context.target)
    try:
        if source.kind == "classes":
            target.check_labels(class_labels(source))
        for item in read(first):
            looked += 1
            problem: object = item
            if isinstance(item, Captioned):
                digest = hashlib.sha256(item.image).digest()
                if stage.deduplicate and digest in seen:
                    problem = Refused(item.number, item.key, "duplicate", item.where, "the same bytes came before")
                else:
                    problem = stage.decoded(item, target.image_size)
                seen.add(digest)
                if "codes" in stage.write and not isinstance(problem, Refused):
                    target.check_labels([(item.caption, item.label)])
            if isinstance(problem, Refused):
                refused[problem.reason] += 1
                example = example or f"; the first: {problem.where}: {problem.detail}"
    except NotFound as error:
        return [absent(subject, [error.where or error.problem], context, is_fetched=True)]
    usable, why = looked - refused.total(), ", ".join(f"{n} {reason}" for reason, n in refused.most_common())
    if not usable:
        return [fault(subject, f"none of the first {looked} items can be used ({why or 'there is none'}){example}",
                      "fix the source")]  # fmt: skip
    about = f"{usable} of the first {looked} items can be used"
    if not refused:
        return [ok(subject, about)]
    about += f" ({why}){example}"
    if stage.on_error == "strict" and refused.keys() - {"duplicate"}:
        return [fault(subject, about, "remove them, or set on_error: skip")]
    return [warning(subject, about, "they are left out, counted and listed")]


def _published(name: str, path: Path) -> str:
    """What a set of conversations has, as its authors publish it. Raises `UserError` where its pictures are missing."""
    records, folder = published_records(name, path), published_files(name, path)[0].parent
    pictures = [folder / Path(picture).relative_to(PUBLISHED) for r in records for picture in r.get("image", ())]
    if gone := [str(picture) for picture in pictures if not picture.is_file()]:
        raise UserError(f"pictures missing: {len(gone)} of {len(pictures)}, the first {gone[0]}",
                        hint=TURN_SETS[name].cure)  # fmt: skip
    return f"{counted(len(records), 'conversation')} of {name}"


def _processor(stage: Stage, context: Context, finished: set[str]) -> Processor | str:
    """The processor that training would use, or why there is none yet.

    Raises:
        UserError: its files are here and cannot be used.
    """
    if "processor" in context.inputs:
        if "processor" not in finished:
            return "the stage that makes the processor has not run"
    elif why := _fetched(str(context.target.path), context.target.revision):
        return why
    return context.processor_of(dict(stage).get("model", "drafter"))


@functools.lru_cache(8)
def _fetched(name: str, revision: str | None) -> str:
    """Fetches a target's small files where they are not on this machine. Returns why they are not, or nothing."""
    if Path(name).is_dir():
        return ""
    try:
        huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=SMALL)
    except (OSError, HFValidationError, HfHubHTTPError) as error:
        fetch = f"hf download {name} --include {' '.join(map(repr, SMALL))}"
        return f"the tokenizer and configs of {name} are not here: {fetch} ({first_line(error)})"
    return ""
