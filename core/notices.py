"""Notices of lower layers to the user that do not stop a run: a damaged file was rebuilt, a line was skipped."""

from __future__ import annotations

import sys

from . import ranks
from .secrets import redact


def notice(text: str) -> None:
    """One line on stderr, from one of the ranks that say it."""
    if ranks.is_first_to(f"notice {text}"):
        print(redact(f"note: {text}"), file=sys.stderr, flush=True)
