"""Training beside a target that all ranks hold together: it runs on one batch, and each rank trains on its own."""

from __future__ import annotations

from typing import Any

from ...core.errors import UserError
from ...models.drafters.distillation import DistillObjective
from .states_source import CachedStates


def check_target_is_not_run(stage: Any, target: Any, drafter: Any, *, key: str) -> None:
    """Raises `UserError` for a `train` stage that would run a tensor parallel target.

    Args:
        drafter: the recipe's section.
        key: of the stage.
    """
    size = getattr(target, "tensor_parallel_size", 1)
    if size == 1:
        return
    way, objective = stage.way(target, drafter), stage.objective
    refusals = {
        "source": (
            way == "states" and not isinstance(stage.source, CachedStates),
            "cache the states first: a stage of kind cache, then source: {kind: cached}",
        ),
        "decoding": (stage.decoding is not None, "leave it out, and compare weights by an evaluate stage"),
        "objective.probabilities": (
            isinstance(objective, DistillObjective) and objective.probabilities == "online",
            "let a regenerate stage keep them (keep_logprobs), and set probabilities: kept",
        ),
        "validation.against_target": (
            (way, stage.model) == ("records", "drafter")
            and stage.validation is not None
            and stage.validation.against_target is not False,
            "set it to false",
        ),
    }
    for name, (refused, hint) in refusals.items():
        if refused:
            raise UserError(
                f"{key}.{name} runs the target while ranks train on batches of their own, and "
                f"target.tensor_parallel_size is {size}: all ranks hold it together, for one batch",
                where=f"key {key}.{name}", hint=hint,
            )  # fmt: skip
