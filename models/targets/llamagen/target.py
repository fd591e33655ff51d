"""LlamaGen as a target: conditional and unconditional rows in one batch, guided before anything is warped.

Letters: R rows (1, or 2 under guidance), N nodes with the root, C condition tokens, n image codes, D width, V codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ....core.batch import CodeBatch, ImageRequest
from ....core.states import Taps, TargetStates
from ...decoding.cache import Cache
from ...decoding.decoder import DecoderStates
from ...decoding.rows import Guidance
from ...decoding.tree import upload_tokens
from ...layer import LayerShape
from ..base import Prompt, TargetShape
from ..guided import DrawingSession, GuidedTarget, steps_of
from .transformer import LlamaGen, LlamaGenConfig, sequence_mask


class LlamaGenTarget(GuidedTarget):
    """Frozen. A request's `condition` is a class label or a caption's features [n,F]."""

    kind: ClassVar[str] = "llamagen"  # of its section

    def __init__(self, model: LlamaGen, guidance: Guidance):
        self.model = model.eval().requires_grad_(False)
        self.guidance = guidance
        self.vocab_size = model.config.vocab_size
        self.num_codes, self.num_layers = model.config.num_codes, model.config.num_layers
        self.grid = model.config.grid

    @property
    def config(self) -> LlamaGenConfig:
        return self.model.config

    @property
    def shape(self) -> TargetShape:
        """The shape that heads mirror: sizes, a layer as in LANTERN's published heads, and the grid of codes."""
        return llamagen_shape(self.config)

    @property
    def device(self) -> torch.device:
        return self.model.tok_embeddings.weight.device

    @property
    def embedding(self) -> Tensor:
        return self.model.tok_embeddings.weight

    def scores(self, feature: Tensor) -> Tensor:
        return self.model.output(feature).float()

    def guided(self, feature: Tensor, steps: Sequence[int]) -> Tensor:
        return self.guidance(self.scores(feature), steps, banned=False)  # every id is a code

    def codes(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens)

    @torch.inference_mode()
    def extend(self, session: DrawingSession, tokens: Tensor, offsets: Sequence[int], mask: Tensor) -> Tensor:
        """Guided scores [N,V] after `tokens` [N], for a drafter that writes after its own committed ones.

        Args:
            offsets: places after the cache's end, one of each token.
            mask: [N,S] bool on the CPU over the last S of what is written, these tokens included; what lies before is
                seen.
        """
        committed = session.cache.length
        places = np.array([committed + offset for offset in offsets])
        tokens, positions, visible = upload_tokens(self.device, tokens, places, mask.numpy())
        # Earlier nodes of this cycle lie after the committed tokens: the cache's length stands at their end meanwhile.
        session.cache.crop_to(committed + mask.shape[1] - len(tokens))
        ids = tokens.expand(self.guidance.num_rows, -1)
        states = self._at(session, ids, positions, self._visible(session, len(tokens), visible))
        session.cache.crop_to(committed)
        return self.guided(states.feature, steps_of(session, offsets))

    def _at(self, session: DrawingSession, ids: Tensor, places: Tensor, mask: Tensor | None) -> DecoderStates:
        return self.model.decode(
            self.model.tok_embeddings(ids), session.cache, places, mask, layers=session.taps.layers
        )

    def _states(self, batch: CodeBatch, uncond: Tensor, layers: Sequence[int]) -> TargetStates:
        config = self.model.config
        embeds, condition_mask = self.model.conditioned(batch.conditions, uncond)
        states = self.model.states(embeds, batch.codes, condition_mask, layers=layers)
        ids = F.pad(batch.codes, (config.num_condition_tokens, 0))
        mask = torch.ones_like(ids, dtype=torch.bool)
        if condition_mask is not None:
            mask[:, : config.num_condition_tokens] = condition_mask
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return TargetStates(
            states.feature, states.layers, positions[None], ids=ids, mask=mask, num_generated=batch.codes.shape[1],
            padding=(0,) * len(ids),
        )  # fmt: skip

    def _prompts(
        self, requests: Sequence[ImageRequest], taps: Taps, capacity: int
    ) -> tuple[DrawingSession, DecoderStates]:
        conditions, uncond = self._both(requests)
        embeds, real = self.model.conditioned(conditions, uncond)
        length = embeds.shape[1]
        cache = Cache(self.num_layers, length + capacity)
        positions = torch.arange(length, device=self.device)
        mask = sequence_mask(length, real, self.device)
        states = self.model.decode(embeds, cache, positions, mask, layers=taps.layers)
        cache.advance(length)
        held = torch.zeros(len(embeds), length, dtype=torch.int64, device=self.device)
        held_mask = torch.ones_like(held, dtype=torch.bool) if real is None else real
        prompt = Prompt(held, held_mask, positions.expand_as(held), self.guidance)
        # One picture's condition is masked alike in both rows.
        return DrawingSession(cache, taps, prompt, real[0] if real is not None and len(requests) == 1 else real), states


def llamagen_shape(config: LlamaGenConfig) -> TargetShape:
    """The shape that heads mirror: as in LANTERN's published ones, a layer with the norm's epsilon of 1e-6."""
    layer = LayerShape(
        vocab_size=config.vocab_size, hidden_size=config.dim, num_heads=config.num_heads,
        num_kv_heads=config.num_heads, intermediate_size=config.hidden, norm_eps=1e-6,
        rope="grid", rope_theta=config.rope_base, grid=config.grid,
        # A head's input at index t reads the token after it, whose cell turns it: one condition token fewer than the
        # target has.
        zeros_before=config.num_condition_tokens - 1, mask_padding=False,
    )  # fmt: skip
    return TargetShape(
        config.vocab_size, config.dim, config.num_layers, layer=layer, grid=config.grid, condition=config.condition
    )
