"""Clones of peers' repositories, made importable: names of transformers 4 that their files import are put back."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict
from unittest.mock import patch

import transformers.utils
from draftsmith.core.errors import UserError
from torch import nn
from transformers import Cache, DynamicCache

EAGLE, LANTERN, DFLASH, DEEPSPEC = "EAGLE", "LANTERN", "dflash", "DeepSpec"
SPECULATORS, SPECFORGE = "speculators", "SpecForge"


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


def specforge(peers: Path, method: str) -> None:
    """SpecForge's clone, of whose `algorithms` this one is importable: the package registers all, and reads their
    configs.

    Raises:
        UserError: as of `clone`.
    """
    folder = clone(peers, SPECFORGE) / "specforge" / "algorithms"
    empty_module("specforge.algorithms", folder)
    empty_module(f"specforge.algorithms.{method}", folder / method)


def speculators(peers: Path) -> None:
    """The installed speculators, without the rest of its package, which reads datasets and asks serving engines.

    Raises:
        UserError: as of `clone`.
    """
    clone(peers, SPECULATORS)
    empty_module("speculators.train", peers)
    empty_module("speculators.train.data", BatchType=dict)


def joined(kind: Any, base: Any, layer: Any, config: Any, weights: Mapping[str, Any]) -> Any:
    """EAGLE's model, or LANTERN's, of its two parts; its own way to them reads folders.

    Args:
        weights: of the layer, all that it has.
    """
    layer.diff_device = False
    missing = layer.load_state_dict(weights, strict=False).missing_keys
    assert not missing, missing
    layer.init_tree()
    whole = kind.__new__(kind)
    nn.Module.__init__(whole)
    whole.base_model, whole.ea_layer, whole.config = base, layer, config
    return whole


def accepted_by(owner: Any) -> list[Any]:
    """The list that is filled with what each of their cycles accepts: `owner` has the `evaluate_posterior`."""
    accepted: list[Any] = []
    judge = owner.evaluate_posterior

    def noted(*arguments: Any, **options: Any) -> Any:
        outcome = judge(*arguments, **options)
        accepted.append(outcome[1])
        return outcome

    owner.evaluate_posterior = noted
    return accepted


@contextmanager
def crops_to_lengths() -> Iterator[None]:
    """Let caches be cropped to a length, which transformers 5 takes for a mistake: it counts what is removed. Until the
    context ends, because `crop(0)` of its own loops removes nothing.
    """
    crop = DynamicCache.crop

    def cropped(self: Cache, length: int) -> None:
        removed = length if length < 0 else length - self.get_seq_length()
        if removed < 0:
            crop(self, removed)

    with patch.object(DynamicCache, "crop", cropped):
        yield
