"""A setting that a section refuses in a validator: the message names the key, the problem and what to do instead."""

from __future__ import annotations


class Refused(ValueError):
    """Pydantic wraps it like any ValueError, and `recipes/config/messages.py` prints its parts.

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
