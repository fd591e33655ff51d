"""DFlash over image codes: a block along the raster row, whose cells are known before its codes are.

The draft of dflash.py beside an image generator: keys and values come from the generator's states, queries are the last
drawn code and masks at the next cells. Rows come with and without the condition (guidance), which drops out in training
as EAGLE's does; the two rows' features are combined by the generator's own guidance before anything is warped.
Letters: R rows, B samples, T places, N committed states of a cycle, Q places of a block, K masks, J joined states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.batch import CodeBatch
from ...core.states import TargetStates, uploaded
from ..attention import attend, attend_all
from ..decoding.cache import Cache
from ..decoding.warp import Warp
from ..layer import LayerShape
from ..targets.base import Target, TargetStep, Verified
from .dflash_module import DflashHead
from .dflash_settings import DflashSettings
from .dflash_training import DflashTraining, Sequences
from .dflash_walk import answers_of


def within_grid(positions: Tensor, layer: LayerShape) -> Tensor:
    """Positions that have a rotation: what a block says of places far behind the last cell is never drawn."""
    return positions.clamp(max=layer.zeros_before + layer.grid**2) if layer.rope == "grid" else positions


def above_next(ids: Tensor, codes: Tensor, grid: int) -> Tensor:
    """[B,T] the code above the one that follows each of `ids` [B,T]; -1 where that lies outside the picture.

    Args:
        codes: [T] bool on the CPU, which are codes.
        grid: codes in a row.
    """
    index = torch.arange(1, len(codes) + 1) - grid
    inside = (index >= 0) & codes[index.clamp(min=0)]
    return torch.where(uploaded(inside, ids.device), ids[:, uploaded(index.clamp(min=0), ids.device)], -1)


class DflashImageTraining(DflashTraining):
    """Blocks after drawn codes of each picture; its condition, or none, stands before the codes."""

    def __init__(self, head: DflashHead, target: Target, config: DflashSettings):
        super().__init__(head, target, config)
        self.grid = target.shape.grid

    def sequences(self, batch: CodeBatch, states: TargetStates) -> Sequences:  # type: ignore[override]
        """The pictures with their conditions; every code is supervised."""
        ids, seen = states.ids, states.mask
        assert ids is not None and seen is not None and states.positions is not None
        codes = torch.arange(ids.shape[1]) >= ids.shape[1] - states.num_generated
        loss_mask = batch.on_host("real")[:, None] & codes
        return Sequences(ids, loss_mask, seen, states.positions[0], batch.seeds, above_next(ids, codes, self.grid))

    def placed(self, positions: Tensor) -> Tensor:
        """Positions that lie on the grid, or just behind it."""
        return within_grid(positions, self.head.shape.layer)


class DflashImageProposal:
    """Drafts one block a cycle, row by row as the target is guided."""

    def __init__(self, head: DflashHead, target: Target, config: DflashSettings):
        self.head, self.target = head.eval(), target
        self.taps, self._grid = config.taps_for(target.shape, training=False), target.shape.grid
        self.max_levels: int | None = head.shape.num_drafts

    @torch.inference_mode()
    def start(self, request: object, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        """Make keys and values of the condition's states; no attention is needed for that."""
        prompt = prefill.prompt
        assert prompt is not None, "this target does not tell what it prefilled"
        self._warp, self._guidance, size = warp, prompt.guidance, self.head.shape.block_size
        self._cache = Cache(self.head.shape.num_layers, prompt.ids.shape[1] + capacity + size)
        # Padding of a row is held and never seen; where no row has any, no mask is needed.
        self._seen = None if bool(prompt.mask.all()) else prompt.mask  # [R,T]
        self._next = prompt.positions[:, -1:] + 1  # [R,1], of the next drawn code
        self._pass(self._joined(prefill), prompt.positions, None)
        self._states = self._joined(prefill)[:, :0]

    def begin(self, first: int) -> None:
        """The first block stands after the condition."""
        self._codes = [first]

    @torch.inference_mode()
    def root(self) -> Tensor:
        """Draft a block from the last drawn code; return q [V] of its first mask."""
        count, shape, device = self._states.shape[1], self.head.shape, self._states.device
        places = self._next - count + torch.arange(count + shape.block_size, device=device)  # [R,N+Q]
        first, step = uploaded(torch.tensor(self._codes[-1:]), device), len(self._codes)
        hidden = self._pass(self._states, places, first.expand(len(self._states), 1))[:, shape.first :]
        self._states = self._states[:, :0]
        scores = self.target.guided(
            hidden.to(self.target.embedding.dtype), list(range(step, step + shape.num_drafts))
        )  # fmt: skip
        self._answers = answers_of(
            self.head, scores, hidden, self._warp, first, self._guidance, above=self._above(step), step=step
        )
        return self._answers.root()

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """Return q [F,V] of nodes, by their depth alone where no place reads the token before it."""
        return self._answers.expand(parents, tokens)

    def _above(self, step: int) -> Tensor:
        """[K] codes above the next cells; -1 where there is none, or it is drafted in this block and not read."""
        index = range(step - self._grid, step - self._grid + self.head.shape.num_drafts)
        codes = [self._codes[i] if 0 <= i < step else -1 for i in index]
        return uploaded(torch.tensor(codes), self.target.embedding.device)

    def accept(self, verified: Verified) -> None:
        """True states of the last drawn code and of the accepted path; the bonus code begins the next block."""
        assert verified.step is not None
        self._states = self._joined(verified.step)
        self._next = self._next + self._states.shape[1]
        self._codes += [*verified.tokens, verified.bonus]

    def _joined(self, step: TargetStep) -> Tensor:
        """[R,N,J*D]."""
        return torch.cat([step.layers[tap] for tap in self.taps.text_layers], dim=-1)

    def _pass(self, states: Tensor, positions: Tensor, first: Tensor | None) -> Tensor:
        """Keep keys and values of states [R,N,J*D]; run the block after `first` [R,1] and return its [R,Q,D].

        Args:
            positions: [R,N+Q] of both; [R,N] without a block.
        """
        head, cache = self.head, self._cache
        blocks = states.new_zeros(len(states), 0, head.shape.layer.hidden_size, dtype=head.dtype)
        if first is not None:
            blocks = head.blocks(first, self.target.embedding)

        def attended(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.own_layers[number].update(k, v)
            if first is None:
                return q
            if self._seen is None:
                return attend_all(q, keys, values)
            held = F.pad(self._seen, (0, keys.shape[2] - self._seen.shape[1]), value=True)
            return attend(q, keys, values, held[:, None, None].expand(-1, 1, q.shape[2], -1))

        hidden = head(blocks, head.context(states), within_grid(positions, head.shape.layer), attended)
        cache.advance(states.shape[1])  # the block's own keys are written over by the next cycle's states
        return hidden
