"""What a recipe takes from outside, before anything is loaded: are its models and data here, and can they be read; and
what several ranks cannot do with a model that each would spread over the GPUs of a node, or hold a part of.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id

from ...core.errors import NotFound, UserError, counted, page
from ...core.files import fetch_command
from ...core.json_types import text_at, value_at, walk
from ...core.placement import check_one_rank
from ...core.results import DATASET_FOLDER
from ...core.section import Section, parts, within
from ...data.captioned.prompts import PromptSource, read_prompts
from ...data.captioned.sources import CaptionedSource, Source, read, repeated, write_digests
from ...data.dataset import ConversationData
from ...data.records.mixture import are_present, missing_files, missing_hint
from ...data.records.table_records import TableRecords
from ...data.suites.benchmark_sets import TURN_SETS
from ...data.suites.suite import INDEX, read_index
from ...data.suites.turn_files import PUBLISHED, published_files, published_records
from ...models.drafters.base import PublishedDrafter
from ...models.targets.drawing import PerceptualConfig
from ...models.targets.load import target_config
from ...models.targets.parallel import check_cut, check_ranks
from ...models.targets.table import image_section
from ...trainers.estimate.data import learns_answers
from ...trainers.estimate.models import target_shape
from ...trainers.evaluate.benchmarks import HUB, SetsBenchmark, TabedBenchmark
from ...trainers.run.context import Context
from ...trainers.run.stage import Planned, Stage, WholeRecipe
from ...trainers.run.stage_records import data_files
from ...trainers.stages.cache import CacheStage
from ...trainers.stages.encode import EncodeStage, resolved, usable_pictures
from ...trainers.train.fit import OutsideStart
from .finding import Finding, Level, fault, graded, ok
from .preflight_samples import DataSection, records_findings
from .schema import Recipe

_SIZE = "tensor_parallel_size"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


def check_placement(
    recipe: Recipe, planned: Sequence[Planned], chosen: Collection[str] | None = None, *, dry_run: bool = False
) -> None:
    """Look at the stages that run.

    Args:
        chosen: names of the stages that run; None: all.
        dry_run: the ranks that will run it are not these, and no stage will look at the target's config.

    Raises:
        UserError: several ranks would read a device map; the run has another number of ranks than hold the target, the
            target cannot be cut for them, two models of a stage want different numbers, or a stage trains beside such a
            target. It has the key.
    """
    for plan in planned:
        stage, name = plan.stage, f"stages.{plan.name}"
        if chosen is not None and plan.name not in chosen:
            continue
        held = dict(recipe.target).get(_SIZE, 1)  # an image generator's section has none
        for key, hint in stage.runs_target().items() if stage.kind == "train" and held > 1 else ():
            raise UserError(
                f"{name}.{key} runs the target while ranks train on batches of their own, and target.{_SIZE} is "
                f"{held}: all ranks hold it together, for one batch", key=f"{name}.{key}", hint=hint,
            )  # fmt: skip
        if not stage.loads_target:
            continue
        stage_target = plan.own_target
        target, key = (recipe.target, "target") if stage_target is None else (stage_target, f"{name}.target")
        size = dict(target).get(_SIZE, 1)
        if not dry_run:
            check_ranks(size, key=f"{key}.{_SIZE}")
        elif size > 1:
            config = target_shape(recipe) if stage_target is None else target_config(stage_target, None, network=False)
            check_cut(config, size, str(target.path), key=f"{key}.{_SIZE}")
        for first, section in (("target", recipe.target), ("drafter", recipe.drafter), (name, stage)):
            for keys, part in walk(None if section is None else section.model_dump(mode="json"), (first,)):
                place = ".".join(keys)
                check_one_rank(text_at(part, "device_map"), key=place)
                other = value_at(part, _SIZE)  # a serving engine's names its own GPUs
                if first != "target" and "engine" not in keys and other not in (None, 1, size):
                    raise UserError(
                        f"{place}.{_SIZE} is {other}, and the target's is {size}", key=f"{place}.{_SIZE}",
                        hint="use 1: each rank then holds this model whole" + f", or {size}" * (size > 1),
                    )  # fmt: skip


def models_findings(recipe: WholeRecipe) -> list[Finding]:
    """Whether the published models that the recipe names are on this machine."""
    findings = []
    for part, section in (("target", recipe.target), ("drafter", recipe.drafter)):
        values = {} if section is None else dict(section)
        for key in ("path", "language_model", "vision_tower"):
            if (name := text_at(values, key)) not in (None, "target"):
                findings.append(_place(f"{part}.{key}", name, values.get("revision"), Path(recipe.output)))
    return findings


def weight_findings(name: str, stage: Stage, recipe: WholeRecipe) -> list[Finding]:
    """A finding for each trained drafter outside the run that a stage reads (`from: {path}`, a method's `drafter:
    {path}`): hours of earlier stages must not end at a name that is nobody's.
    """
    outside: list[tuple[tuple[str, ...], Any]] = []
    if not isinstance(stage, CacheStage):  # which reads their settings alone
        outside += [*within(stage, OutsideStart, ("stages", name)), *within(stage, PublishedDrafter, ("stages", name))]
        outside += within(stage, PerceptualConfig, ("stages", name))
    if stage.trains:
        outside += within(recipe.drafter, PublishedDrafter, ("drafter",))
    named = {".".join((*keys, "path")): section for keys, section in outside if section.path is not None}
    return [_place(key, section.path, section.revision, Path(recipe.output)) for key, section in named.items()]


def _place(key: str, name: str, revision: str | None, output: Path) -> Finding:
    """Whether the weights that a key names are here, or will be."""
    if Path(name).is_dir():
        return ok(key, f"{name} is on this machine")
    if Path(name).resolve().is_relative_to(output.resolve()):
        return ok(key, f"{name} is written by an earlier stage")
    if (command := fetch_command(name)) is not None:
        return Finding("fault", key, f"{name} is not on this machine", command, is_absent=True)
    try:
        validate_repo_id(name)
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
        if any(path.suffix in _WEIGHTS for path in folder.rglob("*")):  # `check` itself fetches the small files
            return ok(key, f"{name} is on this machine")
    except HFValidationError:
        hint = "train it first, name another folder with this key, or run where the folder lies"
        return fault(key, f"there is no folder {Path(name).absolute()}", hint)
    except LocalEntryNotFoundError:
        pass
    if constants.HF_HUB_OFFLINE:
        return fault(key, f"{name} is not on this machine, and HF_HUB_OFFLINE is set",
                     f"where there is a network: hf download {name}")  # fmt: skip
    return ok(key, f"{name} will be downloaded")


# Data


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
        count: records of each data section that are read. 0: nothing is, but for the list of a mixture.
    """
    findings: list[Finding] = []
    for data in sections(plan.stage):
        subject = f"stages.{plan.name}.{data.key}"
        try:
            if data.maker is not None and "data" not in finished:
                findings.append(ok(subject, f"written by stage {data.maker}, which has not run"))
            elif (missing := _missing(subject, data, context)) is not None:
                findings.append(missing)
            elif count == 0:
                findings.append(ok(subject, "on disk"))
            elif isinstance(data.section, Source):
                findings.append(_captioned(subject, data, plan.stage, count, context))
            elif isinstance(data.section, PromptSource):
                prompts = read_prompts(data.section.resolved(_written(data, context)))
                if context.target.draws_images:
                    context.target.check_labels((prompt.caption, prompt.label) for prompt in prompts)
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
    is_fetched = any(isinstance(file, TableRecords) for file in files)  # a table may be a Hub id
    return _absent(subject, missing_files(files), context, missing_hint(files), is_fetched=is_fetched)


def _absent(
    subject: str, paths: Sequence[str], context: Context, cure: str | None = None, *, is_fetched: bool = False
) -> Finding:
    """A fault, which stops a run before its first stage; a warning where a stage may fetch or write what is missing."""
    output = context.folder.parent.resolve()
    is_written = all(Path(path).resolve().is_relative_to(output) for path in paths)
    hint = f"name another place: {subject}.path=..., or fetch it before the run" + f": {cure}" * bool(cure)
    level: Level = "warning" if is_fetched or is_written else "fault"
    return Finding(level, subject, f"not on disk as a file: {', '.join(paths)}", hint, is_absent=True)


def _is_on_hub(data: DataSection) -> bool:
    return data.published is None and data.maker is None and data.section.path == HUB


def _suite(subject: str, data: DataSection, context: Context) -> Finding:
    if _is_on_hub(data):
        hint = f"HF_HUB_OFFLINE is set: name a directory of sets with this key ({page('evaluation.md')})"
        return graded(not constants.HF_HUB_OFFLINE, subject, "its sets are fetched from the Hub", hint)
    if (name := data.published) is None:
        names = list(read_index((_written(data, context) or Path()) / data.section.path).sets)
        return ok(subject, f"{len(names)} sets: {', '.join(names)}")
    path = Path(data.section.path)
    records, folder = published_records(name, path), published_files(name, path)[0].parent
    pictures = [folder / Path(picture).relative_to(PUBLISHED) for r in records for picture in r.get("image", ())]
    gone = [str(picture) for picture in pictures if not picture.is_file()]
    about = f"{counted(len(records), 'conversation')} of {name}"
    about += "".join(f"; {len(gone)} of {len(pictures)} pictures missing, the first {first}" for first in gone[:1])
    return graded(not gone, subject, about, TURN_SETS[name].cure, level="fault")


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
            for item, _ in usable_pictures(read(first), stage, again, refused, log, target.image_size):
                usable += 1
                if "codes" in stage.write:
                    target.check_labels([(item.caption, item.label)])
        except NotFound as error:
            return _absent(subject, [error.where or error.problem], context, is_fetched=True)
        if log.is_file():
            note = json.loads(log.read_text().splitlines()[0])
            example = f"; the first: {note['where']}: {note['detail']}"
    why = ", ".join(f"{n} {reason}" for reason, n in refused.most_common()) or "none is left out"
    about = f"{usable} of the first {usable + refused.total()} items can be used ({why}){example}"
    hint = "fix the source; on_error: skip leaves out, counts and lists what cannot be used"
    return graded(bool(usable) and not refused, subject, about, hint, level="warning" if usable else "fault")
