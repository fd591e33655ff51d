"""Clones of peers' repositories, made importable: names of transformers 4 that their files import are put back."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any, TypedDict

import transformers.utils
from draftsmith.core.errors import UserError

EAGLE, LANTERN = "EAGLE", "LANTERN"
COMMITS = {EAGLE: "cb7e084", LANTERN: "3a56e45"}


def clone(peers: Path, name: str, inner: str = "") -> Path:
    """The folder of a clone, or one in it, from which modules are now imported first.

    Raises:
        UserError: there is none.
    """
    folder = peers / name / inner
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder", where="--peers", hint="see the head of this script")
    if not hasattr(transformers.utils, "LossKwargs"):
        vars(transformers.utils)["LossKwargs"] = TypedDict("LossKwargs", {}, total=False)  # type: ignore[operator]
    sys.path.insert(0, str(folder))
    return folder


def empty_module(name: str, folder: Path | None = None, **names: Any) -> None:
    """Stand a module in the place of one whose file is not read: a package over `folder`, with these names."""
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update(names)
    if folder is not None:
        module.__path__ = [str(folder)]
