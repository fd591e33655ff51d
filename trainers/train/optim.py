"""Optimizer settings of a training stage: AdamW, its parameter groups and its learning-rate schedule."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from ...core.section import Section

# AdamW divides by 1 - beta^step; a rate above it is a slip (1e4 for 1e-4).
Beta = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, le=100)]
Parts = Mapping[str, Sequence[tuple[str, nn.Parameter]]]


class OptimConfig(Section):
    """AdamW. The defaults are those of LLaVA-1.5's scripts (TABED, table 7)."""

    # Learning rate after the warmup.
    lr: Rate
    # Learning rate of single parts (vision_tower, projector, language_model) where it is another one.
    lr_by_part: dict[str, Rate] = Field(default_factory=dict)
    # AdamW's decay rates of its two moments.
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    # AdamW's term beneath the division.
    eps: float = Field(1e-8, gt=0, le=1)
    # AdamW's decay of weights; norms and biases (vectors) are not decayed.
    weight_decay: float = Field(0.0, ge=0, le=100)
    # How the rate falls after the warmup.
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    # Share of all steps, or their number, in which the rate rises from 0.
    warmup_ratio: float = Field(0.0, ge=0, lt=1)
    # The same as a number of steps; give one of the two.
    warmup_steps: int = Field(0, ge=0)
    # Where the schedule ends, as a share of lr.
    final_ratio: float = Field(0.0, ge=0, le=1)
    # Global gradient norm that updates are cut to; null: no clipping (LLaVA-1.5's scripts set none).
    clip_norm: float | None = Field(None, gt=0)
    # Largest entry of a gradient, in its place: EAGLE's and LANTERN's released training clips values at 0.5.
    # Unset it stays out of fingerprints, so that trainings of before go on.
    clip_value: float | None = Field(None, gt=0, exclude_if=lambda value: value is None)

    @model_validator(mode="after")
    def _one_warmup(self) -> OptimConfig:
        if self.warmup_ratio and self.warmup_steps:
            raise ValueError("give warmup_ratio or warmup_steps, not both")
        if self.clip_norm is not None and self.clip_value is not None:
            raise ValueError("give clip_norm or clip_value, not both")
        return self


def parameter_groups(parts: Parts, config: OptimConfig) -> list[dict[str, Any]]:
    """One group per part and kind; norms and biases (vectors) are not decayed."""
    groups = []
    for part, named in parts.items():
        lr = config.lr_by_part.get(part, config.lr)
        for decays in (True, False):
            params = [p for _, p in named if (p.dim() >= 2) == decays]
            if params:
                decay = config.weight_decay if decays else 0.0
                groups.append({"params": params, "lr": lr, "weight_decay": decay, "part": part})
    return groups


def build_optimizer(parts: Parts, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the groups of `parameter_groups`; fused where all parameters are on a GPU.

    With `clip_value` it clips the gradients of every step itself: DeepSpeed clips by norm alone, and whatever its stage
    it hands the optimizer whole gradients, averaged and unscaled, or this rank's share of them.
    """
    groups = parameter_groups(parts, config)
    fused = all(p.is_cuda for g in groups for p in g["params"])
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
    if config.clip_value is not None:
        optimizer.register_step_pre_hook(functools.partial(_clip_values, config.clip_value))
    return optimizer


def _clip_values(bound: float, optimizer: torch.optim.Optimizer, *_: object) -> None:
    nn.utils.clip_grad_value_([p for group in optimizer.param_groups for p in group["params"]], bound)


def rate_multiplier(config: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Step (from 0) -> factor on every group's learning rate."""
    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total_steps)

    def multiplier(step: int) -> float:
        if step < warmup:
            return step / warmup
        if config.schedule == "constant":
            return 1.0
        done = min((step - warmup) / max(1, total_steps - warmup), 1.0)
        shape = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1.0 - done
        return config.final_ratio + (1 - config.final_ratio) * shape

    return multiplier
