"""Reusable memory for batches, and a thread that prefetches items.

New memory is slower than a page cache or a good disk: each of its pages is cleared before it is filled. Pieces are
lent, and come back when the last tensor over them is gone.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

_GRAIN = 2**24  # bytes; pieces are multiples of it, so that one serves batches of about a size
_END = object()

T = TypeVar("T")


class Lender:
    """A pool of memory. It never shrinks below the largest amount that was in use at once."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def lend(self, size: int) -> Tensor:
        """[size] uint8 with anything in it."""
        piece = next((self._free.pop(i) for i, held in enumerate(self._free) if len(held) >= size), None)
        if piece is None:
            self._free.clear()  # too small, all of them
            piece = np.empty(max(1, -(-size // _GRAIN)) * _GRAIN, dtype=np.uint8)
        lent = piece[:size]
        # The tensor's storage holds `lent` itself: it goes with the last view of it.
        weakref.finalize(lent, self._free.append, piece).atexit = False
        return torch.from_numpy(lent)


def prefetched(items: Iterable[T], depth: int = 2) -> Iterator[T]:
    """Iterate over the same items while another thread prefetches up to `depth` of them.

    An exception of an item is raised when that item is taken. The thread ends if the reader stops early.
    """
    pending: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(depth)
    stopped = threading.Event()

    def put(item: object, error: BaseException | None = None) -> None:
        while not stopped.is_set():
            try:
                pending.put((item, error), timeout=0.2)
                return
            except queue.Full:
                continue

    def make() -> None:
        try:
            for item in items:
                put(item)
                if stopped.is_set():
                    return
        except BaseException as error:
            put(None, error)
        else:
            put(_END)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        while True:
            item, error = pending.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        stopped.set()
        thread.join()
