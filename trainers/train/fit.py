"""What every `train` stage shares: its settings, its optimizer with its schedule, and one run of the loop under an
engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import nn
from torch.optim import Optimizer

from ...core import ranks
from ...core.errors import Refused, UserError
from ...core.fields import Place, Revision, Seed
from ...core.files import read_text
from ...core.section import Section
from ...data.loader import Collate, Loader, Samples, steps_per_epoch
from ...data.order import Order
from ...models.drafters import AnyDrafter
from ...models.stored import multiplies_bfloat16
from ..run.context import Context
from ..run.progress import STEP
from ..run.stage import Stage
from .checkpoint import FOLDER, CheckpointConfig
from .engine import Engine
from .loop import Training, train
from .muon import Float32Muon, MuonWithAdamW, is_hidden
from .validate import Validation

SCRATCH = "scratch"
# AdamW divides by 1 - beta^step; a rate above it is a slip (1e4 for 1e-4).
Beta = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, le=100)]


class OptimConfig(Section):
    """AdamW, or Muon beside it. The defaults are those of LLaVA-1.5's scripts (TABED, table 7)."""

    # adamw; or muon, of heads and image generators: Muon trains hidden weight matrices, by updates as large as AdamW's,
    # and AdamW token tables, LM heads, norms and biases at the same rate. It needs engine.zero_stage: 0.
    name: Literal["adamw", "muon"] = Field("adamw", exclude_if=lambda value: value == "adamw")
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
    # Muon's decay of the weights that it trains.
    muon_weight_decay: float = Field(0.1, ge=0, le=100, exclude_if=lambda value: value == 0.1)
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
        if self.name != "muon" and "muon_weight_decay" in self.model_fields_set:
            raise ValueError("muon_weight_decay is Muon's: set name: muon, or leave it out")
        return self


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


class TrainSettings(Stage):
    """What all ways of training have: how long, in which batches and with which optimizer."""

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
    # The optimizer, its schedule and its clipping.
    optim: OptimConfig
    # When to save, and how many to keep.
    checkpoints: CheckpointConfig = CheckpointConfig()
    # Processes that read ahead on each rank; 0: none. Of cached states threads, which need not hand batches over.
    num_workers: int = Field(0, ge=0, le=1024)
    # Steps between two lines of metrics.jsonl.
    log_every: int = Field(10, ge=1)
    expected: Expected | None = None
    kind: Literal["train"]
    # Whose weights are trained; everything else is frozen.
    model: str = "drafter"
    # Another drafter than the recipe's, so that two can be trained beside each other; it then needs `from` (a stage
    # that trained such a one, or scratch), since the latest stage trained another.
    drafter: AnyDrafter | None = None
    validation: Validation | None = None

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give epochs or steps")
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise ValueError("micro_batch_size is larger than batch_size")
        if self.drafter is not None and self.model != "drafter":
            raise Refused("drafter", f"this stage trains the {self.model}", "leave it out")
        if self.drafter is not None and self.from_stage is None:
            raise ValueError("a drafter of its own starts from: scratch, or from a stage that trained such a one")
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
        return self.from_stage if isinstance(self.from_stage, str) and self.from_stage != SCRATCH else None

    def uses(self) -> set[str]:
        """The weights that this stage goes on from: those of the latest stage that trained this model."""
        return set() if self.outside is not None or self.from_stage == SCRATCH else {self.model}

    @property
    def micro(self) -> int:
        """Rows of one forward on one rank."""
        return self.micro_batch_size or -(-self.batch_size // ranks.world_size())

    @property
    def trained(self) -> str:
        """Whose weights are trained, in words."""
        return self.model


def fit(stage: TrainSettings, context: Context, training: Training) -> Engine:
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
    if (path := context.folder / "sample.txt").is_file():  # that was looked at before step 0
        shown = read_text(path, hint="run the stage again (restart=STAGE)")
        tracker.table("sample", ["supervised text in [[ ]]"], [[shown]])
    line = context.progress
    if left_out := training.left_out() if ranks.is_main() else "":
        context.say(left_out)

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
    if ranks.is_main() and (now := training.left_out()) != left_out:
        context.say(now)
    return engine


def training_loader(
    stage: TrainSettings, samples: Samples, collate: Collate, start_step: int, *, seed: int, total: int, **how: Any
) -> Loader:
    """What this rank trains on from `start_step` to step `total`; `how` as of `Loader`: order, lengths, packing."""
    return Loader(
        samples, seed=seed, batch_size=stage.batch_size, micro_batch_size=stage.micro, total_steps=total,
        collate=collate, rank=ranks.rank(), world_size=ranks.world_size(), start_step=start_step,
        num_workers=stage.num_workers, **how,
    )  # fmt: skip


def held_out_loader(samples: Samples, collate: Collate, rows: int, order: Order | None = None) -> Loader:
    """One pass over held-out samples, which the ranks share, `rows` in one forward on one rank."""
    batch_size = rows * ranks.world_size()
    return Loader(
        samples, seed=0, batch_size=batch_size, micro_batch_size=rows, collate=collate, order=order,
        total_steps=steps_per_epoch(len(samples), batch_size), rank=ranks.rank(), world_size=ranks.world_size(),
    )  # fmt: skip


def build_optimizer(parts: Mapping[str, Sequence[tuple[str, nn.Parameter]]], config: OptimConfig) -> Optimizer:
    """AdamW with a group per part and kind, as norms and biases (vectors) are not decayed; fused on a GPU. With `muon`
    its groups of each part's hidden weights stand before these.

    With `clip_value` it clips the gradients of every step itself: DeepSpeed clips by norm alone, and whatever its stage
    it hands the optimizer whole gradients, averaged and unscaled, or this rank's share of them.
    """
    groups: list[dict[str, Any]] = []
    hidden: list[dict[str, Any]] = []
    for part, named in parts.items():
        lr = config.lr_by_part.get(part, config.lr)
        by_muon = {name for name, p in named if config.name == "muon" and is_hidden(name, p)}
        if params := [p for name, p in named if name in by_muon]:
            hidden.append({"params": params, "lr": lr, "weight_decay": config.muon_weight_decay, "part": part})
        for decay, decays in ((config.weight_decay, True), (0.0, False)):
            if params := [p for name, p in named if name not in by_muon and (p.dim() >= 2) == decays]:
                groups.append({"params": params, "lr": lr, "weight_decay": decay, "part": part})
    fused = all(p.is_cuda for g in groups for p in g["params"])
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
    optimizer: Optimizer = adamw
    if config.name == "muon":
        if not hidden:
            raise UserError("nothing is left for Muon: no matrix of hidden weights is trained", key="optim.name",
                            hint="leave it out: adamw")  # fmt: skip
        # Rank 0's processor decides: ranks that round otherwise would part.
        kind = torch.optim.Muon if fused or ranks.on_main(multiplies_bfloat16) else Float32Muon
        optimizer = MuonWithAdamW(kind(hidden, lr=config.lr, adjust_lr_fn="match_rms_adamw"), adamw)
    if (bound := config.clip_value) is not None:

        def clip(optimizer: Optimizer, *_: object) -> None:
            nn.utils.clip_grad_value_([p for group in optimizer.param_groups for p in group["params"]], bound)

        optimizer.register_step_pre_hook(clip)
    return optimizer


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
