"""What `check_drafter` trains: a fresh drafter, on one answer, until it knows it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.batch import Batch, StepLoss
from ..core.errors import UserError
from ..models.drafters.base import DrafterConfig
from ..models.targets.base import Target

KNOWN = 0.95  # share of the answer's tokens that training guesses where it is known by heart
_ZEROS, _CHUNK = 3, 40  # steps: a weight that starts behind a zero then has a gradient; learned at a time
_SUMS = "forward returns sums over supervised tokens, which the loop divides by their number in the whole step"


class Lesson:
    """One answer, and the drafter that learns it.

    Args:
        config: the drafter's section.
        target: the loaded target.
        batch: the answer.
        steps: at most.
        of_pictures: beginnings of names of weights that only pictures reach.

    Raises:
        UserError: a verb returned something else than its protocol says.
    """

    def __init__(self, config: DrafterConfig, target: Target, batch: Batch, steps: int, of_pictures: tuple[str, ...]):
        torch.manual_seed(0)
        module = config.build(target, count_tokens=lambda: torch.ones(target.vocab_size).long())
        _expect(module, nn.Module, "build()", "a torch.nn.Module")
        self.module = module.to(target.device)
        self.objective = config.training_objective(self.module, target)
        _expect(self.objective, nn.Module, "training_objective()", "a torch.nn.Module")
        self.config, self.target, self.batch, self.steps = config, target, batch, steps
        self.states = self._states(batch)
        self._weights = self._trained()
        self.count = len(self._weights)
        self._unreached = {name for name in self._weights if not name.startswith(of_pictures)}
        self._optimizer = torch.optim.AdamW([*self._weights.values()], lr=3e-3, weight_decay=0.0)
        self.losses, self.known = list[float](), 0.0
        self.module.train()

    def learn(self, *, until_known: bool = False) -> bool:
        """Train some steps more; False: there were none left.

        Args:
            until_known: as many as it takes until the metrics say that the answer is known.

        Raises:
            UserError: the loss is not finite, or no gradient reaches a weight.
        """
        begun = len(self.losses)
        self.module.requires_grad_(True)
        while len(self.losses) < self.steps:
            if until_known and len(self.losses) > _ZEROS and self.known >= KNOWN:
                break
            if not until_known and len(self.losses) == begun + _CHUNK:
                break
            self._step()
        self.module.eval()
        return len(self.losses) > begun

    def check_sums(self) -> None:
        """Raise `UserError` where a batch that holds the sample twice has not twice its loss, tokens and metrics."""
        self.objective.eval()
        twice = _twice(self.batch)
        with torch.no_grad():
            one, two = (self._forward(batch, self._states(batch)) for batch in (self.batch, twice))
        supervised = int(self.batch.loss_mask.sum())
        if int(one.num_tokens) < supervised / 2:
            raise UserError(f"num_tokens is {int(one.num_tokens)} where {supervised} tokens are supervised: {_SUMS}")
        pairs = {"num_tokens": (one.num_tokens, two.num_tokens), "loss_sum": (one.loss_sum, two.loss_sum)}
        pairs |= {f"metric {name}": (value, two.metrics[name]) for name, value in one.metrics.items()}
        for name, (alone, both) in pairs.items():
            if abs(float(both) - 2 * float(alone)) > 0.01 * abs(float(alone)) + 1e-3:
                raise UserError(
                    f"{name} is {float(alone):.4g} of one sample and {float(both):.4g} of a batch that holds it twice, "
                    f"not {2 * float(alone):.4g}: {_SUMS}"
                )

    def _states(self, batch: Batch) -> Any:
        return self.target.states(batch, self.config.taps_for(self.target.shape, training=True))

    def _trained(self) -> dict[str, Tensor]:
        called = getattr(self.objective, "parts", None)
        parts: Any = called() if callable(called) else None
        _expect(parts, dict, "parts() of the training objective", "a dict: part -> named parameters")
        named = {name: p for part in parts.values() for name, p in part if p.requires_grad}
        if not named:
            raise UserError("parts() names no weight that is trained")
        return named

    def _forward(self, batch: Batch, states: object) -> StepLoss:
        loss = self.objective(batch, states)
        _expect(loss, StepLoss, "forward() of the training objective", "a StepLoss")
        for name in ("loss_sum", "num_tokens"):
            _expect(getattr(loss, name), Tensor, f"{name} of the StepLoss", "a tensor")
        return loss  # type: ignore[no-any-return]

    def _step(self) -> None:
        step = len(self.losses)
        if step == _ZEROS:
            self.objective.eval()  # noise would be learned by heart, too: it is the same for a sample
        loss = self._forward(self.batch, self.states)
        mean = loss.loss_sum / loss.num_tokens
        if not mean.isfinite():
            raise UserError(f"the loss of step {step} is {float(mean)}")
        if not mean.requires_grad:
            raise UserError("the loss depends on no weight")
        self.losses.append(float(mean.detach()))
        self.known = float(loss.metrics["top1"] / loss.num_tokens) if "top1" in loss.metrics else 0.0
        self._optimizer.zero_grad()
        mean.backward()
        named = self._weights.items()
        self._unreached -= {
            n for n, p in named if p.grad is not None and bool(p.grad.any()) and p.grad.isfinite().all()
        }
        if step + 1 == _ZEROS and self._unreached:
            some = ", ".join(sorted(self._unreached)[:3])
            raise UserError(f"no finite gradient reaches {len(self._unreached)} of {self.count} weights: {some}")
        nn.utils.clip_grad_norm_([*self._weights.values()], 1.0)
        self._optimizer.step()


def _expect(value: object, kind: type, what: str, wanted: str) -> None:
    if not isinstance(value, kind):
        found = "nothing (None)" if value is None else f"a {type(value).__name__}"
        raise UserError(f"{what} returned {found}, expected {wanted}")


def _twice(batch: Batch) -> Batch:
    """Two rows of a batch of one."""
    more: dict[str, Any] = {}
    for field in fields(batch):
        value = vars(batch)[field.name]
        if isinstance(value, Tensor):
            more[field.name] = torch.cat([value, value], dim=1 if field.name == "positions" else 0)
        elif isinstance(value, tuple):
            more[field.name] = value * 2
    return replace(batch, **more)
