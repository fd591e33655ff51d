"""A target's verification pass as CUDA graphs: one for each number of nodes and each length, rounded up.

A pass over 60 nodes launches as many kernels as a long prefill and computes little: the host is what it waits for.
Nodes are padded to a fixed number, and attention reads a fixed number of places, of which a mask hides what lies after
the tree. The cache's buffers stay where they are for every request; the accepted path is committed outside the graph.
Letters: N nodes with the root, padded; K places, V vocabulary, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.states import uploaded
from ..decoding.cache import Cache
from ..decoding.captured import Graphs, why_nowhere
from ..decoding.decoder import CachedDecoder, DecoderStates
from ..decoding.tree import Tree
from ..hub import has_windows, recurrent_layers, rope_of

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
    if getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None):
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


class VerificationGraphs:
    """Passes over trees after one request at a time.

    Args:
        lengths: K, ascending; a request that may come to more gets a cache of its own, and eager passes.
        nodes: N, ascending; larger trees are run eagerly.
    """

    def __init__(self, decoder: CachedDecoder, lengths: Sequence[int], nodes: Sequence[int] = NODES):
        self.decoder, self.lengths, self.nodes = decoder, tuple(lengths), tuple(nodes)
        self.graphs = Graphs(decoder.device)
        self.num_replayed = self.num_eager = 0  # passes
        self._cache: Cache | None = None
        self._lent: Cache | None = None  # to the request that decodes: the same buffers
        self._inputs: dict[int, _Inputs] = {}

    @property
    def seconds(self) -> float:
        """That captures took."""
        return self.graphs.seconds

    @property
    def summary(self) -> str:
        """For the report."""
        counts = f"{len(self.graphs)} captured in {self.graphs.seconds:.1f} s, {self.num_replayed:,} passes replayed"
        most = f"longer than {self.lengths[-1]:,} places, more than {self.nodes[-1]} nodes, or layers are hooked"
        return counts + (f", {self.num_eager:,} eager ({most})" if self.num_eager else "")

    def new_cache(self, needed: int) -> Cache:
        """An empty cache of at least `needed` positions: the static one where it is large enough."""
        # Padding is written after the tree.
        if needed + self.nodes[-1] > self.lengths[-1]:
            return self.decoder.new_cache(needed)
        if self._cache is None:
            self._cache = self.decoder.new_cache(self.lengths[-1])
        self._cache.empty()
        self._lent = copy.copy(self._cache)
        return self._lent

    def verify(self, cache: Cache, root: int, tree: Tree, first: int, layers: tuple[int, ...]) -> Any:
        """Scores [n+1,V] and `DecoderStates` of the root and n nodes; None: the pass must be run eagerly.

        Args:
            first: the root's position.

        Raises:
            RuntimeError: another request was prefilled since, into the same buffers.
        """
        if self._cache is not None and cache is not self._lent and cache.layers is self._cache.layers:
            raise RuntimeError("a later request took the graphs' cache: with graphs, one request decodes at a time")
        count = tree.num_nodes + 1
        nodes = next((n for n in self.nodes if n >= count), None)
        # `always_masks`: hooks change what layers see, and a graph would not ask them.
        if cache is not self._lent or nodes is None or self.decoder.always_masks:
            self.num_eager += 1
            return None
        length = next(k for k in self.lengths if k >= cache.length + nodes)
        if nodes not in self._inputs:
            self._inputs[nodes] = _Inputs(nodes, self.decoder.device)
        inputs = self._inputs[nodes]
        inputs.fill(tree, root, first, cache.length)
        scores, states = self.graphs.replay((nodes, length, layers), lambda: self._run(inputs, length, layers))
        self.num_replayed += 1
        # Out of the graphs' memory, which the next replay writes.
        kept = {layer: part[:, :count].clone() for layer, part in states.layers.items()}
        return scores[:count].clone(), DecoderStates(states.feature[:, :count].clone(), kept, {})

    def _run(self, inputs: _Inputs, length: int, layers: tuple[int, ...]) -> tuple[Tensor, DecoderStates]:
        """The pass itself; reads and writes static buffers only."""
        assert self._cache is not None
        count, device = len(inputs.ids), inputs.ids.device
        behind = torch.arange(length, device=device) - inputs.past  # [K] place after the committed ones
        new = inputs.tree.index_select(1, behind.clamp(0, count - 1)) & (behind < count)
        seen = ((behind < 0) | new)[None, None]  # [1,1,N,K]
        with self._cache.written_at(inputs.past + torch.arange(count, device=device), length):
            states = self.decoder.forward_seeing(
                self.decoder.embed(inputs.ids[None]), self._cache, inputs.positions[None], seen, layers=layers
            )
        return self.decoder.logits(states.feature[0]), states


class _Inputs:
    """Static inputs of a pass over N nodes, in one buffer, which one copy fills."""

    def __init__(self, count: int, device: torch.device):
        words = 8 * (2 * count + 1)
        self._host = np.zeros(words + count * count, dtype=np.uint8)
        self._buffer = torch.zeros(len(self._host), dtype=torch.uint8, device=device)
        numbers, self._tree_on_host = self._host[:words].view(np.int64), self._host[words:].view(bool)
        self._ids, self._positions, self._past = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
        there = self._buffer[:words].view(torch.int64)
        self.ids, self.positions, self.past = there[:count], there[count : 2 * count], there[2 * count :]
        self.tree = self._buffer[words:].view(torch.bool).view(count, count)

    def fill(self, tree: Tree, root: int, first: int, past: int) -> None:
        """What is padding sees itself alone of the new places: an empty row of attention is undefined."""
        real, count, on_host = tree.num_nodes + 1, len(self._ids), tree.tokens.device.type == "cpu"
        self._ids[0], self._past[0] = root, past
        self._ids[1:] = 0
        self._positions[:] = first
        self._positions[1:real] += np.array(tree.depths, dtype=np.int64)
        seen = self._tree_on_host.reshape(count, count)
        seen[:] = np.eye(count, dtype=bool)
        seen[:real, :real] = tree.ancestor_mask().numpy()
        if on_host:
            self._ids[1:real] = tree.tokens.numpy()
        self._buffer.copy_(uploaded(torch.from_numpy(self._host.copy()), self._buffer.device))
        if not on_host:
            self.ids[1:real].copy_(tree.tokens)
