"""A chi-square test of the first two tokens that drafted decoding draws, against the target's own chances of each."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Draw
from draftsmith.eval.rules import Sampling
from draftsmith.models.decoding.warp import Warp
from torch import Tensor


def check_pairs(own: Any, draft: Any, asked: Any, policy: Any, logits: Callable, longer: Callable) -> None:
    """Temperature 1, 500 draws of two tokens of the target's own 5 likeliest; the 99.9% point is not passed.

    Args:
        logits: (target, request) -> [T,V] of its prompt.
        longer: (request, ids) -> the request with these ids after it.
    """
    count, warp = 500, Warp(1.0, top_k=5)
    first: Tensor = warp(logits(own, asked)[-1])
    expected = {
        (a, b): float(first[a] * second[b])
        for a in first.nonzero().flatten().tolist()
        for second in [warp(logits(own, longer(asked, [a]))[-1])]
        for b in second.nonzero().flatten().tolist()
    }
    generator, seen, accepted, drafted = torch.Generator().manual_seed(3), Counter(), 0, 0
    for _ in range(count):
        result = generate(own, draft, asked, Decoding(policy, Sampling(), Draw("sample"), warp, 3, ()), generator)
        seen[tuple(result.tokens[:2])] += 1
        accepted += sum(c.num_accepted for c in result.cycles)
        drafted += sum(c.num_drafted for c in result.cycles)
    assert set(seen) <= set(expected) and 0 < accepted < drafted
    common = {key: chance for key, chance in expected.items() if chance * count >= 5}
    rare = 1 - sum(common.values())
    statistic = sum((seen[key] - count * chance) ** 2 / (count * chance) for key, chance in common.items())
    statistic += (count - sum(seen[key] for key in common) - count * rare) ** 2 / (count * rare) if rare > 1e-9 else 0
    freedom = len(common) - (rare <= 1e-9)
    point = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3  # 99.9%, Wilson-Hilferty
    assert statistic < point, (statistic, point)
