"""Provenance of a run: versions of the packages that matter, and the state of the checkout."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

from ...core.json_types import JsonObject

PACKAGES = (
    "torch",
    "deepspeed",
    "transformers",
    "peft",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
)


def versions() -> JsonObject:
    """Python, packages (None: not installed) and the checkout's git commit with its number of changed files."""
    changed = _git("status", "--porcelain") or ""
    git = {"commit": commit(), "changed_files": len(changed.splitlines())}
    return {"python": platform.python_version(), "packages": packages(), "git": git}


def packages() -> dict[str, str | None]:
    """The versions of those that matter; None: not installed."""
    return {name: version_of(name) for name in PACKAGES}


def commit() -> str | None:
    """The checkout's; None: this is an installed wheel, or git does not answer."""
    return _git("rev-parse", "HEAD")


def version_of(name: str) -> str | None:
    """Return the version of an installed package; None: it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Output of git in this checkout; None for an installed wheel, whatever checkout its environment lies in."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
