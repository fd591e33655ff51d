"""Medusa heads for image generators: one residual block per level on the target's feature (Cai et al. 2024).

Head i reads the feature of the last committed token and scores the token i + 1 places behind it, without knowing what
is drafted in between: the published baseline of LANTERN's Fig. 2.
Letters: R rows, B samples, N positions, F nodes, L levels, D width, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ChameleonConfig

from ...core.errors import UserError
from ...core.loss import StepLoss
from ...core.nouns import CodeBatch
from ...core.section import Section
from ..decoding.slots import Slots
from ..decoding.warp import Warp
from ..llamagen.transformer import LlamaGenConfig
from ..losses import Divergence, divergence
from ..targets.base import Taps, TargetStep


class MedusaLoss(Section):
    # ce: against the image's own next codes (Medusa-1); others: against the target's distribution at that place.
    token_divergence: Literal["ce"] | Divergence = "ce"
    # Weight of level i is decay ** i: later levels are harder and matter less.
    decay: float = Field(0.8, gt=0, le=1)


class MedusaConfig(Section):
    """Residual blocks on the target's feature, each with the target's LM head behind it."""

    kind: Literal["medusa"]
    # Directory or Hub id of trained heads, which a train stage starts from unless it says `from: scratch`; null: a
    # stage trains them from fresh ones.
    path: str | None = None
    revision: str | None = None
    # Levels that can be drafted.
    num_heads: int = Field(5, ge=1)
    # Residual blocks of a head (LANTERN's baseline: two linear layers, of which the LM head is one).
    num_layers: int = Field(1, ge=1)
    loss: MedusaLoss = MedusaLoss()

    def provides(self) -> set[str]:
        """Things that need no stage."""
        return set() if self.path is None else {"drafter"}


@dataclass(frozen=True)
class MedusaShape:
    hidden_size: int
    num_heads: int
    num_layers: int


def medusa_shape(config: MedusaConfig, target: LlamaGenConfig | ChameleonConfig) -> MedusaShape:
    width = target.dim if isinstance(target, LlamaGenConfig) else target.hidden_size
    return MedusaShape(width, config.num_heads, config.num_layers)


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), zero at first: a fresh head predicts what the target's own head does."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        return states + F.silu(self.linear(states))


class MedusaHead(nn.Module):
    """[...,D] -> [L,...,D]: features whose scores the target's LM head gives."""

    def __init__(self, shape: MedusaShape):
        super().__init__()
        self.shape = shape
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(shape.hidden_size) for _ in range(shape.num_layers)))
            for _ in range(shape.num_heads)
        )

    def forward(self, features: Tensor) -> Tensor:
        return torch.stack([head(features) for head in self.heads])


class MedusaTraining(nn.Module):
    """The training forward; the frozen target is no part of the module."""

    def __init__(self, head: nn.Module, target: Any, config: MedusaLoss):
        super().__init__()
        self.head, self.config = head, config
        self.__dict__["target"] = target

    def parts(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        return {"heads": [*self.head.named_parameters()]}

    def forward(self, batch: CodeBatch) -> StepLoss:
        """Sums over the positions whose next code is known, as EAGLE's are counted; level i has i fewer of them.

        top1 and top3 are those of the first level, which is the one that EAGLE's accuracy compares with.
        """
        sequence = self.target.sequence(batch, batch.uncond)
        count = sequence.num_generated
        # Feature at place j of these has generated tokens j, j + 1, ... behind it: level i scores token j + i + 1.
        features = sequence.feature[:, -count - 1 : -1][batch.real]
        ids = sequence.ids[:, -count:][batch.real]
        predicted = self.head(features.to(next(self.head.parameters()).dtype))
        total = features.new_zeros((), dtype=torch.float32)
        metrics: dict[str, Tensor] = {}
        for level, states in enumerate(predicted):
            # Level 0 is for the token behind the one that the target's own head gives.
            length = count - 1 - level
            if length < 1:
                break
            scores = self.target.scores(states[:, :length].to(features.dtype))
            goal_ids = ids[:, level + 1 : level + 1 + length]
            if self.config.token_divergence == "ce":
                loss = F.cross_entropy(scores.flatten(0, 1), goal_ids.flatten(), reduction="sum")
            else:
                with torch.no_grad():
                    goal = self.target.scores(features[:, level + 1 : level + 1 + length])
                loss = divergence(self.config.token_divergence, goal, scores).sum()
            total = total + self.config.decay**level * loss
            if level == 0:
                with torch.no_grad():
                    best = self.target.scores(features[:, 1:]).argmax(-1, keepdim=True)
                right = scores.topk(min(3, scores.shape[-1]), dim=-1).indices == best
                metrics = {"top1": right[..., 0].sum(), "top3": right.any(-1).sum(), "token_loss": loss.detach()}
        return StepLoss(total, torch.tensor(len(features) * (count - 1), device=total.device), metrics)


class MedusaProposal:
    """Scores every level at once from the last committed feature; `expand` answers by level."""

    taps = Taps(feature=True)

    def __init__(self, head: MedusaHead, guided: Callable[[Tensor, Sequence[int]], Tensor]):
        self.head, self.guided = head.eval(), guided
        self.max_levels: int | None = head.shape.num_heads

    def start(self, request: Any, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        assert prefill.feature is not None
        self._warp, self._feature, self._emitted = warp, prefill.feature[:, -1:], 0

    def begin(self, first: int) -> None:
        self._emitted = 1

    @torch.inference_mode()
    def root(self) -> Tensor:
        dtype = next(self.head.parameters()).dtype
        predicted = self.head(self._feature.to(dtype))[:, :, 0].transpose(0, 1)  # [R,L,D]
        steps = [self._emitted + level for level in range(len(predicted[0]))]
        self._levels = self._warp.heat(self.guided(predicted.to(self._feature), steps))  # [L,V]
        self._slots = Slots()
        return self._levels[0]

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        return self._levels[self._slots.take(parents)]

    def accept(self, verified: Any) -> None:
        """The feature whose own head gave the bonus token is that of the last accepted one."""
        self._feature = verified.step.feature[:, -1:]
        self._emitted += len(verified.path) + 1


def save_medusa(head: MedusaHead, folder: Path, manifest: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in head.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "medusa", **asdict(head.shape)}, indent=1))
    (folder / "draftsmith.json").write_text(json.dumps(manifest, indent=1, sort_keys=True))


def load_medusa(folder: Path, shape: MedusaShape) -> MedusaHead:
    """Raises `UserError` where the file is missing or made for another target."""
    head = MedusaHead(shape)
    try:
        head.load_state_dict(load_file(folder / "model.safetensors"))
    except (SafetensorError, OSError, RuntimeError) as error:
        # torch's first line names the class only, and the next one the parameter.
        lines = str(error).strip().splitlines()
        raise UserError(
            f"the heads do not fit this target: {lines[:2][-1].strip()}",
            where=str(folder / "model.safetensors"),
            cure="name the target and num_heads of these heads",
        ) from error
    return head
