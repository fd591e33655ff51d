"""The decoding loop: prefill, then grow a tree, verify it in one target pass, accept a path, commit, observe.

The loop knows no method: the drafter proposes tokens, the policy shapes the tree, and the rule accepts. Plain decoding
is the same loop with nothing proposed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..core.batch import ImageRequest, Request
from ..models.decoding.tree import no_tree
from ..models.decoding.warp import Warp
from ..models.drafters.base import Drafter
from ..models.targets.base import Taps, Target
from .policies import Draw, Expand, TreePolicy
from .rules import Rule, inverse_cdf


@dataclass(frozen=True)
class Cycle:
    """One verification pass. Times in seconds."""

    num_drafted: int  # levels of the tree
    num_nodes: int
    num_accepted: int  # without the bonus token
    num_emitted: int  # with it, and after a cut by the end token or the length
    draft_s: float
    verify_s: float  # the target's pass and the rule
    total_s: float
    rule_s: float = 0.0  # the rule alone
    update_s: float = 0.0  # what the tree's policy makes of the outcome


@dataclass(frozen=True)
class Generation:
    """The output of a request. The first token comes from the prefill, before any cycle."""

    tokens: list[int]
    cycles: list[Cycle]
    prefill_s: float
    draft_prefill_s: float
    total_s: float
    stop: Literal["eos", "length"]
    pruning_s: float = 0.0  # of the draft's prefill, what a drafter that prunes the prompt chose with


@dataclass(frozen=True)
class Decoding:
    """How to decode: everything that stays the same from request to request."""

    policy: TreePolicy
    rule: Rule
    draw: Draw
    warp: Warp
    max_new_tokens: int
    eos_ids: Collection[int]

    def with_length(self, max_new_tokens: int) -> Decoding:
        """A copy with this `max_new_tokens`."""
        return replace(self, max_new_tokens=max_new_tokens)


@torch.inference_mode()
def generate(
    target: Target,
    drafter: Drafter | None,
    request: Request | ImageRequest,
    decoding: Decoding,
    generator: torch.Generator | None = None,
) -> Generation:
    """Continue `request` until an end token (which is kept) or `max_new_tokens`.

    Args:
        drafter: None decodes plainly.
        generator: draws the uniforms of the rule and the bonus tokens and seeds sampled draws, on the CPU; needed
            above temperature 0.
    """
    clock = _Clock(target)
    start = clock.now()
    warp, limit = decoding.warp, decoding.max_new_tokens
    # A tree's nodes are written behind the committed tokens before a path of them is kept.
    capacity = limit + 1 + _most_nodes(decoding.policy, drafter)
    session, step = target.prefill(request, drafter.taps if drafter else Taps(), capacity=capacity)
    token = _pick(warp(step.logits[-1]), warp, generator)
    prefill_s = clock.now() - start
    draft_start = clock.now()
    if drafter is not None:
        drafter.start(request, step, warp, capacity=capacity)
        drafter.begin(token)
        decoding.policy.start()
    draft_prefill_s = clock.now() - draft_start

    tokens, cycles, draw = [token], [], decoding.draw
    while tokens[-1] not in decoding.eos_ids and len(tokens) < limit:
        begin = clock.now()
        tree = no_tree()
        if drafter is not None:
            # The target adds one token itself, so the last positions need no draft.
            levels = min(limit - len(tokens) - 1, drafter.max_levels or limit)
            if levels > 0:
                expand = _truncating(drafter, warp)
                root = warp.truncate(drafter.root())
                draw = draw.seeded(generator, root.device)
                tree = decoding.policy.grow(root, expand, draw, max_levels=levels)
            else:
                drafter.root()
        drafted = clock.now()
        step = target.verify(session, tokens[-1], tree)
        p = step.logits if warp.greedy else warp(step.logits)
        scored = clock.now()
        verified = decoding.rule(tree, p, _uniforms(tree.num_nodes, warp, generator))
        verified = replace(verified, step=step.along([0, *(n + 1 for n in verified.path)]), tree=tree)
        checked = clock.now()
        target.commit(session, verified.path)
        update_s = 0.0
        if drafter is not None:
            drafter.accept(verified)
            time_s = clock.now()
            decoding.policy.observe(verified)
            update_s = clock.now() - time_s
        emitted = _cut([*verified.tokens, verified.bonus], decoding.eos_ids, limit - len(tokens))
        tokens += emitted
        end = clock.now()
        cycles.append(
            Cycle(
                tree.num_levels,
                tree.num_nodes,
                verified.num_accepted,
                len(emitted),
                drafted - begin,
                checked - drafted,
                end - begin,
                checked - scored,
                update_s,
            )
        )
    stop: Literal["eos", "length"] = "eos" if tokens[-1] in decoding.eos_ids else "length"
    pruning_s = getattr(drafter, "pruning_s", 0.0)
    return Generation(tokens, cycles, prefill_s, draft_prefill_s, clock.now() - start, stop, pruning_s)


def _truncating(drafter: Drafter, warp: Warp) -> Expand:
    def expand(parents: Sequence[int], tokens: Tensor) -> Tensor:
        return warp.truncate(drafter.expand(parents, tokens))

    return expand


def _pick(probs: Tensor, warp: Warp, generator: torch.Generator | None) -> int:
    if warp.greedy:
        return int(probs.argmax())
    return inverse_cdf(probs, float(torch.rand((), generator=generator)))


def _uniforms(num_nodes: int, warp: Warp, generator: torch.Generator | None) -> list[float]:
    return [] if warp.greedy else torch.rand(num_nodes + 1, generator=generator, dtype=torch.float64).tolist()


def _cut(emitted: list[int], eos_ids: Collection[int], room: int) -> list[int]:
    """Cut the output after an end token, or at the maximum length."""
    for place, token in enumerate(emitted):
        if token in eos_ids:
            return emitted[: min(place + 1, room)]
    return emitted[:room]


def _most_nodes(policy: TreePolicy, drafter: Drafter | None) -> int:
    return 1 if drafter is None else policy.max_nodes + 1


class _Clock:
    """perf_counter, after the device has finished (CUDA runs behind)."""

    def __init__(self, target: Target):
        self.cuda = getattr(target, "device", torch.device("cpu")).type == "cuda"

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()
