"""`draftsmith train`, `evaluate` and `publish`: the stages of a recipe of these kinds, and no others."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ...core.errors import UserError, page
from ..config.launch import announce, run_recipe, say
from ..config.load import load
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
    """A run's folder is published whether or not its recipe has a stage for it."""
    if not (Path(options.name) / "recipe.yaml").is_file():
        return _runner("publish")(options)
    from .publish_run import publish_run

    return publish_run(Path(options.name), options.settings)


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
        ("deepspeed --quiet --num_gpus 8 --module draftsmith train llava15-68m", "on eight GPUs"),
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
