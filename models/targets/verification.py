"""A target's verification pass in a CUDA graph: one for each number of nodes and each length, rounded up.

A pass over 60 nodes launches as many kernels as a long prefill and computes little: the host is what it waits for.
Letters: N nodes with the root, padded; K places, V vocabulary, D width.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..decoding.cache import Cache
from ..decoding.captured import PassGraphs, why_nowhere
from ..decoding.decoder import CachedDecoder, DecoderStates
from ..decoding.tree import Tree
from ..decoding.upload import upload
from ..hub import has_windows, num_experts, recurrent_layers, rope_of

NODES = (1, 8, 16, 32, 64, 128)
_SHORTEST = 256
# What a kernel does not do beside a mask of its own, or does by values that the host must know.
_KERNELS = {"sdpa", "grouped_sdpa", "eager"}

# Rotations whose frequencies depend on the longest position beyond a length; transformers reads it on the host.
DYNAMIC = {"dynamic", "longrope"}


def why_not(decoder: CachedDecoder) -> str | None:
    """Why this model's passes cannot be captured; None: they can."""
    model, config = decoder.model, decoder.language_model.config
    if (reason := why_nowhere(model.parameters(), decoder.device)) is not None:
        return reason
    rope = rope_of(config)
    kind = rope.get("rope_type") or rope.get("type")
    if kind in DYNAMIC:
        return f"rotations are {kind}, which the host computes anew as positions grow"
    if num_experts(config):
        return "the shapes of a mixture of experts depend on its tokens"
    if recurrent_layers(config):
        return "recurrent layers keep what a tree wrote in tensors of its own size"
    if has_windows(config):
        return "layers see a window of positions, which a graph's buffers do not hold"
    if config._attn_implementation not in _KERNELS:
        return f"attention is {config._attn_implementation}, which takes no mask"
    return None


def lengths_up_to(capacity: int) -> tuple[int, ...]:
    """256, 384, 512, 768, ...: two for each doubling, the last at `capacity` or above."""
    lengths = [_SHORTEST]
    while lengths[-1] < capacity:
        last = lengths[-1]
        lengths.append(last * 3 // 2 if last & (last - 1) == 0 else last * 4 // 3)
    return tuple(lengths)


def verify(
    graphs: PassGraphs, decoder: CachedDecoder, cache: Cache, root: int, tree: Tree, first: int,
    layers: tuple[int, ...],
) -> tuple[Tensor, DecoderStates] | None:  # fmt: skip
    """Scores [n+1,V] and states of the root and n nodes; None: the pass must be run eagerly.

    Args:
        first: the root's position.

    Raises:
        RuntimeError: another request was prefilled since, into the same buffers.
    """
    count = tree.num_nodes + 1
    fit = graphs.fit(cache, count, hooked=decoder.always_masks)
    if fit is None:
        return None
    nodes, length = fit

    def run(ids: Tensor, positions: Tensor, past: Tensor, seen: Tensor) -> tuple[Tensor, ...]:
        behind = torch.arange(length, device=past.device) - past  # [K] place after the committed ones
        new = seen.index_select(1, behind.clamp(0, nodes - 1)) & (behind < nodes)
        full = ((behind < 0) | new)[None, None]  # [1,1,N,K]
        with cache.written_at(past + torch.arange(nodes, device=past.device), length):
            states = decoder.forward_seeing(decoder.embed(ids[None]), cache, positions[None], full, layers)
        return decoder.logits(states.feature[0]), states.feature, *(states.layers[layer] for layer in layers)

    inputs = _inputs(decoder.device, tree, root, first, cache.length, nodes)
    scores, feature, *kept = graphs.run((length, layers), run, *inputs)
    by_layer = {layer: part[:, :count] for layer, part in zip(layers, kept, strict=True)}
    return scores[:count], DecoderStates(feature[:, :count], by_layer, {})


def _inputs(device: torch.device, tree: Tree, root: int, first: int, past: int, nodes: int) -> list[Tensor]:
    """ids [N], positions [N], number of committed tokens [1] and which nodes each one sees [N,N] bool, in one copy.

    Padding sees itself alone of the new places: an empty row of attention is undefined.
    """
    real, on_host = tree.num_nodes + 1, tree.tokens.device.type == "cpu"
    ids, positions, seen = np.zeros(nodes, dtype=np.int64), np.full(nodes, first), np.eye(nodes, dtype=bool)
    ids[0] = root
    positions[1:real] += np.array(tree.depths, dtype=np.int64)
    seen[:real, :real] = tree.ancestor_mask().numpy()
    if on_host:
        ids[1:real] = tree.tokens.numpy()
    inputs = upload(device, ids, positions, np.array([past]), seen)
    if not on_host:
        inputs[0][1:real] = tree.tokens
    return inputs
