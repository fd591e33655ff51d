"""Muon beside AdamW as one optimizer (Jordan et al. 2024; its rate as AdamW's by Liu et al. 2025, arXiv 2502.16982).

Muon orthogonalises the averaged gradient of a hidden weight matrix. It is `torch.optim.Muon` here, with an update of
AdamW's size (`match_rms_adamw`: 0.2 times the root of the larger side), so that both follow one learning rate.

A matrix must be whole: ZeRO 1 to 3 hand an optimizer flat parts, and are refused. DeepSpeed has a Muon of its own for
them, without this size of the update, and its clipping shrinks what is orthogonalised already (DeepSpeed#8439; 0.19.8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Modules and weights with two dimensions that are no hidden weights: tables that tokens, codes or steps choose rows of,
# and what scores a vocabulary. Norms of single heads have two dimensions as well.
TABLES = frozenset({
    "embed_tokens", "lm_head", "markov_w1", "markov_w2", "markov_above", "predecessor_codebook", "successor_codebook",
    "steps", "tok_embeddings", "embedding_table", "output", "shared", "relative_attention_bias",
})  # fmt: skip


def is_hidden(name: str, weight: torch.Tensor) -> bool:
    """Whether Muon trains this weight: a matrix with both sides above 1, by its name no table nor norm."""
    words = name.split(".")
    return weight.dim() == 2 and min(weight.shape) > 1 and not any(w in TABLES or "norm" in w for w in words)


def newton_schulz_flops(shapes: Iterable[Sequence[int]]) -> float:
    """Floating point operations of an update's five Newton-Schulz steps for matrices of these shapes: each multiplies
    X X^T, that by itself, and the result by X (torch 2.13, optim/_muon.py), 4 m^2 n + 2 m^3 with m the smaller side.
    """
    return float(5 * sum(4 * m * m * n + 2 * m**3 for m, n in map(sorted, shapes)))


class Float32Muon(torch.optim.Muon):
    """torch's Muon, whose Newton-Schulz steps are in the weights' own type: torch's are in bfloat16, which processors
    without instructions for it multiply twenty times as slowly. State and groups are torch's.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        assert closure is None, "no engine hands one over"
        for group in self.param_groups:
            assert group["nesterov"] and group["adjust_lr_fn"] == "match_rms_adamw"
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state, momentum = self.state[weight], group["momentum"]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                average = state["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
                update = orthogonal(weight.grad.lerp(average, momentum), group)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-0.2 * max(weight.shape) ** 0.5 * group["lr"])


def orthogonal(update: Tensor, group: Mapping[str, Any]) -> Tensor:
    """[M, N], whose singular values become about 1 (Jordan et al. 2024; coefficients and steps of Muon's `group`)."""
    a, b, c = group["ns_coefficients"]
    wide = update if update.shape[0] <= update.shape[1] else update.T
    wide = wide / wide.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide if update.shape[0] <= update.shape[1] else wide.T


class MuonWithAdamW(torch.optim.Optimizer):
    """The groups of both, Muon's first, with one state: schedules, clipping and checkpoints see a single optimizer."""

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW):
        self.muon, self.adamw = muon, adamw
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        assert closure is None, "no engine hands one over"
        for part in (self.muon, self.adamw):
            # Handed on in each step: a checkpoint brings groups and state anew.
            part.param_groups = [group for group in self.param_groups if ("momentum" in group) == (part is self.muon)]
            part.state = self.state
            part.step()
