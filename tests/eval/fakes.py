"""Small drafters, a target and a policy, one for each thing that the contract must leave possible."""

import torch
from draftsmith.core.batch import Request
from draftsmith.eval.policies import Chain
from draftsmith.models.decoding.rows import guide
from draftsmith.models.decoding.tree import ROOT
from draftsmith.models.drafters.modes import without_pictures
from draftsmith.models.targets.base import Taps, TargetStep
from tiny import proposal


class RowsModel:
    """Several views of one request in one batch over one cache, reduced to one distribution."""

    def __init__(self, decoder, views, reduce):
        self.decoder, self.views, self.reduce = decoder, views, reduce

    def prefill(self, request: Request, capacity: int):
        views = [view(request) for view in self.views]
        self.lengths = torch.tensor([len(v.ids) for v in views])
        self.prefix = prefix = int(self.lengths.max())
        self.cache = self.decoder.new_cache(prefix + capacity)
        embedded = [self.decoder.embed(v.ids[None], v.modality[None], v.pixels) for v in views]
        embeds = torch.cat([torch.nn.functional.pad(e, (0, 0, prefix - e.shape[1], 0)) for e in embedded])
        places = torch.arange(prefix) - (prefix - self.lengths[:, None])
        self.seen = places >= 0  # [R,prefix]
        # Padding sees itself, so that no row of the attention is empty.
        mask = (torch.ones(prefix, prefix, dtype=torch.bool).tril() & self.seen[:, None]) | torch.eye(prefix).bool()
        states = self.decoder.forward(embeds, self.cache, places.clamp(min=0), mask)
        self.cache.advance(prefix)
        return states.feature

    def forward(self, tokens, depths, mask):
        """Nodes at `depths` after the committed tokens; `mask` [N,S] over what is written and not committed."""
        count = len(self.lengths)
        committed = self.cache.length - mask.shape[1] + len(tokens)
        past = torch.cat([self.seen, torch.ones(count, committed - self.prefix, dtype=torch.bool)], dim=1)
        full = torch.cat([past[:, None].expand(-1, len(tokens), -1), mask[None].expand(count, -1, -1)], dim=2)
        offset = torch.tensor(depths) + committed - self.prefix
        embeds = self.decoder.embed(tokens[None]).expand(count, -1, -1)
        return self.decoder.forward(embeds, self.cache, self.lengths[:, None] + offset, full).feature

    def reduced(self, feature):
        """[R,N,D] -> [N,V]."""
        return self.reduce(self.decoder.logits(feature))


def picture(request):
    return request


def no_picture(request):
    return without_pictures(request, 5)


def guidance(scale):
    return lambda scores: guide(scores, scale)


def mix(weights):
    """An ensemble's scores: logarithms of the mixed distributions of rows [R,F,V]."""
    return lambda scores: torch.einsum("r,rfv->fv", weights, scores.softmax(-1)).log()


class RowsProposal:
    """A drafter over rows, as an ensemble or a guided draft: one cache, one reduction."""

    taps, max_levels = Taps(), None

    def __init__(self, decoder, views, reduce):
        self.model = RowsModel(decoder, views, reduce)

    def start(self, request, prefill, warp, *, capacity):
        self.warp = warp
        self.model.prefill(request, capacity)

    def begin(self, first):
        self.pending = [first]

    def root(self):
        n = len(self.pending)
        feature = self.model.forward(torch.tensor(self.pending), list(range(n)), torch.ones(n, n).bool().tril())
        self.model.cache.advance(n)
        self.parents, self.depths = [], []
        return self.warp.apply_temperature(self.model.reduced(feature[:, -1:])[0])

    def expand(self, parents, tokens):
        first = len(self.parents)
        self.parents += parents
        self.depths += [1 if p == ROOT else self.depths[p] + 1 for p in parents]
        mask = torch.zeros(len(parents), len(self.parents), dtype=torch.bool)
        for row in range(len(parents)):
            expansion = first + row
            while expansion != ROOT:
                mask[row, expansion] = True
                expansion = self.parents[expansion]
        cache = self.model.cache
        cache.advance(first)
        feature = self.model.forward(tokens, [d - 1 for d in self.depths[first:]], mask)
        cache.crop_to(cache.length - first)
        return self.warp.apply_temperature(self.model.reduced(feature))

    def accept(self, verified):
        kept = [verified.tree.expansions[node] for node in verified.path if verified.tree.expansions[node] != -1]
        self.model.cache.commit(kept)
        self.pending = [*verified.tokens[len(kept) :], verified.bonus]


class GuidedTarget:
    """A target under guidance: conditional and unconditional rows in one pass, combined before warping."""

    device = torch.device("cpu")

    def __init__(self, decoder, reduce):
        self.model, self.vocab_size = RowsModel(decoder, [picture, no_picture], reduce), decoder.vocab_size

    def prefill(self, request, taps, *, capacity):
        feature = self.model.prefill(request, capacity)
        return None, TargetStep(self.model.reduced(feature[:, -1:]), feature if taps.feature else None)

    def verify(self, session, root, tree):
        tokens = torch.cat([torch.tensor([root]), tree.tokens])
        feature = self.model.forward(tokens, [0, *tree.depths], tree.ancestor_mask())
        return TargetStep(self.model.reduced(feature), feature)

    def commit(self, session, path):
        self.model.cache.commit([0, *(node + 1 for node in path)])


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
