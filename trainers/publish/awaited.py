"""Waits for a transfer and goes when the run is asked to stop: huggingface_hub has no way to end one in its middle.

The transfer stays behind in a thread that ends with the process. It is one file's content, which means nothing before a
commit names it, and which the Hub then has or has not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ..run.stopping import Stop

LOOK_S = 0.1  # between two looks at whether to stop
_Done = TypeVar("_Done")


def awaited(transfer: Callable[[], _Done], stop: Stop, place: str) -> _Done:
    """What `transfer` returns or raises.

    Raises:
        Stopped: the run was asked to stop before it was through.
    """
    stop.check(place)
    returned: list[_Done] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(transfer())
        except BaseException as error:  # raised again where it is waited for
            raised.append(error)

    thread = threading.Thread(target=run, name="transfer", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(LOOK_S)
        if thread.is_alive():
            stop.check(place)
    if raised:
        raise raised[0]
    return returned[0]


def pause(seconds: float, stop: Stop, place: str) -> None:
    """Sleep. Raises `Stopped` as soon as the run is asked to stop."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        stop.check(place)
        time.sleep(min(left, LOOK_S))
