"""A recipe's `engine` section: how weights and optimizer states lie on the ranks. `engine.py` hands it to DeepSpeed."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator

from ...core.errors import UserError
from ...core.heartbeat import BOUND_S
from ...core.section import Section
from ...models.stored import computes_in_bfloat16


class EngineConfig(Section):
    """How weights and optimizer states lie on the ranks."""

    # 0 keeps everything on each rank (best for drafts under 1B); 1 and 2 share optimizer states and gradients;
    # 3 shares the weights too.
    zero_stage: Literal[0, 1, 2, 3] = 0
    # bf16 keeps float32 master weights and sums gradients in float32; fp16 needs a GPU. auto: bf16 on a GPU that
    # computes in it, unless the target is held in float32; fp32 on others and on a CPU.
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"

    # ZeRO 3: weights of fewer numbers than this stay whole on every rank, which costs memory and spares messages. null:
    # DeepSpeed's 100,000; 0 shares all of them out.
    persistence_threshold: int | None = Field(None, ge=0, exclude_if=lambda value: value is None)

    # Float32 matrix products of training steps round their factors to TF32 on GPUs that have it, and are several times
    # as fast. Decoding and the target's states stay exact. Unset it stays out of fingerprints.
    tf32: bool = Field(True, exclude_if=lambda value: value is True)

    # Minutes that a rank waits for another one that was stopped, was lost or hangs; then it ends with exit code 1. One
    # that works alone (it builds an index, scores pictures, uploads) has 48 times as long. Not in fingerprints.
    wait_minutes: float = Field(BOUND_S / 60, gt=0, le=100_000, exclude_if=lambda value: value == BOUND_S / 60)

    @model_validator(mode="after")
    def _read(self) -> EngineConfig:
        if self.persistence_threshold is not None and self.zero_stage != 3:
            raise ValueError("persistence_threshold is of zero_stage: 3; leave it out")
        return self

    def on(self, device: torch.device, *, target_dtype: str = "float32") -> EngineConfig:
        """The section with `auto` resolved for a device.

        Args:
            target_dtype: in which the target is held: float32, bfloat16 or float16.
        """
        if self.precision != "auto":
            return self
        low = target_dtype != "float32" and computes_in_bfloat16(device)
        return self.model_copy(update={"precision": "bf16" if low else "fp32"})


def check_engine(config: EngineConfig) -> None:
    """Refuse what this machine cannot run, before anything is built."""
    if config.precision == "fp16" and not torch.cuda.is_available():
        raise UserError("engine.precision: fp16 does not run on a CPU", key="engine.precision",
                        hint="use fp32 or bf16, or a machine with CUDA")  # fmt: skip
