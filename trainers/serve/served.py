"""What the stages want of a target that an engine runs: answers to requests, and hidden states of batches.

An engine gets one placeholder for a picture. It resizes pictures with other code than ours, so it gets what our own
processor made of them, turned back into bytes.
Letters: B rows, T tokens, D width, L layers; I tiles, P patches, C channels, S side, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.batch import Batch, Request
from ...core.errors import UserError
from ...core.json_types import JsonObject
from ...core.pictures import TEXT, VIDEO, Picture, one_placeholder_each
from ...core.positions import place_positions
from ...core.states import Taps, TargetStates
from ...data.families.processor import Processor
from ...models.decoding.batched import Written
from ...models.hub import num_deepstack
from ...models.targets.language import tapped_states
from .engine_answers import Asked, Job
from .engine_process import EngineProcess

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_PASSED = "engine: {kind: transformers} reads them"


@dataclass(frozen=True)
class ServedAnswers:
    """Writes answers with an engine."""

    process: EngineProcess
    processor: Processor
    sampling: Callable[..., JsonObject]  # (seed, limit, ends, never) -> how an answer is drawn, in the engine's words
    ends: Sequence[int]  # ids of the end tokens
    never: Collection[int]  # ids that no answer has

    def begin(
        self, requests: Sequence[Request], limits: Sequence[int], seeds: Sequence[int]
    ) -> Callable[[], list[Written]]:
        """Ask, and return what waits for the answers."""
        lines, pictures = engine_job(requests, self.processor)
        bias = dict.fromkeys(self.never, -100.0)  # the strongest that engines take
        for line, limit, seed in zip(lines, limits, seeds, strict=True):
            line["sampling"] = self.sampling(seed=seed, limit=limit, ends=self.ends, never=bias)
        of = [Asked(r.name, r.ids, limit) for r, limit in zip(requests, limits, strict=True)]
        job = Job(of, self.processor.num_token_ids, {*self.never}, ends={*self.ends})
        name = self.process.submit(lines, pictures)
        return lambda: [Written(answer.tokens, answer.stop, None) for answer in self.process.wait(name, job)]


@dataclass(frozen=True)
class ServedStates:
    """A target's hidden states by an engine, in place of its own pass. The target is its tables alone."""

    process: EngineProcess
    target: Any
    processor: Processor
    taps: Taps
    layers: tuple[int, ...]  # as the engine was started with

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
        for row, request in enumerate(job.requests):
            states[row, : len(request.ids)] = self.process.states(name, job, row).to(dtype)
        by_layer = dict(zip(self.layers, states.to(device).unbind(2), strict=True))
        feature = decoder.language_model.norm(by_layer[decoder.num_layers])
        positions, _ = place_positions(batch.modality, mask, _pictures(batch), decoder.scheme)
        layers = {layer: by_layer[layer] for layer in self.taps.layers}
        return tapped_states(batch.to(device), self.taps, feature, layers, positions.to(device))


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
        of_row, visual, start = [], int((modality[mask] != TEXT).sum()), place
        while visual > 0:
            of_row.append(next(pictures))
            visual -= of_row[-1].num_tokens
            place += of_row[-1].num_tiles
        pixels = None if batch.pixels is None else batch.pixels[start:place]
        rows.append(Request(ids[mask], modality[mask], pixels, name, tuple(of_row)))
    return rows


def engine_job(requests: Iterable[Request], processor: Processor) -> tuple[list[JsonObject], dict[str, Tensor]]:
    """`ids` and `pictures` of each request, and these pictures [H,W,3] uint8 by name. Raises `UserError` as `shown`."""
    lines, pictures = list[JsonObject](), dict[str, Tensor]()
    for number, request in enumerate(requests):
        named = {
            f"{number}-{index}": pixels
            for index, pixels in enumerate(shown(request.pixels, request.pictures, processor, request.name))
        }
        ids = one_placeholder_each(request.ids.tolist(), request.modality.tolist(), request.pictures)
        lines.append({"ids": ids, "pictures": list(named)})
        pictures |= named
    return lines, pictures


def shown(pixels: Tensor | None, pictures: Sequence[Picture], processor: Processor, name: str) -> list[Tensor]:
    """The pictures of a row as [H,W,3] uint8, of its tiles [I,3,S,S] or patches [P,...]. Raises `UserError`: a clip, or
    a picture in several tiles, which an engine would cut by itself.
    """
    drawn, place = [], 0
    for picture in pictures:
        if picture.modality == VIDEO:
            raise UserError("the engine is handed pictures, and this record has a clip", where=name, hint=_PASSED)
        if picture.whole is None and picture.num_tiles > 1:
            raise UserError("the engine cuts tiles by itself, and this picture has several", where=name, hint=_PASSED)
        assert pixels is not None
        images = processor.image_processor
        mean, std = (torch.tensor(values)[:, None, None] for values in (images.image_mean, images.image_std))
        part, grid, side = pixels[place : place + picture.num_tiles], picture.whole, processor.patch_size
        if grid is None:
            whole = part[0]
        else:  # patches in the order of tokens, as `ordered` of the Qwen family makes them
            merge, rows, columns = grid.merge, grid.rows // grid.merge, grid.columns // grid.merge
            cut = part.view(rows, columns, merge, merge, 3, 2, side, side)[:, :, :, :, :, 0]  # both frames are one
            whole = cut.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, grid.rows * side, grid.columns * side)
        # Normalised [3,H,W] -> the bytes that were normalised.
        drawn.append(((whole.float() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0))
        place += picture.num_tiles
    return [picture.contiguous() for picture in drawn]
