"""Passes whose scores have the same bits for one token as for a drafted chain or tree: on a CPU, in bfloat16.

Torch's kernels choose by the number of rows how they sum. So a plain step runs beside a token that nobody reads, and
attention reads whole blocks of keys, or rounds once what it summed in float64: facts that tests compare, no promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention import folded, hidden_below, run_over
from ..hub import kv_shapes
from .cache import Cache
from .decoder import CachedDecoder, DecoderStates

# What torch's flash attention reads at once on a CPU. MOST: rows of a pass for which products were compared.
KEYS, QUERIES, MOST = 512, 32, 64


def in_float64(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **settings: Any) -> Tensor:
    """Attend as `folded`; what another order of the sums changes is lost where the result is rounded to q's dtype."""
    return folded(q.double(), k.double(), v.double(), mask, **settings).to(q.dtype)


class Identical:
    """The passes after a prompt of one request, of at least `least` places each. With `trees`, where a node's ancestors
    lie at other places than in plain decoding, attention is in float64: dearer, for plain steps too.
    """

    def __init__(self, decoder: CachedDecoder, *, trees: bool, least: int = 2):
        self.decoder, self.trees, self.least = decoder, trees, least
        self.config = decoder.language_model.config
        self.groups = self.config.num_attention_heads // kv_shapes(self.config)[0][0]
        self.summary = f"on, attention {'in float64' if trees else f'over blocks of {KEYS} keys'}"  # for the report

    def sizes(self, past: int, count: int) -> tuple[int, int]:
        """Places of a pass over `count` after `past`, and keys that it reads."""
        rows = max(self.least, count)
        # Sums for 1 to 3 queries, also those that are left of a block, differ from sums for more.
        while not self.trees and (self.groups * rows < 4 or 0 < self.groups * rows % QUERIES < 4):
            rows += 1
        return rows, past + rows if self.trees else -(-(past + rows) // KEYS) * KEYS

    def forward(
        self, embeds: Tensor, cache: Cache, positions: Tensor, mask: Tensor | None = None, *, layers: Sequence[int] = ()
    ) -> DecoderStates:
        """`CachedDecoder.forward`'s states, with those of the places that fill up the pass behind them."""
        assert self.trees or mask is None, "a tree where chains were told"
        past, count = cache.length, embeds.shape[1]
        rows, reach = self.sizes(past, count)
        visible = torch.ones(rows, reach, dtype=torch.bool, device=embeds.device).tril(past)
        if mask is not None:
            visible[:count, past : past + count] = mask
        full = hidden_below(visible, torch.float64 if self.trees else embeds.dtype)[None, None]
        embeds, positions = F.pad(embeds, (0, 0, 0, rows - count)), F.pad(positions, (0, rows - count))
        before, self.config._attn_implementation = self.config._attn_implementation, "sdpa"
        try:
            run_over(self.config, *(("float64_sdpa", in_float64) if self.trees else ("folded_sdpa", folded)))
            with cache.written_at(torch.arange(past, past + rows, device=embeds.device), reach):
                return self.decoder.forward(embeds, cache, positions, full, layers=layers)
        finally:
            self.config._attn_implementation = before
