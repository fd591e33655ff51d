"""LlamaGen as a target: conditional and unconditional rows in one batch, guided before anything is warped.

Letters: R rows (1, or 2 under guidance), N nodes with the root, C condition tokens, n image codes, D width, V codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ....core.batch import CodeBatch, ImageRequest
from ....core.states import Taps, TargetStates
from ...decoding.cache import Cache
from ...decoding.rows import Guidance
from ...decoding.tree import Tree, upload_tokens, upload_tree
from ...layer import LayerShape
from ..base import Prompt, TargetShape, TargetStep, check_layers, guided_batch
from .transformer import LlamaGen, LlamaGenConfig, LlamaGenStates, sequence_mask


@dataclass
class LlamaGenSession:
    cache: Cache
    taps: Taps
    condition_mask: Tensor | None  # [C] bool: the same for both rows; [R*B,C] of B pictures


class LlamaGenTarget:
    """Frozen. A request's `condition` is a class label or a caption's features [n,F]."""

    kind: ClassVar[str] = "llamagen"  # of its section

    def __init__(self, model: LlamaGen, guidance: Guidance):
        self.model = model.eval().requires_grad_(False)
        self.guidance = guidance
        self.vocab_size = model.config.vocab_size
        self.num_codes = model.config.num_codes
        self.grid = model.config.grid

    @property
    def config(self) -> LlamaGenConfig:
        return self.model.config

    @property
    def shape(self) -> TargetShape:
        """What heads mirror: sizes, a layer as in LANTERN's published heads, and the grid of codes."""
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
        """[R,N,D] -> [N,V]: what is decoded from. Node i scores image code number `steps[i]`."""
        return self.guidance(self.scores(feature), steps, banned=False)  # every id is a code

    def codes(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens)

    @torch.inference_mode()
    def prefill(self, request: ImageRequest, taps: Taps, *, capacity: int) -> tuple[LlamaGenSession, TargetStep]:
        session, states = self._prompts([request], taps, capacity)
        rows, length = states.feature.shape[:2]
        condition_mask = None if session.condition_mask is None else session.condition_mask[0]
        positions = torch.arange(length, device=self.device)
        seen = torch.ones(length, dtype=torch.bool, device=self.device) if condition_mask is None else condition_mask
        prompt = Prompt(
            torch.zeros(rows, length, dtype=torch.int64, device=self.device),
            seen.expand(rows, length),
            positions.expand(rows, length),
            self.guidance,
        )
        logits = self.guided(states.feature[:, -1:], [0])
        feature = states.feature if taps.feature else None
        session = replace(session, condition_mask=condition_mask)
        return session, TargetStep(logits, feature, states.layers, {}, prompt)

    @torch.inference_mode()
    def verify(self, session: LlamaGenSession, root: int, tree: Tree) -> TargetStep:
        first = session.cache.length
        tokens, positions, mask = upload_tree(self.device, tree, root, first)
        assert mask is not None
        states = self._at(session, self._embed(tokens), positions, mask)
        feature = states.feature if session.taps.feature else None
        steps = self._steps(first, [0, *tree.depths])
        return TargetStep(self.guided(states.feature, steps), feature, states.layers)

    @torch.inference_mode()
    def prefill_batch(self, requests: Sequence[ImageRequest], *, capacity: int) -> tuple[LlamaGenSession, Tensor]:
        """Run the conditions of B pictures side by side: the session that `feed` takes, and scores [B,V]."""
        session, states = self._prompts(requests, Taps(), capacity)
        return session, guided_batch(self, states.feature[:, -1], 0)

    @torch.inference_mode()
    def feed(self, session: LlamaGenSession, tokens: Tensor) -> Tensor:
        """Scores [B,V] after one more token [B] of each picture of `prefill_batch`."""
        embeds = self.model.tok_embeddings(tokens.to(self.device).repeat(self.guidance.num_rows))[:, None]
        first = session.cache.length
        alone = torch.ones(1, 1, dtype=torch.bool, device=self.device)
        states = self._at(session, embeds, torch.full((1,), first, device=self.device), alone)
        session.cache.advance(1)
        (step,) = self._steps(first, [0])
        return guided_batch(self, states.feature[:, -1], step)

    @torch.inference_mode()
    def extend(self, session: LlamaGenSession, tokens: Tensor, offsets: Sequence[int], mask: Tensor) -> Tensor:
        """Guided scores [N,V] after `tokens` [N], for a drafter that writes after its own committed ones.

        Args:
            offsets: places after the cache's end, one of each token.
            mask: [N,S] bool on the CPU over the last S of what is written, these tokens included; what lies before is
                seen.
        """
        committed = session.cache.length
        places = np.array([committed + offset for offset in offsets])
        tokens, positions, seen = upload_tokens(self.device, tokens, places, mask.numpy())
        # Earlier nodes of this cycle lie after the committed tokens: the cache's length stands at their end meanwhile.
        session.cache.crop_to(committed + mask.shape[1] - len(tokens))
        states = self._at(session, self._embed(tokens), positions, seen)
        session.cache.crop_to(committed)
        return self.guided(states.feature, self._steps(committed, offsets))

    def _steps(self, committed: int, offsets: Sequence[int]) -> list[int]:
        """The index of the image code that each token predicts, given its distance from the `committed` tokens."""
        first = committed - self.model.config.num_condition_tokens + 1  # the code after the root
        return [first + place for place in offsets]

    def _at(self, session: LlamaGenSession, embeds: Tensor, positions: Tensor, mask: Tensor) -> LlamaGenStates:
        """States of tokens `embeds` [R,N,D] at `positions` [N]; `mask` [N,S] as of `extend`, on the device."""
        device, past, count = self.device, session.cache.length, embeds.shape[1]
        condition = session.condition_mask
        rows = () if condition is None else condition.shape[:-1]
        seen: Tensor | None = None
        if condition is not None or mask.shape[1] > 1:  # a single node need not see its siblings
            seen = torch.ones(*rows, count, past + count, dtype=torch.bool, device=device)
            seen[..., past + count - mask.shape[1] :] = mask
            if condition is not None:
                seen[..., : condition.shape[-1]] = condition[..., None, :]
        return self.model.decode(embeds, session.cache, positions, seen, layers=session.taps.layers)

    @torch.inference_mode()
    def commit(self, session: LlamaGenSession, path: Sequence[int]) -> None:
        session.cache.commit([0, *(node + 1 for node in path)])

    @torch.no_grad()
    def states(self, batch: CodeBatch, taps: Taps) -> TargetStates:
        """States of `batch`'s images after their conditions, which the rows of `batch.uncond` lose."""
        check_layers(taps, self.model.config.num_layers)
        return both_sides(self._states, batch, taps)

    def _states(self, batch: CodeBatch, uncond: Tensor, layers: Sequence[int]) -> TargetStates:
        """Rows marked in `uncond` [B] run without their condition; states after `layers` are kept everywhere."""
        config = self.model.config
        embeds, condition_mask = self.model.conditioned(batch.conditions, uncond)
        states = self.model.states(embeds, batch.codes, condition_mask, layers=layers)
        ids = F.pad(batch.codes, (config.num_condition_tokens, 0))
        seen = torch.ones_like(ids, dtype=torch.bool)
        if condition_mask is not None:
            seen[:, : config.num_condition_tokens] = condition_mask
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return TargetStates(
            states.feature, states.layers, positions[None], ids=ids, mask=seen, num_generated=batch.codes.shape[1],
            padding=(0,) * len(ids),
        )  # fmt: skip

    def _embed(self, tokens: Tensor) -> Tensor:
        """Tokens [N] as embeddings [R,N,D], the same for both rows."""
        return self.model.tok_embeddings(tokens).expand(self.guidance.num_rows, -1, -1)

    def _prompts(
        self, requests: Sequence[ImageRequest], taps: Taps, capacity: int
    ) -> tuple[LlamaGenSession, LlamaGenStates]:
        """Runs B conditions: rows are the B with their conditions, then, under guidance, the B without."""
        config, num_rows = self.model.config, self.guidance.num_rows
        uncond = (torch.arange(num_rows, device=self.device) == 1).repeat_interleave(len(requests))
        conditions = [request.condition.to(self.device) for request in requests]
        embeds, mask = self.model.conditioned(conditions * num_rows, uncond)
        length = embeds.shape[1]
        cache = Cache(config.num_layers, length + capacity)
        positions = torch.arange(length, device=self.device)
        states = self.model.decode(
            embeds, cache, positions, sequence_mask(length, mask, self.device), layers=taps.layers
        )
        cache.advance(length)
        return LlamaGenSession(cache, taps, mask), states


def llamagen_shape(config: LlamaGenConfig) -> TargetShape:
    """What heads mirror: as in LANTERN's published ones, a layer with the norm's epsilon of 1e-6."""
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


def both_sides(
    run: Callable[[CodeBatch, Tensor, Sequence[int]], TargetStates], batch: CodeBatch, taps: Taps
) -> TargetStates:
    """What `run` makes of a batch, or of each of its rows with and without the condition (`taps.without_condition`)."""
    if not taps.without_condition:
        return run(batch, batch.uncond, taps.layers)
    conditional, unconditional = (
        run(batch, torch.full_like(batch.uncond, without), taps.layers) for without in (False, True)
    )
    return replace(conditional, unconditional=unconditional)
