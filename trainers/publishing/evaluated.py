"""An evaluation's report as a model card tells it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import UserError
from ...eval.run_tables import overview
from ...eval.tables import markdown
from .places import without_places

REPORT = "report.json"


@dataclass(frozen=True)
class Evaluated:
    """Args:
    table: lines of Markdown.
    about: command, device, date and settings of the measurement.
    findings: what the report says in sentences, as a list of Markdown.
    """

    table: list[str]
    about: dict[str, Any]
    findings: list[str]


def read_evaluation(folder: Path) -> Evaluated:
    """Of an `evaluate` stage's folder, without places. Raises `UserError` where it holds no report."""
    path, again = folder / REPORT, f"run stage {folder.name} again, which writes it"
    if not path.is_file():
        raise UserError("no report of this evaluation", where=str(folder), cure=again)
    report = json.loads(path.read_text())
    try:
        table, findings = overview(report), [f"- {told}" for told in report["findings"]]
    except (KeyError, TypeError) as error:
        raise UserError("the report is of an earlier version", where=str(path), cure=again) from error
    parts = (markdown(table), report["about"], findings)
    return Evaluated(*(without_places(part) for part in parts))
