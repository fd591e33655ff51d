"""A training run small enough to be repeated for every step that it could be stopped at."""

import functools
import gc
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from draftsmith.core import ranks
from draftsmith.data.collate import ConversationCollate, Sample
from draftsmith.data.loader import Loader
from draftsmith.models.parts import PARTS
from draftsmith.models.targets.llava.model import LlavaTraining
from draftsmith.models.training import ModelTraining
from draftsmith.trainers.run.context import EngineConfig
from draftsmith.trainers.run.stopping import Stop
from draftsmith.trainers.train.checkpoint import CheckpointConfig
from draftsmith.trainers.train.engine import Engine, init_distributed
from draftsmith.trainers.train.fit import OptimConfig, build_optimizer, rate_multiplier
from draftsmith.trainers.train.loop import Training, train
from tiny import IMAGE_ID, PATCHES, llava

BATCH = 4


class Samples:
    """Random conversations, some with a picture, of several lengths; sample 0 can be given broken pixels."""

    def __init__(self, count: int = 10, broken: int | None = None):
        self.lengths = np.array([8 + i % 5 if i % 3 else -8 for i in range(count)], dtype=np.int32)
        self.broken = broken

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(6, 58, (abs(int(self.lengths[index])),), generator=generator).tolist()
        pixels = torch.randn(1, 3, 16, 16, generator=generator) if index % 3 else None
        if index == self.broken:
            pixels = torch.full((1, 3, 16, 16), float("nan"))
        image = [IMAGE_ID] * PATCHES if pixels is not None else []
        ids = [1, *image, *words]
        mask = [place > len(ids) // 2 for place in range(len(ids))]
        return Sample(ids, mask, [int(i == IMAGE_ID) for i in ids], pixels, f"record-{index}")


class Noisy(LlavaTraining):
    """Draws at random in every forward, so that a resumed run must restore the random states."""

    def hidden_states(self, batch):
        return torch.nn.functional.dropout(super().hidden_states(batch), 0.2, training=self.training)


def module(*, parts=PARTS, noisy: bool = True, gradient_checkpointing: bool = False) -> LlavaTraining:
    kind = Noisy if noisy else LlavaTraining
    return kind(llava(0, width=16, layers=1).train(), parts, gradient_checkpointing=gradient_checkpointing)


def loader(samples, steps: int, start: int = 0, micro: int = 2, batch: int = BATCH) -> Loader:
    return Loader(
        samples, seed=0, batch_size=batch, micro_batch_size=micro, total_steps=steps,
        collate=ConversationCollate(3, 16), rank=ranks.rank(), world_size=ranks.world_size(), start_step=start,
    )  # fmt: skip


def engine_config(zero: int, precision: str = "fp32") -> EngineConfig:
    """Under ZeRO 3 every weight is shared out: DeepSpeed keeps those of tiny models whole otherwise."""
    return EngineConfig(zero_stage=zero, precision=precision, **({"persistence_threshold": 0} if zero == 3 else {}))


def engine(model, optim: OptimConfig, *, steps: int, zero: int = 0, precision="fp32", micro=2, accumulation=2,
           config: EngineConfig | None = None) -> Engine:  # fmt: skip
    init_distributed()
    # DeepSpeed searches for garbage up to twelve times for an engine, each time through all that earlier ones left.
    gc.freeze()
    return Engine(
        model, build_optimizer(model.parts(), optim), rate_multiplier(optim, steps),
        config or engine_config(zero, precision), micro_batch_size=micro, accumulation=accumulation,
        clip_norm=optim.clip_norm,
    )  # fmt: skip


def weights(built: Engine) -> dict[str, torch.Tensor]:
    with built.full_weights():
        return {n: p.detach().clone() for n, p in built.module.named_parameters()}


def run(folder: Path, *, steps: int = 8, zero: int = 0, every: int | None = None, keep: int = 2,
        optim: OptimConfig | None = None, log: Callable | None = None, samples=None, precision: str = "fp32",
        model: LlavaTraining | None = None, micro: int = 2, fingerprint: str = "f",
        saved: Callable[[Path, int], None] = lambda path, step: None):  # fmt: skip
    """One rank's life: build everything, train (from a checkpoint where there is one)."""
    torch.manual_seed(0)
    optim = optim or OptimConfig(lr=1e-2, warmup_steps=2, clip_norm=1.0)
    model = model or module()
    accumulation = -(-BATCH // (micro * ranks.world_size()))
    built = engine(model, optim, steps=steps, zero=zero, precision=precision, micro=micro, accumulation=accumulation)
    losses: dict[int, float] = {}
    told: list[str] = []

    def keep_log(values, step):
        losses[step] = values["loss"]
        if log:
            log(step)

    with Stop() as stop:
        train(
            built,
            training_of(
                functools.partial(loader, samples or Samples(), steps, micro=micro),
                steps,
                model.states if isinstance(model, ModelTraining) else lambda batch: None,
            ), CheckpointConfig(every=every, keep=keep), log_every=1, folder=folder, fingerprint=fingerprint,
            log=keep_log, rewind=lambda step: None, say=told.append, saved=saved, stop=stop,
        )  # fmt: skip
    return losses, weights(built), told


def training_of(make_loader: Callable, steps: int, source: Callable = lambda batch: None) -> Training:
    """For the loop, whose engine already holds the module; nothing is written at the end."""
    return Training(torch.nn.Module(), make_loader, steps, lambda engine: None, source)


def free_port() -> str:
    """For the launcher: its default port may be another run's on the same machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
