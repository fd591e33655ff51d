"""A picture or clip that lies inside a record file (an Arrow table, a tar) instead of a file of its own.

It is opened like a path, so that readers need not know the difference; its bytes are read only then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO


@dataclass(frozen=True)
class Embedded:
    """Encoded bytes.

    Args:
        where: file and place, for messages.
        stream: opens the bytes anew each time.
    """

    where: str
    stream: Callable[[], BinaryIO]

    def open(self, mode: str = "rb") -> BinaryIO:
        """The encoded bytes, as `Path.open("rb")` gives those of a file."""
        assert mode == "rb", mode
        return self.stream()

    def is_file(self) -> bool:
        """Whether the bytes are there: its record file holds them."""
        return True

    def __str__(self) -> str:
        return self.where
