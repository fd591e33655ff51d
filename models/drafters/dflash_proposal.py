"""DFlash's proposal: a block in one pass, then answers place by place, or node by node where a place reads the tokens
before it.

DFlash's places know the last committed token alone, so that one distribution stands for a level of a tree. DSpark's and
DFlash 2's know the drafted token before them: after the one pass of the backbone a walk asks each node for its own
distribution, which costs a look-up and a small product. What is drawn at a node is drawn from what the walk answers
there, so that chains and trees of any shape are exact as EAGLE's are.
Letters: R rows, N committed states of a cycle, Q places of a block, K places that answer, F nodes, S answered nodes,
J joined states, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.pictures import TEXT
from ...core.states import uploaded
from ..attention import attend, attend_all
from ..decoding.cache import Cache
from ..decoding.rows import Guidance
from ..decoding.tree import ROOT, Expansions
from ..decoding.warp import Warp
from ..targets.base import Target, TargetStep, Verified
from .dflash_module import Before, DflashHead, within_grid
from .dflash_settings import DflashSettings

PIECE = 4096  # states of a prompt that are read at once


class BlockProposal:
    """Drafts one block a cycle, in each row of the target. Its embedding and LM head are used."""

    _states: Tensor  # [R,N,J*D] true ones of what was committed last
    _next: Tensor | int  # [R,1] position of the next committed token, or in all rows

    def __init__(self, head: DflashHead, target: Target, config: DflashSettings):
        self.head, self.target, self.config = head.eval(), target, config
        self.taps = config.taps_for(target.shape, training=False)
        self.max_levels: int | None = head.shape.num_drafts

    def begin(self, first: int) -> None:
        self._tokens = [first]

    @torch.inference_mode()
    def root(self) -> Tensor:
        """Draft a block from the last committed token; return q [V] of its first place."""
        count, shape, device = self._states.shape[1], self.head.shape, self.target.embedding.device
        places = torch.arange(count + shape.block_size, device=device) + (self._next - count)
        places = places.view(-1, places.shape[-1])  # [R,N+Q]
        last = uploaded(torch.tensor(self._tokens[-1:]), device)
        hidden = self._pass(self._states, places, last.expand(len(self._states), 1))[:, shape.first :]
        self._states = self._states[:, :0]
        scores, more = self._scored(hidden, last)
        self._answers: Levels | Walk
        if self.head.walks:
            self._answers = Walk(self.head, scores, hidden, self._warp, last, self._guidance, **more)
        else:
            self._answers = Levels(scores, self._warp)
        return self._answers.root()

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """Return q [F,V] of nodes, by their depth alone where no place reads the token before it."""
        return self._answers.expand(parents, tokens)

    def accept(self, verified: Verified) -> None:
        """True states of the last committed token and of the accepted path; the bonus token begins the next block."""
        assert verified.step is not None
        self._states = self._joined(verified.step)
        self._next = self._next + self._states.shape[1]
        self._tokens += [*verified.tokens, verified.bonus]

    def _begin_at(self, warp: Warp, guidance: Guidance, positions: Tensor | int, held: int) -> None:
        """Begin a request: the next token stands at `positions` [R,1], or in all rows, and at most `held` are held."""
        self._warp, self._guidance, self._next = warp, guidance, positions
        self._cache = Cache(self.head.shape.num_layers, held + self.head.shape.block_size)

    def _scored(self, hidden: Tensor, last: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Scores [K,V] of a block with outputs `hidden` [R,K,D], after the token `last` [1], and more for a `Walk`."""
        raise NotImplementedError

    def _attended(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[R,H,Q,E] of a block's queries, over all that is held and the block."""
        raise NotImplementedError

    def _joined(self, step: TargetStep) -> Tensor:
        """[R,N,J*D]."""
        return torch.cat([step.layers[tap] for tap in self.taps.text_layers], dim=-1)

    def _pass(self, states: Tensor, positions: Tensor, last: Tensor | None = None) -> Tensor:
        """Keep keys and values of states [R,N,J*D]; run the block after `last` [R,1] and return its [R,Q,D].
        `positions` [R,N+Q] are of both; without a block [R,N], which needs no attention.
        """
        head, cache = self.head, self._cache
        blocks = states.new_zeros(len(states), 0, head.shape.layer.hidden_size, dtype=head.dtype)
        if last is not None:
            blocks = head.blocks(last, self.target.embedding)

        def attended(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.kv_layers[number].update(k, v)
            return q if last is None else self._attended(q, keys, values)

        hidden = head(blocks, head.context(states), within_grid(positions, head.shape.layer), attended)
        cache.advance(states.shape[1])  # the block's own keys are written over by the next cycle's states
        return hidden


class DflashProposal(BlockProposal):
    """Beside a language model, of one row."""

    @property
    def num_held(self) -> int:
        return self._cache.length

    @torch.inference_mode()
    def start(self, request: object, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        """Make keys and values of the prompt's states."""
        prompt = prefill.prompt
        assert prompt is not None and prompt.modality is not None, "this target does not tell what it prefilled"
        assert len(prompt.ids) == 1, "drafts of language models read one row"
        visible = prompt.mask[0]
        if self.config.visual(training=False) == "none":
            visible = visible & (prompt.modality[0] == TEXT)
        index = visible.nonzero()[:, 0]
        flat, count = self.config.positions == "flat", len(index)
        positions = (index if flat else torch.arange(count, device=index.device))[None]
        self._begin_at(warp, prompt.guidance, prompt.ids.shape[1] if flat else count, count + capacity)
        states = self._joined(prefill)
        for start in range(0, count, PIECE):
            some = slice(start, start + PIECE)
            self._pass(states[:, index[some]], positions[:, some])
        self._states = states[:, :0]

    def _scored(self, hidden: Tensor, last: Tensor) -> tuple[Tensor, dict[str, Any]]:
        head, below = self.head, self.config.cut_below
        scores = head.draft_scores(hidden[0], self.target.scores, self.target.embedding.dtype)
        if below is not None:
            before = likeliest_before(head, scores, hidden, last, self._guidance)
            self.max_levels = confident_levels(head.confidence(hidden[0], before), below)
        return scores, {}

    def _attended(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        shape, held = self.head.shape, keys.shape[2]
        window = held if shape.sliding_window is None else shape.sliding_window
        if held <= window and not shape.causal:
            return attend_all(q, keys, values)
        # Place i of the block sees the last `window` states before it, itself included, and all of the block, or of a
        # causal one its places up to i.
        first = max(0, held - q.shape[2] - window + 1)
        index, within = torch.arange(first, held, device=q.device), torch.arange(q.shape[2], device=q.device)
        before = held - q.shape[2] + within[:, None] - index
        visible = (before < window) & ((before >= 0) | (not shape.causal))
        return attend_all(q, keys[:, :, first:], values[:, :, first:], visible)


class DflashImageProposal(BlockProposal):
    """Beside an image generator: a block along the raster row, whose cells are known before its codes are."""

    @torch.inference_mode()
    def start(self, request: object, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        """Make keys and values of the condition's states."""
        prompt = prefill.prompt
        assert prompt is not None, "this target does not tell what it prefilled"
        # Padding of a row is held and never seen; where no row has any, no mask is needed.
        self._visible = None if bool(prompt.mask.all()) else prompt.mask  # [R,T]
        self._begin_at(warp, prompt.guidance, prompt.positions[:, -1:] + 1, prompt.ids.shape[1] + capacity)
        states = self._joined(prefill)
        self._pass(states, prompt.positions)
        self._states = states[:, :0]

    def _scored(self, hidden: Tensor, last: Tensor) -> tuple[Tensor, dict[str, Any]]:
        step, count, grid = len(self._tokens), self.head.shape.num_drafts, self.target.shape.grid
        scores = self.target.guided(hidden.to(self.target.embedding.dtype), list(range(step, step + count)))
        # [K] codes above the next cells; -1 where there is none, or it is drafted in this block and not read.
        codes = [self._tokens[i] if 0 <= i < step else -1 for i in range(step - grid, step - grid + count)]
        return scores, {"above": uploaded(torch.tensor(codes), self.target.embedding.device), "step": step}

    def _attended(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self._visible is None:
            return attend_all(q, keys, values)
        held = F.pad(self._visible, (0, keys.shape[2] - self._visible.shape[1]), value=True)
        return attend(q, keys, values, held[:, None, None].expand(-1, 1, q.shape[2], -1))


class Levels:
    """One distribution for each place, of scores [K,V], whatever stands before it."""

    def __init__(self, scores: Tensor, warp: Warp):
        self.q, self._expansions = warp.apply_temperature(scores), Expansions()

    def root(self) -> Tensor:
        return self.q[0]

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        return self.q[_places(self._expansions.take(parents), self.q.device)]


class Walk:
    """A distribution for each node, given the tokens on its path.

    Args:
        scores: [K,V] guided, without what stands before a place.
        outputs: [R,K,D] of the backbone.
        first: [1] the last committed token.
        above: [K] codes above the places, as of `Before`.
        step: the number of the answer's token that the first place scores, for guidance.
    """

    def __init__(
        self, head: DflashHead, scores: Tensor, outputs: Tensor, warp: Warp, first: Tensor, guidance: Guidance,
        *, above: Tensor | None = None, step: int = 0,
    ):  # fmt: skip
        self._head, self._scores, self._outputs, self._warp = head, scores, outputs, warp
        self._first, self._guidance, self._above, self._step = first, guidance, above, step
        self._expansions = Expansions()
        self._states: Tensor | None = None  # [R,1+S,N] that the root's answer and each expansion carry on

    @torch.inference_mode()
    def root(self) -> Tensor:
        return self._answer([0], self._first, None)[0]

    @torch.inference_mode()
    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """q [F,V] after `tokens` [F], each on its parent's path."""
        depths, state = self._expansions.take(parents), None
        if self._states is not None:
            carried = torch.tensor([parent - ROOT for parent in parents])  # the root's stands first
            state = self._states[:, uploaded(carried, self._scores.device)]
        return self._answer(depths, tokens, state)

    def _answer(self, depths: list[int], tokens: Tensor, state: Tensor | None) -> Tensor:
        device = self._scores.device
        places, steps = _places(depths, device), [self._step + depth for depth in depths]
        before = Before(uploaded(tokens, device), None if self._above is None else self._above[places])
        scores, carried = self._head.conditioned(
            self._scores[places], self._outputs[:, places], before, state,
            lambda rows: self._guidance(rows, steps, banned=False),
        )  # fmt: skip
        if carried is not None:
            self._states = carried if self._states is None else torch.cat([self._states, carried], dim=1)
        return self._warp.apply_temperature(scores)


def _places(depths: list[int], device: torch.device) -> slice | Tensor:
    """An index of places: a slice where there is one, of which nothing is gathered nor uploaded."""
    return slice(depths[0], depths[0] + 1) if len(depths) == 1 else uploaded(torch.tensor(depths), device)


def likeliest_before(head: Any, scores: Tensor, outputs: Tensor, first: Tensor, guidance: Guidance) -> Before:
    """The tokens before each place [K] on the likeliest path: known before any token is drawn."""
    if not head.walks:
        return Before(first.expand(len(scores)))
    walk, tokens = Walk(head, scores, outputs, Warp(), first, guidance), [first]
    q = walk.root()[None]
    for place in range(1, len(scores)):
        tokens.append(q.argmax(-1))
        q = walk.expand([place - 2], tokens[-1])
    return Before(torch.cat(tokens))


def confident_levels(logits: Tensor, threshold: float) -> int:
    """How many of a block's tokens are verified: those before which, and with which, the chance by `logits` [K] that
    all are accepted is at least `threshold`; one at least. The host waits once.
    """
    survives = logits.double().sigmoid().cumprod(0)
    return max(1, int((survives >= threshold).sum()))
