"""The only door to DeepSpeed: process group, engine, and how a sum of losses becomes the right gradient.

DeepSpeed is called directly: behind other trainers it quietly becomes DDP on a CPU, while its own
engine trains with ZeRO 0 to 3 on gloo. Optimizers are torch's.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional

from ...core import ranks
from ...core.errors import UserError, first_line, not_loaded
from ...core.heartbeat import BOUND_S
from ...core.pretrained import name_accelerator
from ..run.context import EngineConfig
from ..run.launcher import free_port
from .muon import MuonWithAdamW

BUCKET = 500_000_000  # DeepSpeed's default
_JOIN_S = 60.0  # a rank that has waited so long for the others to join says so
_AFTER_S = 600.0  # that groups wait longer than the heartbeat, which can say for whom


class NotJoined(UserError):
    """Ranks have not met, and cannot ask one another who says so."""

    is_said_by_each_rank = True


def import_deepspeed(level: int = logging.ERROR) -> Any:
    """The module. Its loggers write to the console at import; the run has its own progress line."""
    logging.getLogger("DeepSpeed").setLevel(level)
    name_accelerator()
    import deepspeed

    return deepspeed


def bound_primitives() -> None:
    """On a CPU, let oneDNN and torch's layer above it keep eight compiled primitives each, where nobody set how many.

    In bf16 each length of a batch is a primitive of its own, and by default a thousand are kept: a training of 360
    steps grew from 1.2 to 3.5 GiB (measured). Both read these variables with their first operation.
    """
    if not torch.cuda.is_available():
        for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
            os.environ.setdefault(name, "8")


def init_distributed(*, verbose: bool = False, wait_s: float = BOUND_S) -> None:
    """Join the process group; without a launcher this process is the only rank. Ranks wait `wait_s` seconds for one
    another. Raises `NotJoined` where they cannot meet: no address, a port that is taken.
    """
    deepspeed = import_deepspeed(logging.INFO if verbose else logging.ERROR)
    if torch.distributed.is_initialized():
        return
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    chosen = "MASTER_PORT" not in os.environ
    if chosen:
        os.environ["MASTER_PORT"] = str(free_port())
    if "OMP_NUM_THREADS" not in os.environ and not torch.cuda.is_available():
        # Ranks times threads at most the cores: two spinning pools on two cores run a hundred times slower (measured).
        local_ranks = int(os.environ.get("LOCAL_SIZE") or os.environ["WORLD_SIZE"])
        torch.set_num_threads(max(1, ranks.num_cores() // local_ranks))
    bound_primitives()
    device = ranks.device()
    if device.type == "cuda":
        # Work without a named device (clocks, streams, captured graphs) goes to this rank's GPU, not to the first.
        # Only DeepSpeed's engine sets it otherwise, by LOCAL_RANK, and a rank that decodes builds none.
        torch.cuda.set_device(device)
        os.environ["LOCAL_RANK"] = str(device.index)
    # The shared-memory collective is compiled on first use: 40 s and a compiler, for nothing on a CPU test.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    bound = timedelta(seconds=wait_s + _AFTER_S)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    text = f"rank {ranks.rank()} waits for the other ranks of {ranks.world_size()} to join at {place}"
    notice = threading.Timer(_JOIN_S, print, [text], {"file": sys.stderr, "flush": True})
    notice.daemon = True
    notice.start()
    try:
        deepspeed.init_distributed(dist_backend=backend, verbose=False, timeout=bound)
    except torch.distributed.DistError as error:
        raise NotJoined(
            f"rank {ranks.rank()} could not join the others: {first_line(error)}", where=place,
            hint="MASTER_ADDR and MASTER_PORT name rank 0's machine and a free port of it, on every node; "
            "engine.wait_minutes sets how long ranks wait",
        ) from error  # fmt: skip
    finally:
        notice.cancel()
    # DeepSpeed makes the groups of its gradients without a bound, and torch gives them its own: ten minutes on GPUs.
    deepspeed.comm.comm.cdb.new_group = functools.partial(torch.distributed.new_group, timeout=bound)
    ranks.watch(wait_s)
    if chosen:
        del os.environ["MASTER_PORT"]  # taken: a process that is started from this one needs another
    ranks.check_own_gpu()


@contextmanager
def _patient_barriers() -> Iterator[None]:
    """DeepSpeed's barriers wait for slow disks inside, as ours do: NCCL's end a run after a bound.

    All of a checkpoint's barriers are of all ranks. Its few other collectives follow one, so nobody is late for them.
    """
    from deepspeed import comm

    with patch.object(comm, "barrier", lambda *_, **__: ranks.barrier()):
        yield


@contextmanager
def _tensor_cores(device: torch.device, allowed: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    if allowed and device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if torch.get_float32_matmul_precision() != before:
            torch.set_float32_matmul_precision(before)


def _gradient_sums(config: EngineConfig, accumulation: int) -> tuple[int, dict[str, object]]:
    """ZeRO's stage, and what DeepSpeed is told so that micro-batches' gradients under bf16 are summed in float32.

    Under bf16 DeepSpeed's stage 0 sums in bfloat16 alone. Its stage 1 takes over where there is something to sum.
    """
    if config.precision != "bf16":
        return config.zero_stage, {}
    if config.zero_stage == 0 and accumulation == 1:
        return 0, {}
    return max(1, config.zero_stage), {"data_types": {"grad_accum_dtype": "fp32"}}


class Engine:
    """A module under DeepSpeed. `multiplier` gives a step's factor on the groups' learning rates; `accumulation` is
    about how many forwards an optimizer step has on each rank: `begin` says which is the last.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        multiplier: Callable[[int], float],
        config: EngineConfig,
        *,
        micro_batch_size: int,
        accumulation: int,
        clip_norm: float | None,
    ):
        import deepspeed

        # DeepSpeed still calls these two by their old names, and torch tells the user of it in every stage: nothing in
        # a recipe could change it.
        old = "(all_gather_into_tensor|reduce_scatter_tensor)"
        text = rf"`torch\.distributed\.{old}` is deprecated\. Please use"
        warnings.filterwarnings("ignore", message=text, category=FutureWarning)
        config = config.on(ranks.device())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, multiplier)
        # Allocated whole, 2 GB in float32, however small the model; all of its gradients are one bucket as before.
        trained = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        bucket = min(BUCKET, trained)
        stage, sums = _gradient_sums(config, accumulation)
        if stage and isinstance(optimizer, MuonWithAdamW):
            why = "engine.zero_stage" if config.zero_stage else "bf16 with several micro-batches of a step"
            raise UserError(f"Muon needs whole matrices, and {why} hands an optimizer flat ones", key="optim.name",
                            hint="set zero_stage: 0, and micro_batch_size: null or precision: fp32")  # fmt: skip
        threshold = config.persistence_threshold
        whole = {} if threshold is None else {"stage3_param_persistence_threshold": threshold}
        # ZeRO-3 leaves the process a linear layer of its own, which keeps no gathered weights for the backward: it is
        # kept for this engine's steps, and everything else (a decoding that is timed) has torch's.
        with patch.object(functional, "linear", functional.linear), ranks.pulse().meeting():
            self._engine, self._optimizer, _, _ = deepspeed.initialize(
                model=module,
                optimizer=optimizer,
                lr_scheduler=scheduler,
                dist_init_required=False,
                config={
                    "train_micro_batch_size_per_gpu": micro_batch_size,
                    "gradient_accumulation_steps": accumulation,
                    "gradient_clipping": clip_norm or 0.0,
                    "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket, **whole},
                    "zero_allow_untested_optimizer": True,
                    "zero_force_ds_cpu_optimizer": False,
                    "bf16": {"enabled": config.precision == "bf16"},
                    "fp16": {"enabled": config.precision == "fp16"},
                    "steps_per_print": 10**12,
                    **sums,
                },
            )
            self._linear = functional.linear
        self._engine.checkpoint_engine.load = load_data
        # Loaded weights come in evaluation mode: no dropout, and gradient checkpointing silently off.
        self._engine.train()
        self.config, self.accumulation = config, accumulation
        self._terms = accumulation * torch.distributed.get_world_size()
        # Scalar 1 or 0: whether all of this rank's gradients since the last step were finite (under fp16 always 1).
        # With an infinite gradient ZeRO-0 in float32 writes it into the weights, and ZeRO 1 to 3 and bf16 skip the step
        # without a word (both measured).
        self.gradients_are_finite = torch.ones((), device=self.device)
        # fp16 looks for its loss scale by trying: an overflow there is expected, skipped and tried again smaller.
        self.expects_skips = config.precision == "fp16"
        for parameter in module.parameters():
            if parameter.requires_grad and not self.expects_skips:
                parameter.register_hook(self._watch)

    @property
    def device(self) -> torch.device:
        """Where DeepSpeed keeps the module, and where batches must go."""
        return self._engine.device

    @property
    def module(self) -> nn.Module:
        """The trained module itself, without DeepSpeed around it."""
        return self._engine.module

    def _watch(self, gradient: torch.Tensor) -> None:
        # Finite only if every entry is, and the sum over micro-batches and ranks that is still to come as well.
        size = torch.linalg.vector_norm(gradient.detach(), ord=1, dtype=torch.float32) * self._terms
        self.gradients_are_finite = self.gradients_are_finite * size.isfinite()

    def __call__(self, *inputs: object) -> Any:
        with patch.object(functional, "linear", self._linear), _tensor_cores(self.device, self.config.tf32):
            return self._engine(*inputs)

    def begin(self, *, last: bool) -> None:
        """Called before each micro-batch's forward: whether the update follows it. Packed steps differ in number."""
        self._engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss_sum: torch.Tensor, tokens: float) -> None:
        """Add the gradient of loss_sum / tokens, where `tokens` counts the whole global batch.

        DeepSpeed averages over ranks and accumulation; the factors here undo both.
        """
        world_size = torch.distributed.get_world_size()
        # Gradient checkpointing runs layers again.
        with patch.object(functional, "linear", self._linear), _tensor_cores(self.device, self.config.tf32):
            self._engine.backward(loss_sum * (world_size * self.accumulation / tokens))

    def step(self) -> None:
        """Called after each micro-batch's backward; updates after the last one."""
        self._engine.step()

    def end_step(self) -> None:
        """Forget the finished step's `gradients_are_finite`; called once after each optimizer step."""
        self.gradients_are_finite = torch.ones((), device=self.device)

    @property
    def num_updates(self) -> int:
        """Optimizer steps since step 0, in checkpoints too."""
        return self._engine.global_steps

    @property
    def num_skipped(self) -> int:
        """Optimizer steps that DeepSpeed skipped because of an overflow."""
        return self._engine.skipped_steps

    def rates(self) -> list[float]:
        """Current learning rate of each parameter group."""
        return [group["lr"] for group in self._engine.optimizer.param_groups]

    def save(self, folder: Path, client_state: dict[str, object]) -> None:
        """Write every rank's part under `folder` (all ranks call); frozen weights stay out."""
        with _patient_barriers():
            self._engine.save_checkpoint(
                str(folder), tag="engine", client_state=client_state, save_latest=False, exclude_frozen_parameters=True
            )

    def load(self, folder: Path) -> None:
        """Read what `save` wrote. Raises `UserError` where a file holds more than data (nothing in one is run), or
        weights of other names.
        """
        frozen = {n for n, p in self.module.named_parameters(remove_duplicate=False) if not p.requires_grad}

        def compare(_: nn.Module, keys: Any) -> None:
            lost = sorted(set(keys.missing_keys) - frozen)
            if lost or keys.unexpected_keys:
                raise UserError(
                    f"its weights are not this model's: without {lost}, with {sorted(keys.unexpected_keys)}",
                    where=str(folder),
                    hint="another version of the model wrote it: resume with that version, or remove the folder",
                )

        # Not strict: frozen weights stay out. The rest is compared.
        hook = self.module.register_load_state_dict_post_hook(compare)
        try:
            with _patient_barriers():
                path, _ = self._engine.load_checkpoint(str(folder), tag="engine", load_module_strict=False)
        finally:
            hook.remove()
        assert path is not None, f"DeepSpeed found no checkpoint in {folder}"

    def full_weights(self) -> Any:
        """Context in which rank 0 sees whole parameters, in the precision that forwards use, under any ZeRO stage."""
        import deepspeed

        parameters = list(self.module.parameters())
        return deepspeed.zero.GatheredParameters(parameters, modifier_rank=None, enabled=self.config.zero_stage == 3)


def load_data(path: str | Path, map_location: Any = None) -> Any:
    """Tensors and plain values of a checkpoint's file; `UserError` where it holds other objects, or cannot be read.
    Stands in for DeepSpeed's own reader, which unpickles anything.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    # All of DeepSpeed's own that a checkpoint of ZeRO 1 to 3 holds: numbers under names.
    allowed: list[Any] = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
    # Python before 3.11.4 pickles a member of an enumeration as getattr(class, name): this is all that it may get.
    allowed.append((functools.partial(_member, ZeroStageEnum), "builtins.getattr"))
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location=map_location, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise UserError(
            f"holds more than a checkpoint's data, or is damaged: {not_loaded(error)}", where=str(path),
            hint="nothing in it was run; remove the checkpoint's folder, and an older one is taken",
        ) from error  # fmt: skip


def _member(enumeration: Any, owner: Any, name: str) -> Any:
    if owner is not enumeration or name not in enumeration.__members__:
        raise pickle.UnpicklingError(f"asks for attribute {name!r}")
    return enumeration[name]
