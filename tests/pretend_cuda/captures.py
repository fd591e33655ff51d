"""Captures of the pretend device that break off, and what torch then leaves behind until somebody mends it."""

from __future__ import annotations

from typing import Any

import torch


class Captures:
    """How many succeed before one breaks off (None: all do), and what a broken one leaves until somebody mends it."""

    left: int | None = None
    tried = 0
    stream, pools, random = "default", list[Any](), "free"

    @classmethod
    def leaves(cls) -> tuple[str, int, str]:
        """Current stream, open memory pools, and whether the device's random numbers can be drawn."""
        return cls.stream, len(cls.pools), cls.random

    @classmethod
    def attempt(cls, pool: Any) -> None:
        """As `torch.cuda.graph` ends a capture that broke off: with a second error, on the capture's stream."""
        cls.tried += 1
        if cls.left is None or cls.left > 0:
            cls.left = None if cls.left is None else cls.left - 1
            return
        cls.stream, cls.random = "capture", "captured"
        cls.pools.append(pool)
        try:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more lines")
        except RuntimeError:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")  # noqa: B904

    @classmethod
    def close(cls, device: int, pool: Any) -> None:
        """`_cuda_endAllocateToPool`."""
        if not any(one is pool for one in cls.pools):
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        cls.pools = [one for one in cls.pools if one is not pool]


class _DefaultGenerator:
    def clone_state(self) -> str:
        return "free"

    def graphsafe_set_state(self, state: str) -> None:
        Captures.random = state


def install(num_devices: int) -> None:
    """Let torch ask for what a broken capture leaves."""
    cuda: Any = torch.cuda
    cuda.current_stream = lambda *_: Captures.stream
    cuda.set_stream = lambda stream: setattr(Captures, "stream", stream)
    cuda.default_generators = (_DefaultGenerator(),) * num_devices
    core: Any = torch._C
    core._cuda_endAllocateToPool, core._cuda_releasePool = Captures.close, lambda *_: None
