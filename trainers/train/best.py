"""What trainings share: held-out scores, and which weights of a head were best so far."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...core import ranks
from ...core.batch import StepLoss
from ...core.files import read_json
from ...data.loader import StepBatches
from ..run.stopping import Stop
from .engine import Engine

SCORE = "score.json"  # beside the best weights
_AGAIN = "restart the stage (restart=STAGE): without it nobody knows how good the weights beside it are"


def held_out_scores(
    engine: Engine, steps: Iterable[StepBatches], score: Callable[[Any], StepLoss], stop: Stop
) -> dict[str, float]:
    """`val_loss` and the loss's metrics as means over the supervised positions of all ranks.

    Args:
        score: a batch on the engine's device -> its loss.

    Raises:
        Stopped: on all ranks, between two batches.
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
    tokens = total.pop("tokens")
    return {f"val_{name}": value / tokens for name, value in total.items()}


@dataclass(frozen=True)
class _Score:
    score: float
    step: int


@dataclass(frozen=True)
class Best:
    """The best weights by each score, in folders `best-NAME` of `folder`.

    Args:
        save: head, folder, step -> written there.
    """

    folder: Path
    save: Callable[[nn.Module, Path, int], None]

    def keep(self, scores: Mapping[str, float | None], step: int, head: Callable[[], nn.Module]) -> None:
        """Keep the weights as they are where a score is the best so far (all ranks call).

        Args:
            scores: None has not been measured at this step.
            head: makes a copy of the weights, whole on every rank.
        """
        for name, score in scores.items():
            # Rank 0 reads the score and broadcasts the decision, since another rank might read a half-written file.
            if score is None or not ranks.broadcast(self._is_better(name, score) if ranks.is_main() else None):
                continue
            files = head()
            if ranks.is_main():
                self._write(files, name, score, step)
        ranks.barrier()

    def of(self, name: str) -> tuple[Path, float, int]:
        """Folder, score and step of the best by `name`."""
        folder = self._folder(name)
        best = read_json(folder / SCORE, _Score, hint=_AGAIN)
        return folder, best.score, best.step

    def _is_better(self, name: str, score: float) -> bool:
        mark = self._folder(name) / SCORE
        return not mark.is_file() or score > read_json(mark, _Score, hint=_AGAIN).score

    def _write(self, head: nn.Module, name: str, score: float, step: int) -> None:
        """The score goes first and comes last: where it stands, the weights beside it are whole and its own."""
        folder = self._folder(name)
        (folder / SCORE).unlink(missing_ok=True)
        self.save(head, folder, step)
        aside = folder / f".{SCORE}"
        aside.write_text(json.dumps({"score": score, "step": step, "of": name}))
        os.replace(aside, folder / SCORE)

    def _folder(self, name: str) -> Path:
        return self.folder / f"best-{name}"
