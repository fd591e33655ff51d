"""A generator that drafts for itself: pictures are distributed as its own under each coupling, and codes stay."""

import functools
from dataclasses import replace

import pytest
import torch
from draftsmith.core.batch import ImageRequest
from draftsmith.core.errors import Refused
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Static
from draftsmith.eval.rules import Greedy, Sampling
from draftsmith.models.decoding.tree import chain
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.jacobi import HeadTailConfig, JacobiConfig, JacobiProposal
from draftsmith.models.targets.base import Taps, TargetStep, Verified
from draftsmith.trainers.evaluate.methods import Method
from exact import TableDrafter, TableTarget, accepted_of_drafted, chances, chi_square, statistic
from pydantic import ValidationError
from visual_tiny import anole, greedy, llamagen, request, target

COUPLINGS, INITIAL = ("maximal", "gumbel", "independent"), ("above", "left", "random")
CODES, GRID, LENGTH = 3, 2, 5
WINDOW = Chain(3)


def static(paths):
    return Static([tuple(map(int, path)) for path in paths.split()])


# Siblings at one level, at two, and where the accepted end has no children but others of its level have.
TREES = ("0 1 00 000", "0 1 00 01 10 11", "0 1 00 01 10 11 000", "0 1 00 01 000 001", "0 1 00 10 000 100 0000")


def tabled(seed=0, sharp=1.5):
    """A target whose next code depends on the last two, as scores from a table; no model, so that thousands run."""
    table = sharp * torch.randn(CODES + 1, CODES + 1, CODES, generator=torch.Generator().manual_seed(seed))
    return TableTarget(lambda codes: table[tuple([CODES, CODES, *codes][-2:])], CODES)


@functools.cache
def _cut(warp, shape, values):
    return Warp.truncate(warp, torch.tensor(values).view(shape))


class Remembering(Warp):
    """Cuts each distribution of the table once: they are few, and are warped ten times for each picture."""

    def truncate(self, probs):
        return _cut(self, probs.shape, tuple(probs.flatten().tolist()))


def started(config, target, codes=CODES, head=None, **changes):
    proposal = config.drafter(
        head and [head], type("T", (), {"shape": type("S", (), {"grid": GRID}), "vocab_size": codes})
    )
    for name, value in changes.items():
        setattr(proposal, name, value.__get__(proposal))
    return proposal


def drawn(target, drafter, warp, count, policy=WINDOW, length=LENGTH):
    decoding, generator = Decoding(policy, Sampling(), Draw("sample"), warp, length, ()), torch.Generator()
    generator.manual_seed(1)
    asked = ImageRequest(torch.tensor(0))
    return [generate(target, drafter, asked, decoding, generator) for _ in range(count)]


def expected(target, warp):
    return chances(lambda codes: warp(target.scores(codes)[None])[0], LENGTH)


WINDOWS = [(initial, WINDOW, 3000) for initial in INITIAL]


@pytest.mark.slow
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize(("initial", "policy", "count"), [*WINDOWS, *(("random", static(t), 16_000) for t in TREES)])
def test_codes_are_distributed_as_the_targets(coupling, initial, policy, count):
    """Whole pictures of five codes over several cycles; windows reach over a rejected code into the next cycles."""
    model, warp = tabled(), Remembering(0.9, top_p=0.95)
    drafter = started(JacobiConfig(kind="jacobi", coupling=coupling, initial=initial), model)
    results = drawn(model, drafter, warp, count, policy)
    assert accepted_of_drafted(results)[0] > count / 3
    assert statistic(expected(model, warp), results) < 1


@pytest.mark.parametrize("count", [3000, pytest.param(16_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("coupling", "tree"), [("maximal", TREES[0]), ("maximal", TREES[2]), ("gumbel", TREES[2])])
def test_a_head_before_jacobis_tail_is_exact(coupling, tree, count):
    """A head that is often wrong, in the mean with the stale distribution, whose codes the tail is coupled with."""
    model, warp = tabled(), Remembering(0.9, top_p=0.95)
    tail = JacobiConfig(kind="jacobi", coupling=coupling, initial="random")
    config = HeadTailConfig(kind="head_tail", members=["head"], tail=tail, stale=0.3)
    drafter = started(config, model, head=TableDrafter(tabled(5).scores))
    results = drawn(model, drafter, warp, count, static(tree))
    assert accepted_of_drafted(results)[0] > count / 3
    assert statistic(expected(model, warp), results) < 1


def test_the_first_level_is_the_mean_and_the_tail_is_jacobis():
    """Without a known place the head's alone; `stale` weighs the other, and the head expands nothing."""
    model, head = tabled(), TableDrafter(tabled(5).scores)
    drafter = started(HeadTailConfig(kind="head_tail", members=["head"], stale=0.25), model, head=head)
    session, step = model.prefill(None, Taps(), capacity=9)
    drafter.start(None, step, Warp(1.0), capacity=9)
    drafter.begin(2)
    assert torch.equal(drafter.root(), head.q((2,)))
    tree = chain(torch.tensor([0, 1, 2]), torch.full((3, CODES), 1 / 3))
    step = model.verify(session, 2, tree)
    drafter.accept(Verified((), (), 1, tree=tree, scores=step.logits))
    known = Warp(1.0).apply_temperature(step.logits)
    torch.testing.assert_close(drafter.root(), 0.75 * head.q((2, 1)) + 0.25 * known[1])
    assert torch.equal(drafter.expand([-1], torch.tensor([0]))[0], known[2])
    assert drafter.choose == drafter._tail.choose and len(head.expand.paths) == 0


def branching(codes):
    """Scores after 0, 3 of a target for which it matters which sibling is tried first, and what they are drawn from.

    The window was 0, 0, 0 and nothing of it was accepted, so that q is [.4 .4 .1 .1] at its known places, where 0 was
    certain. What 2 and 3 go on with is accepted more often than what 0 goes on with.
    """
    chances = {(0, 3): [0.6, 0.0, 0.2, 0.2], (3, 0): [0.0, 0.1, 0.1, 0.8]}
    return torch.tensor(chances.get(codes[-2:], [0.4, 0.4, 0.1, 0.1])).log()


@pytest.mark.parametrize(
    "coupling", [c if c == "maximal" else pytest.param(c, marks=pytest.mark.slow) for c in COUPLINGS]
)
def test_siblings_are_tried_in_turn_and_drawn_from_what_they_are_verified_with(coupling):
    """The released sampler of SJD-PAC takes the longest accepted path and draws siblings from the residual. Whole
    pictures of other targets tell neither at 3,000 draws; here the first code of 16,000 cycles is far off.
    """
    model, count, generator = TableTarget(functools.cache(branching), 4), 16_000, torch.Generator().manual_seed(1)
    drafter = started(JacobiConfig(kind="jacobi", coupling=coupling, initial="left"), model, codes=4)
    draw, policy = Draw("sample", generator, choose=drafter.choose), static("0 1 00 01 10 11")
    drafter.start(None, TargetStep(torch.zeros(1, 4)), Warp(1.0), capacity=9)
    drafter.begin(0)
    tree = Chain(3).grow(drafter.root(), drafter.expand, draw, max_levels=3)
    drafter.accept(Verified((), (), 3, tree=tree, scores=model.verify((), 0, tree).logits))
    seen = torch.zeros(4, dtype=torch.float64)
    for uniforms in torch.rand(count, 7, generator=generator, dtype=torch.float64).tolist():
        drafter._noise = {}
        tree = policy.grow(drafter.root(), drafter.expand, draw, max_levels=2)
        verified = Sampling()(tree, model.verify((0,), 3, tree).logits.softmax(-1), uniforms)
        seen[(*verified.tokens, verified.bonus)[0]] += 1
    assert not seen[1] and chi_square(seen, count * torch.tensor([0.6, 0.0, 0.2, 0.2], dtype=torch.float64)) < 1


def stays(self, q, count, generator):
    """Wrong: a code that may stay does, whatever its probability has become."""
    level = self._drawn
    right = JacobiProposal.choose(self, q, count, generator)
    if level < len(self._old) and q[0, self._old[level]] > 0:
        return self._old[level][None, None]
    return right


def one_noise(self, q, count, generator):
    """Wrong: the noise of a place says what the noise of the place before it was, which has been looked at."""
    for noise in self._noise.values():
        self._noise[len(self._codes) + self._drawn] = noise
        break
    return JacobiProposal.choose(self, q, count, generator)


@pytest.mark.parametrize(
    ("coupling", "changes"),
    [("maximal", {"choose": stays}), ("gumbel", {"choose": one_noise})],
    ids=["stays", "noise"],
)
def test_the_draws_find_a_wrong_coupling(coupling, changes):
    model, warp = tabled(), Warp(0.9)
    drafter = started(JacobiConfig(kind="jacobi", coupling=coupling), model, **changes)
    assert statistic(expected(model, warp), drawn(model, drafter, warp, 3000)) > 1.5


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_siblings_are_draws_without_replacement(coupling):
    """20,000 pairs of siblings at a place where another code stood, drawn from another distribution."""
    drafter, count = started(JacobiConfig(kind="jacobi", coupling=coupling), None), 20_000
    old_q, q = torch.tensor([0.6, 0.1, 0.3]), torch.tensor([0.3, 0.5, 0.2])
    generator, seen, pairs = torch.Generator().manual_seed(0), torch.zeros(CODES, CODES), torch.zeros(CODES, CODES)
    drafter.start(None, TargetStep(torch.zeros(1, CODES)), Warp(1.0), capacity=9)
    drafter.begin(0)
    drafter.root()
    noise = []
    for _ in range(count if coupling == "gumbel" else 1):
        drafter._noise = {}
        before = drafter.choose(old_q.expand(1 if coupling == "gumbel" else count, -1), 1, generator)
        noise.append((before, dict(drafter._noise)))
    for before, drafter._noise in noise:
        for code in before.unique():
            drafter._old, drafter._old_q = code[None], old_q[None]
            siblings = drafter.choose(q.expand(int((before == code).sum()), -1), 2, generator)
            seen[code] += siblings[:, 0].bincount(minlength=CODES)
            pairs += (siblings @ torch.tensor([CODES, 1])).bincount(minlength=CODES**2).view(CODES, CODES)
    observed, stayed = seen.double(), int(seen.trace())
    assert chi_square(observed.sum(1), count * old_q.double()) < 1
    assert chi_square(observed.sum(0), count * q.double()) < 1
    without_replacement = q[:, None] * q / (1 - q[:, None])
    assert chi_square(pairs.double().flatten(), count * without_replacement.fill_diagonal_(0.0).double().flatten()) < 1
    assert not pairs.trace()
    # The most that a coupling allows: 1 minus the total variation distance.
    most = float(torch.minimum(old_q, q).sum())
    alone = float((old_q * q).sum())
    if coupling == "maximal":
        assert stayed / count == pytest.approx(most, abs=0.015)
    elif coupling == "independent":
        assert stayed / count == pytest.approx(alone, abs=0.015)
    else:
        assert alone + 0.05 < stayed / count < most + 0.015


def test_couplings_keep_the_window_and_accept_more():
    model, warp, accepted = tabled(sharp=0.7), Warp(1.0), {}
    for coupling in COUPLINGS:
        drafter = started(JacobiConfig(kind="jacobi", coupling=coupling, initial="random"), model)
        assert drafter.taps == Taps()
        accepted[coupling] = accepted_of_drafted(drawn(model, drafter, warp, 100, policy=Chain(12), length=60))[0]
    assert min(accepted["maximal"], accepted["gumbel"]) > 1.05 * accepted["independent"], accepted


def test_what_stands_at_new_places():
    """above: the code a row before; the first row and `left`: the code before; random: every possible code alike."""
    scores = torch.tensor([[0.0, float("-inf"), 0.0]])
    for initial, wanted in (("above", [[1], [1], [2], [0]]), ("left", [[1], [2], [0], [0]])):
        drafter = started(JacobiConfig(kind="jacobi", initial=initial), None)
        drafter.start(None, TargetStep(scores), Warp(), capacity=9)
        drafter.begin(1)
        found = [drafter.root().nonzero().flatten().tolist()]
        for level, code in enumerate((2, 0, 0)):
            found.append(drafter.expand([level - 1], torch.tensor([code]))[0].nonzero().flatten().tolist())
        # Codes 1 | 2 0 0 in rows of two: above the third is the first.
        assert found == wanted, initial
    drafter = started(JacobiConfig(kind="jacobi", initial="random"), None)
    drafter.start(None, TargetStep(scores), Warp(), capacity=9)
    drafter.begin(1)
    assert drafter.root().tolist() == [0.5, 0.0, 0.5]


def test_behind_a_rejected_code_stands_what_the_pass_computed():
    """A window of three with one code accepted: two places are known, at the old codes, and the rest is a guess."""
    drafter, warp = started(JacobiConfig(kind="jacobi", initial="left"), None), Warp(0.7)
    model = tabled()
    session, step = model.prefill(None, Taps(), capacity=9)
    drafter.start(None, step, warp, capacity=9)
    drafter.begin(2)
    tree = Chain(3).grow(drafter.root(), drafter.expand, Draw("sample"), max_levels=3)
    step = model.verify(session, 2, tree)
    verified = Sampling()(tree, warp(step.logits), [0.0, 1.0, 0.5, 0.5])
    verified = replace(verified, path=(0,), tokens=(int(tree.tokens[0]),), bonus=1, tree=tree, scores=step.logits)
    drafter.accept(verified)
    known = warp.apply_temperature(step.logits)
    assert torch.equal(drafter.root(), known[2])
    assert torch.equal(drafter.expand([-1], torch.tensor([0]))[0], known[3])
    assert drafter.expand([0], torch.tensor([2]))[0].tolist() == [0.0, 0.0, 1.0]
    assert drafter._old.tolist() == tree.tokens[2:].tolist() and torch.equal(drafter._old_q, tree.draft_probs[2:])


@pytest.mark.parametrize("name", ["class", "text, guided", "anole"])
@pytest.mark.parametrize("initial", INITIAL)
def test_greedy_pictures_are_the_targets(name, initial):
    """Jacobi decoding: with real tiny generators, guidance included."""
    if name == "anole":
        model = anole()
        asked, length = ImageRequest(torch.tensor([3, 4])), 16
    else:
        made = llamagen(name.split(",")[0], loud=0.1)
        model, asked = target(made, 3.0 if "guided" in name else 1.0), request(made, 3)
        length = made.config.num_codes
    drafter = JacobiConfig(kind="jacobi", initial=initial).drafter(None, model)
    wanted = generate(model, None, asked, greedy(Chain(1), length)).tokens
    result = generate(model, drafter, asked, greedy(Chain(5), length))
    assert result.tokens == wanted
    assert any(c.num_accepted for c in result.cycles)


def test_what_stands_behind_a_path_of_a_tree():
    """Behind a rejected pair stands the first one's line; behind a node without children, the first path's."""
    drafter = started(JacobiConfig(kind="jacobi", initial="random"), model := tabled())
    session, step = model.prefill(None, Taps(), capacity=9)
    drafter.start(None, step, Warp(1.0), capacity=9)
    drafter.begin(2)
    tree = static("0 1 00 01 10 000 100").grow(drafter.root(), drafter.expand, Draw("sample"), max_levels=3)
    step = model.verify(session, 2, tree)
    probs = Warp(1.0).apply_temperature(step.logits)
    for path, line in (((), [0, 2, 5]), ((1,), [4, 6]), ((0, 3), [5]), ((0, 2, 5), [])):
        drafter.accept(Verified(path, tuple(tree.tokens[list(path)].tolist()), 1, tree=tree, scores=step.logits))
        assert torch.equal(drafter._known, probs[[node + 1 for node in line]])
        assert drafter._old.tolist() == tree.tokens[line[1:]].tolist() and len(drafter._old_q) == len(line[1:])


@pytest.mark.parametrize("initial", INITIAL)
def test_a_tree_has_siblings_of_a_first_guess_of_one_code(initial):
    """The first guess is certain, and its siblings are others; greedy pictures are the target's."""
    model = tabled()
    drafter = started(JacobiConfig(kind="jacobi", initial=initial), model)
    greedy_or_drawn = (Greedy(), Warp(), Draw("top-k")), (Sampling(), Warp(1.0, top_k=1), Draw("sample"))
    pictures = [
        generate(
            model, drafter, ImageRequest(torch.tensor(0)), Decoding(policy, rule, draw, warp, 9, ()), torch.Generator()
        ).tokens
        for rule, warp, draw in greedy_or_drawn
        for policy in (Chain(1), static("0 1 2 00 01 02 10 000"))
    ]
    assert pictures.count(pictures[0]) == 4


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ({"tree": "30-4-8"}, "tree"),
        ({"draw": "sample", "rule": "block"}, "rule"),
        ({"draw": "sample", "rule": "block", "coupling": "gumbel"}, "rule"),
    ],
)
def test_trees_and_the_block_rule_are_refused_before_anything_is_loaded(method, key):
    """Block verification looks at codes behind a rejected one, on which a coupled code depends."""
    coupling = method.pop("coupling", "maximal")
    tail = {"kind": "jacobi", "coupling": coupling}
    with pytest.raises(ValidationError, match=key):
        Method(drafter=tail, **method)
    with pytest.raises(ValidationError, match=key):
        Method(drafter={"kind": "head_tail", "members": ["head"], "tail": tail}, **method)
    named = Method(drafter="own", **method)
    with pytest.raises(Refused) as caught:
        JacobiConfig(kind="jacobi", coupling=coupling).check_method(named.tree.kind, named.rule.kind)
    assert caught.value.key == key
    Method(drafter={"kind": "jacobi", "coupling": "independent"}, draw="sample", rule="block")
    Method(drafter={"kind": "jacobi"}, draw="sample", tree={"kind": "static", "choices": [[0], [1]]})
