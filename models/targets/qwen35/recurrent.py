"""A cache for decoders with attention and recurrent layers: keys and values of the former, states of the latter.

A recurrent layer holds the state after the last committed place and what later places have written (`delta_rule`). A
place that is not accepted is dropped, and the state after an accepted path is computed from what its nodes wrote: no
state is ever taken back. Letters: R rows, H heads, N new places, P written places, D channels, W window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ....core.states import uploaded
from ...decoding.cache import CacheLayer
from ...decoding.model_cache import ModelCache, ModelCacheLayer, SizedLayer
from .delta_rule import Step, Written, behind, over_chain, over_tree


class RecurrentLayer(SizedLayer):
    """State and window of the convolution (the W places before a place that it reads) after `base` committed places,
    and what places from there on have written.
    """

    def __init__(self, capacity: int, window: int):
        self.capacity, self.window = capacity, window
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.length = self.base = 0
        self.state: Tensor | None = None  # [R,H,K,E]; None: nothing was run, all zeros
        self.inputs: Tensor | None = None  # [R,W+P,D] of the convolution: the window, then those that wrote
        self.written: Written | None = None  # [.,.,P,.]

    def move_to(self, length: int) -> None:
        """Sets the next place: after `base` anywhere among written places; before it there is no state."""
        count = 0 if self.written is None else self.written.keys.shape[2]
        assert self.base <= length <= self.base + count or length == 0, (
            f"a recurrent state after {self.base} places cannot go back to {length}"
        )
        if length == 0:
            self.reset()
        self.length = length

    def convolve(self, columns: Tensor, weight: Tensor, ancestors: Tensor | None) -> Tensor:
        """[R,N,D] in float32 or wider: each place's channels with those of its W nearest ancestors.

        Args:
            columns: [R,N,D] of the new places.
            weight: [D,W+1]; the last is the place's own.
            ancestors: [1 or R,N,P+N] bool, and the place itself, P the places from `base` to `length`; None: new
                places follow each other after the committed ones and are committed with this pass.
        """
        rows, count, channels = columns.shape
        if self.inputs is None:
            self.inputs = columns.new_zeros(rows, self.window, channels)
        ahead = self.length - self.base
        self.inputs = torch.cat([self.inputs[:, : self.window + ahead], columns], dim=1)
        wide = torch.promote_types(torch.float32, columns.dtype)
        if ancestors is None:
            assert ahead == 0, "a prompt after places that are not committed"
            mixed = F.conv1d(self.inputs.mT.to(wide), weight.unsqueeze(1).to(wide), groups=channels).mT
            self.inputs = self.inputs[:, count:]
            return mixed
        # Everybody's ancestors are the window, too; the nearest is the last that is seen.
        every = F.pad(ancestors, (self.window, 0), value=True)
        rank = every.flip(-1).cumsum(-1).flip(-1)  # of those that are seen, from the place itself: 1, 2, ...
        near = torch.stack([(every & (rank == n)).int().argmax(-1) for n in range(self.window + 1, 0, -1)], dim=-1)
        near = near.expand(rows, -1, -1)  # [R,N,W+1]
        chosen = self.inputs[torch.arange(rows, device=columns.device)[:, None, None], near]  # [R,N,W+1,D]
        return torch.einsum("rnwd,dw->rnd", chosen.to(wide), weight.to(wide))

    def recur(self, step: Step, ancestors: Tensor | None) -> Tensor:
        """Outputs [R,H,N,E] of the new places; `ancestors` as of `convolve`, which runs before."""
        rows, heads, count, width = step.keys.shape
        if self.state is None:
            self.state = step.keys.new_zeros(rows, heads, width, step.values.shape[-1])
        if ancestors is None:
            outputs, self.state = over_chain(step, self.state)
            self.base += count
            return outputs
        ahead = self.length - self.base
        before = self.written.first(ahead) if self.written is not None and ahead else None
        outputs, self.written = over_tree(step, self.state, ancestors, before)
        return outputs

    def commit(self, path: Sequence[int]) -> None:
        """Keep the written places `path`, each the next one's parent, and drop the others."""
        if path:
            assert self.state is not None and self.inputs is not None and self.written is not None
            self.state = behind(self.state, self.written, path)
            window = list(range(self.window)) + [self.window + place for place in path]
            index = uploaded(torch.tensor(window[-self.window :]), self.inputs.device)
            self.inputs = self.inputs.index_select(1, index)
        elif self.inputs is not None:
            self.inputs = self.inputs[:, : self.window]
        self.written = None
        self.length = self.base = self.base + len(path)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; what is not committed goes."""
        self.commit(())
        if self.state is not None and self.inputs is not None:
            self.state, self.inputs = self.state[list(rows)], self.inputs[list(rows)]


class HybridCache(ModelCache):
    """The cache of a decoder some of whose layers recur (`recurs`), over convolutions of `window` places."""

    def __init__(self, recurs: Sequence[bool], capacity: int, window: int):
        super().__init__(len(recurs), capacity)
        self.layers: list[Any] = [
            RecurrentLayer(capacity, window) if recurring else ModelCacheLayer(capacity) for recurring in recurs
        ]
        self.recurs = tuple(recurs)
        self._prompt = False
        self._real: Tensor | None = None

    @property
    def length(self) -> int:
        return int(self.layers[0].length)

    @property
    def kv_layers(self) -> list[CacheLayer]:
        """The layers that attend."""
        pairs = zip(self.layers, self.recurs, strict=True)
        return cast(list[CacheLayer], [layer for layer, recurs in pairs if not recurs])

    @property
    def recurrent(self) -> list[RecurrentLayer]:
        """The layers that recur."""
        return [layer for layer, recurs in zip(self.layers, self.recurs, strict=True) if recurs]

    @contextmanager
    def running_prompt(self, real: Tensor | None) -> Iterator[None]:
        """Within it, places follow each other, and those of `real` [R,T] bool that are False write nothing."""
        self._prompt, self._real = True, real
        try:
            yield
        finally:
            self._prompt, self._real = False, None

    def ancestors(self, layer: RecurrentLayer, mask: Tensor | None, count: int, device: torch.device) -> Tensor | None:
        """The ancestors for `RecurrentLayer.convolve`, from a mask [.,1,N,K] of attention; None there: a chain."""
        if self._prompt:
            return None
        if mask is None:
            places = layer.length - layer.base + torch.arange(count, device=device)
            return (torch.arange(layer.length - layer.base + count, device=device) <= places[:, None])[None]
        return (mask if mask.dtype == torch.bool else mask == 0)[:, 0, :, layer.base :]

    def real(self, first: int, count: int) -> Tensor | None:
        """[R,N,1] bool of the places from `first`: no padding; None: there is none."""
        return None if self._real is None else self._real[:, first : first + count, None]

    def crop_to(self, length: int) -> None:
        """Crop as `Cache.crop_to` does, to a place that recurrent layers have not committed yet, or to 0."""
        super().crop_to(length)
        for layer in self.recurrent:
            layer.move_to(length)

    def advance(self, count: int) -> None:
        length = self.length + count
        super().crop_to(length)
        for layer in self.recurrent:
            layer.commit(range(length - layer.base))  # a prompt's pass has committed its own

    def commit(self, written: Sequence[int]) -> None:
        """Commit as `Cache.commit` does; each of `written` is the next one's parent."""
        length = self.length + len(written)
        self._gather(written)
        for layer in self.recurrent:
            layer.commit(written)
        super().crop_to(length)

    def select_rows(self, rows: Sequence[int]) -> None:
        super().select_rows(rows)
        for layer in self.recurrent:
            layer.select_rows(rows)

    def empty(self) -> None:
        super().empty()
        for layer in self.recurrent:
            layer.reset()

    def written_at(self, places: Tensor, reach: int | None = None) -> NoReturn:
        """Raises `AssertionError`: a graph would repeat the shapes of one state (`evaluate/text.py: why_not`)."""
        raise AssertionError("recurrent layers are not captured")
