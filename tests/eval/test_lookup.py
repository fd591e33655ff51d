"""Drafting by looking up: against slow obvious versions, exact with every tree and draw, and never from pictures."""

import itertools

import numpy as np
import pytest
import torch
from draftsmith.core.batch import TEXT, Request
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Dynamic, Static
from draftsmith.eval.rules import Sampling, Verified
from draftsmith.models.decoding.tree import ROOT
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.lookup import NgramConfig, SuffixConfig
from draftsmith.models.drafters.mixed import MixedConfig
from test_combinations import EMITTED, FIXED, TREES, big, check_two_tokens, drafter_of, off_over_all_draws, open_cycle
from test_contract import greedy
from tiny import request as ask

__all__ = ["big"]  # pytest looks fixtures up by their names here
VOCAB = 9
CONFIGS = {
    "ngram": NgramConfig(kind="ngram"),
    "ngram, two tokens at least": NgramConfig(kind="ngram", min_match=2, branches=2),
    "suffix": SuffixConfig(kind="suffix", levels_per_match=3),
    "suffix, one-hot": SuffixConfig(kind="suffix", levels_per_match=3, proposal="one_hot", min_prob=0),
}


class Sized:
    vocab_size = VOCAB


def started(config, prompt, first, *, visual=(), drafter=None, capacity=20):
    drafter = drafter or config.drafter(config.load(None, Sized), Sized)
    modality = torch.zeros(len(prompt), dtype=torch.int8)
    modality[list(visual)] = 1
    drafter.start(Request(torch.tensor(prompt), modality, None), None, Warp(), capacity=capacity)
    drafter.begin(first)
    return drafter


def took(drafter, *tokens):
    drafter.accept(Verified((0,) * (len(tokens) - 1), tuple(tokens[:-1]), tokens[-1]))


def chain_of(drafter, length):
    root = drafter.root()
    if drafter.max_levels == 0:
        return []
    return (
        Chain(length).grow(root, drafter.expand, Draw("top-k"), max_levels=drafter.max_levels or length).tokens.tolist()
    )


def longest_match(text, most):
    """Length, and the places behind each place that it ends at, latest first."""
    for length in range(min(most, len(text) - 1), 0, -1):
        if ends := [e for e in range(len(text) - 1, length - 1, -1) if text[e - length : e] == text[-length:]]:
            return length, ends
    return 0, []


@pytest.mark.parametrize("letters", [2, 4, 8])
def test_ngram_copies_what_followed_the_most_recent_longest_match(letters):
    """Behind the text's end a copy goes on in itself, as a period does."""
    rng, drafted = np.random.default_rng(letters), 0
    for config, _ in itertools.product((CONFIGS["ngram"], CONFIGS["ngram, two tokens at least"]), range(60)):
        text = rng.integers(0, letters, rng.integers(2, 20)).tolist()
        length, ends = longest_match(text, config.max_match)
        wanted, copied = [], [*text]
        if length >= config.min_match:
            for place in range(ends[0], ends[0] + 6):
                copied.append(copied[place])
            wanted = copied[len(text) :]
        drafter = started(config, text[:-1], text[-1])
        assert chain_of(drafter, 6) == wanted
        drafted += len(wanted)
    assert drafted > 60


@pytest.mark.parametrize("letters", [2, 4])
def test_suffix_counts_what_followed_the_longest_match(letters):
    """q of the root and of every path of two tokens, by counting over all places of the match."""
    rng, most, deeper = np.random.default_rng(letters), 0, 0
    config = SuffixConfig(kind="suffix", min_prob=0.3)
    for _ in range(60):
        text = rng.integers(0, letters, rng.integers(2, 30)).tolist()
        length, ends = longest_match(text, len(text))
        drafter = started(config, text[:-1], text[-1])
        root = drafter.root()
        assert drafter._most == max(1, length) and drafter.max_levels in (None, 0)
        most = max(most, length)
        # Behind the text's end stands what is drafted: the path itself.
        after = [text[end : end + 1] for end in ends]
        counts = {t: after.count([t]) for t in range(letters)}
        kept = {t: n for t, n in counts.items() if n and n >= 0.3 * len(ends)}
        expected = torch.tensor([kept.get(t, 0) / max(1, sum(kept.values())) for t in range(VOCAB)])
        torch.testing.assert_close(root, expected)
        for token in kept:
            q = drafter.expand([ROOT], torch.tensor([token]))[0]
            here = [end for end in ends if text[end] == token]
            below = [[*text, token][end + 1] for end in here]
            chances = {t: below.count(t) for t in range(letters) if below.count(t) >= 0.3 * len(ends) and t in below}
            if length < 2:  # as many levels as tokens of the match
                chances = {}
            expected = torch.tensor([chances.get(t, 0) / max(1, sum(chances.values())) for t in range(VOCAB)])
            torch.testing.assert_close(q, expected)
            deeper += bool(chances)
    assert most > 3 and deeper > 20


def test_a_tree_branches_into_several_matches_the_most_recent_first():
    drafter = started(CONFIGS["ngram"], [0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 4, 5, 0, 1], 2)
    tree = Dynamic(total=9, depth=1, width=3).grow(drafter.root(), drafter.expand, Draw("top-k"), max_levels=9)
    paths = {
        (int(tree.tokens[parent]) if parent != ROOT else None, int(token))
        for token, parent in zip(tree.tokens, tree.parents, strict=False)
    }
    assert paths == {(None, 4), (None, 3), (4, 5), (4, 0), (3, 0)}
    assert [int(tree.tokens[node]) for node in tree.children[ROOT]] == [4, 3]
    assert [int(tree.tokens[node]) for node in tree.children[0]] == [5, 0]


def test_one_hot_proposals_have_one_token():
    drafter = started(CONFIGS["suffix, one-hot"], [1, 2, 1, 3, 1, 3], 1)
    assert drafter.root().tolist() == [0.0] * 3 + [1.0] + [0.0] * 5


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_tokens_of_pictures_are_neither_matched_nor_proposed(config):
    """Two pictures of the same placeholder; the words before them are repeated."""
    picture = 7
    prompt = [1, 2, *[picture] * 4, 3, 4, 1, 2, *[picture] * 4, 3, 1]
    visual = [place for place, token in enumerate(prompt) if token == picture]
    drafter = started(config, prompt, 2, visual=visual)
    assert not drafter.root().any() and drafter.max_levels == 0, "a picture follows every match"
    drafter = started(config, [3, 4, *prompt], 4, visual=[place + 2 for place in visual])
    root = drafter.root()
    if drafter.max_levels != 0:
        assert root[picture] == 0
    took(drafter, 1, 2)
    assert not drafter.root().any()
    # The placeholder's own id as a word of the answer finds no picture.
    took(drafter, picture)
    assert not drafter.root().any()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_answer_is_looked_up_and_a_request_starts_anew(config):
    drafter = started(config, [5], 1)
    assert chain_of(drafter, 3) == []
    took(drafter, 2, 3, 4, 1, 2)
    assert chain_of(drafter, 3)[:2] == [3, 4]
    drafter = started(config, [5, 8], 2, drafter=drafter)
    assert chain_of(drafter, 3) == []


def test_earlier_answers_are_looked_up_where_asked_and_no_more_than_asked():
    """Answers to other prompts: a request that is decoded again does not find its own answer."""
    config = SuffixConfig(kind="suffix", earlier_answers=2)
    drafter = started(config, [5], 1)
    took(drafter, 2, 3, 4)
    drafter = started(config, [5], 2, drafter=drafter)
    assert not drafter.root().any(), "of the same prompt"
    drafter = started(config, [5], 1)
    took(drafter, 2, 3, 4)
    for prompt, (found, last) in enumerate((({3: 1.0}, 6), ({3: 0.5, 6: 0.5}, 7), ({6: 0.5, 7: 0.5}, 8)), 6):
        drafter = started(config, [prompt, prompt], 2, drafter=drafter)
        assert {t: q for t, q in enumerate(drafter.root().tolist()) if q} == found
        took(drafter, last)


@pytest.mark.parametrize("draw", ["top-k", "sample"])
@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_nothing_is_drafted_where_a_picture_follows(name, draw):
    """Of a row of zeros any token would be drawn, and stand."""
    drafter = started(CONFIGS[name], [3, 1, 2, 7, 7, 3], 1, visual=(3, 4))
    tree = Static([(0,), (0, 0)]).grow(drafter.root(), drafter.expand, Draw(draw), max_levels=2)
    assert tree.tokens.tolist() == [2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", TREES)
def test_every_tree_goes_on_where_a_picture_follows_the_only_match(big, tree, temperature):
    """After the last words' match one token can be drafted, and behind it stand rows of zeros."""
    asked = ask(3, 1)
    ids, modality = asked.ids.clone(), asked.modality.clone()
    first_visual = int((modality != TEXT).nonzero()[0])
    lead = [0, 1, 2, 3, 4, 5]
    prompt = torch.cat([torch.tensor([t for t in lead for t in (t, 5)]), ids[first_visual:], torch.tensor(lead)])
    kinds = torch.cat([torch.zeros(12, dtype=torch.int8), modality[first_visual:], torch.zeros(6, dtype=torch.int8)])
    request = Request(prompt, kinds, asked.pixels)
    draws = ("top-k", "sample") if temperature and tree in FIXED else ("top-k",)
    for config, draw in itertools.product(CONFIGS.values(), draws):
        drafter, rule = config.drafter(None, big), Sampling() if temperature else greedy(Chain(1), 1).rule
        decoding = Decoding(TREES[tree](), rule, Draw(draw), Warp(temperature, top_k=3 if temperature else 0), 14, ())
        result = generate(big, drafter, request, decoding, torch.Generator().manual_seed(0))
        assert len(result.tokens) == 14


def test_shares_count_continuations_that_are_pictures():
    """Nine of ten places go on in a picture: the tenth has a tenth of them, too little for half."""
    prompt = [t for _ in range(9) for t in (1, 7)] + [1, 2]
    visual = [place for place, token in enumerate(prompt) if token == 7]
    config = SuffixConfig(kind="suffix", min_prob=0.5)
    assert not started(config, prompt, 1, visual=visual).root().any()
    assert started(SuffixConfig(kind="suffix", min_prob=0.05), prompt, 1, visual=visual).root()[2] == 1


def words(seed, *, images=0):
    """A prompt that holds what the target emits, again and again, so that something is found after any token."""
    asked = ask(3, images)
    ids = torch.randint(0, EMITTED, (24,), generator=torch.Generator().manual_seed(seed))
    return Request(
        torch.cat([asked.ids, ids]),
        torch.cat([asked.modality, torch.full((24,), TEXT, dtype=torch.int8)]),
        asked.pixels,
    )


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_greedy_output_is_plain_decoding(big, config):
    drafter, cycles = config.drafter(None, big), []
    for tree, seed in zip(TREES, range(99), strict=False):
        asked = words(seed, images=seed % 3)
        plain = generate(big, None, asked, greedy(Chain(1), 12)).tokens
        result = generate(big, drafter, asked, greedy(TREES[tree](), 12))
        assert result.tokens == plain, tree
        cycles += result.cycles
    assert any(c.num_accepted for c in cycles) and any(c.num_accepted < c.num_drafted for c in cycles)


def test_cycles_without_a_match_are_steps_of_plain_decoding(big):
    """All of an answer to a prompt that holds nothing of it, before the answer repeats itself."""
    asked = Request(torch.tensor([40, 41, 42]), torch.zeros(3, dtype=torch.int8), None)
    result = generate(big, CONFIGS["ngram"].drafter(None, big), asked, greedy(Chain(3), 2))
    assert [(c.num_drafted, c.num_planned, c.num_emitted) for c in result.cycles] == [(0, 0, 1)]


def cycle_of(config, big):
    return open_cycle(
        big, config.drafter(None, big), [words(seed, images=1) for seed in range(9)], Static([(0,), (1,)])
    )


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_two_sampled_tokens_are_distributed_as_the_targets(big, config, tree):
    """All uniforms of a cycle; the wrong rule goes through the same."""
    check_two_tokens(cycle_of(config, big), tree)


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_sampled_chains_are_exact_over_all_draws(big, name):
    assert off_over_all_draws(cycle_of(CONFIGS[name], big), lambda: Chain(3)) < 2e-5


def test_a_member_that_finds_nothing_leaves_its_weight_to_the_others(big):
    """An ensemble with a head drafts in every cycle, with q that sum to 1, and greedy output stays the target's."""
    config = MixedConfig(kind="ensemble", members=["a", "b"], weights={"kind": "fixed"})
    members = [CONFIGS["ngram"].drafter(None, big), drafter_of("sparrow", big)]
    drafter, asked = config.drafter(members, big), ask(3, 1)
    plain = generate(big, None, asked, greedy(Chain(1), 9)).tokens
    result = generate(big, drafter, asked, greedy(Dynamic(7, 2, 3), 9))
    assert result.tokens == plain and all(c.num_drafted for c in result.cycles[:-1])
    _session, step = big.prefill(asked, drafter.taps, capacity=20)
    drafter.start(asked, step, Warp(), capacity=20)
    drafter.begin(0)
    root = drafter.root()
    assert members[0].max_levels == 0 and drafter.max_levels is None
    torch.testing.assert_close(root.sum(), torch.tensor(1.0))
    # All of the weight on the silent one: the others draft in its place.
    lonely = MixedConfig(kind="ensemble", members=["a", "b"], weights={"kind": "fixed", "values": [1.0, 0.0]})
    result = generate(big, lonely.drafter(members, big), asked, greedy(Chain(3), 9))
    assert result.tokens == plain and all(c.num_drafted for c in result.cycles[:-1])
    silent = [CONFIGS[name].drafter(None, big) for name in ("ngram", "suffix")]
    drafter = config.drafter(silent, big)
    drafter.start(asked, step, Warp(), capacity=20)
    drafter.begin(0)
    assert not drafter.root().any() and drafter.max_levels == 0


@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_check_drafter_takes_one_that_has_nothing_to_say(kind):
    import draftsmith

    seen = draftsmith.check_drafter((NgramConfig if kind == "ngram" else SuffixConfig)(kind=kind))
    assert seen["q"] is not None and seen["greedy"] is not None
