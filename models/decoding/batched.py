"""Plain decoding of many requests at once: answers for training, by a target or by the draft itself, and pictures.

Rows are left padded, so that all of them write at the same place of the cache; each draws from a seed of its own, so
that what a request is answered does not depend on the others beside it (beyond the last bits of a sum).
Letters: R rows, N prompt places, V vocabulary, K kept tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from ...core.batch import TEXT, ImageRequest, Request
from ...core.finite import NotFinite, likeliest
from ...core.states import TopLogProbs
from ..pictures import pictures_of
from .decoder import CachedDecoder
from .warp import Warp

T = TypeVar("T")
_SCORES = "the scores that a token is drawn from"


@dataclass(frozen=True)
class Written:
    """An answer: its ids with the end token, and what was kept of the scores that each of them was drawn from."""

    ids: list[int]
    stop: Literal["eos", "length"]
    top_log_probs: TopLogProbs | None


@torch.no_grad()
def write_answers(
    decoder: CachedDecoder,
    requests: Sequence[Request],
    warp: Warp,
    *,
    limits: Sequence[int],
    seeds: Sequence[int],
    eos_ids: Collection[int],
    keep: Callable[[Tensor], TopLogProbs] | None = None,
    prefill_chunk: int | None = None,
    watch: Callable[[int], None] | None = None,
) -> list[Written]:
    """Continue each request until an end token or its own limit of tokens (at least 1).

    Args:
        seeds: of each request's draws; unused where `warp` is greedy.
        keep: unwarped scores [R,V] -> what is kept of them.
        prefill_chunk: places of the prompts that are run at once; None: all.
        watch: is told after each step how many tokens it wrote.
    """
    assert min(limits) >= 1, limits
    ids: list[list[int]] = [[] for _ in requests]
    log_probs: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in requests]
    uniforms = [
        torch.rand(n, generator=torch.Generator().manual_seed(s), dtype=torch.float64)
        for n, s in zip(limits, seeds, strict=True)
    ]
    rows = _Rows(decoder, requests, capacity=max(limits), prefill_chunk=prefill_chunk)
    scores, step = rows.scores, 0
    while True:
        # Negative where a row's scores are not finite: read with the tokens.
        draws = torch.stack([uniforms[n][min(step, limits[n] - 1)] for n in rows.numbers])
        tokens, of_step = _pick(scores, warp, draws), None if keep is None else keep(scores).to("cpu")
        before = sum(map(len, ids))
        for row, (n, token) in enumerate(zip(rows.numbers, tokens.tolist(), strict=True)):
            if _goes_on(ids[n], limits[n], eos_ids):
                if token < 0:
                    raise NotFinite(_SCORES, f"{requests[n].name or n}, token {len(ids[n])}")
                ids[n].append(token)
                if of_step is not None:
                    log_probs[n].append((of_step.ids[row], of_step.log_probs[row], of_step.log_rest[row]))
        if watch is not None:
            watch(sum(map(len, ids)) - before)
        going = [row for row, n in enumerate(rows.numbers) if _goes_on(ids[n], limits[n], eos_ids)]
        if not going:
            break
        # A row that has ended keeps running, and its output is ignored, until half of the rows have ended.
        if 2 * len(going) <= len(rows.numbers):
            rows.select(going)
            tokens = tokens[going]
        scores, step = rows.feed(tokens.clamp(min=0)), step + 1
    return [
        Written(
            row_ids,
            "eos" if row_ids[-1] in eos_ids else "length",
            None if keep is None else TopLogProbs(*map(torch.stack, zip(*mine, strict=True))),
        )
        for row_ids, mine in zip(ids, log_probs, strict=True)
    ]


@torch.inference_mode()
def draw_pictures(
    target: Any, requests: Sequence[ImageRequest], warp: Warp, *, seeds: Sequence[int]
) -> list[list[int]]:
    """Tokens of whole pictures, drawn side by side: those of `eval.loop.generate` without a drafter, whatever B is.

    Args:
        target: a `GuidedTarget`.
        seeds: of each picture's draws; unused where `warp` is greedy.
    """
    length: int = target.num_codes
    uniforms = torch.stack([_uniforms(length, seed) for seed in seeds]).to(target.device)  # [B,n]
    session, scores = target.prefill_batch(requests, capacity=length)
    tokens = [_pick(scores, warp, uniforms[:, 0])]
    for step in range(1, length):
        tokens.append(_pick(target.feed(session, tokens[-1].clamp(min=0)), warp, uniforms[:, step]))
    drawn: list[list[int]] = torch.stack(tokens, dim=1).tolist()
    for request, row_tokens in zip(requests, drawn, strict=True):
        if min(row_tokens) < 0:
            raise NotFinite(_SCORES, f"{request.name or request.caption or row_tokens}, token {row_tokens.index(-1)}")
    return drawn


def even_batches(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """`items` in order, in as few batches of at most `size` as there can be, of about equal sizes."""
    count = -(-len(items) // size)
    ends = [len(items) * number // count for number in range(count + 1)] if count else [0]
    return [items[start:end] for start, end in itertools.pairwise(ends)]


def _uniforms(count: int, seed: int) -> Tensor:
    """[n] float64, as the decoding loop draws them: the prefill's token from a float32."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.rand(1, generator=generator).double()
    return torch.cat([first, torch.rand(count - 1, generator=generator, dtype=torch.float64)])


class _Rows:
    """The requests that are still being continued: their cache, and which positions each of them attends to."""

    def __init__(
        self, decoder: CachedDecoder, requests: Sequence[Request], *, capacity: int, prefill_chunk: int | None
    ):
        lengths, device = torch.tensor([len(r.ids) for r in requests]), decoder.device
        longest = int(lengths.max())
        self.decoder, self.numbers = decoder, list(range(len(requests)))
        visible = torch.arange(longest) >= longest - lengths[:, None]
        self.visible = visible.to(device)  # [R,positions so far]
        self.cache = decoder.new_cache(longest + capacity)
        ids = torch.zeros(len(requests), longest, dtype=torch.int64)
        modality = torch.full(ids.shape, TEXT, dtype=torch.int8)
        for row, request in enumerate(requests):
            ids[row, longest - len(request.ids) :] = request.ids
            modality[row, longest - len(request.ids) :] = request.modality
        pixels = [r.pixels.to(device) for r in requests if r.pixels is not None]
        pictures = [picture for r in requests for picture in pictures_of(r)]
        prompts = decoder.prompts(
            ids.to(device), modality.to(device), torch.cat(pixels) if pixels else None, pictures, mask=self.visible,
            on_host=(modality, visible),
        )  # fmt: skip
        states = decoder.run(prompts, self.cache, chunk=prefill_chunk)
        self.places = prompts.next_position.to(device)
        self.scores = decoder.logits(states.feature[:, -1])  # [R,V]

    def feed(self, tokens: Tensor) -> Tensor:
        """Scores [R,V] after one more token [R] of each row."""
        self.visible = torch.cat([self.visible, self.visible.new_ones(len(self.visible), 1)], dim=1)
        embeds = self.decoder.embed(tokens[:, None])
        states = self.decoder.forward(embeds, self.cache, self.places[:, None], self.visible[:, None])
        self.cache.advance(1)
        self.places = self.places + 1
        return self.decoder.logits(states.feature[:, -1])

    def select(self, rows: list[int]) -> None:
        """Keep only these rows."""
        self.numbers = [self.numbers[row] for row in rows]
        self.places, self.visible = self.places[rows], self.visible[rows]
        self.cache.select_rows(rows)


def _goes_on(ids: list[int], limit: int, eos_ids: Collection[int]) -> bool:
    return len(ids) < limit and not (ids and ids[-1] in eos_ids)


def _pick(scores: Tensor, warp: Warp, uniforms: Tensor) -> Tensor:
    """[R] tokens of scores [R,V], one draw [R] each; -1 where a row's scores are not finite."""
    if warp.greedy:
        return likeliest(scores)
    cdf = warp(scores).double().cumsum(-1)
    wanted = uniforms.to(cdf)[:, None] * cdf[:, -1:]
    # On the right of equals: a token without probability is never hit.
    tokens, total = torch.searchsorted(cdf, wanted, right=True)[:, 0], cdf[:, -1]
    return tokens.where(total.isfinite() & (total > 0), -1)
