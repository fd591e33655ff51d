"""Damages of files that a run leaves, and what whoever opens them must say."""

from collections.abc import Callable
from pathlib import Path

from draftsmith.core.errors import UserError
from draftsmith.core.files import SMALL_BYTES

MISSING, HUGE = "missing", "huge"
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    MISSING: lambda data: data, "empty": lambda data: b"", "cut in half": lambda data: data[: len(data) // 2],
    "one flipped bit": lambda data: flipped(data),
    "not UTF-8": lambda data: data[: len(data) // 2] + b"\xff\xfe" + data[len(data) // 2 :],
    "a list": lambda data: b"[1]", "nothing": lambda data: b"null", "no fields": lambda data: b"{}",
    HUGE: lambda data: data
}  # fmt: skip
# The file itself is wrong in a way that the error must name it by; of the others the folder may be all that is known.
NAMED = ("empty", "cut in half", "not UTF-8", "a list", "nothing", HUGE)


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def told(path: Path, load: Callable[[], object]) -> set[str]:
    """The damages of `path` that `load` refuses. What it raises is a `UserError` that names the file, or its folder."""
    whole = path.read_bytes()
    refused: dict[str, UserError] = {}
    for name, damage in DAMAGES.items():
        try:
            path.write_bytes(damage(whole))
            if name == MISSING:
                path.unlink()
            if name == HUGE:
                with open(path, "ab") as file:
                    file.truncate(4 * SMALL_BYTES + 1)
            try:
                load()
            except UserError as error:
                refused[name] = error
        finally:
            path.write_bytes(whole)
    load()
    for name, error in refused.items():
        assert (path.name if name in NAMED else str(path.parent)) in str(error), (name, str(error))
        assert error.hint, (name, str(error))
    return set(refused)
