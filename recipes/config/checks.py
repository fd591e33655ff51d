"""What `draftsmith check` looks at, in this order: models without weights, sizes, engine, models on this machine, room
on the disk, finished stages, data.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ...core.errors import UserError, counted, page
from ...core.results import DONE, read_mark
from ...core.section import within
from ...data.served_prompt import difference
from ...eval.quality.measure import QualityConfig
from ...eval.quality.measure import check as check_quality
from ...trainers.run.context import Context, check_engine
from ...trainers.run.matching import begun, made_nothing, stage_state
from ...trainers.run.restart import built_on
from ...trainers.run.run import look_at_results
from ...trainers.run.stage import Planned
from ...trainers.train import checkpoint
from .dry_run import dry_run
from .finding import Finding, fault, graded, ok, tried, warning
from .health import room
from .launch import looked_at, say
from .load import Loaded
from .plan import plan
from .preflight_inputs import check_placement, data_findings, models_findings, weight_findings
from .preflight_samples import model_findings, without_processor


def findings_of(loaded: Loaded, samples: int) -> list[Finding]:
    """Print the dry run of the stages that would run, unless a model of theirs cannot be built."""
    recipe, options, planned, text = loaded.recipe, loaded.options, plan(loaded.recipe, loaded.path), ""
    broken = [finding for finding in model_findings(recipe) if finding.level == "fault"]
    if not broken:
        check_placement(recipe, planned, options.stages, dry_run=True)
        text = dry_run(recipe, planned, options.stages)
        say(text)

    chosen, output = options.stages or tuple(stage.name for stage in planned), Path(recipe.output)
    findings = [
        tried("engine", partial(check_engine, recipe.engine), "change engine"),
        *models_findings(recipe),
        *broken,
        room("output", output, "choose another output=", wanted=1, level="fault"),
        *(warning(stage, words, f"see {page('evaluation.md')}") for stage, words in recipe.warnings()),
        tried("results", partial(look_at_results, planned, chosen, None, output), "make them again: restart=STAGE"),
    ]
    return findings + stages_findings(loaded, planned, chosen, samples, text)


def stages_findings(
    loaded: Loaded, planned: list[Planned], chosen: tuple[str, ...], samples: int, text: str
) -> list[Finding]:
    """What the stages that would run find. `text`: the dry run, whose warnings are of states too large for the disk."""
    findings, output = [], Path(loaded.recipe.output)
    described = dict(block.split(" ", 1) for block in text.split("\nstage ")[1:])
    restarted = built_on(planned, loaded.options.restart)
    for stage, context in looked_at(loaded, planned, "draftsmith check"):
        state, subject, folder = stage_state(stage, output), f"stages.{stage.name}", output / stage.name
        if state == "finished":
            findings.append(_finished(stage.name, folder))
            continue
        if isinstance(state, UserError):
            # What it waits for may be among what this run would do first.
            if all(maker not in chosen or (output / maker / DONE).exists() for maker in stage.inputs.values()):
                findings.append(fault(subject, state.problem, state.hint or ""))
        elif stage.name not in restarted and begun(folder) is not None and not made_nothing(folder):
            findings.append(_goes_on(stage, folder))
        for line in described.get(stage.name, "").splitlines():
            if (what := line.removeprefix("  warning: ")) != line:
                findings.append(fault(subject, what, "choose another output=, or a smaller states.dtype"))
        finished = {thing for thing, folder in context.inputs.items() if (folder / DONE).exists()}
        findings += weight_findings(stage.name, stage.stage, loaded.recipe)
        for place, config in within(stage.stage, QualityConfig):
            for metric in config.metrics:  # whether its weights and the real images are here
                look = partial(check_quality, config.model_copy(update={"metrics": (metric,)}))
                name = f"{'.'.join((subject, *place))} ({metric})"
                findings.append(tried(name, look, "name its place: weights, reference"))
        findings += [one for one in _prompt_findings(stage, context, finished) if one not in findings]
        findings += data_findings(stage, context, finished=finished, count=samples)
    return findings


def _finished(name: str, folder: Path) -> Finding:
    """Whether a finished stage's files are there, by their sizes. What nothing reads any more may have been removed."""
    mark = read_mark(folder / DONE)
    listed = {} if mark is None or mark.files is None else mark.files
    sizes = {file: (folder / file).stat().st_size for file in listed if (folder / file).is_file()}
    changed = [file for file, entry in listed.items() if sizes.get(file) != entry.bytes]
    what = "finished before, same inputs: skipped"
    if changed:
        what = f"finished before, and {len(changed)} of its {len(listed)} files are not as written: {changed[0]}"
    return graded(not changed, f"stages.{name}", what, f"restart={name} makes them again, if anything is to read them")


def _goes_on(stage: Planned, folder: Path) -> Finding:
    """Where a stage continues that has begun."""
    if stage.stage.kind != "train":
        return ok(f"stages.{stage.name}", "begun before: goes on with what is there")
    subject, checkpoints = f"stages.{stage.name}", folder / checkpoint.FOLDER
    state = checkpoint.newest(checkpoints)
    if state is not None:
        return ok(subject, f"continues from step {state.step}, with {counted(state.world_size, 'rank')} as before")
    if any(checkpoints.glob("step-*")):
        return fault(subject, "begun before, and no checkpoint of it can be read", checkpoint.UNUSABLE)
    return ok(subject, "begun before, without a checkpoint: begins at step 0")


_ALIKE = "for a drafter that an engine serves: format: {template: chat}, or export it with a chat template of its own"


def _prompt_findings(plan: Planned, context: Context, finished: set[str]) -> list[Finding]:
    """Warnings of what a server would do otherwise than this stage, where the target's files are here: build another
    prompt, or apply penalties. `finished`: things whose stage has finished.
    """
    stage: dict[str, Any] = dict(plan.stage)
    target, key, findings = context.target, f"stages.{plan.name}.format", list[Finding]()
    if target.draws_images or {"processor", "target"} & (context.inputs.keys() - finished):
        return []
    if without_processor(context):
        return []
    try:
        if plan.stage.answer_format is not None and (text := context.penalties()):
            findings.append(warning("target", text, "serve so, or take the key out of the file"))
        form, processor = stage.get("format"), context.processor()
        trains = plan.stage.trains and stage.get("model") == "drafter" and form and form.template != "plain"
        if trains and form and processor.tokenizer.chat_template and (part := difference(form, processor)) is not None:
            findings.append(warning(key, f"prompts part from the target's chat template {part}", _ALIKE))
    except UserError as error:
        findings.append(warning(key, f"not compared with a server's: {error.problem}", _ALIKE))
    return findings
