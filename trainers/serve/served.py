"""What the stages want of a target that an engine runs: answers to requests, and hidden states of batches.

Letters: B rows, T tokens, D width, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...core.batch import Batch, Request
from ...core.errors import UserError
from ...core.json_types import JsonObject
from ...core.pictures import TEXT, Picture
from ...core.positions import place_positions
from ...core.states import Taps, TargetStates
from ...data.families.processor import Processor
from ...models.decoding.batched import Written
from ...models.hub import num_deepstack
from ...models.targets.language import kept_states
from .engine_answers import Asked, Job
from .engine_pictures import engine_job
from .engine_process import EngineProcess

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class ServedAnswers:
    """Writes answers with an engine."""

    def __init__(
        self,
        process: EngineProcess,
        processor: Processor,
        sampling: Callable[..., JsonObject],
        ends: Sequence[int],
        never: Collection[int],
    ):
        """
        Args:
            sampling: (seed, limit, ends, never) -> how an answer is drawn, in the engine's words.
            ends: ids of the end tokens.
            never: ids that no answer has.
        """
        self.process, self.processor, self.sampling, self.ends = process, processor, sampling, ends
        # The strongest that engines take; an id that comes all the same is refused.
        self._bias = dict.fromkeys(never, -100.0)
        self._never = frozenset(never)

    def begin(
        self, requests: Sequence[Request], limits: Sequence[int], seeds: Sequence[int]
    ) -> Callable[[], list[Written]]:
        """Ask, and return what waits for the answers."""
        lines, pictures = engine_job(requests, self.processor)
        for line, limit, seed in zip(lines, limits, seeds, strict=True):
            line["sampling"] = self.sampling(seed=seed, limit=limit, ends=self.ends, never=self._bias)
        of = [Asked(r.name, r.ids, limit) for r, limit in zip(requests, limits, strict=True)]
        job = Job(of, self.processor.num_token_ids, self._never, ends=set(self.ends))
        return partial(self._finish, self.process.submit(lines, pictures), job)

    def _finish(self, name: str, job: Job) -> list[Written]:
        return [Written(answer.tokens, answer.stop, None) for answer in self.process.wait(name, job)]


@dataclass(frozen=True)
class ServedStates:
    """A target's hidden states by an engine, in place of its own teacher-forced pass.

    Args:
        target: its embedding, final norm and LM head, without layers.
        ahead: batches that are asked for before the first one is read.
    """

    process: EngineProcess
    target: Any
    processor: Processor
    taps: Taps
    layers: tuple[int, ...]  # as the engine was started with
    ahead: int

    def begin(self, batch: Batch) -> Callable[[], TargetStates]:
        """Ask for the states of a batch on the CPU, and return what waits for them."""
        rows = _rows(batch)
        lines, pictures = engine_job(rows, self.processor)
        lines = [line | {"sampling": {"temperature": 0.0, "max_tokens": 1}} for line in lines]
        shape = (len(self.layers), int(self.target.config.hidden_size))
        job = Job([Asked(row.name, row.ids) for row in rows], self.target.config.vocab_size, states=shape)
        return partial(self._finish, batch, self.process.submit(lines, pictures), job)

    @torch.no_grad()
    def _finish(self, batch: Batch, name: str, job: Job) -> TargetStates:
        decoder, mask = self.target.decoder, batch.attention_mask
        dtype, device = self.target.embedding.dtype, self.target.device
        states = torch.zeros(*batch.ids.shape, len(self.layers), self.target.config.hidden_size, dtype=dtype)
        # Other ranks may be inside the same step, or wait for its end: whoever asks stops between two batches.
        self.process.wait(name, job, stops=False)
        for row, asked in enumerate(job.requests):
            states[row, : len(asked.ids)] = self.process.states(name, job, row).to(dtype)
        by_layer = dict(zip(self.layers, states.to(device).unbind(2), strict=True))
        feature = decoder.language_model.norm(by_layer[decoder.num_layers])
        positions, _ = place_positions(batch.modality, mask, _pictures(batch), decoder.scheme)
        layers = {layer: by_layer[layer] for layer in self.taps.layers}
        return kept_states(batch.to(device), self.taps, feature, layers, positions.to(device))


def check_layers(engine: str, layers: Sequence[int], config: PreTrainedConfig) -> None:
    """Raises `UserError` for layers whose states the engine hands out without what the target adds to them.

    Qwen3-VL adds what its tower saw to the output of its first layers, after the place that an engine taps (measured:
    losses 3e-3 apart).
    """
    added = num_deepstack(config)
    if layers[0] <= added:
        raise UserError(
            f"the drafter reads layer {layers[0]}, and at pictures {engine} hands out the first {added} without what "
            "the target adds to them (deepstack)", key="drafter.taps",
            hint=f"set drafter.taps above {added}, or engine: {{kind: transformers}}",
        )  # fmt: skip


def _pictures(batch: Batch) -> tuple[Picture, ...]:
    """The pictures of all rows; tiles without a description are plain pictures."""
    count = 0 if batch.pixels is None else len(batch.pixels) - batch.num_dummy_images
    if batch.pictures or not count:
        return batch.pictures
    patches = round((int((batch.modality != TEXT).sum()) / count) ** 0.5)
    return (Picture(patches),) * count


def _rows(batch: Batch) -> list[Request]:
    """The rows without padding."""
    rows, pictures, place = list[Request](), iter(_pictures(batch)), 0
    for name, ids, modality, mask in zip(
        batch.sample_ids, batch.ids, batch.modality, batch.attention_mask, strict=True
    ):
        own, visual, start = [], int((modality[mask] != TEXT).sum()), place
        while visual > 0:
            own.append(next(pictures))
            visual -= own[-1].num_tokens
            place += own[-1].num_tiles
        pixels = None if batch.pixels is None else batch.pixels[start:place]
        rows.append(Request(ids[mask], modality[mask], pixels, name, tuple(own)))
    return rows
