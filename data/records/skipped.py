"""The log of what a data section leaves out: each record once, for all ranks, workers and restarts together."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ...core.errors import UserError
from ...core.files import LOG_BYTES, append_lines, open_data, parse_json, read_small
from ...core.json_types import JsonMapping, nulls
from ...core.locks import locked
from ...core.ranks import notice

_SHOWN = 6  # kinds of reasons in a line
# Under over_length: drop_images a record is changed and kept; how such a line ends.
TEXT_KEPT = "pictures are dropped, the text is kept"


@dataclass(frozen=True)
class Listed:
    """Lines of a log, counted by what happened."""

    left_out: int = 0
    changed: int = 0  # records whose pictures were dropped
    notices: int = 0  # of whole files: ids that repeat, say
    reasons: Mapping[str, int] = field(default_factory=dict)  # of what was left out, the commonest first

    def __str__(self) -> str:
        more = [f"{self.changed:,} lost their pictures"] * bool(self.changed)
        more += [f"{self.notices:,} notice(s) of whole files"] * bool(self.notices)
        why = f" ({self.why})" if self.reasons else ""
        return "; ".join([f"{self.left_out:,} record(s) were left out{why}", *more])

    @property
    def why(self) -> str:
        """The reasons, the commonest first; those that differ in their numbers alone count together."""
        sums, first = Counter[str](), dict[str, str]()
        for reason, number in self.reasons.items():
            sums[kind := re.sub(r"\d[\d,.]*", "#", reason)] += number
            first.setdefault(kind, reason)
        shown = [f"{number} times {first[kind]}" for kind, number in sums.most_common(_SHOWN)]
        return "; ".join([*shown, *[f"{len(sums) - _SHOWN} other reasons"] * (len(sums) > _SHOWN)])


class SkippedLog:
    """Notes (file, record, id, reason) as lines of JSON. `path` None: nothing is kept."""

    def __init__(self, path: Path | None):
        self.path = path
        self._lines: set[bytes] = set()  # up to `_read`
        self._read = 0

    def add(self, notes: Sequence[JsonMapping]) -> None:
        """Append the notes that nobody has written."""
        if not notes or self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path):
            self.path.touch()
            with open_data(self.path) as log:
                log.seek(self._read)
                self._lines.update(log.readlines())
            fresh = [line for note in notes if (line := json.dumps(nulls(note)).encode() + b"\n") not in self._lines]
            if fresh:
                append_lines(self.path, b"".join(fresh))
            self._lines.update(fresh)
            self._read = self.path.stat().st_size

    def summary(self) -> str:
        """How many records are left out or changed, why, and where they are listed; empty: none is."""
        listed = self.listed()
        return "" if listed == Listed() else f"{listed}: {self.path}"

    def listed(self) -> Listed:
        """What the log holds, whoever wrote it."""
        if self.path is None or not self.path.is_file():
            return Listed()
        hint = "delete the file: the next run writes it again"
        lines = read_small(self.path, hint=hint, max_bytes=LOG_BYTES).splitlines()
        notes = []
        for line in lines:
            with suppress(UserError):  # it is damaged, or was cut off while it was written
                notes.append(parse_json(line, _Note, where="", hint=""))
        if damaged := len(lines) - len(notes):
            notice(f"{self.path}: {damaged} damaged or cut lines are passed over")
        of_records = [note.reason for note in notes if note.record is not None]
        changed = sum(reason.endswith(TEXT_KEPT) for reason in of_records)
        reasons = Counter(reason for reason in of_records if not reason.endswith(TEXT_KEPT))
        return Listed(len(of_records) - changed, changed, len(notes) - len(of_records), dict(reasons.most_common()))


@dataclass(frozen=True)
class _Note:
    record: int | None
    reason: str
