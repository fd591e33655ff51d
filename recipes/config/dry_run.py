"""What a recipe would do at full size, without a network or weights: the target, the drafter and each stage."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from ...core import ranks
from ...models.inline import building
from ...trainers.estimate.auto_dtypes import dtype_text, precision_text
from ...trainers.estimate.long_answers import check_answers
from ...trainers.estimate.models import mirrored_shape, target_lines, target_shape
from ...trainers.run.hardware import Memory
from ...trainers.run.stage import Planned
from ...trainers.stages.train import TrainStage
from .load import uncollected
from .schema import Recipe


@uncollected()
def check_models(recipe: Recipe) -> None:
    """Builds target and drafter on the meta device where the recipe spells them out, as a dry run does.

    Raises:
        UserError: transformers cannot build what the recipe says.
    """
    with building("target"):
        if recipe.target.path is None:
            target_lines(recipe)
    if recipe.drafter is None or recipe.target.path is not None:
        return
    with building("drafter"):
        recipe.drafter.lines(mirrored_shape(recipe), target_shape(recipe))


@uncollected()
def dry_run(recipe: Recipe, planned: Sequence[Planned], stages: Collection[str] | None = None) -> str:
    """The report. Models are built on the meta device from pinned or inline configs.

    Args:
        stages: names of the stages that would run; None: all of them.
    """
    lines = [f"dry run: nothing is written, no network is used ({ranks.world_size()} rank(s))"]
    with building("target"):
        lines += ["", "target", *target_lines(recipe)]
        if recipe.target.dtype == "auto":
            lines.append(f"  dtype {dtype_text(recipe.target)}")
    if recipe.drafter is not None:
        with building("drafter"):
            lines += ["drafter", *recipe.drafter.lines(mirrored_shape(recipe), target_shape(recipe))]
    if recipe.engine.precision == "auto" and any(plan.stage.trains for plan in planned):
        lines += ["engine", f"  precision {precision_text(recipe)}"]
    for plan in planned:
        if stages is None or plan.name in stages:
            with building(f"stages.{plan.name}"):
                check_answers(plan)
                about = "" if plan.stage.about is None else f": {plan.stage.about}"
                lines += ["", f"stage {plan.name} ({plan.stage.kind}){about}", *plan.stage.describe(plan)]
                if (memory := _memory(plan)) is not None:
                    path = recipe.target.path
                    lines += memory.lines(recipe.hardware, is_here=path is None or Path(path).is_dir())
    return "\n".join(lines)


def _memory(plan: Planned) -> Memory | None:
    return plan.stage.memory(plan) if isinstance(plan.stage, TrainStage) else None


def does_not_fit(recipe: Recipe, planned: Sequence[Planned], stages: Collection[str] | None = None) -> list[str]:
    """Names of the stages that would run and do not fit the recipe's hardware."""
    running = [plan for plan in planned if stages is None or plan.name in stages]
    memories = {plan.name: _memory(plan) for plan in running if recipe.hardware is not None}
    return [name for name, memory in memories.items() if memory is not None and not memory.fits(recipe.hardware)]
