"""Small drafters, a target and a policy, one for each thing that the contract must leave possible."""

import torch
from draftsmith.eval.policies import Chain
from draftsmith.models.decoding.tree import ROOT
from draftsmith.models.targets.base import Taps
from tiny import proposal


class Wrapped:
    """Delegates to an ordinary draft; the fakes below change one thing of it."""

    taps, max_levels = Taps(), None

    def __init__(self, model):
        self.inner = proposal(model)

    def start(self, request, prefill, warp, *, capacity):
        self.inner.start(request, prefill, warp, capacity=capacity)

    def begin(self, first):
        self.inner.begin(first)

    def root(self):
        return self.inner.root()

    def expand(self, parents, tokens):
        return self.inner.expand(parents, tokens)

    def accept(self, verified):
        self.inner.accept(verified)


class ReadsFeatures(Wrapped):
    """A head: wants the target's states of what was accepted."""

    taps = Taps(text_layers=(0, 1, 2), feature=True)

    def start(self, request, prefill, warp, *, capacity):
        super().start(request, prefill, warp, capacity=capacity)
        self.features, self.layers = [prefill.feature], [prefill.layers]

    def accept(self, verified):
        super().accept(verified)
        self.features.append(verified.step.feature)
        self.layers.append(verified.step.layers)


class ReadsAttention(Wrapped):
    """SpecVLM's way: the prompt's attention decides. Here the most attended token of the prompt is proposed first."""

    taps = Taps(prefill_attention=(0, 1), attention_queries="last")

    def start(self, request, prefill, warp, *, capacity):
        super().start(request, prefill, warp, capacity=capacity)
        self.attention = prefill.attention
        seen = prefill.attention[1][0].mean(0).clone()
        seen[request.modality != 0] = 0
        self.favourite = int(request.ids[int(seen.argmax())])

    def root(self):
        q = super().root() * 0.5
        q[self.favourite] += 0.5
        return q


class CannotExpand(Wrapped):
    """Medusa's way: one distribution for each level, whatever was drafted above it."""

    taps, max_levels = Taps(feature=True), 2

    def start(self, request, prefill, warp, *, capacity):
        assert prefill.feature is not None
        super().start(request, prefill, warp, capacity=capacity)

    def root(self):
        first = super().root()
        self.levels = [first, super().expand([ROOT], first.argmax()[None])[0]]
        self.slot_levels = []
        return first

    def expand(self, parents, tokens):
        levels = [1 if p == ROOT else self.slot_levels[p] + 1 for p in parents]
        self.slot_levels += levels
        return torch.stack([self.levels[level] for level in levels])

    def accept(self, verified):
        # Its one input was the likeliest first token, which the tree may hold at any node.
        tree, kept = verified.tree, []
        if verified.path and int(tree.tokens[verified.path[0]]) == int(self.levels[0].argmax()):
            kept = [0]
        self.inner._cache.commit(kept)
        self.inner._pending = [*verified.tokens[len(kept) :], verified.bonus]


class ReadsHistory(Chain):
    """A policy that drafts one level more than what stood in the last cycle (as SAGE's reads acceptance)."""

    name = "reads-history"

    def __init__(self, gamma):
        super().__init__(gamma)
        self.lengths, self.accepted = [], []  # one list for each request
        self.last = 0

    def start(self):
        self.lengths.append([])
        self.accepted.append([])
        self.last = 0

    def grow(self, root, expand, draw, *, max_levels):
        levels = min(self.last + 1, max_levels)
        self.lengths[-1].append(levels)
        return super().grow(root, expand, draw, max_levels=levels)

    def observe(self, verified):
        self.last = verified.num_accepted
        self.accepted[-1].append(self.last)


def states(model, asked, tokens):
    """(feature, {layer: state}) of a fresh pass over prompt and tokens; layer 0 is the embedding."""
    ids = torch.cat([asked.ids, torch.tensor(tokens)])
    result, hooks = {}, []
    for number, layer in enumerate(model.model.language_model.layers):
        hooks.append(layer.register_forward_hook(lambda _, ins, out, n=number: result.update({n: ins[0], n + 1: out})))
    with torch.no_grad():
        out = model.model(input_ids=ids[None], pixel_values=asked.pixels)
    for hook in hooks:
        hook.remove()
    return out.last_hidden_state[0], {n: state[0] for n, state in result.items()}
