"""Whether this run was asked to stop (SIGTERM, Ctrl-C), and how its ranks stop together.

One object listens from the first stage to the last, so that no moment swallows a signal: training, evaluation and the
stages that write shards look at it between steps, requests and batches, the runner between stages. A signal may reach
one rank alone, or a rank that waits for the others inside a collective: a thread takes it and tells the other ranks.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from ...core import ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# torchrun hands on a Ctrl-C that the terminal has sent already: so soon it is no second one.
_SAME_S = 0.5
_LOOK_S = 0.5  # between two looks at what other ranks were told
_SAID_S = 5.0  # for the answer to a signal to be printed
_ENDED = 130  # exit code of a second Ctrl-C, as shells have it
_TOLD = "asked to stop"
_Item = TypeVar("_Item")


class Stopped(Exception):
    """The run was asked to stop, and what it has finished is saved."""

    def __init__(self, place: str, step: int | None = None):
        self.step = step
        super().__init__(f"stopped {place}")


class Stop:
    """Listens for SIGTERM and SIGINT while it is entered, and says so; one that is never entered is never raised by a
    signal.

    Ranks must have met in a collective of `core/ranks.py` before: the first one keeps their store to itself.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None):
        self.raised = False  # on this rank, or seen of another
        # Ranks hold one target together and do the same work: all of them check at the same places, and agree there.
        self.in_step = False
        self._say = say
        self._first_int: float | None = None
        self._looked = 0.0

    def __enter__(self) -> Stop:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # A process forked from this one must not write its own signals here.
        os.register_at_fork(after_in_child=_forget)
        self._listener = threading.Thread(target=self._listen, name="asked-to-stop", daemon=True)
        self._listener.start()
        self._before = {number: signal.signal(number, self._signalled) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._writer.close()  # ends the thread, which closes the reader
        # What it says comes before what the caller says next; a terminal that takes no more text keeps nobody here.
        self._listener.join(timeout=_SAID_S)

    def asked(self) -> bool:
        """Whether this rank was asked, or another one that has said so."""
        if not self.raised and time.monotonic() - self._looked > _LOOK_S:
            self._looked = time.monotonic()
            self.raised = ranks.was_told(_TOLD)
        return self.raised

    def check(self, place: str) -> None:
        """Raises `Stopped` on this rank alone (in step: on all): call it inside `together`, or where no other waits."""
        if ranks.any_rank(self.asked()) if self.in_step else self.asked():
            raise Stopped(place)

    def watch(self, items: Iterable[_Item], place: str) -> Iterator[_Item]:
        """The items, with a `check` before each of them."""
        for item in items:
            self.check(place)
            yield item

    def agree(self, place: str) -> None:
        """All ranks call: raises `Stopped` on all of them where one was asked."""
        if ranks.any_rank(self.asked()):
            raise Stopped(place)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What ranks do apart, each at its own pace; all meet at the end, and where one has stopped all do."""
        place: str | None = None
        try:
            yield
        except Stopped as stopped:
            place = str(stopped).removeprefix("stopped ")
        self.settle(ranks.gather(place))

    @staticmethod
    def settle(places: Iterable[str | None]) -> None:
        """Raises `Stopped` where one of the ranks has stopped; its place is not None, and all ranks have all places."""
        for place in places:
            if place is not None:
                raise Stopped(place)

    def _signalled(self, number: int, frame: object) -> None:
        """In the main thread, between two instructions of Python."""
        if number == signal.SIGINT and self._is_second():
            # As if nobody had listened: shells then end a loop around the command, too.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        self.raised = True

    def _is_second(self) -> bool:
        return self._first_int is not None and time.monotonic() - self._first_int > _SAME_S

    def _listen(self) -> None:
        """In a thread, which gets the number of each signal even while the main thread waits for other ranks."""
        warned = False
        with self._reader:
            while numbers := self._reader.recv(1):
                if numbers[0] not in SIGNALS:
                    continue
                if numbers[0] == signal.SIGINT:
                    if self._is_second():
                        time.sleep(1)  # the main thread ends the process, unless it waits
                        os._exit(_ENDED)
                    self._first_int = self._first_int or time.monotonic()
                self.raised = True
                if not warned:
                    warned = True
                    self._say("asked to stop: ends after this step, request or batch (a second Ctrl-C ends at once)")
                    # The store may be in use by the main thread, which must not keep a second signal waiting.
                    threading.Thread(target=ranks.tell, args=(_TOLD,), daemon=True).start()


def _forget() -> None:
    with suppress(ValueError):  # not the main thread: it has no wakeup descriptor to forget
        signal.set_wakeup_fd(-1)
