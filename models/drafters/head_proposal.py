"""Drafting with a head that reads states, one request at a time.

The prompt's inputs are read once, each cycle reads the newest tokens with their true states, and a tree's nodes read
the head's own outputs. Under the text-only window (VATA) visual inputs are never made: what the drafter holds and
does is the same for any number of visual tokens.
Letters: R rows, N inputs, T places, F nodes, D width, V vocabulary, K places seen, S expansions, J joined states.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.pictures import TEXT
from ...core.states import TargetStates, uploaded
from ..decoding.cache import Cache
from ..decoding.head_layer import Rotary, Rotation, rotation
from ..decoding.tree import Expansions, upload_tokens
from ..decoding.warp import Warp
from ..fast.cuda_graphs import Graphs
from ..targets.base import Target, TargetStep, Verified
from .head_module import StateHead
from .head_settings import HeadSettings
from .head_training import base_positions, fill, layout_of

PIECE = 4096  # inputs of a prompt that are read at once


class Recursive:
    """The part of a proposal that runs in each cycle, of every head that reads its own last output: what was committed,
    then the tree that grows after it, whose nodes run after the committed positions of the cache.
    """

    graphs: Graphs | None = None  # of its passes; None: they are run eagerly
    window: int | None = None  # inputs that one sees, itself included; None: all
    captures = True  # whether a pass reads nothing of a request but its arguments and the cache

    _cache: Cache
    _warp: Warp
    _emitted: int  # tokens of the answer that are committed
    _states: Tensor  # [R,N,J*D] true ones of what was committed last
    _tokens: Tensor  # [R,N] the token after each of them, or [1,N] for all rows
    _positions: Tensor  # [R,N], or [3,R,N] of a prompt's end under M-RoPE
    _next: Tensor  # [R,1] position of the root's children
    _rotations: Tensor | None = None  # of the head's `Rotary.table`; None: they are computed in each pass
    _expansions: Expansions
    _outputs: Tensor  # [R,1+S,D] the root's, then each expansion's

    def _fused(self, states: Tensor) -> Tensor:
        """True states [R,N,J*D] -> what the layer reads of them [R,N,D]."""
        raise NotImplementedError

    def _run(self, states: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, depths: Tensor) -> Tensor:
        """[R,N,D] outputs for N states and the tokens after them; `depths` [N] int64, 0 is a true state."""
        raise NotImplementedError

    def _probabilities(self, hidden: Tensor, steps: Sequence[int]) -> Tensor:
        """q [N,V] of outputs; output n scores token number `steps[n]` of the answer (from 0)."""
        raise NotImplementedError

    def _new_cache(self, needed: int) -> Cache:
        """An empty cache of at least `needed` positions."""
        return Cache(1, needed) if self.graphs is None else self.graphs.new_cache(needed)

    def _pass(self, states: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, depths: Tensor) -> Tensor:
        """`_run` of fused states, by a CUDA graph where there is one; `mask` is over all places."""
        if self.graphs is None or not self.graphs.take(self._cache, states.shape[1]):
            return self._run(states, tokens, positions, mask, depths)

        def run(visible: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            states, tokens, positions, depths = inputs
            return (self._run(states, tokens, positions, visible[0], depths),)

        inputs = (states, 1), (tokens, 1), (positions, -1), (depths, 0)
        (hidden,) = self.graphs(positions.dim(), run, self._cache, mask, *inputs)
        return hidden

    def _make_rotations(self, rotary: Rotary, positions: Tensor, further: int) -> None:
        """Make rotations up to `further` behind the last of a request's `positions`. A graph computes its own: it would
        read a shorter request's table.
        """
        if self.graphs is not None:
            self._rotations = None
            return
        reach = int(positions.max()) + further + 1
        if self._rotations is None or len(self._rotations) < reach:
            self._rotations = rotary.table(max(256, 1 << (reach - 1).bit_length()), positions.device)

    def _turned(self, positions: Tensor) -> Tensor | Rotation:
        """Positions as the head's forward reads them: [R,N] as their rotation where there is a table."""
        if self._rotations is None or positions.dim() == 3:
            return positions
        return rotation(self._rotations, positions)

    def _mask_of(self, past: int, count: int, device: torch.device) -> Tensor | None:
        """[N,K] bool of what `count` inputs after `past` ones see of the keys that the cache hands over in the next
        forward; None: one input, which sees all of them. Keys that stand in no input's window are not handed over.
        """
        window = past + count if self.window is None else self.window
        first = max(0, past - window + 1)
        self._cache.hand_over_from(first)
        if count == 1:
            return None
        visible = torch.ones(count, past + count - first, dtype=torch.bool, device=device)
        visible = visible.tril_(past - first)
        return visible if past + count <= window else visible.triu_(past - first - window + 1)

    @torch.inference_mode()
    def root(self) -> Tensor:
        """Read what was committed; only that stays in the cache. q [V] of the token after it."""
        count, past, device = self._states.shape[1], self._cache.length, self._states.device
        self._expansions = Expansions()
        # Text has one position, whatever the number of coordinates.
        positions = self._positions if self._positions.dim() == 2 else self._positions[0]
        self._next = positions[:, -1:] + 1
        mask = self._mask_of(past, count, device)
        true = torch.zeros(count, dtype=torch.int64, device=device)
        hidden = self._pass(self._fused(self._states), self._tokens, self._positions, mask, true)
        self._cache.advance(count)
        self._outputs = hidden[:, -1:]
        return self._probabilities(self._outputs, [self._emitted])[0]

    @torch.inference_mode()
    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """Run nodes [F] on their parents' outputs; the cache keeps its committed length."""
        past, first, device = self._cache.length, len(self._expansions), self._outputs.device
        depths = self._expansions.take(parents)
        # The root's output, whose parent is ROOT, -1, stands before the expansions'.
        # A draft sees as far back as the last true input, in training and here.
        unseen = 0 if self.window is None else max(0, past - self.window)
        self._cache.hand_over_from(unseen)
        visible = self._expansions.ancestors(first, past=past - unseen).numpy()
        rows = np.array([parents, depths, depths])
        rows[0] += 1
        rows[2] -= 1  # behind the root's children
        tokens, (above, below, further), mask = upload_tokens(device, tokens, rows, visible)
        states, positions = self._outputs[:, above], self._next + further
        # Expansions are written after each other; the cache's length covers them only during this forward.
        self._cache.crop_to(past + first)
        hidden = self._pass(states, tokens.expand(len(states), -1), positions, mask, below)
        self._cache.crop_to(past)
        q = self._probabilities(hidden, [self._emitted + depth for depth in depths])
        self._outputs = torch.cat([self._outputs, hidden], dim=1)
        return q


class HeadProposal(Recursive):
    """The proposal of any hidden-state head; of the target its embedding and LM head are used."""

    max_levels: int | None = None

    def __init__(self, head: StateHead, target: Target, config: HeadSettings):
        self.head, self.target, self.config = head.eval(), target, config
        self.taps = config.taps_for(target.shape, training=False)
        self._reads = config.reads(target.shape, training=False)
        self.window = head.shape.sliding_window
        # A pass also reads the request's vector of the last picture; a window moves.
        self.captures = not head.num_queries and self.window is None

    @property
    def num_held(self) -> int:
        return self._cache.length

    @torch.inference_mode()
    def start(self, request: object, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        prompt = prefill.prompt
        assert prompt is not None and prompt.modality is not None, "this target does not tell what it prefilled"
        assert len(prompt.ids) == 1, "heads of language models read one row"
        self._warp, self._capacity, self._emitted = warp, capacity, 0
        self._prompt, self._prefill = prompt, prefill
        self._embedding = self.target.embedding  # to ask for it takes as long as to read it

    @torch.inference_mode()
    def begin(self, first: int) -> None:
        """Read the prompt's inputs except the last one, which reads `first` and belongs to the first cycle."""
        prompt, prefill = self._prompt, self._prefill
        del self._prompt, self._prefill  # free the states of the prompt, which are large for a long clip
        assert prompt.modality is not None
        visual, keep = self.config.visual(training=False), None
        if prefill.attention:
            # [1,T+1] bool: the visual tokens that get the most attention, as many as the share says.
            (layer,), shown = self.taps.prefill_attention, prompt.modality[0] != TEXT
            scores = prefill.attention[layer][0].mean(0).masked_fill(~shown, -1.0)
            best = scores.topk(round(self.config.visual_fraction(training=False) * int(shown.sum()))).indices
            keep = F.one_hot(best, len(shown) + 1).any(0)[None]
        # The first token stands behind the prompt, and has no state.
        ids, mask = F.pad(prompt.ids, (0, 1), value=first), F.pad(prompt.mask, (0, 1), value=True)
        modality, vectors = F.pad(prompt.modality, (0, 1), value=TEXT), max(0, self.head.num_queries - 1)
        layout = layout_of(visual, modality, mask, num_vectors=vectors, keep=keep)
        states = TargetStates(prefill.feature, prefill.layers)
        filled = fill(self.head, visual, self._reads, layout, ids, states, self.target.embedding)
        axes = prompt.positions if prompt.positions.dim() == 3 else prompt.positions[None]
        positions = base_positions(self.config.positions, layout, axes, visual_held=True)
        self._cache = self._new_cache(layout.index.shape[1] + self._capacity)
        self._image = None if filled.image is None else filled.image[:, -1:].clone()
        if self.head.takes_rotations:
            self._make_rotations(self.head.rotary, positions, self._capacity)
        # All inputs but the last one, in pieces, so that no tensor is quadratic in the length of a long clip.
        last = positions.shape[-1] - 1
        for start in range(0, last, PIECE):
            stop, sees = min(start + PIECE, last), None
            piece = filled.each(operator.itemgetter((slice(None), slice(start, stop))))
            if start or (self.window is not None and stop > self.window):
                sees = self._mask_of(start, stop - start, positions.device)
            true = torch.zeros(stop - start, dtype=torch.int64, device=positions.device)
            self._read(
                piece.embeds, piece.fused(self.head), positions[..., start:stop], sees, true, piece.direct, piece.image
            )
            self._cache.advance(stop - start)
        self._states, self._tokens = filled.states[:, -1:].clone(), ids[:, -1:]
        self._positions, self._emitted = positions[..., -1:], 1

    def accept(self, verified: Verified) -> None:
        """True states of the root and of the accepted path, each with the token after it."""
        step = verified.step
        assert step is not None
        joined = self._reads.state
        states = torch.cat([step.layers[layer] for layer in joined], dim=-1) if joined else step.feature
        assert states is not None
        self._states = states  # [1,N,J*D]
        self._tokens = uploaded(torch.tensor([[*verified.tokens, verified.bonus]]), self._states.device)
        self._positions = self._next + torch.arange(self._tokens.shape[1], device=self._states.device)
        self._emitted += self._tokens.shape[1]

    def _fused(self, states: Tensor) -> Tensor:
        return self.head.fuse(states.to(self.head.dtype))

    def _run(self, states: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, depths: Tensor) -> Tensor:
        embeds = self.head.embed(tokens, self._embedding)
        return self._read(embeds, states, self._turned(positions), mask, depths, None, None)

    def _read(
        self, embeds: Tensor, states: Tensor, positions: Tensor | Rotation, mask: Tensor | None, depths: Tensor,
        direct: tuple[Tensor, Tensor] | None, image: Tensor | None,
    ) -> Tensor:  # fmt: skip
        if image is None and self._image is not None:
            image = self._image.expand(-1, states.shape[1], -1)
        return self.head(embeds, states, positions, mask, self._cache, direct=direct, image=image, depths=depths)

    def _probabilities(self, hidden: Tensor, steps: Sequence[int]) -> Tensor:
        scores = self.head.draft_scores(hidden[0], self.target.scores, self._embedding.dtype)
        return self._warp.apply_temperature(scores)
