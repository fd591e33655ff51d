"""Every drafter of states and every pruned one with every tree: what comes out is the target's, at T = 0 and T = 1.

The target can emit six tokens, so that untrained drafters agree with it often.
"""

import functools
import itertools

import family_checks as family
import pytest
import torch
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Dynamic, Product, Static
from draftsmith.eval.rules import Sampling
from draftsmith.models.decoding.tree import chain
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.draft_vocabulary import likeliest_ids
from draftsmith.models.drafters.pruned import PrunedConfig, PrunedProposal
from draftsmith.models.targets.base import Taps
from draftsmith.models.targets.llava.section import LlavaTarget
from exact import accepted_of_drafted, chances, check_drawn
from heads_tiny import config_of, head_of
from tensors import loud
from test_contract import greedy
from test_exactness import FORK, NoResidual, outcomes
from test_sage import all_draws, feed, peaked, tiny_sage
from tiny import IMAGE_ID, SIZES, llava, near
from tiny import request as ask

pytestmark = pytest.mark.slow  # minutes of decoding; each part has quick tests of its own

EMITTED = 6
TAPS = {"kind": "eagle3", "taps": [1, 3, 5]}
DFLASH = {"kind": "dflash", "block_size": 5, "num_layers": 2, "taps": [1, 3, 5]}
DSPARK = DFLASH | {"kind": "dspark", "block_size": 4, "markov_rank": 5}
DRAFTERS = {
    "sparrow": {"kind": "sparrow"},
    "sparrow, second to last": {"kind": "sparrow", "state": -2},
    "sparrow without vata": {"kind": "sparrow", "vata": False, "positions": "flat"},
    "sparrow, half of the visual inputs": {"kind": "sparrow", "vata": False, "visual_share": 0.5, "share_by": "text"},
    "msd": {"kind": "msd"},
    "msd with vata": {"kind": "msd", "vata": True},
    "vispec": {"kind": "vispec", "num_queries": 3},
    "vispec with vata": {"kind": "vispec", "num_queries": 3, "vata": True},
    "hivis": {"kind": "hivis", "num_steps": 2},
    "eagle": {"kind": "eagle"},
    "eagle, placeholders": {"kind": "eagle", "image": "placeholder"},
    "eagle with vata": {"kind": "eagle", "vata": True},
    "eagle, its own vocabulary": {"kind": "eagle", "draft_vocab_size": EMITTED - 2},
    "vispec, its own vocabulary": {"kind": "vispec", "num_queries": 3, "draft_vocab_size": EMITTED - 2},
    "hivis, its own vocabulary": {"kind": "hivis", "num_steps": 2, "draft_vocab_size": EMITTED - 2},
    "medusa, its own vocabulary": {"kind": "medusa", "num_heads": 4, "draft_vocab_size": EMITTED - 2},
    "eagle3": TAPS,
    "eagle3, normed": TAPS | {"fc_norm": True, "norm_output": True},
    "eagle3, one tap at pictures": TAPS | {"visual_slots": "middle", "image": "projected"},
    "eagle3, all taps": TAPS | {"visual_slots": "read"},
    "eagle3, all taps, with vata": TAPS | {"visual_slots": "read", "vata": True},
    "dflash": DFLASH,
    "dflash, its own vocabulary, with vata": DFLASH | {"draft_vocab_size": EMITTED - 2, "vata": True},
    "dflash, a window": DFLASH | {"sliding_window": 6, "positions": "compact"},
    "peagle": TAPS | {"kind": "peagle", "parallel_tokens": 4},
    "peagle, all taps": TAPS | {"kind": "peagle", "parallel_tokens": 3, "visual_slots": "read", "mask_token_id": 61},
    "pruned sibling": "sibling",
    "pruned target": "target",
    "dflash, cut by confidence": DFLASH | {"confidence": {}, "cut_below": 0.3},
    "dspark": DSPARK,
    "dspark, gated, its own vocabulary": DSPARK | {"markov_head_type": "gated", "draft_vocab_size": EMITTED - 1},
    "dspark, rnn, masks alone": DSPARK | {"markov_head_type": "rnn", "sample_from_anchor": False},
    "dspark, cut by confidence": DSPARK | {"confidence": {}, "cut_below": 0.3},
    "dflash2": DFLASH | {"kind": "dflash2", "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 4},
}
BLOCKS = ("dflash", "dspark", "dflash2")
TREES = {
    "chain": lambda: Chain(3),
    "static": lambda: Static(FORK),
    "dynamic": lambda: Dynamic(total=7, depth=2, width=3),
    "product": lambda: Product(total=7, levels=3, width=3),
    "sage online": lambda: tiny_sage("online"),
    "sage template": lambda: tiny_sage("template"),
    "sage dynamic": lambda: tiny_sage("dynamic"),
}
FIXED = ("chain", "static", "sage template")  # shapes that stand before the draw
WARP = Warp(1.0, top_k=3)


@pytest.fixture(scope="module")
def big():
    """Six layers, so that three taps are different ones."""
    return target(llava(0, layers=6))


def target(model):
    return LlavaTarget(model, num_token_ids=EMITTED, image_token_id=IMAGE_ID)


def drafter_of(name, big):
    settings = DRAFTERS[name]
    if isinstance(settings, str):
        reader = big if settings == "target" else target(near(big.decoder.model))
        return PrunedProposal(reader, big, PrunedConfig(kind="pruned", ratio=0.5))
    config = config_of(**settings)
    torch.manual_seed(0)
    ids = None
    if config.kind in ("eagle3", "peagle"):
        never = big.scores(big.embedding[:1])[0].isneginf()
        ids = likeliest_ids(torch.arange(big.vocab_size).float(), EMITTED - 2, never)
    if config.kind in BLOCKS or config.kind == "medusa" or getattr(config, "draft_vocab_size", None):
        head = config.build(big, count_tokens=lambda: torch.arange(big.vocab_size))
    else:
        head = head_of(config, big.shape, ids)
    loud(head)
    return config.drafter(head, big)


def grown_once(name):
    """A policy after its first cycle: SAGE's first tree is a fixed one."""
    policy = TREES[name]()
    policy.start()
    if name.startswith("sage"):
        feed(policy, peaked(0.6), 1)
    return policy


@pytest.fixture(scope="module", params=SIZES.values(), ids=SIZES)
def answered(request):
    """A target; requests to it with two pictures, with none and with one, and what it answers."""
    big = target(llava(0, layers=6, sizes=request.param))
    asked = [ask(3, images, sizes=request.param) for images in (2, 0, 1)]
    return big, [(one, generate(big, None, one, greedy(Chain(1), 7)).tokens) for one in asked]


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_output_is_plain_decoding(answered, name):
    big, answered = answered
    drafter, cycles = drafter_of(name, big), []
    for tree, (asked, plain) in zip(TREES, itertools.cycle(answered)):
        result = generate(big, drafter, asked, greedy(TREES[tree](), 7))
        assert result.tokens == plain, tree
        cycles += result.cycles
    assert any(c.num_accepted for c in cycles)
    assert name == "pruned target" or any(c.num_accepted < c.num_drafted for c in cycles)


class Cycle:
    """A cycle after a prompt and its first token, again and again; and what the target says of the two tokens next."""

    def __init__(self, big, drafter, asked, first):
        self.big, self.drafter, self.asked, self.first = big, drafter, asked, first

    @functools.cached_property
    def wanted(self):
        return torch.stack([self.plain(())[a] * self.plain((a,)) for a in range(EMITTED)])

    @functools.cache  # noqa: B019
    @torch.inference_mode()
    def plain(self, tokens):
        step = self.big.prefill(family.longer(self.asked, (self.first, *tokens)), Taps(), capacity=1)[1]
        return WARP(step.logits[-1])[:EMITTED].double()

    @torch.inference_mode()
    def grow(self, policy, draw):
        """The tree, and the target's distributions at its root and nodes."""
        session, step = self.big.prefill(self.asked, self.drafter.taps, capacity=40)
        self.drafter.start(self.asked, step, WARP, capacity=40)
        self.drafter.begin(self.first)
        expand = lambda parents, tokens: WARP.truncate(self.drafter.expand(parents, tokens))  # noqa: E731
        root = self.drafter.root()
        tree = policy.grow(WARP.truncate(root), expand, draw, max_levels=min(2, self.drafter.max_levels or 2))
        return tree, WARP(self.big.verify(session, self.first, tree).logits)

    def add(self, found, rule, tree, p, weight=1.0):
        """The distribution of two tokens, of `weight`; a block of one is completed by the target's own next token."""
        for tokens, chance in outcomes(rule, tree, p):
            if len(tokens) > 1:
                found[tokens[0], tokens[1]] += weight * chance
            else:
                found[tokens[0]] += weight * chance * self.plain(tokens)


def open_cycle(big, drafter, requests, policy):
    """After a first token where the likeliest draft may stand, and need not."""
    for asked, first in itertools.product(requests, range(EMITTED)):
        cycle = Cycle(big, drafter, asked, first)
        tree, p = cycle.grow(policy, Draw("top-k"))
        if tree.num_nodes and 0.05 < float(p[0, int(tree.tokens[0])]) < 0.95:
            return cycle
    raise AssertionError("no draft of any request may stand")


def cycle_of(name, big):
    return open_cycle(big, drafter_of(name, big), [ask(seed, 1) for seed in range(3)], Chain(1))


def check_two_tokens(cycle, tree_name):
    tree, p = cycle.grow(grown_once(tree_name), Draw("top-k"))
    for rule in (Sampling(), NoResidual()):
        result = torch.zeros(EMITTED, EMITTED, dtype=torch.float64)
        cycle.add(result, rule, tree, p)
        off = float((result - cycle.wanted).abs().max())
        assert off < 2e-5 if isinstance(rule, Sampling) else off > 1e-3, (tree_name, off)


@pytest.mark.parametrize("name", DRAFTERS)
def test_two_sampled_tokens_are_distributed_as_the_targets(big, name):
    """All uniforms of a cycle; the wrong rule goes through the same. A tree for each drafter, all of them for one."""
    cycle, names = cycle_of(name, big), [*TREES]
    for tree_name in names if name == "sparrow" else [names[[*DRAFTERS].index(name) % len(names)]]:
        check_two_tokens(cycle, tree_name)


def off_over_all_draws(cycle, policy):
    """How far two tokens are from the target's, over all draws of a fixed shape."""
    result = torch.zeros(EMITTED, EMITTED, dtype=torch.float64)
    for (tree, p), drawn in all_draws(lambda draw: cycle.grow(policy(), draw)):
        cycle.add(result, Sampling(), tree, p, drawn)
    return float((result - cycle.wanted).abs().max())


@pytest.mark.parametrize(
    ("name", "tree_name"),
    [
        *((name, "chain") for name in ("msd with vata", "dflash, cut by confidence", "dspark, rnn, masks alone",
                                       "dspark, cut by confidence", "dflash2")),
        *(pytest.param(*pair, marks=pytest.mark.slow)
          for pair in itertools.product(("sparrow", "eagle3", "pruned sibling", "dspark"), FIXED)),
    ],
)  # fmt: skip
def test_sampled_proposals(big, name, tree_name):
    """The same over all draws of a fixed shape as well."""
    assert off_over_all_draws(cycle_of(name, big), lambda: grown_once(tree_name)) < 2e-5


class CutByWhatIsDrawn(Chain):
    """Drops the last token of a sampled chain where the draft found it unlikely: what a cut must not depend on."""

    def grow(self, root, expand, draw, *, max_levels):
        tree = super().grow(root, expand, draw, max_levels=max_levels)
        last = tree.num_nodes - 1
        if tree.draft_probs[last, tree.tokens[last]] > 0.3:
            return tree
        return chain(tree.tokens[:last], tree.draft_probs[:last] if last else None)


class ForgetsWhatIsBefore(Chain):
    """Draws a chain along a walk, and says of its second token that it was drawn whatever the first one was."""

    def grow(self, root, expand, draw, *, max_levels):
        tree = super().grow(root, expand, draw, max_levels=max_levels)
        if tree.num_nodes < 2:
            return tree
        second = self.any_first(root, expand)
        return chain(tree.tokens, torch.stack([tree.draft_probs[0], second]))

    def any_first(self, root, expand):
        return sum(root[first] * expand((-1,), torch.tensor([first]))[0] for first in range(EMITTED))


@pytest.mark.parametrize(("name", "wrong"), [("dflash", CutByWhatIsDrawn), ("dspark", ForgetsWhatIsBefore)])
def test_a_cut_that_reads_what_is_drawn_and_a_walk_that_says_another_q_are_not_exact(big, name, wrong):
    """The same enumeration finds them: a confidence head that looks at drawn tokens, and a q that is right in the mean
    over the token before, and not given it.
    """
    assert off_over_all_draws(cycle_of(name, big), lambda: wrong(2)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tree_name", "draw"),
    [
        ("sparrow", "dynamic", "top-k"), ("sparrow", "sage template", "sample"), ("msd with vata", "static", "sample"),
        ("vispec", "sage online", "top-k"), ("eagle3, all taps", "sage dynamic", "top-k"),
        ("eagle3", "chain", "sample"), ("dflash, cut by confidence", "chain", "sample"),
        ("dspark, rnn, masks alone", "chain", "sample"), ("dspark, cut by confidence", "chain", "sample"),
        ("dflash2", "chain", "sample"), ("pruned sibling", "sage online", "top-k"),
        ("pruned sibling", "sage template", "sample"),
    ],
)  # fmt: skip
def test_end_to_end(big, name, tree_name, draw):
    """Five tokens over several cycles, of which the first three are counted."""
    asked, drafter, warp = ask(1, 1), drafter_of(name, big), Warp(1.0, top_k=2)
    decoding, generator = Decoding(TREES[tree_name](), Sampling(), Draw(draw), warp, 5, ()), torch.Generator()
    generator.manual_seed(0)
    expected = chances(lambda ids: warp(family.all_logits(big, family.longer(asked, ids))[-1]), 3)
    results = check_drawn(expected, lambda: generate(big, drafter, asked, decoding, generator), 500)
    assert accepted_of_drafted(results)[0] > 0
    assert not tree_name.startswith("sage") or max(len(result.cycles) for result in results) > 2
