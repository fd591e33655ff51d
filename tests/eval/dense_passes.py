"""Training-time test's attention as one softmax over the keys of all passes: the slow obvious form."""

import math

import torch
from draftsmith.models.decoding.head_layer import through
from draftsmith.models.training_passes import TrainingPasses


def diagonals(count, step, segments=None):
    """[N,(step+1)N] or [B,1,N,(step+1)N] bool: true states up to input i - s, and input i - s + r of pass r."""
    entry = torch.arange(count)
    blocks = [entry[None] <= entry[:, None] - step]
    blocks += [entry[None] == entry[:, None] - step + number for number in range(1, step + 1)]
    mask = torch.cat(blocks, dim=1)
    if segments is None:
        return mask
    return mask & (segments[:, None, :, None] == segments[:, None, None, :]).repeat(1, 1, 1, step + 1)


class Dense(TrainingPasses):
    """Takes the place of the fast form."""

    def attend(self, q, k, v):
        self.all = [*getattr(self, "all", ()), (k, v)]
        mask = diagonals(q.shape[2], len(self.all) - 1, self.segments)
        keys, values = (
            torch.cat(held, 2).repeat_interleave(q.shape[1] // k.shape[1], 1) for held in zip(*self.all, strict=True)
        )
        scores = (q @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
        return scores.softmax(-1) @ values


def by_parts(layer, embeds, states, rope, mask, cache):
    """In place of `JoinedLayer.forward` in passes: its parts one after the other, joined inputs, and autograd."""
    cache.rope = rope if rope is not None else cache.rope
    joined = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(states)], dim=-1)
    return through(layer, states, joined, cache.rope[:, -states.shape[1] :], mask, cache)
