"""What a recipe would do at full size, without a network or weights: the target, the drafter and each stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from ...core import ranks
from ...core.errors import UserError
from ...core.files import fetch_command
from ...core.json_types import listed, walk
from ...core.section import Section, parts
from ...models.hub import config_value
from ...models.inline import building
from ...models.targets.load import target_config
from ...trainers.estimate.models import engine_precision, mirrored_shape, target_lines, target_shape
from ...trainers.estimate.train_memory import Memory
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
    """The report; `stages` None: of all. Models are built on the meta device from pinned or inline configs."""
    lines = [f"dry run: nothing is written, no network is used ({ranks.world_size()} rank(s))"]
    with building("target"):
        lines += ["", "target", *target_lines(recipe)]
    texts = (value for _, value in walk(recipe.model_dump(mode="json")) if isinstance(value, str))
    if commands := [*filter(None, dict.fromkeys(map(fetch_command, texts)))]:
        lines.append("not on this machine: " + "; ".join(commands))
    if recipe.drafter is not None:
        with building("drafter"):
            lines += ["drafter", *recipe.drafter.lines(mirrored_shape(recipe), target_shape(recipe))]
    if recipe.engine.precision == "auto" and any(plan.stage.trains for plan in planned):
        precision = engine_precision(recipe)
        others = "" if precision == "fp32" else " on a GPU that computes in it, else fp32"
        lines += ["engine", f"  precision auto ({precision}{others})"]
    for plan in planned:
        if stages is None or plan.name in stages:
            with building(f"stages.{plan.name}"):
                _check_answers(plan)
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


def _check_answers(plan: Planned) -> None:
    """Raises `UserError`, with the key, where an answer leaves no position of the target for its prompt.

    A captioner and a drafter have positions of their own, and a picture its own number of codes.
    """
    if plan.recipe.target.draws_images:
        return
    stage_target, positions, maker = plan.own_target, None, plan.maker("target")
    while maker is not None and positions is None:  # the stage that trained the target may have given it others
        positions, maker = dict(maker.stage).get("positions"), maker.maker("target")
    if positions is None:
        config = target_shape(plan.recipe) if stage_target is None else target_config(stage_target, None, network=False)
        positions = config_value(config.get_text_config(), "max_position_embeddings")
    for key, length in _answer_lengths(plan.stage, f"stages.{plan.name}") if positions is not None else ():
        if length >= positions:
            raise UserError(
                f"{key} is {length:,}, and the target has {positions:,} positions for a prompt and its answer",
                key=key, hint=f"write at most {positions - 1:,}; beyond its positions a target says noise",
            )  # fmt: skip


def _answer_lengths(section: object, key: str) -> Iterator[tuple[str, int]]:
    """Dotted key -> tokens of an answer, of a section and of those inside it."""
    for name, value in parts(section):
        if name == "max_new_tokens":
            yield from ((f"{key}.{name}", length) for length in listed(value) if length)
        elif not isinstance(section, Section) or name not in ("captioner", "drafter", "drafters"):
            yield from _answer_lengths(value, f"{key}.{name}")
