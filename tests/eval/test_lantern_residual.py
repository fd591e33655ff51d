"""What LANTERN's released rule accepts beside the paper's formulas, on a synthetic source of flat distributions.

Scores of a code are a sum of its place's and its last code's; drafter and target share half of them. Each cycle is a
fresh place with EAGLE-2's tree of 60 nodes. docs/methods/lantern.md has the numbers, printed by `python -m pytest -s`.
"""

import statistics

import pytest
import torch
from draftsmith.eval.lantern import LanternConfig
from draftsmith.eval.policies import Draw, Dynamic
from draftsmith.eval.rules import Codes, Sampling
from draftsmith.models.decoding.tree import ROOT
from draftsmith.models.decoding.warp import Warp

CODES, CYCLES, SEEDS = 256, 100, range(4)
WARP = Warp(1.0, 100, 1.0)


def tau(rule, seed: int) -> float:
    """Tokens of a cycle, the bonus token included: mean over `CYCLES` cycles."""
    draws = torch.Generator().manual_seed(seed)
    shared, own = torch.randn(2, CYCLES + 8, CODES, generator=draws)
    last, own_last = torch.randn(2, CODES, CODES, generator=draws)
    policy, emitted = Dynamic(60, 4, 10), 0
    for place in range(CYCLES):
        above: list[tuple[int, int]] = []  # of each expansion: its place and code

        def q(at: int, code: int) -> torch.Tensor:
            return WARP(shared[at] + last[code])

        def expand(parents, tokens, place=place, above=above, q=q):
            above.extend(
                (place + 1 if parent == ROOT else above[parent][0] + 1, code)
                for parent, code in zip(parents, tokens.tolist(), strict=True)
            )
            return torch.stack([q(*one) for one in above[len(above) - len(parents) :]])

        tree = policy.grow(q(place, 0), expand, Draw("top-k"), max_levels=5)
        nodes = [(place, 0), *((place + d, t) for d, t in zip(tree.depths, tree.tokens.tolist(), strict=True))]
        p = torch.stack([WARP(shared[at] + last[c] + 0.5 * (own[at] + own_last[c])) for at, c in nodes])
        emitted += rule(tree, p, torch.rand(61, generator=draws, dtype=torch.float64).tolist()).num_accepted + 1
    return emitted / CYCLES


@pytest.mark.parametrize(("k", "delta", "expected"), [
    pytest.param(30, 0.2, (2.21, 2.20), marks=pytest.mark.slow),
    pytest.param(120, 0.1, (2.20, 1.96), marks=pytest.mark.slow),
], ids=["few neighbours", "many neighbours"])  # fmt: skip
def test_what_each_rule_accepts(k, delta, expected):
    """With many neighbours a rejection by the released rule removes half of all codes, later drafts among them."""
    codebook = torch.randn(CODES, 8, generator=torch.Generator().manual_seed(0))
    result = {}
    for residual in ("paper", "reference"):
        config = LanternConfig(kind="lantern", k=k, delta=delta, residual=residual)
        result[residual] = [tau(config.build_for_codes(1.0, Codes(codebook)), seed) for seed in SEEDS]
    for name, values in result.items():
        print(f"k {k}, delta {delta}, {name}: {statistics.mean(values):.2f} [{min(values):.2f}, {max(values):.2f}]")
    assert [statistics.mean(values) for values in result.values()] == pytest.approx(expected, abs=0.02)
    exact = [tau(Sampling(), seed) for seed in SEEDS]
    print(f"exact: {statistics.mean(exact):.2f} [{min(exact):.2f}, {max(exact):.2f}]")
    for values in result.values():
        assert all(relaxed > plain for relaxed, plain in zip(values, exact, strict=True))
