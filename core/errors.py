"""The one exception that users see: what was found, where, and what to do about it.

Everything a user can cause (a recipe, a data file, a checkpoint) raises `UserError`; the command
line prints it without a traceback and exits with 2. Programmers' mistakes stay assertions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in a recipe, a file or a command, with what the user can do about it.

    Args:
        problem: what was found and what was expected.
        where: file, key or record that it was found in.
        hint: what to do.
    """

    def __init__(self, problem: str, *, where: str | None = None, hint: str | None = None):
        self.problem, self.where, self.hint = problem, where, hint
        lines = [problem]
        if where:
            lines.append(f"  where: {where}")
        if hint:
            lines.append(f"  hint:  {hint}")
        super().__init__("\n".join(lines))


class TrainingError(UserError):
    """Training stopped before anything was lost: the loss is not finite, a step was skipped, ..."""


def first_line(error: Exception) -> str:
    """The first line of another library's error, or the error's class name where it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names most like `name`, best first (empty where nothing is alike)."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=0.4)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint that names the nearest known names, or all of them where none is near."""
    known = list(known)
    close = nearest(name, known)
    if close:
        return "did you mean " + " or ".join(repr(n) for n in close) + "?"
    return "known names: " + (", ".join(sorted(known)) or "none")
