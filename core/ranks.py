"""Rank and world size of this process, and what ranks exchange outside training. torch.distributed may be off."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import UserError, causes
from .heartbeat import WAITS, Heartbeat, Pulse
from .secrets import redact

if TYPE_CHECKING:
    import torch


# Of the group in which ranks wait while rank 0 works alone (uploads, scores pictures, writes a report). What ends a
# wait for a rank that is stopped or lost is the heartbeat, far sooner.
PATIENCE = timedelta(days=7)

T = TypeVar("T")


def rank() -> int:
    """Global rank; before the process group exists, what the launcher has set."""
    return _group().get_rank() if has_group() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of ranks; before the process group exists, what the launcher has set."""
    return _group().get_world_size() if has_group() else int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Rank within this node, as the launcher has set it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def device() -> torch.device:
    """This rank's GPU, where there is CUDA; else the CPU. Raises `UserError` where the node has more ranks than GPUs.

    A launcher that shows each rank its own GPU alone (Slurm's --gpus-per-task=1) leaves one device to choose from.
    """
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    count, rank_here = torch.cuda.device_count(), local_rank()
    if rank_here >= count > 1:
        raise UserError(
            f"rank {rank()} is number {rank_here} of its node (from 0), which shows {count} GPUs",
            hint=f"start {count} ranks on each node, or show it more GPUs (CUDA_VISIBLE_DEVICES)",
        )
    return torch.device("cuda", rank_here if count > 1 else 0)


def check_own_gpu() -> None:
    """Raises `UserError` where two ranks have one GPU: each was shown the same one, or has the same LOCAL_RANK.

    They would share its memory and its time, and NCCL fails on it without a rank's name. All ranks call.
    """
    import torch

    if not torch.cuda.is_available() or world_size() == 1:
        return
    gpus = gather(str(getattr(torch.cuda.get_device_properties(device()), "uuid", "")))
    for number, gpu in enumerate(gpus):
        if gpu and gpus.index(gpu) != number:
            raise UserError(
                f"ranks {gpus.index(gpu)} and {number} have the same GPU, {gpu}",
                hint="show each rank one of its own (CUDA_VISIBLE_DEVICES, Slurm's --gpus-per-task=1), or show all "
                "ranks of a node all of its GPUs and give each its LOCAL_RANK",
            )


def num_cores() -> int:
    """Cores that this process may use: its affinity (all where the system keeps none), and a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    match = re.match(r"(\d+) (\d+)", quota.read_text()) if quota.is_file() else None
    return cores if match is None else min(cores, max(1, int(match[1]) // int(match[2])))


def is_main() -> bool:
    """Whether this is rank 0, which alone prints, writes and uses the network."""
    return rank() == 0


def share(count: int, *, in_step: bool = False) -> range:
    """This rank's part of `count` items: every `world_size`-th, or all of them where ranks work in step."""
    return range(count) if in_step else range(rank(), count, world_size())


def barrier() -> None:
    """Wait until every rank reaches this call. Uses gloo, which has no watchdog timeout."""
    if has_group():
        with pulse().meeting():
            _group().barrier(group=_patient(_group().group.WORLD))


def _ask(question: Callable[[Any], T], otherwise: T) -> T:
    """The answer of the ranks' store, a fraction of a millisecond; `otherwise` where rank 0, which holds it, ended."""
    before, pulse().state = pulse().state, WAITS
    try:
        return question(_store())
    except RuntimeError:
        return otherwise
    finally:
        pulse().state = before


def is_first_to(what: str) -> bool:
    """Returns True for the first rank that asks about `what` and False for every later call. Used to print a message
    once, whether one rank or all ranks have it.
    """
    if not has_group() or world_size() == 1:
        return is_main()
    return draw(what) in (0, sys.maxsize)


def tell(what: str) -> None:
    """Leave a mark that `was_told` finds on every rank, without waiting for any of them."""
    if has_group() and world_size() > 1:
        with suppress(RuntimeError):  # rank 0, which holds the store, has ended
            _store().set(_key(what), "1")


def was_told(what: str) -> bool:
    """Whether some rank has called `tell`."""
    return has_group() and world_size() > 1 and _ask(lambda store: bool(store.check([_key(what)])), False)


def draw(what: str) -> int:
    """How many draws of `what` came before this one, of any rank: 0, 1, 2, ... A number too large for any list where
    rank 0, which holds the store, has ended: the next meeting says so.
    """
    return _ask(lambda store: int(store.add(_key(what), 1)) - 1, sys.maxsize)


def any_rank(value: bool) -> bool:
    """Whether the value is true on any rank; all ranks call."""
    if not has_group() or world_size() == 1:
        return value
    import torch

    total = torch.tensor([int(value)])
    with pulse().meeting():
        _group().all_reduce(total, group=_patient(_group().group.WORLD))
    return bool(total.item())


def gather(value: T) -> list[T]:
    """Every rank's value, on every rank, in rank order."""
    if not has_group():
        return [value]
    values: list[Any] = [None] * world_size()
    with pulse().meeting():
        _group().all_gather_object(values, value, group=_patient(_group().group.WORLD))
    return values


def broadcast(value: object) -> Any:
    """Broadcast rank 0's value to every rank."""
    if not has_group():
        return value
    box = [value]
    with pulse().meeting():
        _group().broadcast_object_list(box, src=0, group=_patient(_group().group.WORLD))
    return box[0]


def on_main(work: Callable[..., object], *arguments: object) -> Any:
    """Rank 0 works while the others wait; all of them return its value, or raise its `UserError`."""
    value: object = None
    if is_main():
        try:
            value = work(*arguments)
        except UserError as error:
            value = error
    value = broadcast(value)
    if isinstance(value, UserError):
        raise value
    return value


@lru_cache(maxsize=1)
def pulse() -> Pulse:
    """Where this process is, for the other ranks."""
    return Pulse()


def watch(bound_s: float) -> None:
    """From now on this rank, where it waits for others, says for which, and ends after `bound_s` seconds without any
    sign of them. All ranks call, once the group exists.
    """
    if world_size() > 1:
        heartbeat = pulse().heartbeat = Heartbeat(pulse(), rank(), world_size(), _store().clone(), bound_s=bound_s)
        heartbeat.start()


def leave(*, said: bool = True) -> None:
    """This rank ends: it has `said` why it ends without the others, or its last meeting with them is over."""
    if (heartbeat := pulse().heartbeat) is not None:
        heartbeat.leave(said=said)


def lost_by(error: BaseException) -> str | None:
    """Which rank has ended, where that is why a call to the others failed: `rank 1`, `another rank`; None: the error is
    something else. It may take five seconds.
    """
    if not has_group() or world_size() == 1:
        return None
    if not any(
        isinstance(cause, _group().DistError)
        # Gloo's errors have no class of their own: `[.../gloo/transport/tcp/pair.cc:547] Connection closed by peer`.
        or (isinstance(cause, RuntimeError) and ("gloo/" in str(cause) or "closed by peer" in str(cause)))
        for cause in causes(error)
    ):
        return None
    heartbeat = pulse().heartbeat
    return (heartbeat and heartbeat.lost()) or "another rank"


@lru_cache(maxsize=1)
def _patient(group: object) -> Any:
    """A gloo group of all ranks, made at the first call. Waiting in it is not limited by a GPU's watchdog."""
    return _group().new_group(backend="gloo", timeout=PATIENCE)


def _store() -> Any:
    return _group().distributed_c10d._get_default_store()


def _key(what: str) -> str:
    return hashlib.sha256(what.encode()).hexdigest()


def has_group() -> bool:
    """Whether the process group exists: ranks can ask one another."""
    # A process that has not imported torch has joined no group: `--help` need not wait for the import.
    return "torch.distributed" in sys.modules and _group().is_available() and _group().is_initialized()


def _group() -> Any:
    import torch.distributed

    return torch.distributed


def notice(text: str) -> None:
    """One line on stderr, from one of the ranks that say it."""
    if is_first_to(f"notice {text}"):
        print(redact(f"note: {text}"), file=sys.stderr, flush=True)
