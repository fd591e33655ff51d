"""ViSkip: what a target says of its attention on a picture, and decoding that drafts nothing where it is high."""

import itertools
import statistics

import family_checks as family
import pytest
import tiny_qwen
import torch
from decodings import greedy
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Static
from draftsmith.eval.rules import Sampling
from draftsmith.models.decoding.tree import no_tree
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.lookup import NgramConfig
from draftsmith.models.targets.base import Taps
from exact import accepted_of_drafted, chances, check_drawn
from test_combinations import TREES, answered, big, drafter_of
from test_exactness import FORK, distributions, outcomes, trees, wanted
from tiny import llava, near, proposal, request, target

__all__ = ["answered", "big"]  # pytest looks fixtures up by their names here
ALL, NONE = 1e-9, 2.0  # thresholds
DRAFTERS = ("sparrow", "vispec", "eagle3, all taps, with vata", "dflash, cut by confidence", "peagle", "pruned target")
TARGETS = {"llava": lambda: (target(llava(0)), request(3))} | {
    kind: lambda kind=kind: (tiny_qwen.target(tiny_qwen.model(kind)), tiny_qwen.request(kind, ((4, 6),), (2, 4, 4)))
    for kind in tiny_qwen.KINDS
}


def looked_at(result):
    return [cycle.visual_attention for cycle in result.cycles]


def shares(one, asked, tokens):
    """By the slow way: for each token the whole text before it, its last place in eager attention."""
    layer, found = one.decoder.num_layers - 1, []
    taps = Taps(prefill_attention=(layer,), attention_queries="last")
    for count in range(len(tokens)):
        whole = family.longer(asked, tokens[:count])
        step = one.prefill(whole, taps, capacity=1)[1]
        found.append(float(step.attention[layer][0][:, whole.modality != 0].sum(-1).mean()))
    return found


@pytest.mark.parametrize("name", TARGETS)
def test_the_share_is_that_of_an_eager_pass_over_the_whole_text(name):
    one, asked = TARGETS[name]()
    result = generate(one, NgramConfig(kind="ngram").drafter(None, one), asked, greedy(Chain(2), 7, skip=NONE))
    # A cycle knows where its last token came from: token n from the place before it.
    starts = [0, *itertools.accumulate(cycle.num_emitted for cycle in result.cycles)][:-1]
    expected = shares(one, asked, result.tokens)
    assert looked_at(result) == pytest.approx([expected[start] for start in starts], abs=2e-5)
    assert max(looked_at(result)) > 0.02 and max(looked_at(result)) - min(looked_at(result)) > 1e-3


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_output_is_plain_decoding(answered, name):
    """Cycles with a draft and without one follow each other; every other bit of a cycle is what it was."""
    one, asked = answered
    drafter, skipped, drafted = drafter_of(name, one), 0, 0
    for tree, (ask, plain) in zip(TREES, itertools.cycle(asked)):
        before = generate(one, drafter, ask, greedy(TREES[tree](), 7, skip=NONE))
        middle = statistics.median(looked_at(before))
        result = generate(one, drafter, ask, greedy(TREES[tree](), 7, skip=middle or ALL))
        assert result.tokens == plain and before.tokens == plain
        for cycle in result.cycles:
            if cycle.visual_attention >= (middle or ALL):
                assert cycle.num_nodes == cycle.num_planned == 0 and cycle.num_emitted == 1
                skipped += 1
            else:
                drafted += cycle.num_nodes > 0
    assert skipped > 3 and drafted > 3


def test_every_cycle_or_none(big):
    drafter = drafter_of("eagle", big)
    seeing, blind = (generate(big, drafter, request(1, images), greedy(Chain(3), 7, skip=ALL)) for images in (1, 0))
    assert all(cycle.num_nodes == 0 for cycle in seeing.cycles), "each token hangs on the picture a little"
    assert looked_at(blind) == [0.0] * len(blind.cycles), "no picture, nothing to hang on"
    assert any(cycle.num_nodes for cycle in blind.cycles)
    unwatched = generate(big, drafter, request(1), greedy(Chain(3), 7))
    assert looked_at(unwatched) == [None] * len(unwatched.cycles) and unwatched.tokens == seeing.tokens


def two_tokens(p, q, drafts, vocab=3):
    """Distribution of two tokens of sampled chains, a choice before each cycle or within it: (prefix, tree) -> bool."""
    result = torch.zeros(vocab, vocab, dtype=torch.float64)

    def cycle(prefix, shape):
        below = {path: q[(*prefix, *path)] for path in ((), *((t,) for t in range(vocab))) if (*prefix, *path) in q}
        for tree, prefixes, weight in trees(shape, below, "sample"):
            kept = drafts(prefix, tree)
            rows = torch.stack([p[(*prefix, *after)] for after in (prefixes if kept else prefixes[:1])])
            for tokens, chance in outcomes(Sampling(), tree if kept else no_tree(), rows):
                yield tokens, weight * chance

    for tokens, chance in cycle((), [(0,), (0, 0)]):
        if len(tokens) > 1:
            result[tokens[:2]] += chance
        else:
            for further, more in cycle(tokens, [(0,)]):
                result[tokens[0], further[0]] += chance * more
    return result


@pytest.mark.parametrize("choice", [(1, 1, 0, 0), (0, 1, 0, 1), (1, 0, 0, 0)], ids=str)
def test_a_choice_by_the_committed_tokens_is_exact(choice):
    """Enumerated over all draws of draft and rule; a choice for the empty prefix and for each first token."""
    p, q = distributions(2, 3)
    by_prefix = dict(zip([(), (0,), (1,), (2,)], choice, strict=True))
    result = two_tokens(p, q, lambda prefix, tree: by_prefix[prefix])
    assert (result - wanted(p, 3)).abs().max() < 1e-9


def test_a_choice_by_what_was_drafted_is_not():
    """The same enumeration finds it: drafts are kept where the first one is token 0, and dropped otherwise."""
    p, q = distributions(2, 3)
    result = two_tokens(p, q, lambda prefix, tree: int(tree.tokens[0]) == 0)
    assert float(result.sum()) == pytest.approx(1) and (result - wanted(p, 3)).abs().sum() / 2 > 0.01


@pytest.mark.parametrize(
    ("draw", "policy"), [pytest.param("top-k", Chain(2), marks=pytest.mark.slow), ("sample", Static(FORK))]
)
def test_end_to_end(draw, policy):
    """Three sampled tokens over several cycles against the target's own probabilities, by chi-square."""
    model = llava(0)
    one, drafter, asked, warp = target(model), proposal(near(model)), request(2), Warp(1.0, top_k=2)
    expected = chances(lambda ids: warp(family.all_logits(one, family.longer(asked, ids))[-1]), 3)
    before = {ids[:count] for ids in expected for count in range(3)}
    middle = statistics.median(shares(one, asked, [*ids, 0])[-1] for ids in before)
    decoding, generator = Decoding(policy, Sampling(), Draw(draw), warp, 5, (), middle), torch.Generator()
    generator.manual_seed(0)
    results = check_drawn(expected, lambda: generate(one, drafter, asked, decoding, generator), 150)
    assert accepted_of_drafted(results)[0] > 20
    assert sum(share >= middle for result in results for share in looked_at(result)) > 20
