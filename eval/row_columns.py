"""Measured rows held as columns: as objects of Python they take five times the memory, and the tables the time.

`Rows` reads as a list of `Row`, each made when it is asked for. `eval/summary.py` computes from the columns.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from ..core.files import read_json_lines
from ..core.json_types import Json, JsonMapping, JsonObject
from .measured_rows import Row

# What identifies a row within an evaluation. In this order rows are sorted: by request first, so that a bootstrap
# resamples the same requests for every method.
KEY = ("request", "benchmark", "turn", "budget", "temperature", "max_new_tokens", "method", "drafter", "mode", "engine",
       "concurrency")  # fmt: skip
NAMES = (*KEY, "medium", "stop")  # of few different values, strings but for three numbers
COUNTS = ("prompt_tokens", "visual_tokens", "plain_tokens", "identical")
TIMES = ("plain_prefill_s", "plain_total_s", "plain_cycle_s", "prefill_s", "total_s", "draft_s", "draft_cycle_s",
         "verify_s", "rule_s", "cycle_s")  # fmt: skip
PER_CYCLE = ("planned", "drafted", "nodes", "accepted", "emitted")


class _Named:
    """A value of few for each row: its number, and the values."""

    def __init__(self) -> None:
        self.codes, self.values, self._code_of = array("i"), list[Json](), dict[Json, int]()

    def append(self, value: object) -> None:
        code = self._code_of.setdefault(value, len(self.values))
        if code == len(self.values):
            self.values.append(value)
        self.codes.append(code)


class _Lists:
    """Whole numbers for each row, as many as it has, in one array of the smallest type that holds them."""

    def __init__(self, kind: str = "B") -> None:
        self._values: array[Any] = array(kind)
        self._ends = array("q", [0])

    def append(self, values: Iterable[float]) -> None:
        try:
            self._values.extend(values)
        except OverflowError:
            wider = next(kind for kind in "hiq" if array(kind).itemsize > self._values.itemsize)
            self._values = array(wider, self._values[: self._ends[-1]])
            return self.append(values)
        self._ends.append(len(self._values))

    def __getitem__(self, row: int) -> tuple[Json, ...]:
        return tuple(self._values[self._ends[row] : self._ends[row + 1]])

    def lengths(self, at: np.ndarray) -> np.ndarray:
        """[rows] values of each row."""
        ends = np.asarray(self._ends)
        return ends[at + 1] - ends[at]

    def joined(self, at: np.ndarray) -> np.ndarray:
        """The values of these rows, one row after the other."""
        lengths = self.lengths(at)
        shift = np.asarray(self._ends)[at] - np.cumsum(lengths) + lengths
        return np.asarray(self._values)[np.arange(lengths.sum()) + np.repeat(shift, lengths)]


class _Columns:
    """All fields of all rows."""

    def __init__(self) -> None:
        self.names = {name: _Named() for name in NAMES}
        self.numbers = {name: array("q") for name in COUNTS} | {name: array("d") for name in TIMES}
        self.lists = {name: _Lists() for name in ("tokens", *PER_CYCLE)}
        self.parts, self.seconds = _Named(), _Lists("d")  # of `parts_s`: the keys, and the values
        self.details: list[JsonMapping] = []
        self._equal: dict[str, JsonMapping] = {}  # most rows have a small mapping that many others have, too

    def append(self, row: Row) -> None:
        values = vars(row)
        for name, named in self.names.items():
            named.append(values[name])
        for name, numbers in self.numbers.items():
            numbers.append(values[name])
        for name, lists in self.lists.items():
            lists.append(values[name])
        self.parts.append(tuple(row.parts_s))
        self.seconds.append(row.parts_s.values())
        small = len(row.details) < 4
        self.details.append(self._equal.setdefault(repr(row.details), row.details) if small else row.details)

    def row(self, at: int) -> Row:
        values: dict[str, Any] = {name: named.values[named.codes[at]] for name, named in self.names.items()}
        values |= {name: numbers[at] for name, numbers in self.numbers.items()}
        values |= {name: lists[at] for name, lists in self.lists.items()}
        parts = dict(zip(self.parts.values[self.parts.codes[at]], self.seconds[at], strict=True))
        values["identical"] = bool(values["identical"])
        return Row(**values, parts_s=parts, details=self.details[at])


class Rows(Sequence[Row]):
    """Some rows, in an order. Parts of them share their columns."""

    def __init__(self, rows: Iterable[Row] = ()):
        self._columns, self._at = _Columns(), np.arange(0)
        if isinstance(rows, Rows):
            self._columns, self._at = rows._columns, rows._at
        else:
            self.extend(rows)

    def extend(self, rows: Iterable[Row]) -> None:
        """Append rows to the columns, of which these are all."""
        assert len(self) == len(self._columns.details), "part of other rows"
        for row in rows:
            self._columns.append(row)
        self._at = np.arange(len(self._columns.details))

    def __len__(self) -> int:
        return len(self._at)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Row | Rows:
        return self.take(self._at[index]) if isinstance(index, slice) else self._columns.row(int(self._at[index]))

    def __iter__(self) -> Iterator[Row]:
        return map(self._columns.row, self._at.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def take(self, at: np.ndarray) -> Rows:
        """Those at these places of the columns."""
        some = Rows.__new__(Rows)
        some._columns, some._at = self._columns, at
        return some

    def where(self, mask: np.ndarray) -> Rows:
        """Those of which `mask`, bool [rows], is True; or those with these numbers."""
        return self.take(self._at[mask])

    def joined(self, *others: Rows) -> Rows:
        """These and then the others, which are parts of the same rows."""
        assert all(other._columns is self._columns for other in others)
        return self.take(np.concatenate([self._at, *(other._at for other in others)]))

    def has(self, name: str, value: object) -> np.ndarray:
        """bool [rows]: whether a field is `value`."""
        named = self._columns.names[name]
        code = named.values.index(value) if value in named.values else -1
        return self._codes(named) == code

    def distinct(self, name: str) -> list[Json]:
        """The values of a field, each once, in the order in which they first come up."""
        named = self._columns.names[name]
        return [named.values[code] for code in dict.fromkeys(self._codes(named).tolist())]

    def grouped(self, *names: str) -> dict[tuple[Json, ...], Rows]:
        """Rows by these fields, in the order in which each group first comes up."""
        return {key: self.where(places) for key, places in self._groups(names).items()}

    def by(self, key: Callable[[Row], str]) -> dict[str, Rows]:
        """Rows by a key that is the same for all requests of one setting, in the order in which each first comes up."""
        groups: dict[str, list[np.ndarray]] = {}
        for places in self._groups(KEY[1:]).values():
            groups.setdefault(key(self[int(places[0])]), []).append(places)
        return {name: self.where(np.sort(np.concatenate(places))) for name, places in groups.items()}

    def _groups(self, names: Sequence[str]) -> dict[tuple[object, ...], np.ndarray]:
        """Values of these fields -> the rows that have them."""
        if not len(self):
            return {}
        named = [self._columns.names[name] for name in names]
        codes = np.stack([self._codes(one) for one in named], 1)
        _, first, group = np.unique(codes, axis=0, return_index=True, return_inverse=True)
        order = np.argsort(group.ravel(), kind="stable")
        places = np.split(order, np.cumsum(np.bincount(group.ravel()))[:-1])
        keys = [tuple(one.values[code] for one, code in zip(named, codes[at], strict=True)) for at in first]
        return {keys[number]: places[number] for number in np.argsort(first)}

    def ordered(self) -> Rows:
        """By `KEY`, numbers as text."""
        ranks = []
        for named in (self._columns.names[name] for name in KEY):
            order = sorted(range(len(named.values)), key=[str(value) for value in named.values].__getitem__)
            ranks.append(np.argsort(order)[self._codes(named)])
        return self.where(np.lexsort(ranks[::-1]))

    def numbers(self, name: str) -> np.ndarray:
        """[rows] of a field of `COUNTS` or `TIMES`."""
        values = np.asarray(self._columns.numbers[name])[self._at]
        return values.astype(bool) if name == "identical" else values

    def texts(self, name: str) -> list[Json]:
        """A field of `NAMES` of each row."""
        named = self._columns.names[name]
        return [named.values[code] for code in self._codes(named).tolist()]

    def cycles(self, name: str) -> np.ndarray:
        """int64 [cycles]: a field of `PER_CYCLE`, of one row after the other."""
        return self._columns.lists[name].joined(self._at).astype(np.int64)

    def num_cycles(self) -> np.ndarray:
        """[rows] cycles of each row."""
        return self._columns.lists["emitted"].lengths(self._at)

    def sums(self, name: str) -> np.ndarray:
        """[rows] sum of a field of `PER_CYCLE` over each row's cycles."""
        totals = np.concatenate([[0], np.cumsum(self.cycles(name))])
        ends = np.cumsum(self._columns.lists[name].lengths(self._at))
        return np.diff(totals[ends], prepend=0) if len(self) else ends

    def parts(self) -> dict[str, np.ndarray]:
        """Part of the time -> [rows] seconds of it; 0 where a row has no such part."""
        named, seconds = self._columns.parts, self._columns.seconds
        codes = self._codes(named)
        names = dict.fromkeys(name for code in dict.fromkeys(codes.tolist()) for name in named.values[code])
        columns = {name: np.zeros(len(self)) for name in names}
        for code in dict.fromkeys(codes.tolist()):
            mine, its = np.flatnonzero(codes == code), named.values[code]
            for name, values in zip(its, seconds.joined(self._at[mine]).reshape(len(mine), -1).T, strict=True):
                columns[name][mine] = values
        return columns

    def details(self) -> list[JsonMapping]:
        """`Row.details` of each row."""
        return [self._columns.details[at] for at in self._at.tolist()]

    def _codes(self, named: _Named) -> np.ndarray:
        return np.asarray(named.codes)[self._at]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """One line for each row."""
    with open(path, "w") as file:
        file.writelines(json.dumps(row.to_json()) + "\n" for row in rows)


def read_rows(path: Path) -> Rows:
    """Read the rows that `write_rows` wrote. Raises `UserError` if another version wrote them."""
    hint = "evaluate again: it goes on with the requests that were decoded"
    lines = read_json_lines(path, JsonObject, hint=hint)
    return Rows(Row.from_json(values, where=path) for values in lines)
