"""What a process sets up before it joins the others: its GPU, its threads, a port."""

from __future__ import annotations

import os
import socket

import torch

from ...core import ranks


def take_gpu() -> None:
    """Work without a named device (clocks, streams, the capture of graphs) goes to this rank's GPU, not to the first.

    Only DeepSpeed's engine sets it otherwise, and a rank that decodes builds none.
    """
    device = ranks.device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ["LOCAL_RANK"] = str(device.index)  # DeepSpeed takes the GPU's number from it


def fit_threads() -> None:
    """Ranks times threads at most the cores: two spinning pools on two cores run a hundred times slower (measured)."""
    if "OMP_NUM_THREADS" not in os.environ and not torch.cuda.is_available():
        local_ranks = int(os.environ.get("LOCAL_SIZE") or os.environ["WORLD_SIZE"])
        torch.set_num_threads(max(1, ranks.num_cores() // local_ranks))


def bound_primitives() -> None:
    """On a CPU, let oneDNN and torch's layer above it keep eight compiled primitives each, where nobody set how many.

    In bf16 each length of a batch is a primitive of its own, and by default a thousand are kept: a training of 360
    steps grew from 1.2 to 3.5 GiB (measured). Both read these variables with their first operation.
    """
    if not torch.cuda.is_available():
        for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
            os.environ.setdefault(name, "8")


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
