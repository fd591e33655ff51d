"""The one exception that users see: what was found, where, and what to do about it.

Everything a user can cause (a recipe, a data file, a checkpoint) raises `UserError`; the command
line prints it without a traceback and exits with 2. Programmers' mistakes stay assertions.

A setting that a section refuses in a validator raises `Refused`. `counted` and `page` are words of messages.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from .secrets import redact

# Exit codes. Scripts and schedulers branch on them: never give one another meaning.
OK, CRASH, MISTAKE, FAULTS, STOPPED = 0, 1, 2, 3, 143
EXIT_CODES = {
    OK: "done",
    CRASH: "crashed: a bug or a fault of the machine, with its traceback; or another rank was stopped or lost, which "
    "one sentence names; of `audit`: the server is at fault",
    MISTAKE: "a mistake in the command, the recipe or the data, or a run that had to stop; the message says what to do",
    FAULTS: "only `check`, `doctor`, `verify`, `verify-engine` and a dry run (`dry_run=true`): they found something "
    "that must be fixed, or a stage that does not fit the hardware (warnings alone give 0); "
    "of `audit`: too little was tried",
    STOPPED: "stopped on request (SIGTERM, Ctrl-C), with what was done saved; the same command continues from there",
}


class UserError(Exception):
    """A mistake in a recipe, a file or a command, with what the user can do about it. Secrets in it are hidden here,
    before anyone writes, sends or cuts the message.

    Args:
        problem: what was found and what was expected.
        key: the recipe's, dotted; the command line adds who set it. One that begins the problem is not shown again.
        where: file or record that it was found in.
        hint: what to do.
    """

    # Whether every rank that raises it says so; else the first one does for all.
    is_said_by_each_rank: ClassVar[bool] = False

    def __init__(self, problem: str, *, key: str | None = None, where: str | None = None, hint: str | None = None):
        self.problem = redact(encodable(problem))
        self.key, self.where, self.hint = (text and redact(encodable(text)) for text in (key, where, hint))
        lines = [self.problem]
        if self.found_at:
            lines.append(f"  where: {self.found_at}")
        if self.hint:
            lines.append(f"  hint:  {self.hint}")
        super().__init__("\n".join(lines))

    @property
    def found_at(self) -> str:
        """What is told of where it was found: the file or record, and the key."""
        key = f"key {self.key}" if self.key and not self.begins_with_key else None
        return ", ".join(part for part in (self.where, key) if part)

    @property
    def begins_with_key(self) -> bool:
        """Whether the problem shows the key."""
        return self.key is not None and re.match(rf"{re.escape(self.key)}(?![\w/-])", self.problem) is not None


class NotFound(UserError):
    """A file or a folder that a recipe names is not there."""


class TrainingError(UserError):
    """Training stopped before anything was lost: the loss is not finite, a step was skipped, ..."""


def encodable(text: str) -> str:
    r"""The text with lone surrogates (half a character, as JSON's "\ud83d" or a file name in another code has them) as
    escapes: no file and no terminal takes them.
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def shown_value(value: object) -> str:
    """A key or value for a message: printable, cut, and without secrets."""
    text = redact(value if isinstance(value, str) else repr(value))
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= 80 else f"{text[:40]}... ({len(text):,} characters)"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, then what led to it, each once."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        yield error
        chain.append(error)
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """The first line of another library's error without secrets, and the next where the first ends with a colon; or the
    error's class name where it has no message.
    """
    first, *more = redact(str(error)).strip().splitlines() or [type(error).__name__]
    return f"{first} {more[0].strip()}" if first.endswith(":") and more else first


def not_loaded(error: Exception) -> str:
    """Why torch did not load a pickle, without its advice to switch the guard off."""
    if (wanted := re.search(r"GLOBAL ([\w.]+)", str(error))) is not None:
        return f"asks for {wanted[1]}"
    line = first_line(error)
    return type(error).__name__ if "weights_only" in line or "Weights only" in line else line


def nearest(name: str, known: Iterable[str], count: int = 3, likeness: float = 0.5) -> list[str]:
    """The known names most like `name` by their letters, best first; empty where nothing is alike."""
    return difflib.get_close_matches(name, list(known), count, likeness)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint that names the nearest known names, or all of them where none is near."""
    known = list(known)
    if close := nearest(name, known):
        return f"did you mean {' or '.join(map(repr, close))}?"
    return "known names: " + (", ".join(sorted(known)) or "none")


def counted(number: int, noun: str) -> str:
    """A number with its noun, which takes an s but for one: `1 shard`, `1,200 shards`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


_ROOT = Path(__file__).resolve().parents[1]


def page(name: str) -> str:
    """A page of docs/ as messages name it: by `docs/NAME` in the checkout's own folder, elsewhere by its whole path."""
    path, near = _ROOT / "docs" / name, Path("docs", name)
    return str(near) if near.exists() and near.samefile(path) else str(path)


class Refused(ValueError):
    """Pydantic wraps it like any ValueError, and `recipes/config/load.py` prints its parts.

    Args:
        key: dotted, below the section that raises it.
        problem: what is wrong.
        hint: what to do.
    """

    def __init__(self, key: str, problem: str, hint: str | None = None):
        self.key, self.problem, self.hint = key, problem, hint
        super().__init__(": ".join(part for part in (key, problem, hint) if part))

    def under(self, place: str) -> Refused:
        """The same for a section that holds this one at `place`."""
        return Refused(f"{place}.{self.key}".rstrip("."), self.problem, self.hint)
