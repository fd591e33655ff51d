"""`draftsmith train`, `evaluate` and `publish`: the stages of a recipe of these kinds, and no others."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import cast

from ...core.errors import UserError, page
from ...core.files import read_yaml
from ...core.json_types import JsonObject, object_at, text_at
from ...core.results import BEGUN, DONE, read_mark
from ..config.launch import announce, describe, make_context, run_recipe, say
from ..config.load import blamed, load
from .command import NAME, SETTINGS, Command, recipe_arguments


def chosen(arguments: list[str], command: str) -> list[str]:
    """`arguments` with the `stages=` that this command runs; those that the user names must be its own."""
    loaded = load(arguments)
    stages = loaded.recipe.stages
    own = [name for name, stage in stages.items() if stage.command == command]
    names = loaded.options.stages or own
    if not names or not {*names} <= {*own}:
        commands = ", ".join(f"{name} by draftsmith {stage.command}" for name, stage in stages.items())
        raise UserError(
            f"draftsmith {command} does not run {', '.join(names) or 'a stage of this recipe'}", where=str(loaded.path),
            hint=f"its stages are run: {commands}; draftsmith recipe=NAME runs stages of any kind",
        )  # fmt: skip
    return [*(a for a in arguments if a.split("=")[0].lstrip("-") != "stages"), f"stages=[{','.join(names)}]"]


def _runner(command: str) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        arguments = recipe_arguments(options)
        announce(arguments)
        arguments = chosen(arguments, command)
        code = run_recipe(arguments, options.typed)
        if code == 0 and command == "train" and not any(a.startswith("dry_run=") for a in arguments):
            say("measure it: draftsmith evaluate with the same NAME and settings")
        return code

    return run


def _publish(options: argparse.Namespace) -> int:
    """A run's folder is published whether or not its recipe has a stage for it, or described (`dry_run=true`).

    Nothing is trained or measured. A publication that was made with other settings is kept aside, and made anew.

    Raises:
        UserError: it would be uploaded, and nobody is logged in to the Hub.
        Stopped: the run was asked to stop; what the Hub has by then stays there.
    """
    run, settings = Path(options.name), options.settings
    if not (run / "recipe.yaml").is_file():
        return _runner("publish")(options)
    from ...trainers.publish.hub_upload import usable_token
    from ...trainers.run.guard import RunLock
    from ...trainers.run.matching import is_done
    from ...trainers.run.run import run_stages
    from ...trainers.stages.publish import PublishStage
    from ..config.plan import plan

    own = {field.alias or name for name, field in PublishStage.model_fields.items()}
    name, known = _stage(run)
    arguments = [f"recipe={run / 'recipe.yaml'}", f"output={run}", *([] if known else [f"stages.{name}.kind=publish"])]
    for setting in settings:
        if setting in (f"restart={name}", f"stages={name}", f"stages=[{name}]"):
            continue  # a stage that the recipe lacks is none of its stages
        key = setting.partition("=")[0]
        arguments.append(f"stages.{name}.{setting}" if key.split(".")[0] in own else setting)
    loaded = load(arguments)
    planned = plan(loaded.recipe, loaded.path)
    stage = next(p for p in planned if p.name == name)
    if loaded.options.stages or loaded.options.restart:
        raise UserError("a run's folder is published by its own stage alone", where="command line: stages=, restart=",
                        hint=f"leave them out, or name {name}")  # fmt: skip
    if loaded.options.dry_run:
        with blamed(loaded):
            return describe(loaded.recipe, planned)
    # Refuses a misleading name before a model is loaded.
    say("\n".join(stage.stage.describe(stage)))
    RunLock(run, say=say)
    restart = name if f"restart={name}" in settings or _is_other(run / name, stage.fingerprint) else None
    # An earlier publication is not set aside for an upload that cannot begin.
    if cast(PublishStage, stage.stage).uploads and (restart is not None or not is_done(stage, run)):
        usable_token()
    maker = functools.partial(make_context, loaded, options.typed)
    run_stages(planned, maker, output=run, chosen=(name,), restart=restart, say=say)
    return 0


def _stage(run: Path) -> tuple[str, bool]:
    """The name of the run's publishing stage, and whether its recipe has one."""
    path = run / "recipe.yaml"
    hint = "name the folder of a run, as it was left: its recipe.yaml says what was run"
    stages = object_at(read_yaml(path, JsonObject, hint=hint), "stages") or {}
    names = [name for name, stage in stages.items() if text_at(stage, "kind") == "publish"]
    if len(names) > 1:
        command = f"draftsmith recipe={path} output={run} 'stages=[{names[-1]}]'"
        raise UserError(f"this run's recipe publishes in {len(names)} stages, {', '.join(names)}", where=str(path),
                        hint=f"run the one that you mean: {command}")  # fmt: skip
    return (names[0], True) if names else ("publish", False)


def _is_other(folder: Path, fingerprint: str) -> bool:
    """Whether it was made with other settings; what has neither record, the stage itself sets aside."""
    mark = read_mark(folder / BEGUN) or read_mark(folder / DONE)
    return mark is not None and mark.fingerprint != fingerprint


TRAIN = Command(
    name="train",
    summary="run a recipe up to its trained drafter",
    description="Run the recipe's stages up to the trained drafter: all kinds but evaluate and publish. Stages that\n"
    "have finished with the same settings are skipped, and an interrupted one continues from its newest checkpoint.\n"
    f"This process is the only rank; on several GPUs or nodes start it with a launcher ({page('clusters.md')}):\n"
    "  deepspeed --module draftsmith train NAME",
    examples=(
        ("draftsmith train demo/lvlm", "a CPU is enough"),
        ("draftsmith train llava15-68m stages.finetune.optim.lr=5e-5", "another learning rate"),
        ('draftsmith train llava15-68m "stages=[finetune]"', "this stage alone"),
        ("draftsmith train llava15-68m restart=finetune", "again; the old results are kept aside"),
        ("draftsmith train llava15-68m dry_run=true", "what it would do, and no more"),
        ("deepspeed --log_level critical --num_gpus 8 --module draftsmith train llava15-68m", "on eight GPUs"),
    ),
    arguments=(NAME, SETTINGS),
    run=_runner("train"),
)
EVALUATE = Command(
    name="evaluate",
    summary="measure a trained drafter: tau, speedup, identity of outputs",
    description="Run the recipe's stages of kind evaluate on what its earlier stages have left. NAME may be the\n"
    "folder of a run: its own recipe is taken.",
    examples=(
        ("draftsmith evaluate demo/lvlm", ""),
        ("draftsmith evaluate llava15-68m dry_run=true", "what it would measure, and no more"),
        ("draftsmith evaluate runs/demo-lvlm", "the recipe that this folder was made with"),
        (
            "draftsmith evaluate llava15-68m 'stages.evaluate.tree={kind: chain, gamma: 7}' restart=evaluate",
            "again, with longer drafts",
        ),
    ),
    arguments=(NAME, SETTINGS),
    run=_runner("evaluate"),
)
PUBLISH = Command(
    name="publish",
    summary="build the Hub repository of a drafter, and upload it",
    description="Build the repository's folder, try it in a fresh process, and upload it where repo= names one.\n"
    "NAME is the folder of a finished run, and settings are those of a stage of kind publish; or a recipe that has\n"
    "such a stage.",
    examples=(
        ("draftsmith publish runs/llava15-68m", "build and try the folder, and no more"),
        ("draftsmith publish runs/llava15-68m repo=me/llava-1.5-7b-draft", "upload it to a private repository"),
        ("draftsmith publish runs/llava15-68m dry_run=true", "what it would do, and no more"),
        ("draftsmith publish mine.yaml", "the publish stage of this recipe"),
    ),
    arguments=(NAME, SETTINGS),
    run=_publish,
)
