"""What a drafter that is to be published was made from, by names that others know, and where it lies here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ...core.json_types import JsonMapping, JsonObject, text_at
from ...models.drafters.base import DrafterConfig
from ...models.folders import PREFIX, shipped_name
from ..run.context import Context


def target_name(context: Context) -> str:
    """What a target without a Hub id is called."""
    path = context.target.path
    if "target" in context.inputs:
        began = None if path is None else _shipped(path) or Path(path).name
        return "a target that its run trained" + (f", from `{began}`" if began else "")
    if named := _shipped(str(path)):
        return f"`{named}`, which comes with draftsmith"
    return f"`{Path(str(path)).name}`, a target that is not on the Hub under this name"


def parts_of(
    context: Context, drafter: DrafterConfig | None, target: str | None, starts: Iterable[str], datasets: Iterable[str]
) -> list[tuple[str, str]]:
    """What the drafter was made from, whose licences the card follows: (role, name).

    Args:
        drafter: its section.
        starts: heads outside the run that it was trained on from.
    """
    # A target that the run trained has the terms of its data, and of the weights that it was trained from.
    path = context.target.path
    named = target or (None if path is None else hub_id(path) or _shipped(path) or Path(path).name)
    parts = [("target", named)] if named else []
    parts += [("initial weights", name) for name in began_as(drafter, "language_model", "path")]
    parts += [("initial weights", Path(start).name if Path(start).is_dir() else start) for start in starts]
    parts += [("vision tower", name) for name in began_as(drafter, "vision_tower")]
    return parts + [("data", name) for name in datasets]


def sources_of(context: Context, base: str | None) -> dict[str, Path] | None:
    """Where the target's parts lie here: of stages, or a directory of the recipe; None: the Hub or the package
    has them.

    Args:
        base: Hub id that the manifest names the target by, in place of the recipe's path.
    """
    path = context.target.path
    if base is None and "target" not in context.inputs and path is not None and _shipped(path):
        return None  # with the processor that it brings, which the run's own stages have from there
    things: tuple[str, ...] = ("target", "processor", "vq", "text")
    folders = {thing: context.inputs[thing] for thing in things if thing in context.inputs}
    for thing, place in (("target", context.target.path), ("vq", dict(context.target).get("vq"))):
        if (named := text_at(place)) is not None and Path(named).is_dir():
            folders.setdefault(thing, Path(named))
    return folders or None


def hub_id(value: object) -> str | None:
    """A setting that names a repository of the Hub, and no directory here."""
    name = text_at(value)
    return name if name is not None and name.count("/") == 1 and not Path(name).is_dir() else None


def _shipped(place: str) -> str | None:
    """`shipped:NAME` of a directory of the package."""
    return name if (name := shipped_name(place)).startswith(PREFIX) else None


def values_of(drafter: DrafterConfig | JsonMapping | None) -> JsonObject:
    return {} if drafter is None else dict(drafter)


def began_as(drafter: DrafterConfig | None, *keys: str) -> list[str]:
    """Whose weights a drafter began with: Hub ids, and directories by their last name, of which nothing is known."""
    values = values_of(drafter)
    named = [value for key in keys if (value := text_at(values, key)) is not None and value != "target"]
    return [hub_id(name) or Path(name).name for name in named]
