"""Stages of a recipe in this process, as the command line runs them (but for its lock)."""

from pathlib import Path

import yaml
from draftsmith.recipes.launch import context_maker
from draftsmith.recipes.load import load
from draftsmith.recipes.plan import plan
from draftsmith.recipes.schema import TRACKS
from draftsmith.trainers.run import run_stages


def load_spelled(recipe: dict, name: str, output: Path, *settings: str):
    """A recipe that a test spells out, written to a file and read again."""
    path = output / f"{name}.yaml"
    output.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(recipe | {"output": str(output)}, sort_keys=False))
    return load([f"recipe={path}", *settings], TRACKS)


def run_loaded(found, output: Path, *, stages=None, restart=None) -> list[str]:
    """Returns what was said."""
    told: list[str] = []
    planned = plan(found.recipe, found.path)
    make_context = context_maker(found, "the command", told.append)
    run_stages(planned, make_context, output=output, chosen=stages, restart=restart, say=told.append)
    return told
