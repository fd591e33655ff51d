"""Drafting with a model of its own: a draft LVLM that sees the pictures (M, P) or text in their place (T, C).

TABED, sections 3 and 6; what each mode is shown is in `modes.py`, several modes at once in `ensemble.py`.
Letters: R rows, N tokens, F nodes, D width, V vocabulary, S expansions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...core.batch import Request
from ..decoding.cache import Cache
from ..decoding.decoder import CachedDecoder
from ..decoding.rows import Places
from ..decoding.tree import Expansions, accepted_expansions, upload, upload_tokens
from ..decoding.warp import Warp
from ..fast.cuda_graphs import Graphs
from ..pictures import flat_view, without_first
from ..targets.base import Taps, TargetStep, Verified
from .beside import members_in
from .modes import ImageSubstitutes, Mode, View


class IndependentProposal:
    """Proposes with a causal model through its own cache. Pictures are a newline in mode T, `substitutes` in the other
    text modes.
    """

    taps = Taps()
    max_levels: int | None = None

    def __init__(
        self, decoder: CachedDecoder, mode: Mode, *, newline_id: int, substitutes: ImageSubstitutes | None = None
    ):
        self.decoder, self.mode, self.newline_id = decoder, mode, newline_id
        self.substitutes = substitutes or ImageSubstitutes(newline_id)
        self.substitutes.check(mode)
        self._cache: Cache | None = None
        self._last_views: tuple[Request, tuple[View, ...]] | None = None

    @property
    def graphs(self) -> Graphs | None:
        """The CUDA graphs of its decoder's passes."""
        return self.decoder.graphs

    @torch.inference_mode()
    def start(self, request: Request, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        self._warp = warp
        began = time.perf_counter()
        self._last_views = (request, self._views_of(self._as_read(request)))
        # Nothing but captions takes time here; a captioner returns text, so its device has finished.
        self.captioning_s = time.perf_counter() - began if "C" in (self.mode, *members_in(self)) else 0.0
        self._prefill([view.to(self.decoder.device) for view in self._last_views[1]], capacity)
        self._expansions = Expansions()

    def _as_read(self, request: Request) -> Request:
        """The request in the draft's own tiles, where they are not the target's, and as far as it can read them."""
        if (view := request.drafter_view) is not None:
            request = replace(view, originals=view.originals or request.originals)
        request = request if self.decoder.reads_newlines else flat_view(request)
        return request if self.decoder.reads_first else without_first(request)

    def _views_of(self, request: Request) -> tuple[View, ...]:
        """The request as each row sees it."""
        return (self.substitutes.view(request, self.mode),)

    def _prefill(self, views: Sequence[View], capacity: int) -> None:
        """Run the prompts (one in this class). At most `capacity` tokens follow."""
        (view,) = views
        length = len(view.request.ids)
        self._cache = self.decoder.request_cache(length + capacity)
        rope_delta = self._run_prompt(view, self._cache)
        self._places = Places((length,), length + capacity, self.decoder.device, [rope_delta])

    def _run_prompt(self, view: View, cache: Cache, encoded: Tensor | None = None) -> int:
        """Run a prompt into its cache. Returns the row's M-RoPE delta."""
        request = view.request
        ids, modality = request.ids[None], request.modality[None]
        prompts = self.decoder.prompts(ids, modality, request.pixels, request.pictures, pool=view.pool, encoded=encoded)
        self.decoder.run(prompts, cache)
        return prompts.rope_delta

    def views(self, request: Request) -> tuple[View, ...]:
        """The request as each row sees it. The latest request is cached, so it is not captioned twice."""
        if self._last_views is None or self._last_views[0] is not request:
            self._last_views = (request, self._views_of(self._as_read(request)))
        return self._last_views[1]

    def last_position(self, request: Request, max_new_tokens: int) -> int:
        """The last position that the request reaches. A draft proposes noise beyond its own positions (TABED: mode M on
        five pictures).
        """
        return max(len(view.request.ids) for view in self.views(request)) + max_new_tokens

    def begin(self, first: int) -> None:
        self._pending = [first]

    @torch.inference_mode()
    def root(self) -> Tensor:
        """Feed what was committed since the last cycle; the cache then ends at the last committed token."""
        assert self._cache is not None
        past, count = self._cache.length, len(self._pending)
        ids, places = upload(self.decoder.device, np.array([self._pending, range(past, past + count)]))[0]
        feature = self._forward(ids, places, None)
        self._cache.advance(count)
        self._expansions = Expansions()
        return self._q(feature[:, -1:])[0]

    @torch.inference_mode()
    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """Run tokens [F] after the committed ones; the cache keeps its committed length."""
        assert self._cache is not None
        past, first, device = self._cache.length, len(self._expansions), self.decoder.device
        depths = self._expansions.take(parents)
        host = [np.array([past + depth - 1 for depth in depths])]
        done = self._expansions
        # An expansion that is alone and extends a chain of all others needs no mask.
        if not (len(parents) == 1 and done.parents[-1] == len(done) - 2 and done.depths[-1] == len(done)):
            host.append(self._expansions.ancestors(first).numpy())
        tokens, places, *masks = upload_tokens(device, tokens, *host)
        # Expansions are written after each other; the cache's length covers them only during this forward.
        self._cache.crop_to(past + first)
        feature = self._forward(tokens, places, masks[0] if masks else None)
        self._cache.crop_to(past)
        return self._q(feature)

    def _forward(self, tokens: Tensor, places: Tensor, mask: Tensor | None) -> Tensor:
        """[R,N,D] of the same tokens [N] in every row; `places` [N] count as the longest row's positions do."""
        assert self._cache is not None
        rows = self._places
        embeds = self.decoder.embed(tokens[None]).expand(rows.count, -1, -1)
        mask = rows.mask(len(tokens), self._cache.length + len(tokens), mask)
        return self.decoder.forward(embeds, self._cache, rows.positions(places), mask).feature

    def _q(self, feature: Tensor) -> Tensor:
        """[R,N,D] -> [N,V]."""
        return self._warp.apply_temperature(self.decoder.logits(feature[0]))

    def accept(self, verified: Verified) -> None:
        """Keep the cache of accepted nodes; `root` feeds the bonus token and accepted tokens that were not expanded."""
        assert self._cache is not None
        accepted = accepted_expansions(verified)
        self._cache.commit(accepted)
        self._pending = [*verified.tokens[len(accepted) :], verified.bonus]
        self._expansions = Expansions()
