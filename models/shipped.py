"""Trained weights that come with the package: recipes name them as `shipped:NAME`.

models/weights/README.md says how each was made.
"""

from __future__ import annotations

from pathlib import Path

from ..core.errors import UserError, did_you_mean
from ..core.refused import Refused

FOLDER = Path(__file__).parent / "weights"
PREFIX = "shipped:"


def shipped_folder(place: str) -> str:
    """The folder of `shipped:NAME`; any other place as it is. Raises `Refused` where nothing of this name ships."""
    if not place.startswith(PREFIX):
        return place
    folder, names = FOLDER / place.removeprefix(PREFIX), [path.parent.name for path in FOLDER.glob("*/config.json")]
    if folder.name not in names or folder.parent != FOLDER:
        raise Refused("", f"no weights {place!r} come with draftsmith", did_you_mean(folder.name, names))
    return str(folder)


def opened_target(place: str, *, key: str | None = None, where: str | None = None) -> str:
    """`shipped_folder` of a name outside a recipe: of a manifest, or of a command's option. Raises `UserError`."""
    try:
        return shipped_folder(place)
    except Refused as refused:
        raise UserError(refused.problem, key=key, where=where, hint=refused.hint) from refused


def shipped_name(place: str) -> str:
    """`shipped:NAME` of a folder of the package, where it lies differs between machines; any other place as it is."""
    return f"{PREFIX}{Path(place).name}" if Path(place).parent == FOLDER else place
