"""Findings of `check` and `doctor`: level, description and hint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    level: Level
    subject: str
    what: str
    hint: str | None = None
    is_absent: bool = False  # what it is of is not on disk

    def __post_init__(self) -> None:
        assert self.level == "ok" or self.hint, f"{self.subject}: what is wrong has a hint"


def ok(subject: str, what: str) -> Finding:
    """A finding of nothing wrong."""
    return Finding("ok", subject, what)


def warning(subject: str, what: str, hint: str) -> Finding:
    """A finding that does not stop a run; `hint` says what to do."""
    return Finding("warning", subject, what, hint)


def fault(subject: str, what: str, hint: str) -> Finding:
    """A finding that must be fixed; `hint` says how."""
    return Finding("fault", subject, what, hint)


def shown(findings: Sequence[Finding]) -> str:
    """A line for each, with its hint under it, and the sum."""
    width = max((len(f.subject) for f in findings), default=0)
    lines = []
    for f in findings:
        lines.append(f"{f.level:<8} {f.subject:<{width}}  {f.what}")
        if f.hint:
            lines.append(f"{'':<8} {'':<{width}}  hint: {f.hint}")
    faults, warnings = (sum(f.level == level for f in findings) for level in ("fault", "warning"))
    return "\n".join([*lines, "", f"{faults} fault(s), {warnings} warning(s)"])


def any_fault(findings: Sequence[Finding]) -> bool:
    """Whether something must be fixed. Warnings do not count."""
    return any(f.level == "fault" for f in findings)
