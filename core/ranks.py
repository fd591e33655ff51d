"""Rank and world size of this process, and what ranks exchange outside training. torch.distributed may be off."""

from __future__ import annotations

import hashlib
import os
import sys
from datetime import timedelta
from functools import lru_cache
from typing import Any

# How long ranks wait here while rank 0 works alone (uploads, scores pictures, writes a report). Training's own
# collectives keep the launcher's bound (DeepSpeed: ten minutes). A rank that dies is noticed at once in any case.
PATIENCE = timedelta(days=7)


def rank() -> int:
    """Global rank; before the process group exists, what the launcher has set."""
    return _group().get_rank() if _running() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of ranks; before the process group exists, what the launcher has set."""
    return _group().get_world_size() if _running() else int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Rank within this node, as the launcher has set it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def num_cores() -> int:
    """Cores that this process may run on: its affinity, or all where the system keeps none."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_main() -> bool:
    """Whether this is rank 0, which alone prints, writes and uses the network."""
    return rank() == 0


def barrier() -> None:
    """Wait until every rank reaches this call. Uses gloo, which has no watchdog timeout."""
    if _running():
        _group().barrier(group=_patient(_group().group.WORLD))


def is_first_to(what: str) -> bool:
    """Returns True for the first rank that asks about `what` and False for every later call. Used to print a message
    once, whether one rank or all ranks have it.
    """
    if not _running() or world_size() == 1:
        return is_main()
    try:
        return _group().distributed_c10d._get_default_store().add(hashlib.sha256(what.encode()).hexdigest(), 1) == 1
    except RuntimeError:  # rank 0, which holds the store, has ended
        return True


def gather(value: Any) -> list[Any]:
    """Every rank's value, on every rank, in rank order."""
    if not _running():
        return [value]
    values: list[Any] = [None] * world_size()
    _group().all_gather_object(values, value, group=_patient(_group().group.WORLD))
    return values


def broadcast(value: Any) -> Any:
    """Broadcast rank 0's value to every rank."""
    if not _running():
        return value
    box = [value]
    _group().broadcast_object_list(box, src=0, group=_patient(_group().group.WORLD))
    return box[0]


@lru_cache(maxsize=1)
def _patient(group: Any) -> Any:
    """A gloo group of all ranks, made at the first call. Waiting in it is not limited by a GPU's watchdog."""
    return _group().new_group(backend="gloo", timeout=PATIENCE)


def _running() -> bool:
    # A process that has not imported torch has joined no group: `--help` need not wait for the import.
    return "torch.distributed" in sys.modules and _group().is_available() and _group().is_initialized()


def _group() -> Any:
    import torch.distributed

    return torch.distributed
