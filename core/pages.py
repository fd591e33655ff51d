"""Where the pages of docs/ are: beside the code in a checkout, inside the package of an installed wheel."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def page(name: str) -> str:
    """A page of docs/ as messages name it: by `docs/NAME` in the checkout's own folder, elsewhere by its whole path."""
    path, near = _ROOT / "docs" / name, Path("docs", name)
    return str(near) if near.exists() and near.samefile(path) else str(path)
