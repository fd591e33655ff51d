"""Peers' code made importable: a clone of SpecForge and an unpacked speculators, without what they depend on."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

from draftsmith.core.errors import UserError


def importable(peers: Path, name: str) -> Path:
    """The folder of a peer, from which modules are now imported first.

    Raises:
        UserError: there is none.
    """
    folder = peers / name
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder", where="--peers", hint="see the head of scripts/peers/measure.py")
    sys.path.insert(0, str(folder))
    return folder


def empty_module(name: str, folder: Path | None = None, **names: Any) -> None:
    """Stand a module in the place of one whose file is not read: a package over `folder`, with these names."""
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update(names)
    if folder is not None:
        module.__path__ = [str(folder)]


def specforge(peers: Path, method: str) -> None:
    """Makes one folder of SpecForge's `algorithms` importable: the package itself registers every method."""
    folder = importable(peers, "SpecForge") / "specforge" / "algorithms"
    empty_module("specforge.algorithms", folder)
    empty_module(f"specforge.algorithms.{method}", folder / method)


def speculators(peers: Path) -> None:
    """Makes speculators importable without the parts that read datasets and ask serving engines."""
    importable(peers, "speculators")
    empty_module("speculators.train", peers)
    empty_module("speculators.train.data", BatchType=dict)
