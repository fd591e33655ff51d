"""Findings of `check`, `doctor` and `verify`: level, subject, description and hint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from ...core.errors import FAULTS, OK, UserError
from ...core.secrets import redact

Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """The result of one look. A fault must be fixed; a warning does not stop a run."""

    level: Level
    subject: str
    what: str
    hint: str | None = None
    is_absent: bool = False  # what it is of is not on disk

    def __post_init__(self) -> None:
        assert self.level == "ok" or self.hint, f"{self.subject}: what is wrong has a hint"


# Each takes a subject, a description and, but for `ok`, a hint.
ok, warning, fault = (partial(Finding, level) for level in get_args(Level))


def graded(is_fine: bool, subject: str, what: str, hint: str, *, level: Level = "warning") -> Finding:
    """A finding of this level, unless all `is_fine`."""
    return ok(subject, what) if is_fine else Finding(level, subject, what, hint)


def tried(subject: str, look: Callable[[], str | None], hint: str) -> Finding:
    """What `look` says, or the `UserError` that it raises as a fault; `hint` where the error has none."""
    try:
        return ok(subject, look() or "as it should be")
    except UserError as error:
        place = f" ({error.found_at})" if error.found_at else ""
        return fault(subject, f"{error.problem}{place}", error.hint or hint)


def report(findings: Sequence[Finding], title: str = "") -> int:
    """Print a line for each finding, with its hint under it, and the sum. Returns the command's exit code."""
    width = max((len(f.subject) for f in findings), default=0)
    lines = []
    for f in findings:
        lines.append(f"{f.level:<8} {f.subject:<{width}}  {f.what}")
        if f.hint:
            lines.append(f"{'':<8} {'':<{width}}  hint: {f.hint}")
    faults, warnings = (sum(f.level == level for f in findings) for level in ("fault", "warning"))
    text = "\n".join([*lines, "", f"{faults} fault(s), {warnings} warning(s)"])
    print(redact(title + text), flush=True)
    return FAULTS if faults else OK
