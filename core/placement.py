"""Where the weights of a frozen model are loaded: directly onto this rank's device, or spread over its GPUs.

Loaded to the host first, eight ranks that each read 7B in bf16 take 130 GB of it. A model that is spread over GPUs and
does not fit would quietly spill to the host's memory or the disk, and each token would wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import ranks
from .errors import UserError
from .section import Section

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Names that accelerate gives to what lies on no GPU.
_SPILLED = ("cpu", "disk")
ONE_RANK = "python trains/train.py recipe=..., with all GPUs visible (a launcher with one rank hides the others)"


def onto(device: torch.device | None) -> dict[str, Any]:
    """Arguments with which `from_pretrained` reads weights straight onto a GPU, one tensor at a time."""
    return {} if device is None or device.type == "cpu" else {"device_map": {"": device}}


def spread(device_map: str, *, offload: str | None, key: str) -> dict[str, Any]:
    """Arguments with which `from_pretrained` spreads a model by accelerate's map.

    Args:
        offload: cpu: what no GPU holds may lie in the host's memory.
        key: of the section in the recipe, for the message.

    Raises:
        UserError: there are several ranks, each of which would take all GPUs.
    """
    check_one_rank(device_map, key=key)
    if device_map in _SPILLED or offload is not None or not torch.cuda.is_available():
        return {"device_map": device_map}
    from accelerate.utils import get_max_memory

    memory = get_max_memory()
    if torch.cuda.device_count() == 1:
        memory[0] = int(0.9 * memory[0])  # as transformers does, for caches and activations
    # What does not fit is then left on the disk, unread, and `check_spread` names it.
    return {"device_map": device_map, "max_memory": {**memory, "cpu": 0}}


def num_gpus(section: Section | None) -> int:
    """GPUs that all ranks of a stage hold together: one each, or all that one rank sees which spreads its target."""
    if ranks.device().type == "cpu":
        return 0
    is_spread = dict(section or ()).get("device_map") not in (None, "cpu")
    return torch.cuda.device_count() if is_spread else ranks.world_size()


def check_one_rank(device_map: str | None, *, key: str) -> None:
    """Raises `UserError` where several ranks would each spread a whole model over all GPUs of the node."""
    if device_map in (None, "cpu") or ranks.world_size() == 1:
        return
    raise UserError(
        f"{key}.device_map is {device_map}, and this run has {ranks.world_size()} ranks: each of them would spread the "
        "whole model over all GPUs",
        key=f"{key}.device_map",
        hint=f"start one rank: {ONE_RANK}; or set {key}.device_map=null where one GPU holds the model",
    )


def check_spread(model: PreTrainedModel, device_map: str, *, offload: str | None, key: str) -> None:
    """Raises `UserError` where accelerate has left a part of the model on no GPU, unless that was asked for."""
    if device_map in _SPILLED or not torch.cuda.is_available():
        return
    places: Mapping[str, Any] = getattr(model, "hf_device_map", None) or {}
    left = [name for name, place in places.items() if str(place) in _SPILLED]
    if offload is not None:
        left = ["the embedding"] if model.get_input_embeddings().weight.is_meta else []
    if left:
        raise UserError(
            f"{key}.device_map is {device_map}, and {torch.cuda.device_count()} GPU(s) do not hold {len(left)} of "
            f"{len(places)} parts of the model: {left[0]} is the first",
            key=f"{key}.device_map",
            hint=f"show the run more GPUs: {ONE_RANK}; or set {key}.offload=cpu, which leaves all but the embedding in "
            "the host's memory and is slow",
        )


@contextmanager
def without_storage(device: torch.device) -> Iterator[None]:
    """Modules that are built inside hold parameters for `fill`, on a GPU without storage; buffers are real.

    On a CPU nothing is changed.
    """
    if device.type == "cpu":
        yield
        return
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        yield


def fill(
    module: nn.Module, state: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype | None = None
) -> None:
    """Give a module that was built in `without_storage` its weights, and put it onto the device.

    Args:
        state: all of its tensors; they may lie anywhere.
        dtype: of floating-point tensors; None: as they are stored on a GPU, as the module has them on a CPU.

    Raises:
        RuntimeError: names or shapes differ, as of `load_state_dict`.
    """
    if device.type == "cpu":
        module.load_state_dict(state)
    else:
        moved = {name: t.to(device, dtype if t.is_floating_point() else None) for name, t in state.items()}
        module.load_state_dict(moved, assign=True)
    module.to(device, dtype)
