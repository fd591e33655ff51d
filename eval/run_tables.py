"""What an evaluation measured, read back from its report: for trackers, comparisons of runs, and model cards."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core.json_types import Json, JsonMapping
from .tables import Column, Table, text

COLUMNS = (
    "measured on",
    "method",
    "requests",
    "tau",
    "tau 95% low",
    "tau 95% high",
    "speedup of decoding",
    "identical",
)


@dataclass(frozen=True)
class Cell:
    """One method on one set of requests; None: not measured."""

    where: str
    method: str
    requests: int
    tau: float | None  # tokens per target pass, bonus token included; None: no cycle was run
    interval: tuple[float, float] | None  # 95%, of tau
    speedup: float | None  # of decoding, against plain decoding in the same run
    identical: int | None  # answers whose tokens are plain decoding's; None: they need not be
    temperature: float = 0.0
    end_to_end: float | None = None  # speedup with the prefill
    expected: float | None = None  # speedup of decoding that tau and the cost of a cycle promise
    quartiles: tuple[float, float] | None = None  # of the speedup of decoding, over requests
    max_new_tokens: int = 0
    drafters: tuple[str, ...] = ()  # stages that trained them, or names that the evaluation gave them
    relaxed: bool = False  # outputs are not distributed as the target's
    answers: int = 0  # of all drafters, which decode the same requests
    requests_of: str = ""  # the set, its budget and turn, whatever else `where` says


def cells(report: JsonMapping) -> list[Cell]:
    """Every cell of a `report.json`, in its order.

    Raises:
        KeyError: an earlier version of draftsmith wrote it.
    """
    many_t, many_new = (len({cell[key] for cell in report["cells"]}) > 1 for key in ("temperature", "max_new_tokens"))
    return [_cell(cell, many_t, many_new) for cell in report["cells"]]


def _cell(cell: JsonMapping, with_temperature: bool, with_length: bool) -> Cell:
    name = cell["benchmark"] + (f" at {cell['budget']}" if cell["budget"] else "")
    parts = [name, cell["turn"], with_temperature and f"T {cell['temperature']:g}",
             with_length and f"{cell['max_new_tokens']} new",
             "engine" in cell and f"{cell['engine']}, {cell['concurrency']} at once"]  # fmt: skip
    return Cell(
        where=", ".join(part for part in parts if part),
        method=cell["method"],
        requests=int(cell["requests"]),
        tau=_number(cell["tau"]),
        interval=_pair(tuple(cell["tau_interval"])),
        speedup=_number(cell["DSR"]),
        identical=int(cell["identical"]) if cell["exact"] else None,
        temperature=float(cell["temperature"]),
        end_to_end=_number(cell["ESR"]),
        expected=_number(cell.get("expected_speedup")),
        quartiles=_pair(cell.get("DSR_spread")),
        max_new_tokens=int(cell["max_new_tokens"]),
        drafters=tuple(cell.get("drafters", ())),
        relaxed=bool(cell.get("relaxed", False)),
        answers=int(cell.get("answers", cell["requests"])),
        requests_of=", ".join(part for part in parts[:2] if part),
    )


def _number(value: Json) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def _pair(values: Json) -> tuple[float, float] | None:
    low, high = map(_number, values or (None, None))
    return None if low is None or high is None else (low, high)


def readable(cell: Cell) -> list[object]:
    """The cell under `COLUMNS`."""
    low, high = cell.interval or (None, None)
    return [cell.where, cell.method, cell.requests, cell.tau, low, high, cell.speedup, cell.identical]


def overview(report: JsonMapping) -> Table:
    """What a model card says of an evaluation; of suites the first turns."""
    columns = (text("measured on"), text("method"), Column("temperature", "g"), Column("n", "d"),
               Column("tau [95%]", kind="interval"), Column("decoding", unit="x"), Column("end to end", unit="x"),
               Column("same tokens as plain", kind="count"))  # fmt: skip
    rows = tuple(
        (c.where, c.method, c.temperature, c.requests, (c.tau, *c.interval) if c.tau and c.interval else None,
         c.speedup, c.end_to_end, None if c.identical is None else (c.identical, c.answers))
        for c in cells({**report, "cells": [c for c in report["cells"] if c["turn"] in ("", "first")]})
    )  # fmt: skip
    return Table("", columns, rows)
