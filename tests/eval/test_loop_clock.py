"""What each clock of the loop counts, every speedup rests on: a clock that only the parts of a request move.

Each part takes a power of two, so that a sum says which parts are in it.
"""

from types import SimpleNamespace

import pytest
import torch
from draftsmith.eval import loop
from draftsmith.eval.block import Block
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.measured_rows import measure, time_parts
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import Greedy, Sampling, inverse_cdf
from draftsmith.models.decoding.tree import Tree, chain
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.targets.base import Taps, TargetStep

PREFILL, START, BEGIN, POLICY_START, ROOT_PASS, EXPAND, VERIFY, RULE, COMMIT, ACCEPT, OBSERVE = (
    float(2**n) for n in range(11)
)
GAMMA, VOCAB = 3, 8


class Clock:
    def __init__(self):
        self.seconds = 1000.0

    def __call__(self):
        return self.seconds

    def takes(self, seconds):
        self.seconds += seconds


class Target:
    """Says 1, 1, 1, ..."""

    vocab_size, device = VOCAB, torch.device("cpu")

    def __init__(self, clock):
        self.clock = clock

    def prefill(self, request, taps, *, capacity):
        self.clock.takes(PREFILL)
        return None, TargetStep(torch.eye(VOCAB)[[1]])

    def verify(self, session, root, tree):
        self.clock.takes(VERIFY)
        return TargetStep(torch.eye(VOCAB)[[1] * (tree.num_nodes + 1)])

    def commit(self, session, path):
        self.clock.takes(COMMIT)


class Drafter:
    """Says 1, then 2: one draft of a cycle stands."""

    taps, max_levels = Taps(), None

    def __init__(self, clock):
        self.clock = clock

    def start(self, request, prefill, warp, *, capacity):
        self.clock.takes(START)

    def begin(self, first):
        self.clock.takes(BEGIN)

    def root(self):
        self.clock.takes(ROOT_PASS)
        return torch.eye(VOCAB)[1]

    def expand(self, parents, tokens):
        self.clock.takes(EXPAND)
        return torch.eye(VOCAB)[[2] * len(parents)]

    def accept(self, verified):
        self.clock.takes(ACCEPT)


class Policy(Chain):
    def __init__(self, clock):
        super().__init__(GAMMA)
        self.clock = clock

    def start(self):
        self.clock.takes(POLICY_START)

    def observe(self, verified):
        self.clock.takes(OBSERVE)


class Rule(Greedy):
    def __init__(self, clock):
        self.clock = clock

    def __call__(self, tree, p, uniforms=()):
        self.clock.takes(RULE)
        return super().__call__(tree, p, uniforms)


@pytest.fixture
def clock(monkeypatch):
    result = Clock()
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=result))
    return result


def decoded(clock, *, drafts, limit=8):
    decoding = Decoding(Policy(clock), Rule(clock), Draw("top-k"), Warp(), limit, ())
    return generate(Target(clock), Drafter(clock) if drafts else None, None, decoding)


def test_each_clock_counts_its_own_parts_and_nothing_else(clock):
    result = decoded(clock, drafts=True)
    assert result.prefill_s == PREFILL
    assert result.draft_prefill_s == START + BEGIN + POLICY_START
    *whole, last = result.cycles
    # One token of each cycle stands. Room for 7 more tokens: 2 by each cycle, and the last one by the target alone.
    assert [cycle.num_drafted for cycle in result.cycles] == [3, 3, 2, 0]
    for cycle in whole:
        assert cycle.draft_s == ROOT_PASS + (cycle.num_drafted - 1) * EXPAND
        assert cycle.verify_s == VERIFY + RULE, "the target's pass and the rule"
        assert (cycle.rule_s, cycle.update_s) == (RULE, OBSERVE)
        assert cycle.total_s == cycle.draft_s + VERIFY + RULE + COMMIT + ACCEPT + OBSERVE
    assert (last.num_nodes, last.draft_s) == (0, ROOT_PASS)
    assert result.total_s == clock.seconds - 1000.0
    assert result.total_s == result.prefill_s + result.draft_prefill_s + sum(c.total_s for c in result.cycles)


def test_plain_decoding_is_charged_for_no_drafting(clock):
    result = decoded(clock, drafts=False)
    assert (result.prefill_s, result.draft_prefill_s) == (PREFILL, 0.0)
    assert [(c.draft_s, c.verify_s, c.rule_s, c.update_s) for c in result.cycles] == [(0, VERIFY + RULE, RULE, 0)] * 7
    assert result.total_s == PREFILL + 7 * (VERIFY + RULE + COMMIT)


def test_a_clock_that_is_given_counts_in_the_place_of_the_walls():
    given = Clock()
    decoding = Decoding(Policy(given), Rule(given), Draw("top-k"), Warp(), 8, ())
    result = generate(Target(given), Drafter(given), None, decoding, clock=given)
    assert result.total_s == given.seconds - 1000.0 and result.prefill_s == PREFILL
    assert sum(c.total_s for c in result.cycles) == result.total_s - result.prefill_s - result.draft_prefill_s


def test_a_row_has_the_whole_time(clock):
    plain, drafted = decoded(clock, drafts=False), decoded(clock, drafts=True)
    row = measure([plain], [drafted], benchmark="b", method="M", request="r", temperature=0.0, max_new_tokens=8,
                  medium="text")  # fmt: skip
    assert (row.plain_prefill_s, row.prefill_s) == (PREFILL, PREFILL + START + BEGIN + POLICY_START)
    assert (row.plain_total_s, row.total_s) == (plain.total_s, drafted.total_s)
    assert row.plain_total_s > row.plain_prefill_s and row.total_s > row.prefill_s
    parts = time_parts(drafted)
    assert sum(parts.values()) == drafted.total_s and parts["others"] == 4 * (COMMIT + ACCEPT)
    assert parts["verification"] == 4 * (VERIFY + RULE) and parts["tree_update"] == 4 * OBSERVE


# ---- a uniform of exactly 0


@pytest.mark.parametrize("first", range(4))
def test_a_uniform_of_zero_takes_the_first_token_with_probability(first):
    probs = torch.zeros(5)
    probs[first:] = 1 / (5 - first)
    assert inverse_cdf(probs, 0.0) == first
    assert inverse_cdf(probs.flip(0), 1 - 2**-53) == 4 - first


def test_uniforms_of_zero_accept_no_token_without_probability():
    """Drafts that the target gives nothing: 0 is not below a chance of 0."""
    p = torch.tensor([[0.0, 0.0, 1.0]]).expand(3, 3)
    q = torch.tensor([[0.5, 0.5, 0.0]]).expand(2, 3)
    branches = Tree(torch.tensor([0, 1]), (-1, -1), (-1, -1), q[:1], (0, 0))
    for rule, tree in (
        (Sampling(), chain(torch.tensor([0, 1]), q)),
        (Sampling(), chain(torch.tensor([0, 1]))),
        (Sampling(), branches),
        (Block(), chain(torch.tensor([0, 1]), q)),
    ):
        verified = rule(tree, p, [0.0] * (tree.num_nodes + 1))
        assert (verified.num_accepted, verified.bonus) == (0, 2)


@pytest.mark.parametrize("warp", [Warp(1.0, top_k=2), Warp(1.0, top_p=0.6)], ids=["top-k", "top-p"])
def test_generate_with_uniforms_of_zero_emits_what_the_cut_target_can_say(monkeypatch, clock, warp):
    """The least likely tokens come first in the vocabulary: an uncut target would say them."""
    scores = torch.tensor([-3.0, -2.0, -1.0, 0.0, 1.0, 1.5, 3.0, 3.0])

    class Rising(Target):
        def prefill(self, request, taps, *, capacity):
            return None, TargetStep(scores[None])

        def verify(self, session, root, tree):
            return TargetStep(scores.expand(tree.num_nodes + 1, -1))

    monkeypatch.setattr(torch, "rand", lambda size, generator=None, dtype=None: torch.zeros(size, dtype=dtype))
    decoding = Decoding(Policy(clock), Sampling(), Draw("top-k"), warp, 8, ())
    for drafter in (None, Drafter(clock)):
        assert generate(Rising(clock), drafter, None, decoding, torch.Generator()).tokens == [6] * 8
