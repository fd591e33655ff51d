"""Runs a recipe in this process, on any rank: everything that `recipe=NAME key=value ...` does."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ...core import ranks
from ...core.errors import FAULTS, OK, UserError
from ...core.files import read_yaml, write_whole
from ...core.import_paths import code_of, kinds_within
from ...core.interpolation import resolved
from ...core.json_types import JsonObject, object_at
from ...core.secrets import redact, redact_output, redact_tree
from .files import is_published
from .load import Loaded, blamed, checked, leave_at_once, load, read_words

if TYPE_CHECKING:
    from ...trainers.run.stage import Planned
    from .schema import Recipe

RECIPE, ABOUT = "recipe.yaml", "run.yaml"  # what a run writes of itself into its folder
ANNOUNCED = "DRAFTSMITH_ANNOUNCED"  # in the environment of ranks whose launcher has said it
CALLED_FROM = "DRAFTSMITH_CALLED_FROM"  # set by scripts/demo: the caller's folder, where it is another


def say(text: str) -> None:
    """A line for people, from rank 0."""
    if ranks.is_main():
        print(redact(text), flush=True)


def announce(arguments: Sequence[str]) -> None:
    """Say what will run, before anything slow is imported; ranks of `draftsmith demo` leave it to that command."""
    if ANNOUNCED not in os.environ and ranks.is_main() and (text := announcement(arguments)) is not None:
        say(text)


def announcement(arguments: Sequence[str]) -> str | None:
    """A run's first lines: what runs, by its header, and where its results will lie. None for a dry run, and for what
    `load` will refuse.
    """
    try:
        words = read_words(arguments)
        output = str(resolved(words.tree)["output"])
    except (UserError, KeyError):
        return None
    if words.options.dry_run:
        return None
    header = re.match(r"#[# ]*(.*)", words.path.read_text(encoding="utf-8"))
    about = words.name if header is None else f"{words.name}: {header[1]}"
    begun = ", which goes on with what is there" if (Path(output) / ABOUT).is_file() else ""
    return f"{about}\n  results: {shown_place(output)}{begun}; torch and DeepSpeed are loading"


def shown_place(output: str | Path) -> str:
    """A folder of this process for whoever reads of it: whole where a script runs it from another folder than its
    caller's (`scripts/demo`).
    """
    return str(Path.cwd() / output) if CALLED_FROM in os.environ else str(output)


def run_recipe(arguments: Sequence[str], command: str) -> int:
    """Run (or dry-run) a recipe's stages. Returns 0; 3 where a dry run does not fit.

    Args:
        command: for records, without secrets.

    Raises:
        Stopped: the run was asked to stop, and has saved what it did; `recipes/commands/cli.py` says so.
    """
    loaded = load(list(arguments))
    from ...trainers.run.context import check_engine
    from ...trainers.run.restart import pending_restart
    from ...trainers.run.run import check_stages, run_stages
    from .alike import check_alike
    from .dry_run import check_models
    from .ending import ending
    from .plan import plan
    from .preflight_inputs import check_placement

    recipe, options = loaded.recipe, loaded.options
    with blamed(loaded):
        check_engine(recipe.engine)
        planned = plan(recipe, loaded.path)
        check_placement(recipe, planned, options.stages, dry_run=options.dry_run)
        for key, text in recipe.warnings():
            say(f"warning: {key}.{text}")
        if options.dry_run:
            return describe(recipe, planned, options.stages)
        check_models(recipe)
    from transformers.utils import logging as hf_logging

    from ...trainers.run.guard import RunLock, end_with_launcher
    from ...trainers.run.progress import watched
    from ...trainers.train.engine import init_distributed

    redact_output()
    end_with_launcher()
    output = Path(recipe.output)
    RunLock(output, say=say)
    for name in options.stages or recipe.stages:
        if (folder := output / name).exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file, and stage {name} wants its folder there", key=f"stages.{name}",
                            hint="remove it, or choose another output")  # fmt: skip
    # Publishing alone makes nothing: what the run was trained with stays written.
    makes = any(recipe.stages[name].kind != "publish" for name in options.stages or recipe.stages)
    init_distributed(verbose=options.verbose, wait_s=60 * recipe.engine.wait_minutes)
    check_alike(loaded, planned)
    if makes:
        ranks.on_main(_refuse_foreign, output)
    words = [word for word in arguments if not word.lstrip("-").startswith("verbose=")]  # changes no result
    restart = pending_restart(planned, output, options.restart, words, say)
    ranks.on_main(_check_data, loaded, planned, command, restart)
    ranks.on_main(check_stages, planned, output, options.stages, restart)
    if not sys.stderr.isatty() or not ranks.is_main() or watched():
        # Progress bars of libraries clutter a log, every rank would draw one, and each would push the live line away.
        hf_logging.disable_progress_bar()
    if makes:
        ranks.on_main(_write_provenance, loaded, planned, output, command)
    maker = functools.partial(make_context, loaded, command)
    run_stages(planned, maker, output=output, chosen=options.stages, restart=restart, say=say, words=words)
    ranks.leave(said=False)
    ran = options.stages or [*recipe.stages]
    if ranks.is_main() and (last := ending(recipe, loaded.path, ran, shown_place(output))):
        say(last)
    return 0


def describe(recipe: Recipe, planned: Sequence[Planned], stages: Collection[str] | None = None) -> int:
    """Say what would run, and write nothing. Returns the exit code: a finding where a stage does not fit."""
    from .dry_run import does_not_fit, dry_run

    leave_at_once()
    say(dry_run(recipe, planned, stages))
    if large := does_not_fit(recipe, planned, stages):
        say(f"does not fit the recipe's hardware: stage {', '.join(large)}")
    return FAULTS if large else OK


def _check_data(loaded: Loaded, planned: Sequence[Planned], command: str, restart: str | None) -> None:
    """Raises `UserError` where data of a stage that would run is missing, or of a restarted one broken: before earlier
    stages take hours, or results move aside. What restarted stages read is indexed.
    """
    from ...core.results import DONE, read_mark
    from ...trainers.run.matching import is_done
    from ...trainers.run.restart import built_on
    from .preflight_inputs import data_findings, models_findings, weight_findings

    stale = built_on(planned, restart)
    for stage, context in looked_at(loaded, planned, command):
        is_stale = stage.name in stale
        if not is_stale and is_done(stage, context.folder.parent):
            continue
        stays = {t for t, folder in context.inputs.items() if folder.name not in stale and read_mark(folder / DONE)}
        findings = weight_findings(stage.name, stage.stage, loaded.recipe)
        if "target" not in context.inputs and stage.stage.kind != "publish":  # which names it alone
            findings += [finding for finding in models_findings(loaded.recipe) if finding.is_absent]
        findings += data_findings(stage, context, finished=stays, count=8 if is_stale else 0)
        for finding in findings:
            if finding.level == "fault" or (finding.is_absent and is_stale):
                hint = f'{finding.hint}; or name the stages whose data is there: "stages=[...]"'
                raise UserError(finding.what, key=finding.subject, hint=hint)


def looked_at(loaded: Loaded, planned: Sequence[Planned], command: str) -> Iterator[tuple[Planned, Any]]:
    """The stages that would run, each with the context in which its data is looked at."""
    output, chosen = Path(loaded.recipe.output), loaded.options.stages
    for stage in planned:
        if chosen is None or stage.name in chosen:
            inputs = {thing: output / maker for thing, maker in stage.inputs.items()}
            yield stage, make_context(loaded, command, stage, output / stage.name, inputs)


def make_context(
    loaded: Loaded, command: str, stage: Planned, folder: Path, inputs: Mapping[str, Path],
    stop: Any = None, line: Any = None, *, tell: Callable[[str], None] = say,
) -> Any:  # fmt: skip
    """A stage's `Context`. Without `stop` no signal reaches it, and what is `auto` stays so: the stage does not run."""
    from ...trainers.run.context import Context
    from ...trainers.run.precision import settled
    from ...trainers.run.progress import StageLine
    from ...trainers.run.stopping import Stop

    recipe = loaded.recipe
    context = Context(
        stage.name, folder, recipe.seed, stage.fingerprint, recipe.target, recipe.drafter, recipe.engine,
        recipe.tracking, dict(inputs), tell, recipe=loaded.tree, command=command, stop=stop or Stop(),
        progress=line or StageLine(stage.name),
    )  # fmt: skip
    return context if stop is None else settled(context, stage)


def _refuse_foreign(output: Path) -> None:
    """Raises `UserError` where a `recipe.yaml` or `run.yaml` of somebody's own would be written over."""
    hint = "rename it, or choose another output: a run writes its whole recipe and its command there"
    about = output / ABOUT
    # A run writes run.yaml first.
    foreign = output / RECIPE if not about.exists() and (output / RECIPE).exists() else None
    if about.exists() and not {"command", "recipe"} <= set(read_yaml(about, JsonObject, hint=hint)):
        foreign = about
    if foreign is not None:
        raise UserError("the output folder holds a file that no run wrote", where=str(foreign), hint=hint)


def _with_earlier(loaded: Loaded, planned: Sequence[Planned], output: Path) -> JsonObject:
    """The recipe's tree, with the finished stages that it lacks of the recipe that stands in the folder: several may
    share one, and a publication knows those of `recipe.yaml` alone. Raises `UserError` where they do not fit together.
    """
    from ...trainers.run.matching import done, is_done
    from ...trainers.run.restart import built_on
    from .plan import plan

    path, stages = output / RECIPE, object_at(loaded.tree, "stages") or {}
    hint = "delete it: this run writes it again"
    before = (object_at(read_yaml(path, JsonObject, hint=hint), "stages") or {}) if path.is_file() else {}
    marks = {name: mark for name in (*before, *stages) if (mark := done(output / name)) is not None}
    order, stale = [*stages], built_on(planned, loaded.options.restart)
    for name in [name for name in before if name in marks and name not in stages]:
        reads = [*(object_at(marks[name].settings, "inputs") or {}).values()]
        makers = {other for other, mark in marks.items() if mark.fingerprint in reads}
        if stale & makers:  # results of what goes now
            stale.add(name)
        else:  # behind its last input, or first: none stands between that it would take in its stead
            order.insert(max((place for place, other in enumerate(order, 1) if other in makers), default=0), name)
    if not (more := [name for name in before if name in order and name not in stages]):
        return loaded.tree
    tree = loaded.tree | {"stages": {name: stages.get(name, before.get(name)) for name in order}}
    inputs = {stage.name: stage.inputs for stage in planned}
    try:
        recipe = checked(replace(loaded, tree=tree), imports=loaded.options.allow_import or not is_published(path))
        whole = plan(recipe, loaded.path)
        if all(is_done(p, output) if p.name in more else p.inputs == inputs[p.name] for p in whole):
            return tree
    except UserError:
        pass
    hint = ("choose another output, write those stages into this recipe as they were run (where the drafter is "
            "another, the new stage has it as its own `drafter`), or move their folders away")  # fmt: skip
    problem = f"the output folder holds finished stages of another recipe: {', '.join(more)}"
    raise UserError(problem, key="output", where=str(path), hint=hint)


def _write_provenance(loaded: Loaded, planned: Sequence[Planned], output: Path, command: str) -> None:
    """The recipe as it is written, the command, versions and git state, before anything else is written.

    A publication holds what is written here: nothing of it may change from start to start of a command.
    """
    from ...core.results import DONE, read_mark
    from .alike import versions

    tree = _with_earlier(loaded, planned, output)
    output.mkdir(parents=True, exist_ok=True)
    before = read_yaml(output / ABOUT, JsonObject, hint="") if (output / ABOUT).is_file() else {}
    name = loaded.path.name
    if loaded.path.resolve() == (output / RECIPE).resolve():  # its own: whose it was stays known
        name = str(before.get("recipe", name))
    about: JsonObject = {"command": command, "recipe": name, **versions()}
    if kinds := sorted({*kinds_within(loaded.recipe.model_dump(mode="json"))}):
        about["code"] = {kind: code_of(kind) for kind in kinds}
        begun = [n for n in loaded.recipe.stages if (output / n).is_dir() and read_mark(output / n / DONE) is None]
        goes_on = f"; begun with the old code and going on with the new: {', '.join(begun)}." if begun else ":"
        # Like a version of draftsmith it is in no fingerprint: an edit would cost every finished stage.
        for kind, now in about["code"].items():
            if (object_at(before, "code") or {}).get(kind, now) != now:
                say(f"warning: the code of {kind} has changed since this run was started last; finished stages are "
                    f"not run again{goes_on} restart=STAGE makes a stage anew")  # fmt: skip
    write_whole(output / ABOUT, yaml.safe_dump(about, sort_keys=False).encode())
    write_whole(output / RECIPE, yaml.safe_dump(redact_tree(tree), sort_keys=False).encode())
