"""Validation while a drafter trains: its held-out loss, and how often its next token is the target's.

The share of positions where draft and target agree is what greedy decoding will accept at depth one;
the loss against the record's own answer says less about that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor

from ...core import ranks
from ...core.batch import Batch, StepLoss
from ...core.errors import UserError
from ...core.section import Section
from ...data.dataset import ConversationData
from ...data.loader import StepBatches
from ...models.drafters.distillation import Teacher
from ..run.stopping import Stop
from .engine import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Validation(Section):
    """Scores held-out samples at regular intervals of optimizer steps, and after the last one."""

    # Optimizer steps between two scores; the last step always has one.
    every: int = Field(ge=1)
    # Rows of one forward on one rank; null: 8 of a draft LVLM, 16 of a head.
    micro_batch_size: int | None = Field(None, ge=1)

    def rows(self, default: int) -> int:
        """Rows of one forward."""
        return self.micro_batch_size or default


class RecordsValidation(Validation):
    """Validation of draft LVLMs."""

    # Each held-out record has to bring an answer.
    learns_answers: ClassVar[bool] = True

    # The held-out records.
    data: ConversationData
    # Also run the frozen target on them (null: yes): `val_agreement`. It reads the draft's own batches, so both must
    # have their pictures in tiles, or both in one tile each.
    against_target: bool | None = None


class HeadValidation(Validation):
    """Validation of heads, which hold out a share of their own samples (`held_out`)."""

    # The largest number of samples.
    max_samples: int | None = Field(None, ge=1)


def held_out_scores(
    engine: Engine, steps: Iterable[StepBatches], score: Callable[[Any], StepLoss], stop: Stop
) -> dict[str, float]:
    """`val_loss` and the loss's metrics as means over the supervised positions of all ranks. `score` gives the loss of
    a batch on the engine's device. Stops on all ranks, between two batches.
    """
    sums: dict[str, Tensor] = {}
    engine.module.eval()
    with torch.no_grad():
        for step in steps:
            for batch in step.micro:
                stop.agree("in a validation")
                loss = score(batch.to(engine.device))
                for name, value in {"loss": loss.loss_sum, "tokens": loss.num_tokens, **loss.metrics}.items():
                    sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + value.double().cpu()
    engine.module.train()
    names = sorted(sums)
    values = torch.stack([sums[name] for name in names]).to(engine.device)
    with ranks.pulse().meeting():
        dist.all_reduce(values)
    total = dict(zip(names, values.tolist(), strict=True))
    if not (tokens := total.pop("tokens")):
        raise UserError("no supervised token in the held-out samples", hint="the skipped*.jsonl of the stage say why")
    return {f"val_{name}": value / tokens for name, value in total.items()}


def validate(
    engine: Engine, steps: Iterable[StepBatches], target: PreTrainedModel | None, stop: Stop
) -> dict[str, float]:
    """`val_loss`, `val_accuracy` and `val_agreement` with the most likely token of the frozen target, if it is given,
    at every supervised position: means over supervised tokens of all ranks. Stops as `held_out_scores` does.
    """

    def score(batch: Batch) -> StepLoss:
        return engine(batch, None, None if target is None else target_choice(target, batch))

    scores = held_out_scores(engine, steps, score, stop)
    names = ["val_loss", "val_accuracy", *([] if target is None else ["val_agreement"])]
    return {name: scores[name] for name in names}


def target_choice(target: PreTrainedModel, batch: Batch) -> Tensor:
    """[S] the target's most likely token at each supervised position, given the record's own words before it."""
    hidden = Teacher(target).states(batch).feature
    assert hidden is not None
    logits = target.lm_head(hidden[:, :-1][batch.loss_mask[:, 1:].to(hidden.device)])
    return logits.argmax(-1).to(batch.ids.device)
