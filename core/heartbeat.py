"""What each rank of a run is in, kept in the ranks' store: a rank that waits names the one it waits for, and ends.

torch's groups cannot do this: their time-outs know no rank, end no process that is suspended, and cannot tell a rank
that works alone from one that was stopped. One thread writes this rank's place every second and reads the others' while
this rank waits; another judges what was read, since the first may hang in the store.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

BOUND_S = 1800.0  # the setting's default: that long a rank waits for one of which nothing comes
ALONE = 48  # times the bound for a rank that lives and works alone: it builds an index, scores pictures, uploads
_TELL_S = 60.0  # a rank that has waited so long says for whom
_SILENT_S = 10.0  # without a beat: stopped, killed, or its machine is lost
_EVERY_S = 1.0
_KEY = "draftsmith/beat/{}"
# What a rank is in. Of steps each rank makes equally many, and each has its bound; of other work nobody knows how long
# it takes.
WORKS, STEPS, WAITS, ENDED = "works", "steps", "waits", "ended"


class Pulse:
    """Where this rank's main thread is. Changed by that thread alone. `number` counts meetings and steps begun: of
    ranks that live, those with the smallest are waited for. `signs` counts up with everything that is begun or done.
    """

    def __init__(self) -> None:
        self.stage, self.what, self.state = "", "its start", WORKS
        self.number = self.signs = 0
        self.heartbeat: Heartbeat | None = None  # of a run of several ranks

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Around a call in which all ranks wait for one another."""
        self.number += 1
        self.signs += 1
        self.state = WAITS
        try:
            yield
        finally:
            self.signs += 1
            self.state = WORKS

    def begin(self, what: str, *, is_step: bool = False) -> None:
        """All ranks begin `what` now; a step, or something that may take a rank long."""
        self.number += 1
        self.signs += 1
        self.what, self.state = what, STEPS if is_step else WORKS

    def enter(self, stage: str) -> None:
        """All ranks begin a stage."""
        self.stage = f"stage {stage}"
        self.begin("its beginning")

    def advance(self, what: str) -> None:
        """A sign of work that goes on, of this rank alone."""
        self.signs += 1
        self.what, self.state = what, STEPS

    @property
    def where(self) -> str:
        """For people: `stage target, step 12 of 40`."""
        return ", ".join(part for part in (self.stage, self.what) if part)


@dataclass
class _Peer:
    """Another rank, as it was seen last: when its beat and its signs changed, by the watcher's own clock."""

    beat_s: float
    sign_s: float
    beat: int = -1
    number: int = 0
    signs: int = -1
    state: str = WORKS
    where: str = "its start"


class _Late(NamedTuple):
    """A rank that is waited for: why, for how long nothing has come of it, and how long that may last."""

    rank: int
    why: str
    is_silent: bool
    quiet_s: float
    bound_s: float


class Heartbeat:
    """Names the ranks that this one waits for, and ends it after `bound_s` in which nothing comes of them. `store` is a
    connection of its own: one that hangs keeps its other users waiting.
    """

    def __init__(
        self,
        pulse: Pulse,
        rank: int,
        world_size: int,
        store: Any,
        *,
        bound_s: float,
        end: Callable[[int], None] = os._exit,  # no exception reaches a thread that waits in a collective
    ):
        self._pulse, self._rank, self._size, self._store, self._exit = pulse, rank, world_size, store, end
        self._bound_s = bound_s
        # Shorter ones for a short bound.
        self._tell_s, self._silent_s = min(_TELL_S, bound_s / 3), min(_SILENT_S, bound_s / 4)
        self._every_s = min(_EVERY_S, bound_s / 20)
        self._over = threading.Event()
        # Whether a connection to another rank broke, and whether that to the store did.
        self._has_lost = self._is_lost = False
        # Counted in ticks, which stand still while this process is suspended: then it waits for nobody.
        self._clock = self._since = self._answered = 0.0
        self._signs = -1
        self._peers: dict[int, _Peer] = {}
        self._said: set[tuple[int, bool]] = set()

    def start(self) -> None:
        """From now on others see this rank, and it looks at them where it waits."""
        self._writer = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._writer.start()
        threading.Thread(target=self._watch, name="waiting-for-ranks", daemon=True).start()

    def leave(self, *, said: bool) -> None:
        """The run is over for this rank. One that has `said` why it ends before the others tells them with its last
        beat, and waits for that to be written.
        """
        self._pulse.state = ENDED if said else self._pulse.state
        self._over.set()
        if said:
            self._writer.join(2 * _EVERY_S)

    def lost(self) -> str:
        """Which rank has ended, of a run whose connections broke; "" where none has. Takes five seconds where none has
        said so.
        """
        self._has_lost = True
        for _ in range(25):
            ended = [rank for rank, peer in self._peers.items() if peer.state == ENDED]
            if not ended and not self._is_lost:
                time.sleep(self._every_s / 5)
        gone = [r for r, peer in self._peers.items() if self._clock - peer.beat_s > 2.5 * self._every_s]
        if self._rank and (self._is_lost or self._clock - self._answered > 2.5 * self._every_s):
            gone = [0]  # which keeps the list of the others
        gone = ended or gone
        shown = ", ".join(map(str, sorted(gone)[:8])) + ", ..." * (len(gone) > 8)
        return f"rank{'s' * (len(gone) > 1)} {shown}" if gone else ""

    def _beat(self) -> None:
        beat = 0
        while not (is_last := self._over.wait(self._every_s if beat else 0)) or self._pulse.state == ENDED:
            # Of a large run the store would be busy where all ranks read all others all the time.
            looks = self._has_lost or self._clock - self._since > self._tell_s / 3
            ranks = range(self._size) if looks else [self._rank]
            pulse = self._pulse
            place = json.dumps([beat, pulse.number, pulse.signs, pulse.state, pulse.where])
            try:
                self._store.set(_KEY.format(self._rank), place)
                values = self._store.multi_get([_KEY.format(rank) for rank in ranks])
            except RuntimeError:  # the process that holds the store, rank 0 or its launcher, has ended
                self._is_lost = True
                return
            if is_last:
                return
            beat += 1
            now = self._answered = self._clock
            peers = {rank: self._peers.get(rank, _Peer(now, now)) for rank in ranks}
            for peer, value in zip(peers.values(), values, strict=True):
                before = peer.beat, peer.signs
                peer.beat, peer.number, peer.signs, peer.state, peer.where = json.loads(value)
                peer.beat_s = now if peer.beat != before[0] else peer.beat_s
                peer.sign_s = now if peer.signs != before[1] else peer.sign_s
            del peers[self._rank]
            self._peers = peers

    def _watch(self) -> None:
        while not self._over.wait(self._every_s / 2):
            self._clock += self._every_s / 2
            if not self._has_lost:  # `lost` looks by itself
                self._look()

    def _look(self) -> None:
        if self._pulse.signs != self._signs:
            self._signs, self._since = self._pulse.signs, self._clock
            self._said.clear()
        waited = self._clock - self._since
        if self._pulse.state not in (WAITS, STEPS) or waited < self._tell_s / 3:
            return
        late = self._late()
        silent = {(one.rank, one.is_silent) for one in late}
        what = f"rank {self._rank} has waited {_length(waited)} in {self._pulse.where}"
        speaker = min({*range(self._size)} - {one.rank for one in late})  # the first that waits, for all of them
        if waited > self._tell_s and not silent <= self._said and self._rank == speaker:
            self._said |= silent
            print(f"{what}, for {_reasons(late)}", file=sys.stderr, flush=True)
        if over := [one for one in late if min(waited, one.quiet_s) > one.bound_s]:
            cure = "the same command continues, and engine.wait_minutes sets how long ranks wait"
            print(f"error: {what} for {_reasons(over)}, and ends: {cure}", file=sys.stderr, flush=True)
            self._exit(1)

    def _late(self) -> list[_Late]:
        unanswered = self._clock - self._answered
        if self._rank and (self._is_lost or unanswered > self._silent_s):
            how = "ended" if self._is_lost else f"given no sign for {_length(unanswered)}"
            bound = self._tell_s if self._is_lost else self._bound_s
            return [_Late(0, f"which has {how} and keeps the list of the others", True, unanswered, bound)]
        late = []
        for rank, peer in sorted(self._peers.items()):
            silent, quiet = self._clock - peer.beat_s, self._clock - peer.sign_s
            if peer.state == ENDED:
                late.append(_Late(rank, "which has ended and said why", True, quiet, self._tell_s / 3))
            elif silent > self._silent_s:
                why = f"which has given no sign for {_length(silent)} (it was in {peer.where})"
                late.append(_Late(rank, why, True, silent, self._bound_s))
            elif peer.number < self._pulse.number:
                bound = self._bound_s * (ALONE if peer.state == WORKS else 1)
                late.append(_Late(rank, f"which lives and is in {peer.where}", False, quiet, bound))
        return late


def _reasons(late: Collection[_Late]) -> str:
    first = [f"rank {one.rank}, {one.why}" for one in late][:4]
    return "; ".join([*first, f"and {len(late) - 4} more"] if len(late) > 4 else first)


def _length(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
