"""What every `train` stage shares: its settings, and one run of the loop under an engine with its trackers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from pydantic import Field, model_validator

from ...core import ranks
from ...core.fields import Place, Revision, Seed
from ...core.section import Section
from ...data.loader import Collate, Loader, Samples, steps_per_epoch
from ...data.order import Order
from ..run.context import Context
from ..run.progress import STEP
from ..run.stage import Stage
from ..run.tracked import track_sample
from .checkpoint import FOLDER, CheckpointConfig
from .engine import Engine
from .loop import Training, train
from .optim import OptimConfig, build_optimizer, rate_multiplier

SCRATCH = "scratch"


class Expected(Section):
    """Declared sizes of data that is not on disk. Once the data is there, measured sizes replace them."""

    # Records or pictures.
    samples: int = Field(ge=1)
    # Ids that are text, over all samples.
    text_tokens: int | None = Field(None, ge=0)
    # Ids that stand for pictures and clips, over all samples.
    visual_tokens: int | None = Field(None, ge=0)


class OutsideStart(Section):
    """Weights outside the run."""

    # Directory or Hub id of a trained head: ours, an export, or one that others published.
    path: Place
    revision: Revision | None = None
    # The head was trained for another target of this shape and tokenizer, a base model before its fine-tuning say: that
    # target's name, and the head's copy of its embedding, are not compared with this target's.
    other_target: bool = False


class FitSettings(Stage):
    """How long, in which batches and with which optimizer."""

    # The stage whose weights this one starts from; null: the latest that made this model (of drafters, that trained the
    # recipe's own); scratch: none of them.
    # {path: FOLDER_OR_HUB_ID}: a head outside the run, whose settings the drafter's section must have.
    from_stage: str | OutsideStart | None = Field(None, alias="from")
    # Of initial weights and data order; null: the recipe's.
    seed: Seed | None = None
    # Times that all samples are seen.
    epochs: int | None = Field(None, ge=1)
    # Optimizer steps; in place of epochs.
    steps: int | None = Field(None, ge=1)
    # Rows of an optimizer step over all ranks, and of one forward on one rank.
    batch_size: int = Field(ge=1)
    # Rows of one forward on one rank, where `batch_size` does not fit: gradients are accumulated. null: all at once.
    micro_batch_size: int | None = Field(None, ge=1)
    # AdamW, its schedule and its clipping.
    optim: OptimConfig
    # When to save, and how many to keep.
    checkpoints: CheckpointConfig = CheckpointConfig()
    # Processes that read ahead on each rank; 0: none. Of cached states threads, which need not hand batches over.
    num_workers: int = Field(0, ge=0, le=1024)
    # Steps between two lines of metrics.jsonl.
    log_every: int = Field(10, ge=1)
    expected: Expected | None = None

    @model_validator(mode="after")
    def _one_length(self) -> FitSettings:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give epochs or steps")
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise ValueError("micro_batch_size is larger than batch_size")
        return self

    def num_steps(self, num_samples: int) -> int:
        """Optimizer steps, the last partial batch of each epoch kept."""
        return self.steps or steps_per_epoch(num_samples, self.batch_size) * (self.epochs or 0)

    @property
    def outside(self) -> OutsideStart | None:
        """The weights outside the run that it starts from; None: it starts from a stage's, or from scratch."""
        return self.from_stage if isinstance(self.from_stage, OutsideStart) else None

    @property
    def earlier(self) -> str | None:
        """The stage that `from` names; None: it names none."""
        return None if self.outside is not None or self.from_stage == SCRATCH else self.from_stage  # type: ignore[return-value]

    def uses(self) -> set[str]:
        """The weights that this stage goes on from: those of the latest stage that trained this model."""
        is_apart = self.outside is not None or self.from_stage == SCRATCH
        return set() if is_apart else {self.model}  # type: ignore[attr-defined]

    @property
    def micro(self) -> int:
        """Rows of one forward on one rank."""
        return self.micro_batch_size or -(-self.batch_size // ranks.world_size())


def fit(stage: FitSettings, context: Context, training: Training) -> Engine:
    """Train the module, or go on from its newest checkpoint; returns its engine."""
    training.module.to(ranks.device())  # before its optimizer, which is fused where the weights are on a GPU
    optimizer = build_optimizer(training.module.parts(), stage.optim)  # type: ignore[operator]
    engine = Engine(
        training.module,
        optimizer,
        rate_multiplier(stage.optim, training.total),
        context.engine,
        micro_batch_size=stage.micro,
        accumulation=training.steps(0).accumulation,
        clip_norm=stage.optim.clip_norm,
    )
    tracker = context.tracker()
    track_sample(tracker, context.folder)
    line = context.progress

    def rewind(step: int) -> None:
        tracker.rewind(step)
        line.count(STEP, training.total, step)

    def log(values: Mapping[str, float | Path], step: int) -> None:
        tracker.log(values, step)
        line.log({name: value for name, value in values.items() if not isinstance(value, Path)}, step)

    train(
        engine,
        training,
        stage.checkpoints,
        log_every=stage.log_every,
        folder=context.folder / FOLDER,
        fingerprint=context.fingerprint,
        log=log,
        rewind=rewind,
        saved=lambda path, step: tracker.artifact("checkpoint", [path], step),
        say=context.say,
        stop=context.stop,
        tick=line.advance,
    )
    return engine


def training_loader(
    stage: FitSettings,
    samples: Samples,
    collate: Collate,
    start_step: int,
    *,
    seed: int,
    total: int,
    grouped: bool = False,
    order: Order | None = None,
    lengths: np.ndarray | None = None,
    max_tokens: int | None = None,
) -> Loader:
    """What this rank trains on from `start_step` to step `total`; the last four as of `Loader`."""
    return Loader(
        samples,
        seed=seed,
        batch_size=stage.batch_size,
        micro_batch_size=stage.micro,
        total_steps=total,
        collate=collate,
        grouped=grouped,
        order=order,
        lengths=lengths,
        max_tokens=max_tokens,
        rank=ranks.rank(),
        world_size=ranks.world_size(),
        start_step=start_step,
        num_workers=stage.num_workers,
    )


def held_out_loader(samples: Samples, collate: Collate, rows: int, order: Order | None = None) -> Loader:
    """One pass over held-out samples, which the ranks share.

    Args:
        rows: of one forward on one rank.
    """
    batch_size = rows * ranks.world_size()
    return Loader(
        samples, seed=0, batch_size=batch_size, micro_batch_size=rows, collate=collate, order=order,
        total_steps=steps_per_epoch(len(samples), batch_size), rank=ranks.rank(), world_size=ranks.world_size(),
    )  # fmt: skip


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
