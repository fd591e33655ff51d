"""Answers that are longer than the target's positions: a stage that would write them stops the dry run."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.errors import UserError
from ...core.json_types import listed
from ...core.section import Section, parts
from ...models.hub import config_value
from ...models.targets.load import target_config
from ..run.stage import Planned
from .models import target_shape

_LENGTH = "max_new_tokens"


def check_answers(plan: Planned) -> None:
    """Raises `UserError`, with the key, where an answer leaves no position of the target for its prompt.

    A captioner and a drafter have positions of their own, and a picture its own number of codes.
    """
    stage, recipe = plan.stage, plan.recipe
    if recipe.target.draws_images:
        return
    own = plan.own_target
    config = target_shape(recipe) if own is None else target_config(own, None, network=False)
    positions = _of_stages(plan) or config_value(config.get_text_config(), "max_position_embeddings")
    if positions is None:
        return
    for key, length in _lengths(stage):
        if length >= positions:
            raise UserError(
                f"stages.{plan.name}.{key} is {length:,}, and the target has {positions:,} positions for a prompt and "
                "its answer", key=f"stages.{plan.name}.{key}",
                hint=f"write at most {positions - 1:,}; beyond its positions a target says noise",
            )  # fmt: skip


def _of_stages(plan: Planned) -> int | None:
    """The positions that the stage which trained the target gave it, if one did."""
    maker = plan.earlier.get(plan.inputs.get("target", ""))
    while maker is not None:
        if (positions := dict(maker.stage).get("positions")) is not None:
            return int(positions)
        maker = maker.earlier.get(maker.inputs.get("target", ""))
    return None


def _lengths(section: object, key: str = "") -> Iterator[tuple[str, int]]:
    """Dotted key -> tokens of an answer, of a section and of those inside it."""
    for name, value in parts(section):
        place = f"{key}.{name}" if key else str(name)
        if name == _LENGTH:
            yield from ((place, length) for length in listed(value) if length)
        elif not isinstance(section, Section) or name not in ("captioner", "drafter", "drafters"):
            yield from _lengths(value, place)
