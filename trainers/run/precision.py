"""What `auto` became for a stage: recorded where the stage begins, and held against it when the stage goes on.

Recipe and fingerprint keep the word, so that a run may be planned, measured and published on any machine. Results
depend on what it became: shards, answers and checkpoints of one stage are never of two types (docs/decisions/0022).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...core import ranks
from ...core.errors import UserError
from ...core.json_types import parts as parts_of_tree
from ...core.results import BEGUN, read_mark, write_mark
from ...core.section import Section
from ...models.drafters import members_of
from ...models.drafters.mixed import MixedConfig
from ...models.stored import resolved_dtype
from .context import Context
from .matching import made_nothing
from .stage import Planned, Stage

AUTO = "auto"


def settled(context: Context, planned: Planned) -> Context:
    """The context with types in the place of `auto` in its target, drafter and engine. All ranks call.

    Raises:
        UserError: `auto` has no answer here; or the stage was begun where it became another type, which is named.
    """
    if not planned.stage.holds_models:
        return context
    resolved = ranks.on_main(_recorded, context, planned)
    return replace(
        context,
        target=with_types(context.target, "target", resolved),
        drafter=with_types(context.drafter, "drafter", resolved),
        engine=context.engine.model_copy(update={"precision": resolved.get(_ENGINE, context.engine.precision)}),
        resolved=resolved,
    )


def settled_stage(context: Context, planned: Planned) -> Any:
    """The stage's section with the types of a settled context: of its methods' drafters, its captioner, its target."""
    return with_types(planned.stage, f"stages.{planned.name}", context.resolved)


_ENGINE = "engine.precision"


def _recorded(context: Context, planned: Planned) -> dict[str, str]:
    resolved, path = _resolutions(context, planned), context.folder / BEGUN
    mark = read_mark(path)
    if mark is None:
        return resolved
    if mark.resolved is None or made_nothing(context.folder):
        write_mark(path, replace(mark, resolved=resolved))
        return resolved
    for key, now in resolved.items():
        if (before := mark.resolved.get(key, now)) != now:
            raise UserError(
                f"stage {planned.name} was begun where {key}: {AUTO} is {before}, and here it is {now}",
                where=str(context.folder),
                hint=f"go on with it on such a machine, or restart={planned.name} runs it again here (the old folder "
                "is kept aside)",
            )  # fmt: skip
    return resolved


def _resolutions(context: Context, planned: Planned) -> dict[str, str]:
    """Dotted key of the recipe -> what `auto` is for this stage on this machine."""
    device, stage = context.device(), planned.stage
    roots = {"target": context.target, "drafter": context.drafter, f"stages.{planned.name}": stage}
    if stage.own_target is not None:
        del roots["target"]  # it measures another
    resolved = {}
    for root, section in roots.items():
        for key, inner in _automatic(section, root):
            source = context.inputs.get("target") or inner.path if inner is context.target else inner.path
            resolved[f"{key}.dtype"] = resolved_dtype(inner, source, device, key=key)
    if stage.trains and context.engine.precision == AUTO:
        resolved[_ENGINE] = _precision(context, stage, resolved)
    return resolved


def _precision(context: Context, stage: Stage, resolved: Mapping[str, str]) -> str:
    if stage.is_small_net:  # beside which no target is held
        return "fp32"
    held = resolved.get("target.dtype") or context.target.dtype
    return str(context.engine.on(context.device(), target_dtype=held).precision)


def _automatic(value: object, key: str) -> Iterator[tuple[str, Any]]:
    """(dotted key, section) of all sections below `value` whose `dtype` is auto."""
    parts = _parts(value)
    if isinstance(value, Section) and parts.get("dtype") == AUTO:
        yield key, value
    for name, part in parts.items():
        yield from _automatic(part, f"{key}.{name}")


def with_types(value: object, key: str, resolved: Mapping[str, str]) -> Any:
    """`value`, a section or sections by name or place, with the types of `resolved` in all sections in it."""
    if not any(name.startswith(f"{key}.") for name in resolved):
        return value
    before = _parts(value)
    parts = {name: with_types(part, f"{key}.{name}", resolved) for name, part in before.items()}
    if isinstance(value, Section):
        changed = {name: part for name, part in parts.items() if part is not before[name]}
        own = {"dtype": resolved[f"{key}.dtype"]} if f"{key}.dtype" in resolved else {}
        return value.model_copy(update=changed | own)
    if isinstance(value, Mapping):
        return parts
    return type(value)(parts.values()) if isinstance(value, list | tuple) else value


def _parts(value: object) -> dict[Any, Any]:
    """What is right below, by field, name or place. An ensemble has its members as sections."""
    if isinstance(value, Section):
        return dict(value) | ({"members": tuple(members_of(value))} if isinstance(value, MixedConfig) else {})
    return dict(parts_of_tree(value))
