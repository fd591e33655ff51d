"""Checks a recipe's data before a run: files on disk, whether records can be read, and an example of a sample.

Records of conversations are encoded as training would encode them where the processor is at hand; elsewhere their
files are looked for. Nothing is written.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..core.errors import NotFound, UserError, first_line
from ..core.pages import page
from ..core.section import Section, parts
from ..core.words import counted
from ..data.captioned import Captioned, CaptionedSource, Refused, class_labels, read
from ..data.captioned.items import Source
from ..data.captioned.prompts import ImagePrompt, PromptSource, read_prompts
from ..data.collate import Sample
from ..data.dataset import ConversationData, ConversationDataset
from ..data.families.processor import Processor
from ..data.pictures.media_files import BadMedia, MediaFile, is_there, located
from ..data.records.mixture import Name, Selection, are_present
from ..data.records.record import paths
from ..data.records.skipped import Listed
from ..data.sources import answered
from ..data.stage_folders import DATASET_FOLDER
from ..data.suites.suite import INDEX, read_index
from ..data.suites.turn_files import published_files
from ..models.families.generators import AnyTarget, image_section
from ..trainers.estimate.data import learns_answers
from ..trainers.evaluate.benchmarks import HUB, SetsBenchmark, TabedBenchmark
from ..trainers.run.context import Context
from ..trainers.run.stage import Stage
from ..trainers.run.stage_records import data_files
from ..trainers.stages.encode import EncodeStage, resolved
from ..trainers.train.preflight import render
from .finding import Finding, fault, ok, warning
from .preflight_absent import absent, absent_records
from .preflight_sets import published_set, quality_findings

SHOWN_IDS = 1200  # characters of a rendered sample
TOLERANCE = 0.05  # of the declared number of records


@dataclass(frozen=True)
class Found:
    """A data section inside a stage: records of conversations, or what the classes below have."""

    key: str
    section: Any
    form: Any = None  # the prompt format around it, or None
    maker: str | None = None  # the stage that writes what it names
    learned: bool = False  # each record has to bring an answer

    is_suite: ClassVar[bool] = False  # a directory of benchmark sets

    def missing(self, subject: str, context: Context) -> Finding | None:
        """None: it is on disk, or the stage itself will fetch it or say what it lacks."""
        files = data_files(self.section, context)
        return None if are_present(files) else absent_records(subject, files, context)

    def look(self, subject: str, stage: Stage, context: Context, finished: set[str], count: int) -> list[Finding]:
        """Reads `count` records of data that is there, as the stage would."""
        files = data_files(self.section, context)
        processor = _processor(stage, context, finished)
        if self.form is None or isinstance(processor, str):
            why = "no prompt format is around it" if self.form is None else str(processor)
            usable, finding = _files(subject, self, files, why, count)
        else:
            usable, finding = _encoded(subject, self, files, processor, count)
        expected = dict(stage).get("expected") if self.key == "data" else None
        if not usable or expected is None or abs(usable - expected.samples) <= TOLERANCE * expected.samples:
            return [finding]
        key = subject.removesuffix("data") + "expected.samples"
        problem = f"the recipe declares {expected.samples:,} records, and the data has {usable:,}"
        hint = f"look whether its files are whole; for other data set {key}={usable}"
        return [finding, warning(key, problem, hint)]

    def written(self, context: Context) -> Path | None:
        """The folder of the data that a stage of the run writes."""
        return None if self.maker is None else context.inputs["data"] / DATASET_FOLDER


@dataclass(frozen=True)
class FoundItems(Found):
    """Captioned pictures."""

    def missing(self, subject: str, context: Context) -> None:
        """`look` says it."""

    def look(self, subject: str, stage: Stage, context: Context, finished: set[str], count: int) -> list[Finding]:
        source = resolved(self.section, None if self.maker is None else context.inputs["data"])
        return _captioned(subject, source, stage, count, context)  # type: ignore[arg-type]


@dataclass(frozen=True)
class FoundPrompts(Found):
    """Prompts of pictures."""

    def missing(self, subject: str, context: Context) -> Finding | None:
        path = self.section.resolved(self.written(context)).path
        return None if path is None or Path(path).is_file() else absent(subject, [str(path)], context)

    def look(self, subject: str, stage: Stage, context: Context, finished: set[str], count: int) -> list[Finding]:
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

    def look(self, subject: str, stage: Stage, context: Context, finished: set[str], count: int) -> list[Finding]:
        from huggingface_hub import constants

        if self.published is not None:
            return [published_set(subject, self.published, Path(self.section.path))]
        if self._on_hub and constants.HF_HUB_OFFLINE:
            return [warning(subject, "its sets are fetched from the Hub, and HF_HUB_OFFLINE is set",
                            f"name a directory of sets with this key ({page('evaluation.md')})")]  # fmt: skip
        if self._on_hub:
            return [ok(subject, "its sets will be fetched from the Hub")]
        try:
            names = list(read_index(self._folder(context)).sets)
        except UserError as error:
            problem = f"{self._folder(context) / INDEX}: {error.problem}"
            return [fault(subject, problem, f"{page('evaluation.md')} has the layout")]
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


def data_findings(name: str, stage: Stage, context: Context, *, finished: set[str], count: int) -> list[Finding]:
    """Findings about one stage's data.

    Args:
        context: of the stage; its `inputs` are folders of stages that may not have run.
        finished: things whose stage has finished.
        count: records of each data section that are read.
    """
    findings = quality_findings(f"stages.{name}", stage)
    for data in sections(stage):
        subject = f"stages.{name}.{data.key}"
        if data.maker is not None and "data" not in finished:
            findings.append(ok(subject, f"written by stage {data.maker}, which has not run"))
            continue
        try:
            missing = data.missing(subject, context)
            findings += data.look(subject, stage, context, finished, count) if missing is None else [missing]
        except UserError as error:
            where = f", {error.found_at}" if error.found_at else ""
            findings.append(fault(subject, f"{error.problem}{where}", error.hint or "fix or replace the file"))
    return findings


def missing_data(name: str, stage: Stage, context: Context) -> list[Finding]:
    """Faults of one stage's data: files that nothing brings and that are not on disk. Only mixtures are opened."""
    findings = (data.missing(f"stages.{name}.{data.key}", context) for data in sections(stage) if data.maker is None)
    return [finding for finding in findings if finding is not None and finding.level == "fault"]


def _encoded(subject: str, data: Found, files: list[Name], processor: Processor, count: int) -> tuple[int, Finding]:
    """How many records can be used, and what some of them become."""
    section = data.section
    with tempfile.TemporaryDirectory() as cache:
        log = Path(cache) / "skipped.jsonl"
        dataset = ConversationDataset(
            section, data.form, processor, files=files, skipped_log=log, cache=Path(cache), learned=data.learned
        )
        looked = range(0, len(dataset), max(1, -(-len(dataset) // count)))
        samples = [dataset[index] if data.learned else _prompt(dataset, index, data) for index in looked]
        listed = dataset.log.listed()
    kept = [sample for sample in samples if sample is not None and (any(sample.loss_mask) or not data.learned)]
    about = f"{counted(len(dataset), 'usable record')}, {len(samples)} read{_question_end(section)}"
    why = "; ".join(f"{number} times {reason}" for reason, number in list(listed.reasons.items())[:3])
    if not kept:
        use = "learned from" if data.learned else "asked"
        return len(dataset), fault(subject, f"{about}: none can be {use}: {why}", "fix the records")
    ids, supervised = (sum(map(of, kept)) for of in (lambda s: len(s.ids), lambda s: sum(s.loss_mask)))
    shown = render(kept[0], processor)
    shown = shown if len(shown) <= SHOWN_IDS else shown[:SHOWN_IDS] + " ..."
    of = f"{supervised / len(kept):,.0f} of them supervised\n  [[ ]]" if data.learned else "up to the answer\n  prompt"
    about += f": {ids / len(kept):,.0f} ids each, {of}: {shown}"
    if listed != Listed():
        return len(dataset), warning(subject, f"{listed} ({why or 'see ids and over_length'}); {about}",
                                     "fix them, or set on_error: strict to stop at the first")  # fmt: skip
    return len(dataset), ok(subject, about)


def _prompt(dataset: ConversationDataset, index: int, data: Found) -> Sample | None:
    """A record up to its last answer; None: it cannot be used, and is left out."""
    try:
        request, _ = dataset.request(index)
        if data.key == "data" and len(request.ids) >= dataset.config.max_length:
            raise dataset.too_long(len(request.ids) + 1)
        return answered(request, [], request.name)
    except UserError as error:
        dataset.leave_out(index, error)
        return None


def _question_end(section: ConversationData) -> str:
    """Whether the questions are asked otherwise than the records have them."""
    end = section.question_end
    return f"; each question ends with {end!r} (question_end, which null takes away)" if end else ""


def _files(subject: str, data: Found, files: list[Name], why: str, count: int) -> tuple[int, Finding]:
    """How many records can be used, and the files that some of them name, without a processor."""
    section = data.section
    with tempfile.TemporaryDirectory() as cache:
        chosen = Selection(files, cache=Path(cache), seed=section.mixture_seed, learned=data.learned)
        problems = list(chosen.problems())
    places = chosen.places()[: section.max_samples]
    looked = places[:: max(1, -(-len(places) // count))].tolist()
    missing: list[MediaFile] = []
    outside: list[BadMedia] = []
    for file, number in looked:
        records = chosen.files[file]
        record = records.read(number)
        images = Path(section.images) if section.images else records.folder
        videos = Path(section.videos) if section.videos else images
        named = [(images, name) for name in paths(record, "image")] + [
            (videos, name) for name in paths(record, "video")
        ]
        for folder, name in named:
            try:
                path = located(folder, name, allow_outside=section.allow_outside)
            except BadMedia as error:
                outside.append(error)
            else:
                missing += [] if is_there(path) else [path]
    about = f"{counted(len(places), 'usable record')}, {len(looked)} looked at ({why}){_question_end(section)}"
    usable = len(places)
    if problems:
        file, number, problem = problems[0]
        about += f"; {len(problems)} unusable, the first: {file.file_of(number)}, record {number}: {problem}"
    if not usable:
        return usable, fault(subject, about, "fix the records, or name another file")
    if outside:
        first = outside[0]
        lead = "1 name leads" if len(outside) == 1 else f"{len(outside)} names lead"
        return usable, fault(subject, f"{about}; {lead} out of the folder {first.where}, the first: {first.problem}",
                             str(first.hint))  # fmt: skip
    stops = section.on_error == "strict"
    cure = "fix these records, or set on_error: skip" if stops else "unusable records are left out"
    if missing:
        gone = f"{len(missing)} files are missing, the first: {missing[0]}"
        fetch = "fetch them, or set images / videos to their folder"
        if len(missing) == 1:
            gone, fetch = f"a file is missing: {missing[0]}", "fetch it, or set images / videos to its folder"
        return usable, fault(subject, f"{about}; {gone}", "; ".join([fetch, *[cure] * bool(problems)]))
    if problems and stops:
        return usable, fault(subject, about, cure)
    return usable, warning(subject, about, "they are left out and listed") if problems else ok(subject, about)


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


def _processor(stage: Stage, context: Context, finished: set[str]) -> Processor | str:
    """The processor that training would use, where it needs no network; else why there is none."""
    if "processor" in context.inputs and "processor" not in finished:
        return "the stage that makes the processor has not run"
    path = context.target.path
    if "processor" not in context.inputs and (path is None or not is_local(str(path), context.target.revision)):
        return f"the processor of {path} is not on this machine"
    try:
        return context.processor_of(dict(stage).get("model", "drafter"))
    except (UserError, OSError) as error:
        return first_line(error)


def is_local(name: str, revision: str | None = None) -> bool:
    """Whether a model's files are here: a folder, or a repository in the Hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    if Path(name).is_dir():
        return True
    try:
        return isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
    except ValueError:  # no name of a repository
        return False
