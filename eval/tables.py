"""How the reports write tables and intervals."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; cells are text."""
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def interval(ends: Sequence[float]) -> str:
    """[low, high] with two decimals."""
    low, high = ends
    return f"[{low:.2f}, {high:.2f}]"
