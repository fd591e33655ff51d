"""What lower layers tell the user without stopping: a damaged file that was made again, a line that was passed over."""

from __future__ import annotations

import sys

from . import ranks
from .secrets import redact


def notice(text: str) -> None:
    """One line on stderr, from one of the ranks that say it."""
    if ranks.is_first_to(f"notice {text}"):
        print(redact(f"note: {text}"), file=sys.stderr, flush=True)
