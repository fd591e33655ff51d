"""One rank's engine without DeepSpeed, whose own code asks a real GPU. What the training loop calls is the same."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .device import COUNTS, OnDevice

TRAINED_ON = set[str]()  # devices of what engines trained


class PlainEngine:
    """Takes `trainers.train.engine.Engine`'s place in a process with the pretend device."""

    expects_skips, num_skipped = False, 0

    def __init__(
        self, module: Any, optimizer: Any, multiplier: Any, config: Any, *,
        micro_batch_size: int, accumulation: int, clip_norm: float | None,
    ):  # fmt: skip
        from draftsmith.core.ranks import local_rank

        self.device = torch.device("cuda", local_rank())
        self.module = module.to(self.device)
        TRAINED_ON.update(str(p.device) for p in self.module.parameters() if p.requires_grad)
        self.optimizer, self.config, self.accumulation, self.clip_norm = optimizer, config, accumulation, clip_norm
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, multiplier)
        self.gradients_are_finite = torch.ones((), device=self.device)
        self.num_updates, self.updates = 0, True
        self.module.train()

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def begin(self, *, last: bool) -> None:
        self.updates = last

    def backward(self, loss_sum: Any, tokens: float) -> None:
        (loss_sum / tokens).backward()

    def step(self) -> None:
        if not self.updates:
            return
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.clip_norm:
            torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        self.num_updates += 1
        COUNTS.launches["training step"] += 1

    def end_step(self) -> None:
        pass

    def rates(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def save(self, folder: Any, client_state: Any) -> None:
        pass

    def full_weights(self) -> Any:
        return contextlib.nullcontext()


def install() -> None:
    """Take the place of DeepSpeed's engine, and of NCCL, which here is gloo that refuses a CPU's tensors."""
    import deepspeed
    from draftsmith.trainers.train import engine, fit

    engine.Engine = fit.Engine = PlainEngine  # type: ignore[misc,assignment]
    join, reduce = deepspeed.init_distributed, torch.distributed.all_reduce

    def init_distributed(dist_backend: str, **settings: Any) -> Any:
        assert dist_backend == "nccl", dist_backend
        return join(dist_backend="gloo", **settings)

    def all_reduce(tensor: Any, *args: Any, group: Any = None, **settings: Any) -> Any:
        if group is not None and group is not torch.distributed.group.WORLD:
            return reduce(tensor, *args, group=group, **settings)
        if not isinstance(tensor, OnDevice):
            raise RuntimeError("No backend type associated with device type cpu")
        COUNTS.launches["all_reduce"] += 1
        return reduce(tensor.held, *args, **settings)

    deepspeed.init_distributed, torch.distributed.all_reduce = init_distributed, all_reduce
