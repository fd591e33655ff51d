"""Heads in the decoding loop: plain decoding's images, oracles that are accepted whole, and the target's distribution.

Letters: R rows, N positions, K places seen, D width, L levels.
"""

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from draftsmith.core.batch import ImageRequest
from draftsmith.eval.block import Block
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import CHOICES, AdtTree, Chain, Draw, Dynamic, Static
from draftsmith.eval.rules import Sampling
from draftsmith.models.decoding.rows import Guidance
from draftsmith.models.decoding.tree import ROOT
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.eagle_images import ImageEagleProposal
from draftsmith.models.drafters.llamagen import SiblingConfig, SiblingProposal
from draftsmith.models.drafters.medusa import MedusaProposal
from draftsmith.models.targets.anole.target import AnoleTarget
from draftsmith.models.targets.llamagen.target import LlamaGenTarget
from exact import chances, check_drawn
from test_block import block_outcomes
from test_exactness import NoResidual, outcomes
from test_sage import all_draws
from torch import nn
from visual_tiny import (
    DFLASH,
    DSPARK,
    EAGLE,
    MEDUSA,
    anole,
    greedy,
    llamagen,
    plain,
    request,
    target,
    trained,
    true_features,
)

SETTINGS = {  # name -> condition, guidance scale, interval
    "class": ("class", 1.0, -1),
    "guided": ("text", 3.0, -1),
    "interval": ("class", 3.0, 3),
    "other sizes": ("text", 3.0, 6),
}
SIZES = {"other sizes": {"grid": 5, "vocab": 37, "dim": 48, "heads": 3}}
ANOLES = {"anole": {}, "anole, other sizes": {"grid": 5, "heads": 4, "kv_heads": 2}}
FORK = [(0,), (1,), (0, 0)]


def adt(grid=4, **changes):
    settings = {
        "total": 12, "initial_depth": 2, "initial_width": 3, "width_step": 1, "width_range": (1, 5),
        "depth_range": (0, 5), **changes,
    }  # fmt: skip
    return AdtTree(kind="adt", **settings).build(grid=grid)


POLICIES = {
    "chain": lambda grid: Chain(4),
    "static": lambda grid: Static(CHOICES["mc_sim_7b_63"]),
    "dynamic": lambda grid: Dynamic(total=16, depth=3, width=4),
    "adt": adt,
}


@pytest.fixture(scope="module")
def drafters():
    """Heads that agree with their target now and then, for each setting."""
    result = {}
    for name, (condition, scale, interval) in SETTINGS.items():
        generator = target(llamagen(condition, **SIZES.get(name, {})), scale, interval)
        # A block draft learns these few pictures by heart in as many steps as the others take to agree now and then.
        kinds = {EAGLE: 40, MEDUSA: 40, DFLASH: 15, DSPARK: 15}
        heads = [(c, trained(generator, c, steps=steps)[0]) for c, steps in kinds.items()]
        proposals = {config.kind: config.drafter(head, generator) for config, head in heads}
        smaller = llamagen(condition, **SIZES.get(name, {}))
        generator_ = torch.Generator().manual_seed(1)
        smaller.output.weight.data += 0.15 * torch.randn(smaller.output.weight.shape, generator=generator_)
        proposals["sibling"] = SiblingProposal(target(smaller, scale, interval))
        result[name] = generator, proposals
    return result


def check_cycles(result, length):
    """All cells and no more; a draft leaves room for the target's own token, down to the last cell."""
    emitted = 1
    for cycle in result.cycles:
        assert cycle.num_drafted <= max(0, length - emitted - 1)
        assert cycle.num_emitted == cycle.num_accepted + 1
        emitted += cycle.num_emitted
    assert emitted == len(result.tokens) == length and result.stop == "length"


@pytest.mark.covering
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", ["eagle", "medusa", "dflash", "dspark", "sibling"])
@pytest.mark.parametrize("shape", POLICIES)
def test_greedy_images_are_the_targets(drafters, setting, kind, shape):
    generator, proposals = drafters[setting]
    cycles, images = [], []
    for seed in range(6, 9):
        asked = request(generator.model, seed)
        images.append(plain(generator, asked))
        result = generate(
            generator, proposals[kind], asked, greedy(POLICIES[shape](generator.grid), generator.num_codes)
        )
        assert result.tokens == images[-1]
        check_cycles(result, generator.num_codes)
        cycles += result.cycles
    assert any(c.num_accepted for c in cycles) and any(c.num_accepted < c.num_drafted for c in cycles)
    assert len(set(map(tuple, images))) == 3 and len(set(itertools.chain(*images))) > 5


@pytest.mark.parametrize("length", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", ["eagle", "medusa", "dflash", "dspark", "sibling"])
def test_a_part_of_an_image(drafters, kind, length):
    generator, proposals = drafters["guided"]
    asked = request(generator.model, 6)
    result = generate(generator, proposals[kind], asked, greedy(Dynamic(16, 3, 4), length))
    assert result.tokens == plain(generator, asked)[:length]
    check_cycles(result, length)


@pytest.mark.parametrize("kind", ["eagle", "medusa", "dflash", "dspark", "sibling"])
def test_a_drafter_keeps_nothing_of_the_last_request(drafters, kind):
    generator, proposals = drafters["guided"]
    alone = generate(generator, proposals[kind], request(generator.model, 7), greedy(adt(), 16))
    generate(generator, proposals[kind], request(generator.model, 8), greedy(adt(), 16))
    again = generate(generator, proposals[kind], request(generator.model, 7), greedy(adt(), 16))
    assert again.tokens == alone.tokens
    assert [c.num_accepted for c in again.cycles] == [c.num_accepted for c in alone.cycles]


@pytest.mark.parametrize("config", [EAGLE, MEDUSA, DFLASH, DSPARK], ids=["eagle", "medusa", "dflash", "dspark"])
def test_a_float32_head_of_a_bfloat16_target(config):
    generator = target(llamagen("text").bfloat16(), 3.0)
    torch.manual_seed(0)
    head = config.build(generator)
    assert {p.dtype for p in head.parameters()} == {torch.float32}
    result = generate(
        generator, config.drafter(head, generator), request(generator.model), greedy(Dynamic(16, 3, 4), 16)
    )
    check_cycles(result, 16)


# ---- oracles


class Oracle(nn.Module):
    """In an EAGLE head's place: the target's true next state, found out from what the proposal shows alone.

    Tokens travel in the cache as keys, so that a position's history is what its mask lets it see.
    """

    def __init__(self, truth, prompts, *, mask_padding):
        """`truth`: row, codes -> [D] state of the last of them. `prompts`: each row's tokens after its first."""
        super().__init__()
        self.shape, self.fc = SimpleNamespace(mask_padding=mask_padding), nn.Linear(1, 1)
        self.truth, self.prompts, self.dtype = truth, prompts, torch.float32

    def predict(self, features, tokens, positions, mask, cache):
        rows, count = tokens.shape
        keys = tokens[:, None, :, None].float()
        seen, _ = cache.layers[0].update(keys, keys)  # [R,1,K,1]
        answers = torch.zeros_like(features)
        for row, place in itertools.product(range(rows), range(count)):
            visible = slice(None) if mask is None else mask[place] if mask.dim() == 2 else mask[row, place]
            history = seen[row, 0, visible, 0].long().tolist()
            prompt = self.prompts[row]
            if len(history) <= len(prompt):
                continue  # a prompt place, or padding
            assert history[: len(prompt)] == prompt
            assert int(positions.expand(rows, -1)[row, place]) == len(history) - 1
            codes = history[len(prompt) :]
            torch.testing.assert_close(features[row, place], self.truth(row, codes[:-1]), atol=3e-5, rtol=0)
            answers[row, place] = self.truth(row, codes)
        return answers


class LevelOracle(nn.Module):
    """In Medusa's place: finds the state it is given in the image's own, and answers with those after it."""

    def __init__(self, states, levels=3):
        super().__init__()
        self.states, self.shape = states, SimpleNamespace(num_heads=levels)  # [R,n,D], entry j scores code j
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, features):
        off = (self.states - features).abs().amax((0, 2))
        place = int(off.argmin())
        assert off[place] < 3e-5 and features.shape[1] == 1
        last = self.states.shape[1] - 1
        behind = [min(place + level, last) for level in range(1, self.shape.num_heads + 1)]
        return self.states[:, behind].transpose(0, 1)[:, :, None]  # [L,R,1,D]


def truth_of(generator, asked):
    """row, codes -> [D] state of the last of them, by a plain pass over that row alone."""
    known = {}

    @torch.no_grad()
    def truth(row, codes):
        key = (row, *codes)
        if key not in known:
            if isinstance(generator, AnoleTarget):
                prompt = [0, 21] if row else [0, *asked.condition.tolist(), 22, 21]
                states = generator.model.model(input_ids=torch.tensor([prompt + codes])).last_hidden_state
            else:
                states = true_features(generator.model, asked.condition, row + 1, codes)[row:]
            known[key] = states[0, -1]
        return known[key]

    return truth


def with_oracle(setting, kind, seed, *, loud):
    """(target, request, proposal); `loud` targets are sure of each token."""
    if setting in ANOLES:
        generator = anole(**ANOLES[setting])
        asked = ImageRequest(torch.tensor([25, 31, 28])[:seed])
        prompts = [[*asked.condition.tolist(), 22, 21], [21]]
    else:
        condition, scale, interval = SETTINGS[setting]
        generator = target(llamagen(condition, loud=loud, **SIZES.get(setting, {})), scale, interval)
        asked = request(generator.model, seed)
        prompts = [[0] * (generator.config.num_condition_tokens - 1)] * 2
    truth = truth_of(generator, asked)
    if kind == "eagle":
        oracle = Oracle(truth, prompts, mask_padding=setting in ANOLES)
        return generator, asked, ImageEagleProposal(oracle, generator.guided)
    image, rows = plain(generator, asked), generator.guidance.num_rows
    states = torch.stack([torch.stack([truth(row, image[:n]) for n in range(len(image))]) for row in range(rows)])
    return generator, asked, MedusaProposal(LevelOracle(states), generator.guided)


@pytest.mark.covering
@pytest.mark.parametrize("shape", POLICIES)
@pytest.mark.parametrize("kind", ["eagle", "medusa"])
@pytest.mark.parametrize("setting", [*SETTINGS, *ANOLES])
def test_an_oracle_is_accepted_to_full_depth(setting, kind, shape):
    """True states in, the target's own choice out: anything misplaced by one would show in the first cycle."""
    for seed in (1, 3):
        # Loud: the likeliest path is then a tree's best path.
        generator, asked, draft = with_oracle(setting, kind, seed, loud=3.0)
        count = generator.num_codes
        result = generate(generator, draft, asked, greedy(POLICIES[shape](generator.grid), count))
        assert result.tokens == plain(generator, asked) and len(set(result.tokens)) > 2
        check_cycles(result, count)
        assert all(c.num_accepted == c.num_drafted for c in result.cycles)
        assert max(c.num_drafted for c in result.cycles) >= 3 and len(result.cycles) <= max(6, count // 3)


class Watched(Static):
    """Compares what was drafted from with the target's own distribution, at the root and along each accepted path."""

    def __init__(self, choices):
        super().__init__(choices)
        self.compared = 0

    def grow(self, root, expand, draw, *, max_levels):
        self.q = {ROOT: root}

        def kept(parents, tokens):
            rows = expand(parents, tokens)
            self.q |= {len(self.q) - 1 + i: row for i, row in enumerate(rows)}
            return rows

        return super().grow(root, kept, draw, max_levels=max_levels)

    def observe(self, verified):
        num_condition = [ROOT, *(verified.tree.expansions[node] for node in verified.path)]
        along = verified.scores[[0, *(node + 1 for node in verified.path)]]
        for place, (index, scores) in enumerate(zip(num_condition, along, strict=True)):
            if verified.tree.num_nodes and (place == 0 or index != ROOT):
                torch.testing.assert_close(self.q[index], scores.softmax(-1), atol=1e-3, rtol=0)
                self.compared += 1


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
@pytest.mark.parametrize("setting", [*SETTINGS, *ANOLES])
def test_an_oracle_drafts_from_the_targets_own_distribution(setting, kind):
    """Guided as the target is, token by token: also where guidance ends."""
    generator, asked, draft = with_oracle(setting, kind, 1, loud=0.35)
    # A short tree has its root at every other token, a tall one its nodes at most of them.
    for choices in ([(0,)], CHOICES["mc_sim_7b_63"]):
        policy = Watched(choices)
        result = generate(generator, draft, asked, greedy(policy, generator.num_codes))
        assert result.tokens == plain(generator, asked) and policy.compared > 6


@pytest.mark.parametrize("shape", ["chain", "dynamic", "static"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_copy_of_the_target_is_accepted_whole(setting, shape):
    condition, scale, interval = SETTINGS[setting]
    generator = target(llamagen(condition, loud=3.0, **SIZES.get(setting, {})), scale, interval)
    draft = SiblingProposal(target(copy.deepcopy(generator.model), scale, interval))
    asked = request(generator.model, 6)
    count = generator.num_codes
    result = generate(generator, draft, asked, greedy(POLICIES[shape](generator.grid), count))
    assert result.tokens == plain(generator, asked)
    assert all(c.num_accepted == c.num_drafted for c in result.cycles) and len(result.cycles) <= max(6, count // 3)


@pytest.mark.parametrize(("asked_for", "used"), [(None, 3.0), (1.5, 1.5), (1.0, 1.0)])
def test_a_sibling_is_guided_by_its_own_scale(asked_for, used):
    """Null: by the target's. The interval is the target's always."""
    big, small = (target(llamagen("text"), 3.0, 5) for _ in range(2))
    config = SiblingConfig(kind="llamagen", path="small", size="B", cfg_scale=asked_for)
    expected = SiblingProposal(LlamaGenTarget(small.model, Guidance(used, 5)))
    q = []
    for draft in (config.drafter(small.model, big), expected):
        one = request(big.model, 3)
        draft.start(one, big.prefill(one, draft.taps, capacity=20)[1], Warp(1.0), capacity=20)
        draft.begin(4)
        q.append(draft.root())
    assert torch.equal(*q)
    assert config.drafter(small.model, big).model.guidance == Guidance(used, 5)


# ---- sampling


SMALLER = DSPARK.model_copy(update={"block_size": 2})  # codes above it in rows of two are not of the block


class Setting:
    """A tiny guided target with few codes, and a head; `p` after codes comes from one teacher-forced pass."""

    def __init__(self, kind, *, scale=2.0, interval=-1, warp=None):
        self.model = llamagen("text", grid=2, vocab=5, loud=0.1)
        self.generator = target(self.model, scale, interval)
        self.asked, self.warp = request(self.model, 6), warp or Warp(0.8, top_k=3)
        config = {"eagle": EAGLE, "medusa": MEDUSA, "dflash": DFLASH, "dspark": SMALLER}[kind]
        head = trained(self.generator, config, steps=4)[0]
        if kind == "dspark":  # a bias that says something
            torch.nn.init.normal_(head.markov_head.markov_w2.weight, std=0.5)
        self.drafter = config.drafter(head, self.generator)
        self.scale, self.interval, self.known = scale, interval, {}

    def p(self, codes):
        if codes not in self.known:
            rows = self.generator.guidance.num_rows
            states = true_features(self.model, self.asked.condition, rows, list(codes))[:, -1]
            cond, uncond = self.model.output(states)
            alone = self.interval >= 0 and len(codes) - 1 > self.interval
            scores = cond if alone else uncond + self.scale * (cond - uncond)
            probs = (scores / self.warp.temperature).double().softmax(-1)
            floor = probs.topk(self.warp.top_k or 5).values[-1]
            self.known[codes] = torch.where(probs >= floor, probs, 0.0) / probs[probs >= floor].sum()
        return self.known[codes]

    def cycle(self, policy, draw, first):
        """The first cycle's tree and the target's warped probabilities, after `first` from the prefill."""
        session, step = self.generator.prefill(self.asked, self.drafter.taps, capacity=30)
        self.drafter.start(self.asked, step, self.warp, capacity=30)
        self.drafter.begin(first)
        policy.start()
        root = self.warp.truncate(self.drafter.root())
        tree = policy.grow(
            root, lambda p, t: self.warp.truncate(self.drafter.expand(p, t)), draw, max_levels=2
        )  # fmt: skip
        return tree, self.warp(self.generator.verify(session, first, tree).logits)

    def emitted(self, policy, rule, first, draw):
        """Distribution [V,V] of the two tokens after `first`, and the probability that a draft stands."""
        result, accepted = torch.zeros(5, 5, dtype=torch.float64), 0.0
        run = lambda draw: self.cycle(policy, draw, first)  # noqa: E731
        for (tree, p), weight in all_draws(run) if draw == "sample" else [(run(Draw(draw)), 1.0)]:
            if isinstance(rule, Block):
                ids = tree.tokens.tolist()
                found_ = ((tuple([*ids[:n], bonus]), chance) for n, bonus, chance in block_outcomes(rule, tree, p))
            else:
                found_ = outcomes(rule, tree, p)
            for tokens, chance in found_:
                accepted += weight * chance * (len(tokens) > 1)
                if len(tokens) > 1:
                    result[tokens[0], tokens[1]] += weight * chance
                else:
                    result[tokens[0]] += weight * chance * self.p((first, tokens[0]))
        return result, accepted

    def wanted(self, first):
        return torch.stack([self.p((first,))[a] * self.p((first, a)) for a in range(5)])


EXACT = {
    "dynamic": (lambda: Dynamic(5, 1, 2), "top-k", Sampling()),
    "adt": (lambda: adt(initial_depth=1, initial_width=2), "top-k", Sampling()),
    "fork-top-k": (lambda: Static(FORK), "top-k", Sampling()),
    "chain-sample": (lambda: Chain(2), "sample", Sampling()),
    "fork-sample": (lambda: Static(FORK), "sample", Sampling()),
    "block": (lambda: Chain(2), "sample", Block()),
}


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["eagle", "medusa", "dflash", "dspark"])
@pytest.mark.parametrize("name", EXACT)
def test_two_tokens_are_distributed_as_the_targets(name, kind):
    """All draws and uniforms of a cycle, with guidance that ends between the two tokens, a temperature and top-k."""
    make, draw, rule = EXACT[name]
    setting = Setting(kind, interval=0)
    roots = setting.p(()).nonzero().flatten().tolist()
    for first in roots[: 1 if draw == "sample" else 2]:
        result, accepted = setting.emitted(make(), rule, first, draw)
        assert float(result.sum()) == pytest.approx(1, abs=1e-6)
        assert (result - setting.wanted(first)).abs().max() < 2e-6
        assert 0.05 < accepted < 0.999
    if name != "block":
        wrong, _ = setting.emitted(make(), NoResidual(), first, draw)
        assert (wrong - setting.wanted(first)).abs().sum() / 2 > 0.003, "guards this test"


def test_the_settings_of_that_test_are_not_flat():
    """Each of them moves p by more than the test could miss."""
    right = Setting("eagle", interval=0)
    others = [
        Setting("eagle", interval=-1), Setting("eagle", interval=0, scale=3.0),
        Setting("eagle", interval=0, warp=Warp(1.0, top_k=3)), Setting("eagle", interval=0, warp=Warp(0.8, top_k=4)),
    ]  # fmt: skip
    for other in others:
        first = int(right.p(()).argmax())
        assert (right.wanted(first) - other.wanted(first)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("fork-sample", 400),
        *(pytest.param(name, 2500, marks=pytest.mark.slow) for name in ("dynamic", "adt", "fork-sample", "block")),
    ],
)
def test_end_to_end(name, count):
    """Whole images of four codes through `generate`, against the target's own probabilities."""
    make, draw, rule = EXACT[name]
    setting = Setting("eagle", interval=1)
    decoding, generator = Decoding(make(), rule, Draw(draw), setting.warp, 4, ()), torch.Generator().manual_seed(3)
    run = lambda: generate(setting.generator, setting.drafter, setting.asked, decoding, generator)  # noqa: E731
    results = check_drawn(chances(setting.p, 4), run, count)
    for result in results:
        check_cycles(result, 4)
    assert {result.cycles[0].num_accepted for result in results} == {0, 1, 2}
