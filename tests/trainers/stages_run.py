"""Stages of a recipe in this process, as the command line runs them (but for its lock)."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from draftsmith.core.results import DONE, read_mark, sums_of, write_mark
from draftsmith.core.tracking import TrackingConfig
from draftsmith.recipes.config.launch import make_context
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan
from draftsmith.trainers.run.context import Context, EngineConfig
from draftsmith.trainers.run.run import MakeContext, run_stages

# Overrides of recipe=demo/lvlm-from-nothing: a target from a synthetic dataset of a hundred records.
TINY_DATASET = [
    "stages=[world,seeing,target]",
    "stages.seeing.steps=1",
    "stages.seeing.batch_size=8",
    "stages.world.splits.train={name: 2, colors: 2, caption: 2, attribute: 60, "
    "conversation: 20, place: 2, probe: 2, count: 2, word: 2, "
    "difference: 2, edit: 2, story: 2, sums: 2, fact: 10, aside: 2}",
    "stages.world.splits.align.caption=1",
    "stages.world.splits.seen={attribute: 1, conversation: 1, place: 1, count: 1, probe: 1, difference: 1}",
    "stages.world.splits.text={sums: 1, fact: 1, aside: 1}",
    "stages.world.splits.binding.attribute=1",
    "stages.world.splits.held_out={caption: 1, attribute: 1, conversation: 1}",
]

# Overrides of recipe=demo/lvlm-from-nothing: all of its stages, a few steps each.
FEW = [
    "stages.world.splits.train={name: 4, colors: 4, caption: 20, attribute: 20, "
    "conversation: 20, place: 4, probe: 4, count: 4, word: 4, "
    "difference: 4, edit: 4, story: 4, sums: 4, fact: 4, aside: 2}",
    "stages.world.splits.align.caption=20",
    "stages.world.splits.seen={attribute: 1, conversation: 1, place: 1, difference: 1, probe: 1, count: 1}",
    "stages.world.splits.text={sums: 2, fact: 1, aside: 1}",
    "stages.world.splits.held_out={attribute: 5, caption: 2, conversation: 2}",
    "stages.world.splits.binding.attribute=6",
    "stages.seeing.steps=2",
    "stages.target.steps=4",
    "stages.language.steps=2",
    "stages.finetune.steps=3",
    "stages.evaluate.max_new_tokens=12",
]


def contexts(say: Callable[[str], None], **settings: Any) -> MakeContext:
    """Makes the contexts of stages that need no target and no drafter; their messages go to `say`."""

    def context(stage, folder, inputs, stop, line):
        return Context(
            name=stage.name, folder=folder, seed=0, fingerprint=stage.fingerprint, target=None, drafter=None,
            engine=EngineConfig(), tracking=TrackingConfig(), inputs=inputs, say=say, stop=stop, progress=line,
            **settings,
        )  # fmt: skip

    return context


def list_anew(folder: Path) -> None:
    """As if the stage had written its files as they are now; those that are gone leave the list."""
    mark = read_mark(folder / DONE)
    names = [name for name in mark.files if (folder / name).is_file()]
    write_mark(folder / DONE, replace(mark, files=sums_of(folder, names)))


def load_spelled(recipe: dict, name: str, output: Path, *settings: str):
    """A recipe that a test spells out, written to a file and read again."""
    path = output / f"{name}.yaml"
    output.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(recipe | {"output": str(output)}, sort_keys=False))
    return load([f"recipe={path}", *settings])


def runner(recipe: Callable[[], dict], name: str):
    """Functions that read a recipe that a test spells out, and run stages of it."""

    def loaded(output: Path, *settings: str):
        return load_spelled(recipe(), name, output, *settings)

    def run(output: Path, *settings: str, stages=None, restart=None) -> list[str]:
        return run_loaded(loaded(output, *settings), output, stages=stages, restart=restart)

    return loaded, run


def run_loaded(found, output: Path, *, stages=None, restart=None) -> list[str]:
    """Returns what was said."""
    told: list[str] = []
    planned = plan(found.recipe, found.path)
    maker = functools.partial(make_context, found, "the command", tell=told.append)
    run_stages(planned, maker, output=output, chosen=stages, restart=restart, say=told.append)
    return told
