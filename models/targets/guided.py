"""The decoding that all image generators share: rows with and without the condition in one batch, guided first.

Letters: R rows (1, or 2 under guidance), N nodes with the root, B pictures, T prompt places, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...core.batch import CodeBatch, ImageRequest
from ...core.states import Taps, TargetStates
from ..decoding.cache import Cache
from ..decoding.decoder import DecoderStates
from ..decoding.rows import Guidance
from ..decoding.tree import Tree, upload_tree
from .base import Prompt, Target, TargetStep, check_layers


@dataclass
class DrawingSession:
    """A request, or B pictures that are drawn side by side."""

    cache: Cache
    taps: Taps
    prompt: Prompt
    prompt_mask: Tensor | None  # [T] or [R*B,T] bool: places of the prompt that later ones see; None: all


class GuidedTarget(Target):
    """A frozen image generator, which also draws B pictures side by side: R rows (2 under guidance) for each of them.

    A family adds its model, its prompts and its ids.
    """

    config: Any  # the transformer's
    guidance: Guidance
    num_layers: int
    num_codes: int  # tokens of a picture
    grid: Any  # codes along a side of a picture: a family's own property

    def codes(self, tokens: Sequence[int]) -> Tensor:
        """[n] int64: the codes of a picture's tokens."""
        raise NotImplementedError

    def _prompts(
        self, requests: Sequence[ImageRequest], taps: Taps, capacity: int
    ) -> tuple[DrawingSession, DecoderStates]:
        """Runs B prompts: rows are the B with their conditions, then, under guidance, the B without."""
        raise NotImplementedError

    def _at(self, session: DrawingSession, ids: Tensor, places: Tensor, mask: Tensor | None) -> DecoderStates:
        """States of `ids` [R*B,N] at `places` [N]; `mask` as of `_visible`."""
        raise NotImplementedError

    def _states(self, batch: CodeBatch, uncond: Tensor, layers: Sequence[int]) -> TargetStates:
        """Rows marked in `uncond` [B] run without their condition; states after `layers` are kept everywhere."""
        raise NotImplementedError

    @torch.inference_mode()
    def prefill(self, request: ImageRequest, taps: Taps, *, capacity: int) -> tuple[DrawingSession, TargetStep]:
        session, states = self._prompts([request], taps, capacity)
        logits, feature = self.guided(states.feature[:, -1:], [0]), states.feature if taps.feature else None
        return session, TargetStep(logits, feature, states.layers, states.attention, session.prompt)

    @torch.inference_mode()
    def verify(self, session: DrawingSession, root: int, tree: Tree) -> TargetStep:
        ids, places, mask = upload_tree(self.device, tree, root, session.cache.length)
        assert mask is not None
        visible = self._visible(session, len(ids), mask)
        states = self._at(session, ids.expand(self.guidance.num_rows, -1), places, visible)
        feature = states.feature if session.taps.feature else None
        return TargetStep(self.guided(states.feature, steps_of(session, [0, *tree.depths])), feature, states.layers)

    @torch.inference_mode()
    def commit(self, session: DrawingSession, path: Sequence[int]) -> None:
        session.cache.commit([0, *(node + 1 for node in path)])

    @torch.inference_mode()
    def prefill_batch(self, requests: Sequence[ImageRequest], *, capacity: int) -> tuple[DrawingSession, Tensor]:
        """Run the prompts of B pictures side by side: the session that `feed` takes, and scores [B,V]."""
        session, states = self._prompts(requests, Taps(), capacity)
        return session, self._guided_batch(states.feature[:, -1], 0)

    @torch.inference_mode()
    def feed(self, session: DrawingSession, tokens: Tensor) -> Tensor:
        """Scores [B,V] after one more token [B] of each picture of `prefill_batch`."""
        ids = tokens.to(self.device).repeat(self.guidance.num_rows)[:, None]
        alone = torch.ones(1, 1, dtype=torch.bool, device=self.device)
        place = torch.full((1,), session.cache.length, device=self.device)
        states = self._at(session, ids, place, self._visible(session, 1, alone))
        (step,) = steps_of(session, [0])
        session.cache.advance(1)
        return self._guided_batch(states.feature[:, -1], step)

    def _guided_batch(self, feature: Tensor, step: int) -> Tensor:
        """[R*B,D] -> [B,V]: what B pictures are decoded from at token `step`; their conditional rows come first."""
        rows = feature.unflatten(0, (self.guidance.num_rows, -1))
        return self.guided(rows, [step] * rows.shape[1])

    def _both(self, requests: Sequence[ImageRequest]) -> tuple[list[Tensor], Tensor]:
        """The conditions of all R*B rows, and which rows lose theirs [R*B] bool."""
        num_rows = self.guidance.num_rows
        uncond = (torch.arange(num_rows, device=self.device) == 1).repeat_interleave(len(requests))
        return [request.condition.to(self.device) for request in requests] * num_rows, uncond

    def _visible(self, session: DrawingSession, count: int, mask: Tensor) -> Tensor | None:
        """[count,P+count] or [R*B,count,P+count] bool of `count` new places, over the P before them and themselves.
        `mask`: [count,S] over the last S of these places; what lies before, the prompt apart, is seen.
        """
        past, prompt = session.cache.length, session.prompt_mask
        if prompt is None and mask.shape[1] == 1:  # a single node need not see its siblings
            return None
        rows = () if prompt is None else prompt.shape[:-1]
        visible = torch.ones(*rows, count, past + count, dtype=torch.bool, device=self.device)
        visible[..., past + count - mask.shape[1] :] = mask
        if prompt is not None:
            visible[..., : prompt.shape[-1]] = prompt[..., None, :]
        return visible

    @torch.no_grad()
    def states(self, batch: CodeBatch, taps: Taps) -> TargetStates:
        """States of `batch`'s images after their conditions, which the rows of `batch.uncond` lose; with
        `taps.without_condition` those of each row with its condition, and beside them those without.
        """
        check_layers(taps, self.num_layers)
        if not taps.without_condition:
            return self._states(batch, batch.uncond, taps.layers)
        conditional, unconditional = (
            self._states(batch, torch.full_like(batch.uncond, without), taps.layers) for without in (False, True)
        )
        return replace(conditional, unconditional=unconditional)


def steps_of(session: DrawingSession, offsets: Sequence[int]) -> list[int]:
    """The number of the image token that each token predicts, by its distance from the committed ones."""
    first = session.cache.length - session.prompt.ids.shape[1] + 1  # the one after the root
    return [first + place for place in offsets]
