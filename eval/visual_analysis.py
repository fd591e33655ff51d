"""Moved to `eval/studies/drawn/section.py`; this name goes with the evaluate stage that uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from .rows import Row
from .studies.drawn.section import drawn_section
from .tables import section_markdown


def row_of(old: Mapping[str, Any], **more: Any) -> Row:
    """A row as evaluations kept it before `eval/rows.py`."""
    values: dict[str, Any] = {f.name: old[f.name] for f in fields(Row) if f.name in old}
    accepted = tuple(old["accepted"])
    whole = {"benchmark": "", "method": old["drafter"], "temperature": 0.0, "max_new_tokens": 0, "medium": "drawn",
             "tokens": (), "nodes": accepted, "draft_cycle_s": 0.0, "rule_s": 0.0}  # fmt: skip
    emitted = [a + 1 for a in accepted]
    if emitted:
        emitted[-1] -= sum(emitted) - old["emitted"]
    return Row(**(whole | values | {"accepted": accepted, "emitted": tuple(emitted)} | more))


def write_section(
    folder: Path, config: Any, readings: Any, results: Any, tables: Any, pictures: Any, captions: Any, *, plain: str,
    rules: Any, quality: Any, encoded: Any,
) -> list[str]:  # fmt: skip
    rows = [row_of(row, temperature=t, method=name)
            for t, methods in results.items() for name, some in methods.items() for row in some]  # fmt: skip
    section = drawn_section(
        folder, config, readings, rows, pictures, captions, rules=rules, quality=quality, encoded=encoded
    )
    return section_markdown(section)
