"""What an evaluation measured, read back from its report: for trackers, comparisons of runs, and model cards."""

from __future__ import annotations

from types import SimpleNamespace

from ..core.json_types import JsonMapping, JsonObject
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
NEWER = {"drafters": (), "relaxed": False, "expected_speedup": None, "DSR_spread": None}  # than the oldest report


class Cell(SimpleNamespace):
    """A method on a set of requests: the fields of a cell of report.json under their names; None: not measured.

    Beside them stand `where`, all that it was measured on as far as the report's cells differ, and `of`, the set with
    its budget and turn. `identical` is None where outputs need not be plain decoding's.
    """


def cells(report: JsonMapping) -> list[Cell]:
    """Every cell of a `report.json`, in its order.

    Raises:
        KeyError: an earlier version of draftsmith wrote it.
    """
    hot, long = (len({cell[key] for cell in report["cells"]}) > 1 for key in ("temperature", "max_new_tokens"))
    return [_cell(cell, hot, long) for cell in report["cells"]]


def _cell(cell: JsonObject, with_temperature: bool, with_length: bool) -> Cell:
    of = cell["benchmark"] + (f" at {cell['budget']}" if cell["budget"] else "")
    of += f", {cell['turn']}" if cell["turn"] else ""
    where = [of, with_temperature and f"T {cell['temperature']:g}", with_length and f"{cell['max_new_tokens']} new",
             "engine" in cell and f"{cell['engine']}, {cell['concurrency']} at once"]  # fmt: skip
    values: JsonObject = NEWER | {"answers": cell["requests"]} | cell
    for name in {"tau_interval", "DSR_spread"} & {*cell}:
        values[name] = None if None in cell[name] else tuple(cell[name])
    values |= {name: None if cell[name] is None else float(cell[name]) for name in ("tau", "DSR", "ESR")}
    values["identical"] = int(cell["identical"]) if cell["exact"] else None
    return Cell(**values, where=", ".join(part for part in where if part), of=of)


def readable(cell: Cell) -> list[object]:
    """The cell under `COLUMNS`."""
    ends = cell.tau_interval or (None, None)
    return [cell.where, cell.method, cell.requests, cell.tau, *ends, cell.DSR, cell.identical]


def overview(report: JsonMapping) -> Table:
    """What a model card says of an evaluation; of suites the first turns."""
    columns = (text("measured on"), text("method"), Column("temperature", "g"), Column("n", "d"),
               Column("tau [95%]", kind="interval"), Column("decoding", unit="x"), Column("end to end", unit="x"),
               Column("same tokens as plain", kind="count"))  # fmt: skip
    rows = tuple(
        (c.where, c.method, c.temperature, c.requests, (c.tau, *c.tau_interval) if c.tau and c.tau_interval else None,
         c.DSR, c.ESR, None if c.identical is None else (c.identical, c.answers))
        for c in cells({**report, "cells": [c for c in report["cells"] if c["turn"] in ("", "first")]})
    )  # fmt: skip
    return Table("", columns, rows)
