"""What `draftsmith check` looks at: the engine, models on this machine, room on the disk, finished stages, data."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from huggingface_hub import constants

from ..core.errors import UserError
from ..core.json_types import text_at
from ..core.results import DONE, read_mark
from ..trainers.run.deepspeed_section import check_engine
from ..trainers.run.matching import begun, made_nothing, stage_state
from ..trainers.run.run import built_on, look_at_results
from ..trainers.run.stage import Planned, WholeRecipe
from ..trainers.train import checkpoint
from .finding import Finding, fault, ok, warning
from .launch import looked_at
from .load import Loaded
from .preflight_data import data_findings, is_local
from .preflight_weights import weight_findings

GIB = 2**30


def engine_findings(recipe: WholeRecipe) -> list[Finding]:
    try:
        check_engine(recipe.engine)
    except UserError as error:
        return [fault("engine", error.problem, error.hint or "change engine")]
    return [ok("engine", f"zero_stage {recipe.engine.zero_stage}, {recipe.engine.precision}")]


def models_findings(recipe: WholeRecipe) -> list[Finding]:
    """Whether the published models that the recipe names are on this machine."""
    findings = []
    for key, name, revision in _published(recipe):
        if is_local(name, revision):
            findings.append(ok(key, f"{name} is on this machine"))
        elif constants.HF_HUB_OFFLINE:
            findings.append(fault(key, f"{name} is not on this machine, and HF_HUB_OFFLINE is set",
                               f"where there is a network: hf download {name}"))  # fmt: skip
        else:
            findings.append(ok(key, f"{name} will be downloaded"))
    return findings


def _published(recipe: WholeRecipe) -> list[tuple[str, str, str | None]]:
    """(key, Hub id or folder, revision)."""
    keys = ("path", "language_model", "vision_tower")
    repositories = []
    for part, section in (("target", recipe.target), ("drafter", recipe.drafter)):
        values = {} if section is None else dict(section)
        for key in keys:
            if (name := text_at(values, key)) not in (None, "target"):
                repositories.append((f"{part}.{key}", name, values.get("revision")))
    return repositories


def disk_findings(output: Path) -> list[Finding]:
    folder = output
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    about = f"{free / GIB:,.1f} GiB are free under {folder.resolve()}"
    if not os.access(folder, os.W_OK):
        return [fault("output", f"{folder} cannot be written", "choose another output=, or fix its permissions")]
    if free < GIB:
        return [fault("output", about, "make room, or choose another output=")]
    return [ok("output", about)]


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
        findings += data_findings(stage.name, stage.stage, context, finished=finished, count=count)
    return findings
