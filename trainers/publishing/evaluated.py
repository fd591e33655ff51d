"""A run's report as the rows of a card's table, whichever track wrote it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import UserError
from ...eval.run_tables import overview
from ...eval.tables import interval, markdown, markdown_table
from .places import without_places

REPORT = "report.json"


@dataclass(frozen=True)
class Evaluated:
    """Args:
    table: lines of Markdown.
    about: command, device, date and settings of the measurement.
    findings: what the report says in sentences.
    """

    table: list[str]
    about: dict[str, Any]
    findings: list[str]


def read_evaluation(folder: Path) -> Evaluated:
    """Of an `evaluate` stage's folder, without places. Raises `UserError` where it holds no report."""
    found = _read(folder)
    return Evaluated(*(without_places(part) for part in (found.table, found.about, found.findings)))


def _read(folder: Path) -> Evaluated:
    path = folder / REPORT
    if path.is_file():
        report = json.loads(path.read_text())
        if "version" in report:
            return Evaluated(markdown(overview(report)), report["about"], [f"- {told}" for told in report["findings"]])
        rows = _cells(report) if "cells" in report else _drawn(report) if "grid" in report else _answered(report)
        head = ["measured on", "method", "T", "n", "tau [95%]", "decoding", "end to end", "same tokens as plain"]
        return Evaluated(markdown_table(head, rows), report["about"], _findings(folder / "report.md"))
    suite, table = folder / "suite.json", folder / "suite.md"
    if suite.is_file() and table.is_file():
        lines = [line for line in table.read_text().splitlines() if line.startswith("|")]
        return Evaluated(lines, json.loads(suite.read_text()).get("about", {}), _findings(table))
    raise UserError(
        "no report of this evaluation", where=str(folder), cure=f"run stage {folder.name} again, which writes it"
    )


def _findings(path: Path) -> list[str]:
    """The sentences at the top of a report."""
    found: list[str] = []
    for line in path.read_text().splitlines():
        if line.startswith("- "):
            found.append(line)
        elif found or line.startswith("|"):
            break
    return found


def _tau(table: dict[str, Any]) -> str:
    return f"{table['tau']:.2f} {interval(table['tau_interval'])}"


def _same(table: dict[str, Any], greedy: bool) -> str:
    return f"{table['identical']}/{table['requests']}" if greedy else "-"


def _answered(report: dict[str, Any]) -> list[list[str]]:
    """Of draft LVLMs: benchmark -> mode."""
    temperature = report["about"].get("temperature", 0)
    return [
        [benchmark, f"{mode}, chain of {report['gamma']}", f"{temperature:g}", str(t["requests"]), _tau(t),
         f"{t['DSR']:.2f}x", f"{t['ESR']:.2f}x", _same(t, not temperature)]
        for benchmark, modes in report["tables"].items()
        for mode, t in modes.items()
    ]  # fmt: skip


def _cells(report: dict[str, Any]) -> list[list[str]]:
    """Of heads of language models: a cell for each set, length and temperature."""
    return [
        [c["set"] + (f", {c['visual_tokens']:,.0f} visual tokens" if c["visual_tokens"] else ""), c["method"],
         f"{c['temperature']:g}", str(c["requests"]), _tau(c), f"{c['DSR']:.2f}x", f"{c['ESR']:.2f}x",
         _same(c, not c["temperature"])]
        for c in report["cells"]
    ]  # fmt: skip


def _drawn(report: dict[str, Any]) -> list[list[str]]:
    """Of heads of image generators: temperature -> method."""
    return [
        [report["about"].get("prompts", "-"), method, f"{float(temperature):g}", str(t["requests"]), _tau(t), "-",
         f"{t['SR']:.2f}x", "-" if t["rule"] == "lantern" else _same(t, not float(temperature))]
        for temperature, methods in report["tables"].items()
        for method, t in methods.items()
    ]  # fmt: skip
