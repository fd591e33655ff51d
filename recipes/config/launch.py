"""Runs a recipe in this process, on any rank: everything that `recipe=NAME key=value ...` does."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ...core import ranks
from ...core.errors import UserError
from ...core.files import read_yaml, write_whole
from ...core.import_paths import code_of, kinds_within
from ...core.json_types import JsonMapping, JsonObject, object_at
from ...core.secrets import redact, redact_argument, redact_output, redact_tree
from .announce import ANNOUNCED, announcement
from .exit_codes import FAULTS, OK
from .load import Loaded, load
from .messages import blamed
from .uncollected import leave_at_once

if TYPE_CHECKING:
    from ...trainers.run.stage import Planned
    from .schema import Recipe

RECIPE, ABOUT = "recipe.yaml", "run.yaml"  # what a run writes of itself into its folder


def say(text: str) -> None:
    """A line for people, from rank 0."""
    if ranks.is_main():
        print(redact(text), flush=True)


def announce(arguments: Sequence[str]) -> None:
    """Say what will run, before anything slow is imported; ranks of `draftsmith demo` leave it to that command."""
    if ANNOUNCED not in os.environ and ranks.is_main() and (text := announcement(arguments)) is not None:
        say(text)


def typed(arguments: Sequence[str]) -> str:
    """The command as it was typed, without secrets. A launcher's own words are not known to its processes."""
    module = "python -m draftsmith"
    programs = {"train.py": "trains/train.py", "__main__.py": module, "cli.py": f"{module}.recipes.commands.cli"}
    program = programs.get(Path(sys.argv[0]).name, "draftsmith")
    return f"{program} {shlex.join(redact_argument(a) for a in arguments)}"


def run_recipe(arguments: Sequence[str], command: str) -> int:
    """Run (or dry-run) a recipe's stages. Returns 0; 3 where a dry run does not fit; 143 where the launcher has ended.

    Args:
        command: as it was typed, for records.

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
    from .preflight_parallel import check_parallel, check_places

    recipe, options = loaded.recipe, loaded.options
    with blamed(loaded.written):
        check_engine(recipe.engine)
        planned = plan(recipe, loaded.path)
        check_places(recipe, planned, options.stages)
        check_parallel(recipe, planned, options.stages, dry_run=options.dry_run)
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
    if not end_with_launcher():
        print("the launcher of this rank has ended: nothing is begun", file=sys.stderr, flush=True)
        return 143
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
    if restart is not None:
        ranks.on_main(_look_at_data, loaded, planned, command)
    with _of_another(loaded, output):
        ranks.on_main(check_stages, planned, output, options.stages, restart)
    ranks.on_main(_refuse_missing, loaded, planned, command)
    if not sys.stderr.isatty() or not ranks.is_main() or watched():
        # Progress bars of libraries clutter a log, every rank would draw one, and each would push the live line away.
        hf_logging.disable_progress_bar()
    if makes:
        _write_provenance(loaded, output, command)
    run_stages(
        planned,
        context_maker(loaded, command),
        output=output,
        chosen=options.stages,
        restart=restart,
        say=say,
        words=words,
    )
    ranks.leave(said=False)
    if ranks.is_main() and (last := ending(recipe, loaded.path, options.stages or [*recipe.stages])):
        say(last)
    return 0


@contextmanager
def _of_another(loaded: Loaded, output: Path) -> Iterator[None]:
    """Says first whose the folder is, where another recipe's run lies there: its settings differ in most keys, and
    `restart=` would set that run aside.
    """
    try:
        yield
    except UserError as error:
        about = output / ABOUT
        known = read_yaml(about, JsonObject, hint="choose another output") if about.is_file() else {}
        whose, own = str(known.get("recipe")), loaded.path.name
        if not known or RECIPE in (whose, own) or whose == own:
            raise
        raise UserError(
            f"this folder holds a run of {whose}, and this is {own}: {error.problem}", where=error.where,
            hint="choose another output: output=FOLDER; or, to set that run aside: "
            + (error.hint or "").removesuffix(", or choose another output"),
        ) from error  # fmt: skip


def describe(recipe: Recipe, planned: Sequence[Planned], stages: Collection[str] | None = None) -> int:
    """Say what would run, and write nothing. Returns the exit code: a finding where a stage does not fit."""
    from .dry_run import does_not_fit, dry_run

    leave_at_once()
    say(dry_run(recipe, planned, stages))
    large = does_not_fit(recipe, planned, stages)
    if large:
        say(f"does not fit the recipe's hardware: stage {', '.join(large)}")
    return FAULTS if large else OK


def _refuse_missing(loaded: Loaded, planned: Sequence[Planned], command: str) -> None:
    """Raises `UserError` where data of a stage that would run is not on disk: before earlier stages take hours."""
    from ...trainers.run.run import is_done
    from .preflight_data import missing_data
    from .preflight_weights import weight_findings

    for stage, context in looked_at(loaded, planned, command):
        if is_done(stage, context.folder.parent):
            continue
        missing = missing_data(stage.name, stage.stage, context)
        looked = weight_findings(stage.name, stage.stage, loaded.recipe)
        for finding in (*missing, *(one for one in looked if one.level == "fault")):
            raise UserError(finding.what, key=finding.subject,
                            hint=f'{finding.hint}; or name the stages whose data is there: "stages=[...]"')  # fmt: skip


def _look_at_data(loaded: Loaded, planned: Sequence[Planned], command: str) -> None:
    """Raises `UserError` where data of the restarted stages is missing or broken: before results move aside.

    A look indexes the data.
    """
    from ...core.results import DONE, read_mark
    from ...trainers.run.restart import built_on
    from .finding import any_fault
    from .preflight_data import data_findings

    restart = loaded.options.restart
    assert restart is not None
    stale = built_on(planned, restart)
    for stage, context in looked_at(loaded, planned, command):
        if stage.name not in stale:
            continue
        kept = {t for t, folder in context.inputs.items() if folder.name not in stale and read_mark(folder / DONE)}
        for finding in data_findings(stage, context, finished=kept, count=8):
            if any_fault([finding]) or finding.is_absent:
                raise UserError(f"restart={restart}: {finding.what}", key=finding.subject, hint=finding.hint)


def looked_at(loaded: Loaded, planned: Sequence[Planned], command: str) -> Iterator[tuple[Planned, Any]]:
    """The stages that would run, each with the context in which its data is looked at."""
    output, chosen, make_context = Path(loaded.recipe.output), loaded.options.stages, context_maker(loaded, command)
    for stage in planned:
        if chosen is None or stage.name in chosen:
            inputs = {thing: output / maker for thing, maker in stage.inputs.items()}
            yield stage, make_context(stage, output / stage.name, inputs)


def context_maker(loaded: Loaded, command: str, tell: Callable[[str], None] = say) -> Callable[..., Any]:
    """Returns the function that makes a stage's context: (planned, folder, inputs, stop, line) -> context. Without
    `stop` no signal reaches it, and what is `auto` stays so: the stage does not run.

    Args:
        tell: what a stage says goes there.
    """
    from ...trainers.run.context import Context
    from ...trainers.run.precision import settled
    from ...trainers.run.progress import StageLine
    from ...trainers.run.stopping import Stop

    recipe = loaded.recipe

    def make_context(
        stage: Planned,
        folder: Path,
        inputs: Mapping[str, Path],
        stop: Stop | None = None,
        line: StageLine | None = None,
    ) -> Context:
        context = Context(
            name=stage.name,
            folder=folder,
            seed=recipe.seed,
            fingerprint=stage.fingerprint,
            target=recipe.target,
            drafter=recipe.drafter,
            engine=recipe.engine,
            tracking=recipe.tracking,
            inputs=dict(inputs),
            say=tell,
            recipe=loaded.tree,
            command=command,
            stop=stop or Stop(),
            progress=line or StageLine(stage.name),
        )
        return context if stop is None else settled(context, stage)

    return make_context


def _refuse_foreign(output: Path) -> None:
    """Raises `UserError` where a `recipe.yaml` or `run.yaml` of somebody's own would be written over."""
    hint = "rename it, or choose another output: a run writes its whole recipe and its command there"
    about = output / ABOUT
    if not about.exists():
        # A run writes run.yaml first.
        if (output / RECIPE).exists():
            raise UserError("the output folder holds a recipe that no run wrote", where=str(output / RECIPE), hint=hint)
        return
    known = read_yaml(about, JsonObject, hint=hint)
    if not {"command", "recipe"} <= set(known):
        raise UserError("the output folder holds a file that no run wrote", where=str(about), hint=hint)


def _tell_changed(code: JsonMapping, output: Path, stages: Iterable[str]) -> None:
    """A warning for each class of another package whose package is another than when this run was started last. Like a
    version of draftsmith it is in no fingerprint: an edit would cost every finished stage.
    """
    from ...core.results import DONE, read_mark

    before = output / ABOUT
    recorded = object_at(read_yaml(before, JsonObject, hint=""), "code") if before.is_file() else None
    begun = [name for name in stages if (output / name).is_dir() and read_mark(output / name / DONE) is None]
    for kind, now in code.items():
        if (recorded or {}).get(kind, now) != now:
            goes_on = f"; begun with the old code and going on with the new: {', '.join(begun)}" if begun else ""
            say(f"warning: the code of {kind} has changed since this run was started last; finished stages are not run "
                f"again{goes_on}{'.' if begun else ':'} restart=STAGE makes a stage anew")  # fmt: skip


def _write_provenance(loaded: Loaded, output: Path, command: str) -> None:
    """The resolved recipe, the command, versions and git state, before anything else is written.

    A publication holds what is written here: nothing of it may change from start to start of a command.
    """
    if not ranks.is_main():
        return
    from .provenance import versions

    output.mkdir(parents=True, exist_ok=True)
    name, before = loaded.path.name, output / ABOUT
    if loaded.path.resolve() == (output / RECIPE).resolve() and before.is_file():  # its own: whose it was stays known
        name = str(read_yaml(before, JsonObject, hint="").get("recipe", name))
    about: JsonObject = {"command": command, "recipe": name, **versions()}
    if kinds := sorted({*kinds_within(loaded.recipe.model_dump(mode="json"))}):
        about["code"] = {kind: code_of(kind) for kind in kinds}
        _tell_changed(about["code"], output, loaded.recipe.stages)
    write_whole(output / ABOUT, yaml.safe_dump(about, sort_keys=False).encode())
    write_whole(output / RECIPE, yaml.safe_dump(redact_tree(loaded.tree), sort_keys=False).encode())
