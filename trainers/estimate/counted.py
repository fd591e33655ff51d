"""Bytes that a pass makes, counted on the meta device: its own code runs with the true shapes, and nothing is computed.

What lives, and how long, is Python's and autograd's own doing there as on a GPU. Kernels' workspaces and the gaps of an
allocator are not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.experimental import _config
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

META = torch.device("meta")
_SDPA = "scaled_dot_product_attention"


def most_bytes(run: Callable[[], Any]) -> float:
    """Most bytes of tensors that `run` makes on the meta device and that live at once; what it returns lives on."""
    # Masks of padding hide nothing here.
    whole: Any = _config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
    with _Live() as live, whole, patch.object(F, _SDPA, _attend):
        run()
    return float(live.most)


def flops(run: Callable[[], Any]) -> float:
    """Floating point operations of the matrix products that `run` makes on the meta device."""
    with FlopCounterMode(display=False) as counter:
        most_bytes(run)
    return float(counter.get_total_flops())


def along(count: Callable[[int], float], size: int, first: int) -> float:
    """`count(size)` of what grows by equal steps (layers, rows, chunks of a prompt), from counts at `first` and twice
    that: a large pass takes long to count.
    """
    if size <= 2 * first:
        return count(size)
    low, high = count(first), count(2 * first)
    return high + (high - low) * (size - 2 * first) / first


class _Live(TorchDispatchMode):
    """Bytes on the meta device, by storage; each is counted until nobody holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.held: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            return True  # transformers asks whether rows are whole and hold one sample each: they do
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors((made,)):
            if tensor.is_meta:
                self._count(tensor.untyped_storage(), args)
        return made

    def _count(self, storage: torch.UntypedStorage, args: Sequence[object]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.held or any(key == given.untyped_storage()._cdata for given in _tensors(args)):
            return  # a view, or written in place: perhaps of a weight, which was there before
        self.now += size
        self.most = max(self.most, self.now)
        self.held[key] = weakref.ref(storage, lambda _: self._gone(key, size))

    def _gone(self, key: int, size: int) -> None:
        self.now -= size
        del self.held[key]


def _tensors(args: Sequence[object]) -> list[Tensor]:
    given = [part for one in args for part in (one if isinstance(one, tuple | list) else (one,))]
    return [part for part in given if isinstance(part, Tensor)]


def _attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *_: object, **__: object) -> Tensor:
    """Attention as a fused kernel keeps it: inputs, output and log-sum-exp. The meta device would make all scores."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype)  # kernels add it to scores
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=attn_mask)[0]
