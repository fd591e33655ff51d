"""Bytes of tensors that are made and live at once, on whatever device they are."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Most bytes of tensors that were made inside and lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in given and key not in self.seen:
                    self.seen.add(key)
                    self.now += size
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._gone, key, size)
        return made

    def _gone(self, key: int, size: int) -> None:
        self.now -= size
        self.seen.discard(key)


class Watched(TorchDispatchMode):
    """Tells `note` of every operation inside, and of the tensors that it made."""

    def __init__(self, note: Callable[[Any, list[torch.Tensor]], Any]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.note(func, [part for part in tree_leaves(made) if isinstance(part, torch.Tensor)])
        return made
