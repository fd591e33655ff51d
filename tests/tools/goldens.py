"""How goldens are written, read and compared; of `freeze.py`, which stands beside this file."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write(path: Path, value: Any) -> None:
    """Write a string as it is and any other value as JSON; folders are made as needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else pretty(value) + "\n")


def read(path: Path) -> Any:
    """The value of a .json file, or another file's text; None where there is no file."""
    if not path.is_file():
        return None
    text = path.read_text()
    return json.loads(text) if path.suffix == ".json" else text


def pretty(value: Any, depth: int = 0) -> str:
    """JSON with a line for each key, and lists of numbers in one line."""
    pad = " " * (depth + 1)
    if isinstance(value, dict) and value:
        lines = [f"{pad}{json.dumps(key)}: {pretty(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"
    if isinstance(value, list) and any(isinstance(item, dict | list | str) for item in value):
        return "[\n" + ",\n".join(pad + pretty(item, depth + 1) for item in value) + "\n" + " " * depth + "]"
    return json.dumps(value)


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Key and value of everything in a file; texts by their lines."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from leaves(item, f"{key}/{name}" if key else str(name))
    elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        # In any order: what a request was continued with.
        for item, count in Counter(value).items():
            yield f"{key}/{item}", count
    elif isinstance(value, list) and value:
        for number, item in enumerate(value):
            yield from leaves(item, f"{key}[{number}]")
    elif isinstance(value, str) and "\n" in value:
        for number, line in enumerate(value.splitlines(), 1):
            yield f"line {number}", line
    else:
        yield key, value


ABSENT = "(absent)"
_HASH = re.compile(r"[0-9a-f]{16}$")


def differences(old: Any, new: Any, *, same_machine: bool, close: float | None = None) -> list[str]:
    """`key: old -> new` for everything that differs.

    Args:
        close: what numbers may differ by, relatively, of other forms of the same arithmetic; hashes of weights then may
            differ as well, and tokens and counts may not. None: nothing may.
    """
    before, after = dict(leaves(old)), dict(leaves(new))
    return [
        f"{key}: {before.get(key, ABSENT)!r} -> {after.get(key, ABSENT)!r}"
        for key in [*before, *(key for key in after if key not in before)]
        if not _equal(key, before.get(key, ABSENT), after.get(key, ABSENT), same_machine, close)
    ]


def _equal(key: str, old: Any, new: Any, same_machine: bool, close: float | None) -> bool:
    if isinstance(old, float) and isinstance(new, float) and math.isnan(old) and math.isnan(new):
        return True
    if same_machine and close is not None and old != new:
        if isinstance(old, str) and isinstance(new, str):
            return _HASH.search(old) is not None and _HASH.sub("", old) == _HASH.sub("", new)
        return (
            isinstance(old, float) and isinstance(new, float) and math.isclose(old, new, rel_tol=close, abs_tol=close)
        )
    if same_machine or old == new:
        return bool(old == new and type(old) is type(new))
    if key.startswith(("decoded/", "taus/")):
        return True
    if isinstance(old, str) and isinstance(new, str):
        return _HASH.sub("", old) == _HASH.sub("", new)
    if isinstance(old, float) and isinstance(new, float):
        return not key.endswith("loss") or math.isclose(old, new, rel_tol=1e-2)
    return False
