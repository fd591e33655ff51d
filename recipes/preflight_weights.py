"""Trained drafters outside the run that a stage reads (`from: {path}`, a method's `drafter: {path}`), looked for before
it runs: hours of earlier stages must not end at a name that is nobody's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.utils import HFValidationError, validate_repo_id

from ..core.section import parts
from ..models.drafters.base import PublishedDrafter
from ..trainers.run.stage import Stage, WholeRecipe
from ..trainers.train.fit import OutsideStart
from .finding import Finding, fault, ok
from .preflight_data import is_local


def trained_outside(section: object, key: str) -> Iterator[tuple[str, OutsideStart | PublishedDrafter]]:
    """(key, section) of each that names weights of another run or of the Hub."""
    match section:
        case OutsideStart() | PublishedDrafter(path=str()):
            yield f"{key}.path", section
        case list():  # a cache's heads, whose settings alone are read
            return
        case _:
            for name, part in parts(section):
                yield from trained_outside(part, f"{key}.{name}")


def weight_findings(name: str, stage: Stage, recipe: WholeRecipe) -> list[Finding]:
    """A finding for each of a stage's."""
    found = dict(trained_outside(stage, f"stages.{name}"))
    match recipe.drafter:
        case PublishedDrafter(path=str()) as drafter if stage.trains:
            found["drafter.path"] = drafter
    output = Path(recipe.output).resolve()
    return [_finding(key, str(section.path), section.revision, output) for key, section in found.items()]


def _finding(key: str, path: str, revision: str | None, output: Path) -> Finding:
    if Path(path).resolve().is_relative_to(output) and not Path(path).exists():
        return ok(key, f"{path} is written by an earlier stage")
    if is_local(path, revision):
        return ok(key, f"{path} is on this machine")
    try:
        validate_repo_id(path)
    except HFValidationError:
        hint = "train it first, name another folder with this key, or run where the folder lies"
        return fault(key, f"there is no folder {Path(path).absolute()}", hint)
    if constants.HF_HUB_OFFLINE:
        hint = f"where there is a network: hf download {path}"
        return fault(key, f"{path} is no folder here, and HF_HUB_OFFLINE is set", hint)
    return ok(key, f"{path} will be downloaded")
