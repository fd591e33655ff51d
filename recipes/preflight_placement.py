"""Refuses, before anything is loaded, a recipe that would spread a model over the GPUs of a node once for each rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..core import ranks
from ..core.json_types import text_at, walk
from ..core.placement import check_one_rank
from ..trainers.run.stage import Planned
from .schema import Recipe


def check_places(recipe: Recipe, planned: Sequence[Planned], chosen: Collection[str] | None) -> None:
    """Raises `UserError` with the key of a device map that several ranks would read.

    Args:
        chosen: names of the stages that run; None: all.
    """
    if ranks.world_size() == 1:
        return
    loading = [p for p in planned if p.stage.loads_target and (chosen is None or p.name in chosen)]
    sections = {"target": recipe.target, "drafter": recipe.drafter} if loading else {}
    for key, section in [*sections.items(), *((f"stages.{p.name}", p.stage) for p in loading)]:
        if section is not None:
            for place, part in walk(section.model_dump(mode="json"), (key,)):
                check_one_rank(text_at(part, "device_map"), key=".".join(place))
