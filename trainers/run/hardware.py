"""A recipe's `hardware` section, and the memory that a dry run compares with it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from pydantic import Field

from ...core.section import Section

_GIB = 2**30
# CUDA's context, libraries' workspaces and what the allocator cannot use.
RUNTIME = 2 * _GIB
# Of a process without a GPU: Python with the libraries of a stage (0.42 to 0.53 GiB measured with tiny models).
PROCESS = 0.5 * _GIB


class Hardware(Section):
    """What a recipe is meant to run on: a dry run says whether its trainings fit. Nothing else reads it."""

    # GPUs of the run, all nodes together.
    gpus: int = Field(ge=1)
    # Of each of them, as it is sold: 80 for an H100 of 80 GB.
    memory_gb: float = Field(gt=0)


@dataclass(frozen=True)
class Memory:
    """Bytes of one training step on the fullest GPU, or of a process without one, by what takes them."""

    parts: dict[str, float] = field(default_factory=dict)
    # A kind of drafter whose training cannot be counted without weights, and why (`DrafterConfig.empty`).
    uncounted: str | None = None

    @property
    def total(self) -> float:
        """All of it on a GPU, with what CUDA and its libraries take."""
        return sum(self.parts.values()) + RUNTIME

    def fits(self, hardware: Hardware | None) -> bool:
        """Whether it fits a GPU; nobody knows without one."""
        return hardware is None or self.total <= hardware.memory_gb * _GIB

    def lines(self, hardware: Hardware | None, *, is_here: bool = False) -> list[str]:
        """The lines of a dry run.

        Args:
            is_here: what the recipe reads is on this machine, which may run it: without a GPU, if it has none.
        """
        each = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in self.parts.items() if size >= 0.05 * _GIB)
        each = each or "models under 0.1"
        if hardware is None and is_here and not torch.cuda.is_available():
            whole = sum(self.parts.values()) + PROCESS
            line = f"  memory of a process, without a GPU, about {whole / _GIB:.1f} GiB: {each}, Python 0.5"
        else:
            line = f"  memory of the fullest GPU about {self.total / _GIB:.1f} GiB: {each}, CUDA 2.0"
        if self.uncounted:
            line += f"; not counted: activations of {self.uncounted}"
        if hardware is None:
            return [line]
        verdict = "fits" if self.fits(hardware) else "DOES NOT FIT"
        return [line, f"  {verdict} {hardware.gpus} GPU(s) of {hardware.memory_gb:g} GB each"]
