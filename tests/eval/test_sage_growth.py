"""What SAGE's ways to grow a tree are worth on a synthetic source, beside the static tree that it starts from.

Drafter and target are tables: scores of a token are a sum of its place's and its last token's, times a sharpness that
drifts with the place (so that entropies of neighbouring steps go together). The target adds noise of its own, little in
the agreeing pair and more in the other. docs/methods/sage.md has the numbers, which `python -m pytest -s`
of this file prints.
Letters: T places, V tokens.
"""

import statistics

import pytest
import torch
from draftsmith.eval.policies import CHOICES, Draw, Sage, SageTree, Static
from draftsmith.eval.rules import Greedy
from draftsmith.models.decoding.tree import ROOT

TOKENS, VOCAB, SEEDS = 300, 48, range(5)
NOISE = {"agreeing": 0.3, "less agreeing": 0.7}
GROWTHS = {
    "template, cumulative": {},  # algorithm 1 as printed, and the default
    "template, local": {"threshold": "local"},
    "online, cumulative": {"growth": "online"},
    "online, local": {"growth": "online", "threshold": "local"},
}


class Source:
    """Scores [V] of drafter and target at a place after a token."""

    def __init__(self, noise: float, seed: int):
        draws = torch.Generator().manual_seed(seed)
        self.noise, places = noise, TOKENS + 32
        self.place, self.last, self.other_place, self.other_last = (
            torch.randn(rows, VOCAB, generator=draws) / 2**0.5 for rows in (places, VOCAB, places, VOCAB)
        )
        drift = torch.randn(places, generator=draws)
        level, levels = 0.0, []
        for step in drift.tolist():
            level = 0.8 * level + 0.6 * step  # of variance 1
            levels.append(8.0 + 3.0 * level)
        self.sharpness = torch.tensor(levels).clamp(min=0.5)

    def drafter(self, place: int, token: int) -> torch.Tensor:
        """q [V]."""
        return (self.sharpness[place] * (self.place[place] + self.last[token])).softmax(-1)

    def target(self, place: int, token: int) -> torch.Tensor:
        """Scores [V]."""
        own = self.place[place] + self.last[token]
        return own + self.noise * (self.other_place[place] + self.other_last[token])


def tau(policy, source: Source) -> float:
    """Tokens of a verification pass, the bonus token included, over one greedy answer of `TOKENS` tokens."""
    policy.start()
    place, token, cycles = 0, 0, 0
    while place < TOKENS:
        above: list[tuple[int, int]] = []  # of each expansion: its place and token

        def expand(parents, tokens, place=place, above=above):
            above.extend(
                (place + 1 if parent == ROOT else above[parent][0] + 1, t)
                for parent, t in zip(parents, tokens.tolist(), strict=True)
            )
            return torch.stack([source.drafter(*one) for one in above[len(above) - len(parents) :]])

        tree = policy.grow(source.drafter(place, token), expand, Draw("top-k"), max_levels=16)
        at = [(place, token), *((place + d, t) for d, t in zip(tree.depths, tree.tokens.tolist(), strict=True))]
        scores = torch.stack([source.target(*one) for one in at])
        verified = Greedy()(tree, scores)
        policy.observe(type(verified)(verified.path, verified.tokens, verified.bonus, scores[:1], tree=tree))
        place, token, cycles = place + verified.num_accepted + 1, verified.bonus, cycles + 1
    return place / cycles


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, list[float]]]:
    """Pair -> method -> tau of each seed."""
    result: dict[str, dict[str, list[float]]] = {}
    for pair, noise in NOISE.items():
        policies = {"static": Static(CHOICES["mc_sim_7b_63"])}
        policies |= {name: Sage(SageTree(kind="sage", **given)) for name, given in GROWTHS.items()}
        result[pair] = {n: [tau(p, Source(noise, seed)) for seed in SEEDS] for n, p in policies.items()}
        for name, values in result[pair].items():
            print(f"{pair:<14} {name:<21} {statistics.mean(values):.2f} [{min(values):.2f}, {max(values):.2f}]")
    return result


EXPECTED = {  # means; docs/methods/sage.md gives them with their spread
    "agreeing": (3.97, 3.18, 4.20, 4.00, 4.59),
    "less agreeing": (2.49, 1.98, 2.19, 2.08, 2.20),
}


@pytest.mark.slow
@pytest.mark.parametrize("pair", NOISE)
def test_tau_of_each_growth(measured, pair):
    names = ["static", *GROWTHS]
    assert [statistics.mean(measured[pair][name]) for name in names] == pytest.approx(EXPECTED[pair], abs=0.02)


@pytest.mark.slow
def test_what_the_numbers_say(measured):
    """For every seed, so that no spread covers it."""

    def above(pair: str, better: str, worse: str) -> bool:
        return all(a > b for a, b in zip(measured[pair][better], measured[pair][worse], strict=True))

    for pair in NOISE:
        assert above(pair, "static", "template, cumulative"), (
            "the printed default loses to the tree that it starts from"
        )
        for threshold in ("cumulative", "local"):
            if pair == "agreeing":
                assert above(pair, f"online, {threshold}", f"template, {threshold}")
        assert above(pair, "template, local", "template, cumulative")
    assert above("agreeing", "online, local", "static")
    for name in GROWTHS:
        assert above("less agreeing", "static", name), (
            "the target contradicts a sure draft: adapting to it does not pay"
        )
