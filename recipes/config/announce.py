"""The first lines of a run, before torch is imported: what runs, how long it takes, and where its results will lie.

Times are those of the recipe's own header; nothing is estimated.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ...core.errors import UserError
from ...core.interpolation import resolved
from .load import read_words

ANNOUNCED = "DRAFTSMITH_ANNOUNCED"  # in the environment of ranks whose launcher has said it
CALLED_FROM = "DRAFTSMITH_CALLED_FROM"  # set by scripts/demo: the caller's folder, where it is another
_TIME = re.compile(r"(?:about|Hours:) [^.;]*?\b(?:minutes?|hours?)\b[^.;]*")


def shown_place(output: str | Path) -> str:
    """A folder of this process for whoever reads of it: whole where a script runs it from another folder than its
    caller's (`scripts/demo`).
    """
    return str(Path.cwd() / output) if CALLED_FROM in os.environ else str(output)


def announcement(arguments: Sequence[str]) -> str | None:
    """The lines for `recipe=NAME key=value ...`; None for a dry run, and for what `load` will refuse."""
    try:
        words = read_words(arguments)
        outputs = [value for key, value in words.overrides if key == "output"]
        output = str(resolved(words.tree | {"output": [words.tree.get("output"), *outputs][-1]})["output"])
    except UserError:
        return None
    if words.options.dry_run:
        return None
    title, time = _header(words.path)
    begun = ", which goes on with what is there" if (Path(output) / "run.yaml").is_file() else ""
    lines = [f"{words.name}: {title}" if title else words.name]
    lines += [f"  {time}"] if time and time not in title else []
    if time and words.options.stages is not None:
        lines.append(f"  of all stages; here only: {', '.join(words.options.stages)}")
    return "\n".join([*lines, f"  results: {shown_place(output)}{begun}; torch and DeepSpeed are loading"])


def _header(path: Path) -> tuple[str, str]:
    """Its first line, and its words on the time; "" where it has none."""
    comments = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comments.append(line.lstrip("# ").strip())
    found = _TIME.search(" ".join(comments))
    return (comments[0] if comments else ""), found[0] if found else ""
