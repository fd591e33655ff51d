"""Refuses, before anything is loaded, what a target that several ranks hold together cannot do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ..core.errors import UserError
from ..models.targets.parallel import check_ranks
from ..trainers.run.stage import Planned
from ..trainers.stages.train import TrainStage
from .schema import Recipe

_SIZE = "tensor_parallel_size"


def check_parallel(
    recipe: Recipe, planned: Sequence[Planned], chosen: Collection[str] | None, *, dry_run: bool = False
) -> None:
    """Look at the stages that run.

    Args:
        chosen: names of the stages that run; None: all.
        dry_run: the ranks that will run it are not these.

    Raises:
        UserError: the run has another number of ranks than hold the target, two models of a stage want different
            numbers, or a stage trains beside such a target.
    """
    for one in planned:
        if chosen is not None and one.name not in chosen:
            continue
        stage = one.stage
        if stage.kind == "train":
            _check_training(stage, getattr(recipe.target, _SIZE, 1), f"stages.{one.name}")
        if not stage.loads_target:
            continue
        own = getattr(stage, "target", None)
        target = recipe.target if own is None else own
        key = "target" if own is None else f"stages.{one.name}.target"
        size = getattr(target, _SIZE, 1)
        if not dry_run:
            check_ranks(size, key=f"{key}.{_SIZE}")
        sections = {"drafter": recipe.drafter, f"stages.{one.name}": stage}
        for place, other in (found for key, section in sections.items() for found in _sizes(_dumped(section), key)):
            if other not in (1, size):
                raise UserError(
                    f"{place}.{_SIZE} is {other}, and the target's is {size}", where=f"key {place}.{_SIZE}",
                    hint="use 1: each rank then holds this model whole" + f", or {size}" * (size > 1),
                )  # fmt: skip


def _check_training(stage: TrainStage, size: int, key: str) -> None:
    for name, hint in stage.runs_target().items() if size > 1 else ():
        raise UserError(
            f"{key}.{name} runs the target while ranks train on batches of their own, and target.{_SIZE} is {size}: "
            "all ranks hold it together, for one batch", where=f"key {key}.{name}", hint=hint,
        )  # fmt: skip


def _dumped(section: Any) -> Any:
    return None if section is None else section.model_dump(mode="json")


def _sizes(section: object, key: str) -> Iterator[tuple[str, int]]:
    """Key of each section that names a number of ranks, and the number; a serving engine's names its own GPUs."""
    if isinstance(section, list):
        for place, part in enumerate(section):
            yield from _sizes(part, f"{key}.{place}")
    elif isinstance(section, dict):
        if isinstance(section.get(_SIZE), int):
            yield key, section[_SIZE]
        for name, part in section.items():
            if name != "engine":
                yield from _sizes(part, f"{key}.{name}")
