"""Published models and trained drafters outside the run, looked for before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id

from ...core.json_types import text_at
from ...core.section import parts
from ...models.drafters.base import PublishedDrafter
from ...trainers.run.stage import Stage, WholeRecipe
from ...trainers.train.fit import OutsideStart
from .finding import Finding, fault, ok

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


def models_findings(recipe: WholeRecipe) -> list[Finding]:
    """Whether the published models that the recipe names are on this machine."""
    findings = []
    for part, section in (("target", recipe.target), ("drafter", recipe.drafter)):
        values = {} if section is None else dict(section)
        for key in ("path", "language_model", "vision_tower"):
            if (name := text_at(values, key)) not in (None, "target"):
                findings.append(_place(f"{part}.{key}", name, values.get("revision"), Path(recipe.output)))
    return findings


def weight_findings(name: str, stage: Stage, recipe: WholeRecipe) -> list[Finding]:
    """A finding for each trained drafter outside the run that a stage reads (`from: {path}`, a method's `drafter:
    {path}`): hours of earlier stages must not end at a name that is nobody's.
    """
    outside = dict(trained_outside(stage, f"stages.{name}"))
    match recipe.drafter:
        case PublishedDrafter(path=str()) as drafter if stage.trains:
            outside["drafter.path"] = drafter
    output = Path(recipe.output)
    return [_place(key, str(section.path), section.revision, output) for key, section in outside.items()]


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


def _place(key: str, name: str, revision: str | None, output: Path) -> Finding:
    """Whether the weights that a key names are here, or will be."""
    if Path(name).resolve().is_relative_to(output.resolve()) and not Path(name).exists():
        return ok(key, f"{name} is written by an earlier stage")
    if Path(name).is_dir() or _in_cache(name, revision):
        return ok(key, f"{name} is on this machine")
    try:
        validate_repo_id(name)
    except HFValidationError:
        hint = "train it first, name another folder with this key, or run where the folder lies"
        return fault(key, f"there is no folder {Path(name).absolute()}", hint)
    if constants.HF_HUB_OFFLINE:
        return fault(key, f"{name} is not on this machine, and HF_HUB_OFFLINE is set",
                     f"where there is a network: hf download {name}")  # fmt: skip
    return ok(key, f"{name} will be downloaded")


def _in_cache(name: str, revision: str | None) -> bool:
    """Whether weights of a repository are in the Hub's cache; `check` itself fetches its small files."""
    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return False
    return any(path.suffix in _WEIGHTS for path in folder.rglob("*"))
