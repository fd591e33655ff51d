"""Losses of published heads by the formulas of their authors' training scripts, on plain tensors: one sample at a time.

Sources: EAGLE `eagle/train/main.py`, MSD's and ViSpec's forks of it, EAGLE-3 `eagle/traineagle3/cnets.py`; P-EAGLE by
its paper (arXiv 2602.01469), with anchors as docs/papers.md has them.
Nothing of the project is used: weights by their published names, a target by its states.
Letters: T tokens, N inputs, D width, V vocabulary, H heads, E width of a head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

State = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    eps: float
    theta: float = 10000.0


@dataclass(frozen=True)
class Sample:
    """`embeds` [T,D] of each token, the target's `feature` [T,D], its `scores` [T,V], and [T] what is supervised."""

    embeds: Tensor
    feature: Tensor
    scores: Tensor
    supervised: Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def turned(x: Tensor, places: Tensor, theta: float) -> Tensor:
    """[N,H,E] by rotary positions, halves."""
    half = x.shape[-1] // 2
    angles = places[:, None].double() * theta ** (-torch.arange(half).double() / half)
    cos, sin = (f(torch.cat([angles, angles], -1))[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def linear(x: Tensor, state: State, name: str) -> Tensor:
    return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))


def heads_of(x: Tensor, state: State, name: str, shape: Shape, count: int) -> Tensor:
    """[N,count,E]; shared keys and values are repeated for each head of queries."""
    made = linear(x, state, name).unflatten(-1, (count, -1))
    return made.repeat_interleave(shape.heads // count, dim=1)


def attention(x: Tensor, state: State, name: str, shape: Shape) -> Tensor:
    places = torch.arange(len(x))
    q = turned(heads_of(x, state, f"{name}.q_proj", shape, shape.heads), places, shape.theta)
    k = turned(heads_of(x, state, f"{name}.k_proj", shape, shape.kv_heads), places, shape.theta)
    v = heads_of(x, state, f"{name}.v_proj", shape, shape.kv_heads)
    weights = torch.einsum("nhe,mhe->hnm", q, k) / q.shape[-1] ** 0.5
    weights = weights.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf")).softmax(-1)
    return linear(torch.einsum("hnm,mhe->nhe", weights, v).flatten(1), state, f"{name}.o_proj")


def feed_forward(x: Tensor, state: State, name: str) -> Tensor:
    return linear(
        F.silu(linear(x, state, f"{name}.gate_proj")) * linear(x, state, f"{name}.up_proj"), state, f"{name}.down_proj"
    )


def layer(x: Tensor, state: State, shape: Shape) -> Tensor:
    """EAGLE's layer: the norm before the attention is left out where the checkpoint has none."""
    before = state.get("layers.0.input_layernorm.weight")
    x = x + attention(x if before is None else norm(x, before, shape.eps), state, "layers.0.self_attn", shape)
    return x + feed_forward(
        norm(x, state["layers.0.post_attention_layernorm.weight"], shape.eps), state, "layers.0.mlp"
    )


def crossed(goal: Tensor, ours: Tensor) -> Tensor:
    """[N] -sum p log q."""
    return -(goal.softmax(-1) * ours.log_softmax(-1)).sum(-1)


def eagle(state: State, sample: Sample, shape: Shape, lm_head: Tensor, direct: Tensor | None = None) -> Tensor:
    """Sum over supervised tokens of SmoothL1 + 0.1 times the cross-entropy.

    Args:
        direct: [T] bool, visual tokens whose embedding enters the layer as it is (MSD).
    """
    inputs = linear(torch.cat([sample.embeds[1:], sample.feature[:-1]], -1), state, "fc")
    if direct is not None:
        inputs = torch.where(direct[1:, None], sample.embeds[1:], inputs)
    predicted, goal = layer(inputs, state, shape), sample.feature[1:]
    away = F.smooth_l1_loss(predicted, goal, reduction="none").mean(-1)
    each = away + 0.1 * crossed(sample.scores[1:], predicted @ lm_head.T)
    return (each * sample.supervised[1:]).sum()


def eagle3(state: State, sample: Sample, joined: Tensor, shape: Shape, passes: int = 7) -> Tensor:
    """Sum over supervised tokens and passes, pass s with 0.8^s: `traineagle3`'s training-time test.

    Each pass shifts tokens and goals left by one and reads the outputs of the pass before; earlier passes' keys stand
    on the diagonals.

    Args:
        joined: [T,3D] states of the three layers.
    """
    known = state["t2d"].bool()
    shifted = lambda x, by: F.pad(x, (0, 0) * (x.dim() - 1) + (0, by))[by:]  # noqa: E731
    hidden, total = linear(joined, state, "fc"), torch.zeros(())
    keys: list[Tensor] = []
    values: list[Tensor] = []
    length = len(hidden)
    causal = torch.ones(length, length).triu(1).bool()
    for number in range(passes):
        embeds, goal = shifted(sample.embeds, number + 1), shifted(sample.scores, number + 1)
        mask = shifted(sample.supervised, number + 1) & known[goal.argmax(-1)]
        x = torch.cat([
            norm(embeds, state["midlayer.input_layernorm.weight"], shape.eps),
            norm(hidden, state["midlayer.hidden_norm.weight"], shape.eps),
        ], -1)  # fmt: skip
        places = torch.arange(length) + number
        q = turned(heads_of(x, state, "midlayer.self_attn.q_proj", shape, shape.heads), places, shape.theta)
        keys.append(turned(heads_of(x, state, "midlayer.self_attn.k_proj", shape, shape.kv_heads), places, shape.theta))
        values.append(heads_of(x, state, "midlayer.self_attn.v_proj", shape, shape.kv_heads))
        weights = torch.einsum("nhe,mhe->hnm", q, keys[0]).masked_fill(causal, float("-inf"))
        own = [torch.einsum("nhe,nhe->hn", q, key)[..., None] for key in keys[1:]]
        weights = (torch.cat([weights, *own], -1) / q.shape[-1] ** 0.5).softmax(-1)
        mixed = torch.einsum("hnm,mhe->nhe", weights[..., :length], values[0])
        for behind, value in enumerate(values[1:]):
            mixed = mixed + weights[..., length + behind].T[..., None] * value
        hidden = hidden + linear(mixed.flatten(1), state, "midlayer.self_attn.o_proj")
        own_norm = norm(hidden, state["midlayer.post_attention_layernorm.weight"], shape.eps)
        hidden = hidden + feed_forward(own_norm, state, "midlayer.mlp")
        ours = linear(norm(hidden, state["norm.weight"], shape.eps), state, "lm_head")
        total = total + 0.8**number * (crossed(goal[:, known], ours) * mask).sum()
    return total


def peagle(
    state: State, sample: Sample, joined: Tensor, shape: Shape, mask_embed: Tensor, *, tokens: int, decay: float = 0.8
) -> Tensor:
    """Sum over blocks of the weighted cross-entropies of the tokens that one pass drafts.

    A block begins after each supervised token that another follows: a row of its own, of the true entries up to it and
    `tokens` - 1 masks. A block counts as many supervised tokens as there are for each block.

    Args:
        joined: [T,3D] states of the three layers.
        mask_embed: [D] row of the mask's id.
    """
    known, learned = state["t2d"].bool(), sample.supervised.bool()
    anchors = [at for at in range(1, len(learned) - 1) if learned[at] and learned[at + 1]]
    weights, total = torch.tensor([decay**place for place in range(tokens)]), torch.zeros(())
    masks = (mask_embed.expand(tokens - 1, -1), state["mask_hidden"][0].expand(tokens - 1, -1))
    for anchor in anchors:
        embeds = torch.cat([sample.embeds[1 : anchor + 1], masks[0]])
        hidden = linear(torch.cat([joined[:anchor], masks[1]]), state, "fc")
        x = torch.cat([
            norm(embeds, state["midlayer.input_layernorm.weight"], shape.eps),
            norm(hidden, state["midlayer.hidden_norm.weight"], shape.eps),
        ], -1)  # fmt: skip
        hidden = hidden + attention(x, state, "midlayer.self_attn", shape)
        own_norm = norm(hidden, state["midlayer.post_attention_layernorm.weight"], shape.eps)
        hidden = (hidden + feed_forward(own_norm, state, "midlayer.mlp"))[-tokens:]
        ours = linear(norm(hidden, state["norm.weight"], shape.eps), state, "lm_head")
        for place in range(tokens):
            if not learned[anchor : anchor + place + 2].all() or anchor + place + 1 == len(learned):
                break
            goal = sample.scores[anchor + place]
            if known[goal.argmax()]:
                total = total + weights[place] * crossed(goal[None, known], ours[None, place])[0]
    return total * learned[1:].sum() / len(anchors) / weights.sum()


def vispec(state: State, sample: Sample, shape: Shape, lm_head: Tensor, passes: int = 2) -> Tensor:
    """Sum over supervised tokens of 10 |p - q| + 0.1 ListMLE over the ten likeliest, the mean over the passes.

    Of a sample without pictures, whose global vector is zero; each further pass reads the outputs of the one before.
    """
    states, goal, total = sample.feature[:-1], sample.scores[1:], torch.zeros(())
    for _ in range(passes):
        joined = linear(torch.cat([states, torch.zeros_like(states)], -1), state, "img_fc")
        outputs = layer(linear(torch.cat([sample.embeds[1:], joined], -1), state, "fc"), state, shape)
        ours = outputs @ lm_head.T
        likeliest = goal.topk(10).indices
        ranked = ours.gather(-1, likeliest)
        lists = sum(ranked[:, i:].logsumexp(-1) - ranked[:, i] for i in range(10))
        each = 10 * (goal.softmax(-1) - ours.softmax(-1)).abs().sum(-1) + 0.1 * lists
        total = total + (each * sample.supervised[1:]).sum() / passes
        states = torch.cat([sample.feature[:1], outputs[:-1]])
    return total
