"""What `auto` and the end tokens were for a stage: recorded where it begins, and compared when it goes on.

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
from ...data.conversations import end_ids
from ...models.drafters import members_of
from ...models.drafters.mixed import MembersConfig
from ...models.stored import resolved_dtype
from .context import Context
from .matching import made_nothing
from .stage import Planned

AUTO = "auto"
_ENGINE = "engine.precision"
ENDS = "end_ids"


def settled(context: Context, planned: Planned) -> Context:
    """The context with types in the place of `auto` in its target, drafter and engine. All ranks call. Raises
    `UserError` where `auto` has no answer here, or became another type where the stage was begun.
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
    if planned.own_target is not None:
        del roots["target"]  # it measures another
    resolved = {}
    for root, section in roots.items():
        for key, inner in _automatic(section, root):
            source = context.inputs.get("target") or inner.path if inner is context.target else inner.path
            resolved[f"{key}.dtype"] = resolved_dtype(inner, source, device, key=key)
    if stage.trains and (planned.is_small_net or context.engine.precision == AUTO):
        held = resolved.get("target.dtype") or context.target.dtype
        usual = context.engine.on(device, target_dtype=held).precision
        resolved[_ENGINE] = "fp32" if planned.is_small_net else usual
    return resolved


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
        of_key = {"dtype": resolved[f"{key}.dtype"]} if f"{key}.dtype" in resolved else {}
        return value.model_copy(update=changed | of_key)
    if isinstance(value, Mapping):
        return parts
    return type(value)(parts.values()) if isinstance(value, list | tuple) else value


def _parts(value: object) -> dict[Any, Any]:
    """What is right below, by field, name or place. An ensemble has its members as sections."""
    if isinstance(value, Section):
        return dict(value) | ({"members": tuple(members_of(value))} if isinstance(value, MembersConfig) else {})
    return dict(parts_of_tree(value))


def record_ends(context: Context, planned: Planned) -> None:
    """Record the end tokens that a stage's answers are begun with, unless they are the tokenizer's own alone; rank 0's.
    No plan has them in its fingerprint: they are read from the target's files, which may be on the Hub. Raises
    `UserError` where the stage was begun with others: some of its answers would run on where others end.
    """
    form, mark = planned.stage.answer_format, read_mark(context.folder / BEGUN)
    if form is None or mark is None:
        return
    stage_target, recorded = planned.own_target, mark.resolved or {}
    processor = (context if stage_target is None else replace(context, target=stage_target)).processor()
    usual, here = str(processor.eos_id), ", ".join(map(str, end_ids(processor, form)))
    if (before := recorded.get(ENDS, usual)) == here:
        return
    if made_nothing(context.folder):
        others = {key: value for key, value in recorded.items() if key != ENDS}
        resolved = others if here == usual else others | {ENDS: here}
        write_mark(context.folder / BEGUN, replace(mark, resolved=resolved))
        return
    raise UserError(
        f"stage {planned.name} was begun where answers end at id {before}, and here they end at {here}",
        where=str(context.folder),
        hint="eos_token_id of the target's generation_config.json was another, or was not read by the version that "
        f"began it: restart={planned.name} runs the stage again (the old folder is kept aside)",
    )


def say_penalties(context: Context, planned: Planned) -> None:
    """Say what of the target's generation config no answer of this stage gets."""
    if planned.stage.answer_format is None:
        return
    own = planned.own_target
    if text := (context if own is None else replace(context, target=own)).penalties():
        context.say(f"warning: {text}")
