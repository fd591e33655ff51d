"""A generator that drafts for itself: pictures are distributed as its own under each coupling, and codes stay."""

import functools
import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from draftsmith.core.batch import ImageRequest
from draftsmith.core.errors import Refused, UserError
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Dynamic, Static
from draftsmith.eval.rules import Greedy, Sampling
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.jacobi import JacobiConfig, JacobiProposal
from draftsmith.models.targets.base import Taps, TargetStep
from draftsmith.trainers.evaluate.methods import Method
from exact import TableTarget, accepted_of_drafted, chances, chi_square, statistic
from pydantic import ValidationError
from visual_tiny import anole, greedy, llamagen, request, target

COUPLINGS, INITIAL = ("maximal", "gumbel", "independent"), ("above", "left", "random")
CODES, GRID, LENGTH = 3, 2, 5


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


def started(config, target, **changes):
    proposal = config.drafter(None, type("T", (), {"shape": type("S", (), {"grid": GRID}), "vocab_size": CODES}))
    for name, value in changes.items():
        setattr(proposal, name, value.__get__(proposal))
    return proposal


def drawn(target, drafter, warp, count, window=3, length=LENGTH):
    decoding, generator = Decoding(Chain(window), Sampling(), Draw("sample"), warp, length, ()), torch.Generator()
    generator.manual_seed(1)
    asked = ImageRequest(torch.tensor(0))
    return [generate(target, drafter, asked, decoding, generator) for _ in range(count)]


def expected(target, warp):
    return chances(lambda codes: warp(target.scores(codes)[None])[0], LENGTH)


@pytest.mark.slow
@pytest.mark.parametrize(("coupling", "initial"), itertools.product(COUPLINGS, INITIAL))
def test_codes_are_distributed_as_the_targets(coupling, initial):
    """Whole pictures of five codes over several cycles; windows reach over a rejected code into the next cycles."""
    model, warp, count = tabled(), Remembering(0.9, top_p=0.95), 3000
    drafter = started(JacobiConfig(kind="jacobi", coupling=coupling, initial=initial), model)
    results = drawn(model, drafter, warp, count)
    assert accepted_of_drafted(results)[0] > count / 3
    assert statistic(expected(model, warp), results) < 1


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
def test_a_draw_has_the_distribution_that_it_is_verified_with(coupling):
    """20,000 draws of a place where another code stood, drawn from another distribution."""
    drafter, count = started(JacobiConfig(kind="jacobi", coupling=coupling), None), 20_000
    old_q, q = torch.tensor([0.6, 0.1, 0.3]), torch.tensor([0.3, 0.5, 0.2])
    generator, seen, stayed = torch.Generator().manual_seed(0), Counter(), 0
    for _ in range(count):
        drafter.start(None, TargetStep(torch.zeros(1, CODES)), Warp(1.0), capacity=9)
        drafter.begin(0)
        drafter._drawn = 0
        before = int(drafter.choose(old_q[None], 1, generator))
        drafter._old, drafter._old_q, drafter._drawn = torch.tensor([before]), old_q[None], 0
        after = int(drafter.choose(q[None], 1, generator))
        seen[before, after] += 1
        stayed += before == after
    observed = torch.tensor([[seen[a, b] for b in range(CODES)] for a in range(CODES)], dtype=torch.float64)
    assert chi_square(observed.sum(1), count * old_q.double()) < 1
    assert chi_square(observed.sum(0), count * q.double()) < 1
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
        accepted[coupling] = accepted_of_drafted(drawn(model, drafter, warp, 100, window=12, length=60))[0]
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


def test_a_tree_that_branches_is_refused():
    model = tabled()
    drafter = started(JacobiConfig(kind="jacobi", initial="random"), model)
    for policy, draw in (
        (Dynamic(4, 1, 2), "top-k"), (Static([(0,), (1,), (0, 0)]), "top-k"), (Static([(0,), (1,)]), "sample"),
    ):  # fmt: skip
        greedy_or_sampled = (Greedy(), Warp()) if draw == "top-k" else (Sampling(), Warp(1.0))
        decoding = Decoding(policy, greedy_or_sampled[0], Draw(draw), greedy_or_sampled[1], LENGTH, ())
        with pytest.raises(UserError, match="drafts a window of codes, and the tree branches"):
            generate(model, drafter, ImageRequest(torch.tensor(0)), decoding, torch.Generator())


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
    with pytest.raises(ValidationError, match=key):
        Method(drafter={"kind": "jacobi", "coupling": coupling}, **method)
    named = Method(drafter="own", **method)
    with pytest.raises(Refused) as caught:
        JacobiConfig(kind="jacobi", coupling=coupling).check_method(named.tree.kind, named.rule.kind)
    assert caught.value.key == key
    Method(drafter={"kind": "jacobi", "coupling": "independent"}, draw="sample", rule="block")
