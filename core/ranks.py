"""Which of the running processes this one is. Reads torch.distributed, or says "the only one"."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist


def rank() -> int:
    """Global rank; before the process group exists, what the launcher has set."""
    return dist.get_rank() if _running() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return dist.get_world_size() if _running() else int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_main() -> bool:
    """Rank 0 speaks, writes and talks to the network."""
    return rank() == 0


def barrier() -> None:
    if _running():
        dist.barrier()


def gather(value: Any) -> list[Any]:
    """Every rank's value, on every rank, in rank order."""
    if not _running():
        return [value]
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, value)
    return found


def agree(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if not _running():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _running() -> bool:
    return dist.is_available() and dist.is_initialized()
