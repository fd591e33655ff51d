"""One block a cycle: what a DFlash draft proposes beside the target's states, for a language model or a generator.

Image codes: a block stands along the raster row, whose cells are known before its codes are. Rows come with and without
the condition, and their features are combined by the generator's own guidance before anything is warped.
Letters: R rows (one of a language model), N committed states of a cycle, C states held, Q places of a block, K masks,
J joined states, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.pictures import TEXT
from ...core.states import uploaded
from ..attention import attend, attend_all
from ..decoding.cache import Cache
from ..decoding.warp import Warp
from ..targets.base import Target, TargetStep, Verified
from .dflash_confidence import kept_levels
from .dflash_module import DflashHead, within_grid
from .dflash_settings import DflashSettings
from .dflash_walk import Levels, Walk, answers_of, likeliest_before

PIECE = 4096  # states of a prompt that are read at once


class BlockProposal:
    """What both have in common. Of the target its embedding and LM head are used."""

    def __init__(self, head: DflashHead, target: Target, config: DflashSettings):
        self.head, self.target, self.config = head.eval(), target, config
        self.taps = config.taps_for(target.shape, training=False)
        self.max_levels: int | None = head.shape.num_drafts

    @torch.inference_mode()
    def root(self) -> Tensor:
        """Draft a block from the last committed token; return q [V] of its first mask."""
        (rows, count, _), device = self._states.shape, self.target.embedding.device
        places = torch.arange(count + self.head.shape.block_size, device=device) + (self._next - count)
        first = uploaded(torch.tensor([self._last]), device)
        blocks = self._pass(self._states, places.view(-1, places.shape[-1]), first.expand(rows, 1))
        hidden = blocks[:, self.head.shape.first :]
        self._states = self._states[:, :0]
        self._answers = self._read(hidden, first)
        return self._answers.root()

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """Return q [F,V] of nodes, by their depth alone where no place reads the token before it."""
        return self._answers.expand(parents, tokens)

    def accept(self, verified: Verified) -> None:
        """True states of the last committed token and of the accepted path; the bonus token begins the next block."""
        assert verified.step is not None
        self._states, self._last = self._joined(verified.step), verified.bonus
        self._next = self._next + self._states.shape[1]

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
            return self._attended(q, keys, values) if first is not None else q

        hidden = head(blocks, head.context(states), positions, attended)
        cache.advance(states.shape[1])  # the block's own keys are written over by the next cycle's states
        return hidden


class DflashProposal(BlockProposal):
    """Of a language model."""

    @property
    def num_held(self) -> int:
        """Number of tokens whose keys and values the draft holds."""
        return self._cache.length

    @torch.inference_mode()
    def start(self, request: object, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        """Make keys and values of the prompt's states; no attention is needed for that."""
        prompt = prefill.prompt
        assert prompt is not None and prompt.modality is not None, "this target does not tell what it prefilled"
        assert len(prompt.ids) == 1, "drafts of language models read one row"
        self._warp, self._guidance, kept = warp, prompt.guidance, prompt.mask[0]
        if self.config.visual(training=False) == "none":
            kept = kept & (prompt.modality[0] == TEXT)
        index = kept.nonzero()[:, 0]
        flat, count = self.config.positions == "flat", len(index)
        positions = index if flat else torch.arange(count, device=index.device)
        self._next = prompt.ids.shape[1] if flat else count  # position of the next committed token
        self._cache = Cache(self.head.shape.num_layers, count + capacity + self.head.shape.block_size)
        self._within = torch.arange(self.head.shape.block_size, device=index.device)
        states = self._joined(prefill)
        for start in range(0, count, PIECE):
            some = slice(start, start + PIECE)
            self._pass(states[:, index[some]], positions[None, some], None)
        self._states = states[:, :0]

    def begin(self, first: int) -> None:
        """The first block stands after the prompt."""
        self._last = first

    def _read(self, hidden: Tensor, first: Tensor) -> Levels | Walk:
        """What the block's masks [1,K,D] after `first` [1] answer; a confidence head says how many are verified."""
        scores = self.head.draft_scores(hidden[0], self.target.scores, self.target.embedding.dtype)
        if self.config.cut_below is not None:
            before = likeliest_before(self.head, scores, hidden, first, self._guidance)
            self.max_levels = kept_levels(self.head.confidence(hidden[0], before), self.config.cut_below)
        return answers_of(self.head, scores, hidden, self._warp, first, self._guidance)

    def _attended(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        window, held = self.head.shape.sliding_window, keys.shape[2]
        if window is None or held <= window:
            return attend_all(q, keys, values)
        # Place i of the block sees the last `window` states before it, itself included, and all of the block.
        first = max(0, held - q.shape[2] - window + 1)
        index = torch.arange(first, held, device=q.device)
        seen = held - q.shape[2] + self._within[:, None] - index < window
        return attend_all(q, keys[:, :, first:], values[:, :, first:], seen)


class DflashImageProposal(BlockProposal):
    """Of an image generator, row by row as it is guided."""

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
        states = self._joined(prefill)
        self._pass(states, prompt.positions, None)
        self._states = states[:, :0]

    def begin(self, first: int) -> None:
        """The first block stands after the condition."""
        self._last, self._codes = first, [first]

    def accept(self, verified: Verified) -> None:
        """Also keep the drawn codes, which stand above the next ones."""
        super().accept(verified)
        self._codes += [*verified.tokens, verified.bonus]

    def _read(self, hidden: Tensor, first: Tensor) -> Levels | Walk:
        """What the block's masks [R,K,D] after `first` [1] answer."""
        step, count, grid = len(self._codes), self.head.shape.num_drafts, self.target.shape.grid
        scores = self.target.guided(hidden.to(self.target.embedding.dtype), list(range(step, step + count)))
        # -1 where no code is above, or it is drafted in this block and not read.
        codes = [self._codes[i] if 0 <= i < step else -1 for i in range(step - grid, step - grid + count)]
        above = uploaded(torch.tensor(codes), hidden.device)
        return answers_of(self.head, scores, hidden, self._warp, first, self._guidance, above=above, step=step)

    def _attended(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self._seen is None:
            return attend_all(q, keys, values)
        held = F.pad(self._seen, (0, keys.shape[2] - self._seen.shape[1]), value=True)
        return attend(q, keys, values, held[:, None, None].expand(-1, 1, q.shape[2], -1))

    def _pass(self, states: Tensor, positions: Tensor, first: Tensor | None) -> Tensor:
        return super()._pass(states, within_grid(positions, self.head.shape.layer), first)
