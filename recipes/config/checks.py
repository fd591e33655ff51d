"""What `draftsmith check` looks at: the engine, models on this machine, room on the disk, finished stages, data."""

from __future__ import annotations

from pathlib import Path

from ...core.errors import UserError
from ...core.results import DONE, read_mark
from ...core.section import within
from ...eval.quality import QualityConfig
from ...eval.quality import check as check_quality
from ...trainers.run.context import check_engine
from ...trainers.run.matching import begun, made_nothing, stage_state
from ...trainers.run.restart import built_on
from ...trainers.run.run import look_at_results
from ...trainers.run.stage import Planned, Stage, WholeRecipe
from ...trainers.train import checkpoint
from .finding import Finding, fault, ok, tried, warning
from .launch import looked_at
from .load import Loaded
from .preflight_data import data_findings
from .preflight_weights import weight_findings


def engine_finding(recipe: WholeRecipe) -> Finding:
    def look() -> str:
        check_engine(recipe.engine)
        return f"zero_stage {recipe.engine.zero_stage}, {recipe.engine.precision}"

    return tried("engine", look, "change engine")


def quality_findings(subject: str, stage: Stage) -> list[Finding]:
    """A finding for each metric's weights and for the real images, of each section on how pictures are judged."""
    findings = []
    for place, config in within(stage, QualityConfig):
        key = ".".join((subject, *place))
        looks = {f"{key}.weights ({m})": config.model_copy(update={"metrics": (m,), "reference": None})
                 for m in config.metrics}  # fmt: skip
        if config.reference is not None:
            looks[f"{key}.reference"] = config.model_copy(update={"metrics": ()})
        for name, part in looks.items():

            def look(part: QualityConfig = part) -> str:
                check_quality(part)
                return "there"

            findings.append(tried(name, look, "name its place with this key"))
        compares = {"fid", "precision_recall"} & set(config.metrics)
        if compares and config.reference is None:
            what = f"{' and '.join(sorted(compares))} compare with real images, and no folder is named"
            findings.append(fault(f"{key}.reference", what, "name a folder of real images"))
    return findings


def states_too_large(text: str) -> dict[str, str]:
    """Read a dry run's text: stage -> why its states do not fit on the disk."""
    warnings, stage = {}, ""
    for line in text.splitlines():
        if line.startswith("stage "):
            stage = line.split()[1]
        elif line.startswith("  warning: "):
            warnings[stage] = line.removeprefix("  warning: ")
    return warnings


def results_findings(loaded: Loaded, planned: list[Planned], chosen: tuple[str, ...]) -> list[Finding]:
    """What stages that would run read of finished ones, and whether it is as it was written."""
    try:
        look_at_results(planned, chosen, None, Path(loaded.recipe.output))
    except UserError as error:
        return [fault("results", error.problem, error.hint or "")]
    return []


def _finished(name: str, folder: Path) -> Finding:
    """Whether a finished stage's files are still there. A cache that nothing reads any more may have been removed."""
    mark = read_mark(folder / DONE)
    listed = {} if mark is None or mark.files is None else mark.files
    sizes = {file: path.stat().st_size for file in listed if (path := folder / file).is_file()}
    gone = [file for file, entry in listed.items() if sizes.get(file) != entry.bytes]
    if not gone:
        return ok(f"stages.{name}", "finished before, same inputs: skipped")
    what = f"finished before, and {len(gone)} of its {len(listed)} files are not there as written, the first: {gone[0]}"
    return warning(f"stages.{name}", what, f"restart={name} makes them again, if anything is to read them")


def _goes_on(stage: Planned, folder: Path) -> list[Finding]:
    """Where a stage continues that has begun; none for one that has made nothing yet."""
    if begun(folder) is None or made_nothing(folder):
        return []
    if stage.stage.kind != "train":
        return [ok(f"stages.{stage.name}", "begun before: goes on with what is there")]
    subject, checkpoints = f"stages.{stage.name}", folder / checkpoint.FOLDER
    state = checkpoint.newest(checkpoints)
    if state is not None:
        number = f"{state.world_size} rank{'s' * (state.world_size > 1)}"
        return [ok(subject, f"continues from step {state.step}, with {number} as before")]
    if any(checkpoints.glob("step-*")):
        return [fault(subject, "begun before, and no checkpoint of it can be read", checkpoint.UNUSABLE)]
    return [ok(subject, "begun before, without a checkpoint: begins at step 0")]


def stages_findings(
    loaded: Loaded, planned: list[Planned], chosen: tuple[str, ...], count: int, too_large: dict[str, str]
) -> list[Finding]:
    output, findings = Path(loaded.recipe.output), []
    restarted = built_on(planned, loaded.options.restart)
    for stage, context in looked_at(loaded, planned, "draftsmith check"):
        state = stage_state(stage, output)
        subject = f"stages.{stage.name}"
        if isinstance(state, UserError):
            # What it waits for may be among what this run would do first.
            waits = any(maker in chosen and not read_mark(output / maker / DONE) for maker in stage.inputs.values())
            if not waits:
                findings.append(fault(subject, state.problem, state.hint or ""))
        elif state == "finished":
            findings.append(_finished(stage.name, output / stage.name))
            continue
        elif stage.name not in restarted:
            findings += _goes_on(stage, output / stage.name)
        if stage.name in too_large:
            findings.append(fault(subject, too_large[stage.name], "choose another output=, or a smaller states.dtype"))
        finished = {thing for thing, folder in context.inputs.items() if read_mark(folder / DONE)}
        findings += weight_findings(stage.name, stage.stage, loaded.recipe)
        findings += quality_findings(subject, stage.stage)
        findings += data_findings(stage, context, finished=finished, count=count)
    return findings
