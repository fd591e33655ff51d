"""Refuses, before anything is loaded, what several ranks cannot do: with a model that each would spread over the GPUs
of a node, and with a target that they hold together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ...core import ranks
from ...core.errors import UserError
from ...core.json_types import text_at, value_at, walk
from ...core.placement import check_one_rank
from ...core.section import Section
from ...models.targets.load import target_config
from ...models.targets.parallel import check_cut, check_ranks
from ...trainers.estimate.models import target_shape
from ...trainers.run.stage import Planned
from ...trainers.stages.train import TrainStage
from .schema import Recipe

_SIZE = "tensor_parallel_size"


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


def check_parallel(
    recipe: Recipe, planned: Sequence[Planned], chosen: Collection[str] | None, *, dry_run: bool = False
) -> None:
    """Look at the stages that run.

    Args:
        chosen: names of the stages that run; None: all.
        dry_run: the ranks that will run it are not these, and no stage will look at the target's config.

    Raises:
        UserError: the run has another number of ranks than hold the target, the target cannot be cut for them, two
            models of a stage want different numbers, or a stage trains beside such a target.
    """
    for one in planned:
        if chosen is not None and one.name not in chosen:
            continue
        stage = one.stage
        if stage.kind == "train":
            _check_training(stage, _size(recipe.target), f"stages.{one.name}")
        if not stage.loads_target:
            continue
        own = dict(stage).get("target")
        target = recipe.target if own is None else own
        key = "target" if own is None else f"stages.{one.name}.target"
        size = _size(target)
        if not dry_run:
            check_ranks(size, key=f"{key}.{_SIZE}")
        elif size > 1:
            config = target_shape(recipe) if own is None else target_config(own, None, network=False)
            check_cut(config, size, str(target.path), key=f"{key}.{_SIZE}")
        sections = {"drafter": recipe.drafter, f"stages.{one.name}": stage}
        for place, other in (found for key, section in sections.items() for found in _sizes(section, key)):
            if other not in (1, size):
                raise UserError(
                    f"{place}.{_SIZE} is {other}, and the target's is {size}", key=f"{place}.{_SIZE}",
                    hint="use 1: each rank then holds this model whole" + f", or {size}" * (size > 1),
                )  # fmt: skip


def _check_training(stage: TrainStage, size: int, key: str) -> None:
    for name, hint in stage.runs_target().items() if size > 1 else ():
        raise UserError(
            f"{key}.{name} runs the target while ranks train on batches of their own, and target.{_SIZE} is {size}: "
            "all ranks hold it together, for one batch", key=f"{key}.{name}", hint=hint,
        )  # fmt: skip


def _size(target: Section) -> int:
    return dict(target).get(_SIZE, 1)  # an image generator's section has none


def _sizes(section: Section | None, key: str) -> Iterator[tuple[str, int]]:
    """Key of each section that names a number of ranks, and the number; a serving engine's names its own GPUs."""
    for place, part in walk(None if section is None else section.model_dump(mode="json"), (key,)):
        size = value_at(part, _SIZE)
        if size is not None and "engine" not in place:
            yield ".".join(place), size
