"""What a stage has finished, line by line, so that a killed run goes on behind it.

Every rank appends to a file of its own and reads all of them, so the number of ranks may change between two starts. A
line that was cut off while it was written does not count.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ...core import ranks


class ResumeLog:
    """Values by key, in `<stem>-<rank>.jsonl`."""

    def __init__(self, stem: Path):
        self._path = stem.with_name(f"{stem.name}-{ranks.rank()}.jsonl")
        self.values: dict[str, Any] = {}
        written = re.compile(re.escape(stem.name) + r"-\d+\.jsonl")
        for path in sorted(p for p in stem.parent.glob("*.jsonl") if written.fullmatch(p.name)):
            for line in path.read_text().splitlines():
                try:
                    key, value = json.loads(line)
                except ValueError:
                    continue  # cut off
                self.values[key] = value

    def add(self, key: str, value: Any) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a+b") as file:
            # A new value starts on a line of its own, also behind one that was cut off.
            if file.tell() and not _ends_a_line(file):
                file.write(b"\n")
            file.write(json.dumps([key, value]).encode() + b"\n")
        self.values[key] = value


def _ends_a_line(file: Any) -> bool:
    file.seek(-1, 2)
    return bool(file.read(1) == b"\n")
