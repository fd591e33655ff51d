"""Log of the finished work of a stage, one line per item, so that a killed run can resume.

Every rank appends to a file of its own and reads all of them, so the number of ranks may change between two starts. A
line that was cut off while it was written, or is damaged otherwise, does not count, which is said. Each line ends with
a checksum: a changed digit is valid JSON still.
"""

from __future__ import annotations

import itertools
import json
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import xxhash
from pydantic import TypeAdapter

from ...core import ranks
from ...core.errors import UserError
from ...core.files import LOG_BYTES, append_lines, parse_json, read_small
from ...core.json_types import Json, JsonObject, nulls
from ...core.ranks import notice
from ..run.stopping import Stop, Stopped

_LINE: TypeAdapter[tuple[str, Json] | tuple[str, Json, str]] = TypeAdapter(tuple[str, Json] | tuple[str, Json, str])


def _checksum(key: str, value: object) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps([key, value]).encode())


class ResumeLog:
    """Values by key, in `<stem>-<rank>.jsonl`."""

    def __init__(self, stem: Path):
        self._stem, self._path = stem, stem.with_name(f"{stem.name}-{ranks.rank()}.jsonl")
        self._written = re.compile(re.escape(stem.name) + r"-\d+\.jsonl")
        self.values: JsonObject = {}
        self._told: set[str] = set()
        self.read()

    def read(self) -> None:
        """Read what all ranks have kept by now into `values`. A damaged line is told the first time that it is read."""
        for path in sorted(p for p in self._stem.parent.glob("*.jsonl") if self._written.fullmatch(p.name)):
            text = read_small(path, hint="delete the file: its items are worked on again", max_bytes=LOG_BYTES)
            for number, line in enumerate(text.splitlines(), start=1):
                if not line:
                    continue
                try:
                    key, value, *checksum = parse_json(line, _LINE, where="", hint="")
                    # Lines of earlier versions have none.
                    problem = "its checksum differs" if checksum and checksum != [_checksum(key, value)] else ""
                except UserError as error:
                    problem = error.problem
                if not problem:
                    self.values[key] = value
                elif (place := f"{path}, line {number}") not in self._told:
                    self._told.add(place)
                    notice(f"{place} is damaged, and its item is worked on again ({problem})")

    def add(self, key: str, value: object) -> None:
        """Append a JSON value, with null for NaN, to this rank's file. Raises `UserError` where the disk is full."""
        value = nulls(value)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        append_lines(self._path, json.dumps([key, value, _checksum(key, value)]).encode() + b"\n")
        self.values[key] = value


Unit = list[tuple[int, int]]  # items (number of the log, index) that one rank does one after the other


def resumed(stem: Path, count: int, work: Callable[[int], object], stop: Stop) -> list[Json]:
    """What `work` returns for each of `count` items, of all ranks: kept as soon as it is there, and not done again.

    Args:
        stem: of the log's files.
        work: index -> a value of JSON types; None: the item is left out, and tried again by the next run.

    Raises:
        Stopped: on all ranks, where one was asked to stop: after the item in hand, which is kept.
    """
    return resumed_in_turn([stem], [count], lambda _, index: work(index), stop)[0]


def resumed_in_turn(
    stems: Sequence[Path],
    counts: Sequence[int],
    work: Callable[[int, int], Json],
    stop: Stop,
    *,
    before: Callable[[int, Sequence[int]], None] = lambda part, left: None,
    expected: Callable[[int, int], float] = lambda part, index: 0.0,
    others: Callable[[int], None] = lambda count: None,
) -> list[list[Json]]:
    """`resumed` for several logs whose items are worked on in turn: item 0 of each log, then item 1 of each.

    Several ranks draw from one queue, the longest first, so that all end at nearly the same time.

    Args:
        counts: items of each log.
        work: (number of the log, index) -> a value of JSON types, or None.
        before: is told, log by log and before any item, what is left to do.
        expected: (number of the log, index) -> how long an item takes, in any unit.
        others: is told how many items other ranks have taken, whenever this one draws.

    Returns:
        The values of each log.
    """
    logs = [ResumeLog(stem) for stem in stems]
    _agree(logs, stop)
    # Another rank may see a file a moment later: all draw from what rank 0 has read.
    left: list[list[int]] = ranks.broadcast(
        [[index for index in range(n) if str(index) not in log.values] for log, n in zip(logs, counts, strict=True)]
    )
    nowhere: list[tuple[int, int]] = []
    stopped: str | None = None
    try:
        for part, indices in enumerate(left):
            before(part, indices)
        for part, index in dealt(units(left, expected), others, in_step=stop.in_step):
            log = logs[part]
            stop.check(f"in {stems[part].name}, {len(log.values):,} of {counts[part]:,} are kept")
            value = work(part, index)
            if value is None:
                nowhere.append((part, index))
            elif ranks.is_main() or not stop.in_step:
                log.add(str(index), value)
    except Stopped as error:
        stopped = str(error).removeprefix("stopped ")
    # Ranks have done different numbers of items: all meet here, and all stop where one was asked to.
    each = ranks.gather((stopped, nowhere))
    stop.settle(place for place, _ in each)
    left_out = {item for _, its in each for item in its}
    if stop.in_step:
        _agree(logs, stop)
    else:
        for log in logs:
            log.read()
    return [
        [None if (part, index) in left_out else log.values[str(index)] for index in range(count)]
        for part, (log, count) in enumerate(zip(logs, counts, strict=True))
    ]


def units(left: Sequence[Sequence[int]], expected: Callable[[int, int], float]) -> list[Unit]:
    """The items of one index in each log that has it left, by index.

    With several ranks by expected time, the longest first; the short ones at the end fill what is uneven.
    """
    at: dict[int, Unit] = {}
    for index, part in sorted((index, part) for part, indices in enumerate(left) for index in indices):
        at.setdefault(index, []).append((part, index))
    several = ranks.world_size() > 1
    return sorted(at.values(), key=lambda unit: -sum(expected(*item) for item in unit) if several else 0)


def dealt(queue: Sequence[Unit], others: Callable[[int], None], *, in_step: bool) -> Iterator[tuple[int, int]]:
    """The items that this rank has to do: all of one that is alone, and of ranks in step; else those that it draws."""
    if in_step or ranks.world_size() == 1:
        yield from itertools.chain(*queue)
        return
    name = ranks.broadcast(uuid.uuid4().hex)
    place = 0
    while (drawn := min(ranks.draw(name), len(queue))) < len(queue):
        others(sum(map(len, queue[place:drawn])))
        yield from queue[drawn]
        place = drawn + 1
    others(sum(map(len, queue[place:])))


def _agree(logs: Sequence[ResumeLog], stop: Stop) -> None:
    """Where ranks work in step, all have what rank 0 has read: another rank may see a file a moment later."""
    if stop.in_step:
        for log in logs:
            log.values = ranks.broadcast(log.values)
