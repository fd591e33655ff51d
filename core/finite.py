"""NaN and infinity are stopped where they enter: weights when they load, scores before a token is taken from them.

A target of NaNs would agree with itself: every answer would be "identical to plain decoding".
Letters: B rows, T places, D width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from .errors import UserError
from .states import TargetStates

_SINGLE = "model.safetensors"
_OVERFLOW = (
    "the weights were finite when they were loaded, so activations overflow: try a type with a larger range (dtype: "
    "bfloat16 or float32), and look whether weights and config.json belong together"
)


class NotFinite(UserError):
    """NaN or infinity in what a model computed."""

    def __init__(self, what: str, request: str | None = None):
        self.what = what
        super().__init__(f"{what} are not finite (NaN or infinity)", where=request and f"request {request}",
                         hint=_OVERFLOW)  # fmt: skip

    def of(self, request: str) -> NotFinite:
        """The same error with the request's name."""
        return NotFinite(self.what, request)


# Of Gemma 4's layers that cut off what is too large: where nothing is, these numbers are infinite.
_BOUNDS = (".input_min", ".input_max", ".output_min", ".output_max")


def check_module(model: nn.Module, source: str | Path) -> None:
    """Raises `UserError` with the file and the tensor where a weight or a stored buffer of `model` is not finite."""
    check_weights(model.state_dict(), source)


@torch.no_grad()
def check_weights(tensors: Mapping[str, Tensor], source: str | Path) -> None:
    """Raises `UserError` with the file and the tensor where one is not finite; each is read once, where it lies."""
    pointers = set()
    for name, tensor in tensors.items():
        tensor = getattr(tensor, "_local_tensor", tensor)  # of one that is cut over ranks, this rank's part
        # What accelerate has left on the disk is read when it is used; scores are checked then.
        if not tensor.is_floating_point() or tensor.is_meta or tensor.numel() == 0 or tensor.data_ptr() in pointers:
            continue
        pointers.add(tensor.data_ptr())  # tied weights have two names
        # The extremes hold no second tensor of this size, and a NaN is both of them.
        extremes = torch.stack(torch.aminmax(tensor.float() if tensor.element_size() == 1 else tensor))
        if name.endswith(_BOUNDS) and not bool(extremes.isnan().any()):
            continue
        if not bool(extremes.isfinite().all()):
            raise UserError(
                f"weight {name} holds NaN or infinity", where=_file_of(source, name),
                hint="the weights are damaged, or their training diverged: fetch them again, or train again",
            )  # fmt: skip


def _file_of(source: str | Path, name: str) -> str:
    folder = Path(source)
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # the weight is what is told, not its index
        return str(folder / json.loads((folder / f"{_SINGLE}.index.json").read_text())["weight_map"][name])
    return str(folder / _SINGLE if (folder / _SINGLE).is_file() else source)


def likeliest(scores: Tensor) -> Tensor:
    """[...,V] -> [...] int64 ids of the largest scores; -1 where a row has NaN, plus infinity or nothing but minus
    infinity. Nothing waits for the device: who reads the ids reads that with them.
    """
    best = scores.argmax(-1)  # a NaN is the largest
    return best.where(scores.gather(-1, best.unsqueeze(-1)).squeeze(-1).isfinite(), -1)


def check_states(states: TargetStates, names: Iterable[str]) -> None:
    """Raises `NotFinite` with the first of `names` (B) whose row of a state is not finite."""
    parts = [*([] if states.feature is None else [states.feature]), *states.layers.values()]
    finite = torch.stack([part.isfinite().flatten(1).all(1) for part in parts]).all(0)
    for name, is_finite in zip(names, finite.tolist(), strict=False):  # fillers have no name
        if not is_finite:
            raise NotFinite("the target's hidden states", name)
