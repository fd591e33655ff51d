"""Packing: the samples of a batch one behind the other in a single row without padding, each attending to itself alone.

A packed `Batch` is laid out as any other; models put its tokens into one row while they run and spread what comes out,
so pictures, labels, positions and seeds are those of the padded batch. transformers' decoders build the block-diagonal
attention themselves where token indices begin anew and no mask is given: a mask for sdpa and eager attention, lengths
for flash attention. Letters: B samples, T tokens, M tokens without padding, D width, n coordinates of positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.batch import Batch


@dataclass(frozen=True)
class PackedRow:
    """Where the tokens of a batch stand in the row."""

    shape: tuple[int, int]  # B, T
    places: Tensor  # [M] int64 in the flattened batch
    segments: Tensor  # [M] int64 number of each token's sample, ascending
    indices: Tensor  # [M] int64 token index within its sample

    @classmethod
    def of(cls, mask: Tensor) -> PackedRow:
        """Of a batch whose tokens `mask` [B,T] keeps, padded on the right."""
        places = mask.flatten().nonzero()[:, 0]
        width = mask.shape[1]
        return cls((mask.shape[0], width), places, places // width, places % width)

    def pack(self, values: Tensor) -> Tensor:
        """[B,T,...] -> [1,M,...]."""
        return values.flatten(0, 1)[self.places][None]

    def spread(self, states: Tensor) -> Tensor:
        """[1,M,...] -> [B,T,...], zero at padding."""
        rows, width = self.shape
        empty = states.new_zeros(rows * width, *states.shape[2:])
        return empty.index_copy(0, self.places, states[0]).unflatten(0, self.shape)

    @property
    def mask(self) -> Tensor:
        """[M,M] bool: each token sees its own sample up to itself."""
        return (self.segments[:, None] == self.segments).tril()


def last_states(decoder: Any, batch: Batch, embeds: Tensor, positions: Tensor, **more: Tensor | list[Tensor]) -> Tensor:
    """Final states [B,T,D] of a decoder of transformers over the embeddings [B,T,D] of a batch, packed or padded.

    Args:
        positions: [B,T], or [3,B,T] under M-RoPE.
        more: what the decoder takes beside these; [B,T] tensors are packed, too.
    """
    if not batch.packed:
        mask = batch.attention_mask.long()
        return _run(decoder, inputs_embeds=embeds, attention_mask=mask, position_ids=positions, **more)
    row = PackedRow.of(batch.attention_mask)
    if positions.dim() == 3:
        # Qwen-VL's decoders read a fourth row of positions: token indices, by which they tell samples apart.
        packed = torch.stack([row.indices[None], *(row.pack(part) for part in positions)])
    else:
        packed = row.pack(positions)
    more = {name: row.pack(value) if isinstance(value, Tensor) else value for name, value in more.items()}
    return row.spread(_run(decoder, inputs_embeds=row.pack(embeds), attention_mask=None, position_ids=packed, **more))


def _run(decoder: Any, **inputs: Any) -> Tensor:
    return decoder(use_cache=False, **inputs).last_hidden_state
