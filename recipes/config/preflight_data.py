"""The data sections of a recipe's stages, and what `check` finds in each: is it on disk, and can it be read."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...core.errors import NotFound, UserError, counted, page
from ...core.results import DATASET_FOLDER
from ...core.section import Section, parts
from ...data.captioned.prompts import ImagePrompt, PromptSource, read_prompts
from ...data.captioned.sources import CaptionedSource, Source, read, repeated, write_digests
from ...data.dataset import ConversationData
from ...data.records.mixture import are_present, missing_files, missing_hint
from ...data.records.table_records import TableRecords
from ...data.suites.benchmark_sets import TURN_SETS
from ...data.suites.suite import INDEX, read_index
from ...data.suites.turn_files import PUBLISHED, published_files, published_records
from ...models.targets.table import AnyTarget, image_section
from ...trainers.estimate.data import learns_answers
from ...trainers.evaluate.benchmarks import HUB, SetsBenchmark, TabedBenchmark
from ...trainers.run.context import Context
from ...trainers.run.stage import Planned, Stage
from ...trainers.run.stage_records import data_files
from ...trainers.stages.encode import EncodeStage, resolved, usable_pictures
from .finding import Finding, fault, ok, warning
from .preflight_samples import DataSection, records_findings


def sections(
    section: object, key: str = "", form: object = None, maker: str | None = None, learned: bool = False
) -> Iterator[DataSection]:
    """Every data section inside a stage."""
    match section:
        case Source():
            yield DataSection(key, section, maker=maker)
        case PromptSource():
            yield DataSection(key, section, maker=section.from_stage)
        case ConversationData():
            yield DataSection(key, section, form, section.from_stage, learned)
        case SetsBenchmark() | TabedBenchmark():
            data, published = section.data, section.published if isinstance(section, SetsBenchmark) else None
            yield DataSection(f"{key}.data", data, form, data.from_stage, is_suite=True, published=published)
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
        try:
            if data.maker is not None and "data" not in finished:
                findings.append(ok(subject, f"written by stage {data.maker}, which has not run"))
            elif (missing := _missing(subject, data, context)) is not None:
                findings.append(missing)
            elif isinstance(data.section, Source):
                findings.append(_captioned(subject, data, plan.stage, count, context))
            elif isinstance(data.section, PromptSource):
                prompts = prompts_of(data.section.resolved(_written(data, context)), context.target)
                findings.append(ok(subject, f"{len(prompts):,} prompts"))
            elif data.is_suite:
                findings.append(_suite(subject, data, context))
            else:
                files = data_files(data.section, context)
                findings += records_findings(subject, data, files, plan, context, finished, count)
        except UserError as error:
            where = f", {error.found_at}" if error.found_at else ""
            findings.append(fault(subject, f"{error.problem}{where}", error.hint or "fix or replace the file"))
    return findings


def _written(data: DataSection, context: Context) -> Path | None:
    """The folder of the data that a stage of the run writes."""
    return None if data.maker is None else context.inputs["data"] / DATASET_FOLDER


def missing_data(name: str, stage: Stage, context: Context) -> list[Finding]:
    """Faults of one stage's data: files that nothing brings and that are not on disk. Only mixtures are opened."""
    named = (data for data in sections(stage) if data.maker is None)
    findings = (_missing(f"stages.{name}.{data.key}", data, context) for data in named)
    return [finding for finding in findings if finding is not None and finding.level == "fault"]


def _missing(subject: str, data: DataSection, context: Context) -> Finding | None:
    """None: it is on disk, or the stage itself fetches it or says what it lacks."""
    match data.section:
        case Source():
            return None
        case PromptSource():
            path = data.section.resolved(_written(data, context)).path
            return None if path is None or Path(path).is_file() else _absent(subject, [str(path)], context)
    if data.published is not None:
        try:
            published_files(data.published, Path(data.section.path))
        except UserError as error:
            return _absent(subject, [str(error.where)], context, error.hint)
        return None
    if data.is_suite:
        index = (_written(data, context) or Path()) / data.section.path / INDEX
        return None if _is_on_hub(data) or index.is_file() else _absent(subject, [str(index)], context)
    files = data_files(data.section, context)
    if are_present(files):
        return None
    missing = missing_files(files)
    folders = [path for path in missing if Path(path).is_dir() and not _is_ours(path, context)]
    if folders:
        what = "; ".join(f"{path} is a folder, and a file of records is expected" for path in folders)
        return fault(subject, what, f"name a file: {subject}.path={folders[0]}/...")
    is_fetched = any(isinstance(file, TableRecords) for file in files)  # a table may be a Hub id
    return _absent(subject, missing, context, missing_hint(files), is_fetched=is_fetched)


def _absent(
    subject: str, paths: Sequence[str], context: Context, cure: str | None = None, *, is_fetched: bool = False
) -> Finding:
    """A fault, which stops a run before its first stage; a warning where a stage may fetch or write what is missing."""
    is_ours = all(_is_ours(path, context) for path in paths)
    place, fetch = f"name another place: {subject}.path=...", "fetch it before the run"
    hint = f"{place}, or {fetch}: {cure}" if cure else f"{fetch}, or {place}"
    what = f"not on disk: {', '.join(paths)}"
    return Finding("warning" if is_fetched or is_ours else "fault", subject, what, hint, is_absent=True)


def _is_ours(path: str, context: Context) -> bool:
    """Whether it lies in the run's own output."""
    return Path(path).resolve().is_relative_to(context.folder.parent.resolve())


def _is_on_hub(data: DataSection) -> bool:
    return data.published is None and data.maker is None and data.section.path == HUB


def _suite(subject: str, data: DataSection, context: Context) -> Finding:
    from huggingface_hub import constants

    layout = page("evaluation.md")
    if _is_on_hub(data) and constants.HF_HUB_OFFLINE:
        return warning(subject, "its sets are fetched from the Hub, and HF_HUB_OFFLINE is set",
                       f"name a directory of sets with this key ({layout})")  # fmt: skip
    if _is_on_hub(data):
        return ok(subject, "its sets will be fetched from the Hub")
    if (name := data.published) is None:
        names = list(read_index((_written(data, context) or Path()) / data.section.path).sets)
        return ok(subject, f"{len(names)} sets: {', '.join(names)}")
    path = Path(data.section.path)
    records, folder = published_records(name, path), published_files(name, path)[0].parent
    pictures = [folder / Path(picture).relative_to(PUBLISHED) for r in records for picture in r.get("image", ())]
    if gone := [str(picture) for picture in pictures if not picture.is_file()]:
        what = f"pictures missing: {len(gone)} of {len(pictures)}, the first {gone[0]}"
        return fault(subject, what, TURN_SETS[name].cure)
    return ok(subject, f"{counted(len(records), 'conversation')} of {name}")


def prompts_of(source: PromptSource, target: AnyTarget) -> list[ImagePrompt]:
    """The prompts. Raises `UserError` where they cannot be read, or the target cannot be asked by them."""
    prompts = read_prompts(source)
    if target.draws_images:
        target.check_labels((prompt.caption, prompt.label) for prompt in prompts)
    return prompts


def _captioned(subject: str, data: DataSection, stage: EncodeStage, count: int, context: Context) -> Finding:
    """The first items, read and decoded as the stage does it."""
    source: CaptionedSource = resolved(data.section, None if data.maker is None else context.inputs["data"])
    first = source.model_copy(update={"max_samples": min(count, source.max_samples or count)})
    refused, usable, target, example = Counter[str](), 0, image_section(context.target), ""
    with tempfile.TemporaryDirectory() as folder:
        digests, log = Path(folder) / "digests", Path(folder) / "refused.jsonl"
        try:
            if source.kind == "classes":
                target.check_labels(source.class_labels())
            write_digests(read(first), digests)
            again = repeated([digests]) if stage.deduplicate else {}
            lenient = stage.model_copy(update={"on_error": "skip"})
            for picture in usable_pictures(read(first), lenient, again, refused, log, target.image_size):
                usable += 1
                if "codes" in stage.write:
                    target.check_labels([(picture.item.caption, picture.item.label)])
        except NotFound as error:
            return _absent(subject, [error.where or error.problem], context, is_fetched=True)
        if log.is_file():
            note = json.loads(log.read_text().splitlines()[0])
            example = f"; the first: {note['where']}: {note['detail']}"
    looked, why = usable + refused.total(), ", ".join(f"{n} {reason}" for reason, n in refused.most_common())
    if not usable:
        what = f"none of the first {looked} items can be used ({why or 'there is none'}){example}"
        return fault(subject, what, "fix the source")
    about = f"{usable} of the first {looked} items can be used"
    if not refused:
        return ok(subject, about)
    about += f" ({why}){example}"
    if stage.on_error == "strict" and refused.keys() - {"duplicate"}:
        return fault(subject, about, "remove them, or set on_error: skip")
    return warning(subject, about, "they are left out, counted and listed")
