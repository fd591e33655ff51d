"""Drafting with a head that reads states, one request at a time.

The prompt's inputs are read once, each cycle reads the newest tokens with their true states, and a tree's nodes read
the head's own outputs. Under the text-only window (VATA) visual inputs are never made: what the drafter holds and
does is the same for any number of visual tokens.
Letters: N inputs, T places, F nodes, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.pictures import TEXT
from ...core.states import uploaded
from ..decoding.head_layer import Rotation
from ..decoding.warp import Warp
from ..targets.base import Prompt, Target, TargetStep, Verified
from .head_inputs import Filled, Sequences, base_positions, fill, lay_out
from .head_module import StateHead
from .head_settings import HeadSettings
from .recursion import Recursive

PIECE = 4096  # inputs of a prompt that are read at once


class HeadProposal(Recursive):
    """The proposal of any hidden-state head; of the target its embedding and LM head are used."""

    max_levels: int | None = None

    def __init__(self, head: StateHead, target: Target, config: HeadSettings):
        self.head, self.target, self.config = head.eval(), target, config
        self.taps = config.taps_for(target.shape, training=False)
        self._reads = config.reads(target.shape, training=False)
        self.captures = not head.num_queries  # a pass also reads the request's vector of the last picture

    @property
    def num_held(self) -> int:
        """Number of inputs whose keys and values the drafter holds."""
        return self._cache.length

    @torch.inference_mode()
    def start(self, request: object, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        """Keep the prompt and its states; the head reads them in `begin`."""
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
        visual = self.config.visual(training=False)
        keep = self._kept(prompt, prefill) if prefill.attention else None
        sequences = _with_first(prompt, first, prefill)
        vectors = self.head.num_queries - 1 if self.head.num_queries else 0
        layout = lay_out(visual, sequences.modality, sequences.mask, num_vectors=vectors, keep=keep)
        filled = fill(self.head, visual, self._reads, layout, sequences, self.target.embedding)
        positions = base_positions(self.config.positions, layout, sequences, visual_held=True)
        self._cache = self._new_cache(layout.index.shape[1] + self._capacity)
        self._image = None if filled.image is None else filled.image[:, -1:].clone()
        if self.head.takes_rotations:
            self._lay_out(self.head.rotary, positions, self._capacity)
        self._read_prompt(filled, positions)
        self._states, self._tokens = filled.states[:, -1:].clone(), sequences.ids[:, -1:]
        self._positions, self._emitted = positions[..., -1:], 1

    def accept(self, verified: Verified) -> None:
        """True states of the root and of the accepted path, each with the token after it."""
        assert verified.step is not None
        self._states = self._true(verified.step)
        self._tokens = uploaded(torch.tensor([[*verified.tokens, verified.bonus]]), self._states.device)
        self._positions = self._next + torch.arange(self._tokens.shape[1], device=self._states.device)
        self._emitted += self._tokens.shape[1]

    def _read_prompt(self, filled: Filled, positions: Tensor) -> None:
        """Run all inputs but the last one in chunks, so that no tensor is quadratic in the length of a long clip."""
        last = positions.shape[-1] - 1
        for start in range(0, last, PIECE):
            stop = min(start + PIECE, last)
            piece, mask = filled.part(start, stop), None
            if start:
                mask = torch.ones(stop - start, stop, dtype=torch.bool, device=positions.device).tril_(start)
            states, places = piece.fused(self.head), positions[..., start:stop]
            true = torch.zeros(stop - start, dtype=torch.int64, device=self.target.embedding.device)
            self._read(piece.embeds, states, places, mask, true, piece.direct, piece.image)
            self._cache.advance(stop - start)

    def _true(self, step: TargetStep) -> Tensor:
        """[1,N,S*D]."""
        if self._reads.state:
            return torch.cat([step.layers[layer] for layer in self._reads.state], dim=-1)
        assert step.feature is not None
        return step.feature

    def _fused(self, states: Tensor) -> Tensor:
        return self.head.fuse(states.to(self.head.dtype))

    def _run(self, states: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, depths: Tensor) -> Tensor:
        return self._read(self._embed(tokens), states, self._turned(positions), mask, depths, None, None)

    def _embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._embedding).to(self.head.dtype)

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

    def _kept(self, prompt: Prompt, prefill: TargetStep) -> Tensor:
        """[1,T+1] bool: the visual tokens that get the most attention, as many as the share says."""
        modality, (layer,) = prompt.modality, self.taps.prefill_attention
        assert modality is not None
        scores, shown = prefill.attention[layer][0].mean(0), modality[0] != TEXT
        count = round(self.config.held_visual_share * int(shown.sum()))
        best = scores.masked_fill(~shown, -1.0).topk(count).indices
        return F.one_hot(best, len(shown) + 1).any(0)[None]


def _with_first(prompt: Prompt, first: int, prefill: TargetStep) -> Sequences:
    """The prompt and the first token after it: T + 1 places, of which the last has no state."""
    positions = prompt.positions if prompt.positions.dim() == 3 else prompt.positions[None]
    modality = prompt.modality
    assert modality is not None
    return Sequences(
        ids=F.pad(prompt.ids, (0, 1), value=first),
        mask=F.pad(prompt.mask, (0, 1), value=True),
        modality=F.pad(modality, (0, 1), value=TEXT),
        positions=positions,
        feature=prefill.feature,
        layers=prefill.layers,
    )
