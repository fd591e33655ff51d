"""Optimizer steps of micro-batches, a pure function of (seed, epoch, global sample index).

Nothing of the loader needs saving: step and seed say which samples come next, on any rank, so a
resumed run reads none of the data that it has already seen.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import multiprocessing
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from ..core.errors import UserError
from .order import Order, epoch_order, packed_rows, rows_of_rank

T = TypeVar("T")


class Samples(Protocol):
    """What the loader reads from."""

    @property
    def lengths(self) -> np.ndarray:
        """[n] tokens of each sample, negative without pictures."""
        ...

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True)
class Subset:
    """Some of the samples."""

    samples: Any
    indices: np.ndarray
    lengths: np.ndarray  # of the subset

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.samples[int(self.indices[index])]


# (samples, epoch=) -> a micro-batch; of no samples, one that supervises nothing (a rank that the last batch leaves
# without). Random draws of a sample happen here and depend on its name and the epoch only.
Collate = Callable[..., Any]


@dataclass(frozen=True)
class StepBatches:
    """What one rank computes in one optimizer step: micro-batches (`Batch`, `CodeBatch`, ...)."""

    step: int
    epoch: int
    micro: list[Any]


@dataclass(frozen=True)
class Loader:
    """Iterates optimizer steps from `start_step` on."""

    samples: Samples
    seed: int
    batch_size: int  # rows of one optimizer step over all ranks
    micro_batch_size: int  # rows of one forward on one rank
    total_steps: int  # stop there; the data is gone through as often as that takes
    collate: Collate
    grouped: bool = False  # batches of one modality (LLaVA's `group_by_modality_length`)
    rank: int = 0
    world_size: int = 1
    start_step: int = 0
    num_workers: int = 0  # reading processes; 0 reads in this one
    order: Order | None = None  # which samples an epoch has and when; None: all of them, shuffled or `grouped`
    # [n] by which ranks share a batch, where they are known better than the samples' own.
    lengths: np.ndarray | None = None
    # Pack a step's samples into rows of so many tokens at most, each one micro-batch; `micro_batch_size` is not read
    # then. None: padded batches.
    max_tokens: int | None = None

    @property
    def steps_per_epoch(self) -> int:
        """The last partial batch counts."""
        return steps_per_epoch(len(self.samples if self.order is None else self.order), self.batch_size)

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step on each rank: the same number on all of them, and about so many where packed."""
        if self.max_tokens is not None:
            tokens = self.batch_size * float(np.abs(self._tokens).mean())
            return max(1, math.ceil(tokens / (self.max_tokens * self.world_size)))
        return -(-self.batch_size // (self.micro_batch_size * self.world_size))

    @property
    def _tokens(self) -> np.ndarray:
        return self.samples.lengths if self.lengths is None else self.lengths

    def rows(self, epoch: int) -> np.ndarray:
        """The samples of an epoch in their order."""
        if self.order is not None:
            return self.order(epoch)
        lengths, size = self.samples.lengths, self.batch_size
        return epoch_order(lengths, seed=self.seed, epoch=epoch, batch_size=size, grouped=self.grouped)

    def micro_batches(self, batch: np.ndarray) -> list[np.ndarray]:
        """The samples of each of this rank's micro-batches of a global batch."""
        if self.max_tokens is not None:
            rows = packed_rows(np.abs(self._tokens[batch]), self.max_tokens, self.world_size)
            return [batch[row[self.rank]] for row in rows]
        mine, size = rows_of_rank(batch, self._tokens, self.rank, self.world_size), self.micro_batch_size
        return [mine[number * size : (number + 1) * size] for number in range(self.accumulation)]

    def __len__(self) -> int:
        return self.total_steps - self.start_step

    def __iter__(self) -> Iterator[StepBatches]:
        with warnings.catch_warnings():
            # A recipe's workers are for its real hardware: a smaller machine reads slower, and that is all.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader = torch.utils.data.DataLoader(
                _Steps(self),
                batch_size=None,
                sampler=range(self.start_step, self.total_steps),
                num_workers=self.num_workers,
                worker_init_fn=quiet_worker,
                # Reading draws nothing at random; a fixed generator keeps workers from touching the global one.
                generator=torch.Generator().manual_seed(self.seed),
            )
        batches = iter(loader)
        if self.num_workers:
            kill_at_exit()
        try:
            for step in batches:
                if isinstance(step, UserError):
                    raise step
                yield step
        finally:
            # Stop the worker processes here. Left to the garbage collector, which closes their queues first, each would
            # be waited for ten seconds.
            del batches


class _Steps(torch.utils.data.Dataset):
    def __init__(self, loader: Loader):
        self.loader = loader
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __getitem__(self, step: int) -> StepBatches | UserError:
        """The error is handed over as it is: raised in a worker, it would reach the user as a traceback in a text."""
        try:
            return self._step(step)
        except UserError as error:
            return error

    def _step(self, step: int) -> StepBatches:
        loader = self.loader
        epoch, step_in_epoch = divmod(step, loader.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, loader.rows(epoch)
        rows = self._order[step_in_epoch * loader.batch_size : (step_in_epoch + 1) * loader.batch_size]
        micro = [
            loader.collate([loader.samples[int(i)] for i in part], epoch=epoch) for part in loader.micro_batches(rows)
        ]
        if loader.max_tokens is not None:
            micro = [replace(batch, packed=True) for batch in micro]
        return StepBatches(step, epoch, micro)


def steps_per_epoch(num_samples: int, batch_size: int) -> int:
    """Optimizer steps that go through the data once, the last partial batch kept."""
    return -(-num_samples // batch_size)


def prefetched(items: Iterable[T], depth: int = 2) -> Iterator[T]:
    """Iterate over the same items while another thread makes up to `depth` of them beforehand. An exception of an item
    is raised when that item is taken. The thread ends if the reader stops early.
    """
    left = iter(items)
    end: Any = object()
    with ThreadPoolExecutor(1) as thread:
        pending = deque(thread.submit(next, left, end) for _ in range(depth))
        while (item := pending.popleft().result()) is not end:
            pending.append(thread.submit(next, left, end))
            yield item


def quiet_worker(worker: int) -> None:
    """Launchers signal the whole process tree: workers outlive the signal so that the step in hand can be saved. They
    die with their parent instead (Linux), so that a killed rank leaves none behind; a rank that ends by an exception
    needs `kill_at_exit`.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    parent = os.getppid()
    if os.uname().sysname == "Linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def kill_at_exit() -> None:
    """Call after quiet workers were started: Python waits for the remaining ones, possibly for ever."""
    atexit.unregister(_kill_workers)
    atexit.register(_kill_workers)  # the last to be registered is the first to run


def _kill_workers() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would call it a crash
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
