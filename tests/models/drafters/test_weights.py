"""Rules of weights: kept scores against the whole history computed anew, ties, edges, and memory that does not grow."""

import itertools

import pytest
import torch
from draftsmith.models.drafters import weights as module
from draftsmith.models.drafters.ensemble import EnsembleConfig, preset
from draftsmith.models.drafters.weights import (
    FixedWeights,
    GridWeights,
    InverseWeights,
    grid,
    grid_scores,
    mixture,
    weights_of,
)
from fails import fails_with
from pydantic import ValidationError

CPU = torch.device("cpu")


def blocks(seed, members=3, vocab=12, count=6):
    """(p [P,V], q [R,P,V]) of a few cycles of different lengths, each nearest another draft; two tokens cannot come."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        length = 1 + number % 4
        noise, q = (torch.randn(*s, vocab, generator=generator) * 2 for s in ((length,), (members, length)))
        p = q[number % members] + noise / 2
        p[..., -2:] = q[..., -2:] = float("-inf")
        yield p.softmax(-1), q.softmax(-1)


def started(rule, members=3):
    built = weights_of(rule, members)
    built.start(CPU)
    return built


@pytest.mark.parametrize("window", [None, 1, 4, 16])
@pytest.mark.parametrize("score", ["hits-then-kl", "hits", "kl", "tvd"])
@pytest.mark.parametrize("order", ["released", "article"])
def test_the_grid_against_the_whole_history(score, order, window):
    """Every weight, every position, one at a time, from the definition."""
    rule = started(GridWeights(kind="grid", parts=4, score=score, order=order, window=window))
    assert rule.current.tolist() == pytest.approx([1 / 3] * 3)
    history, chosen = [], set()
    for p, q in blocks(1):
        rule.observe(p, q)
        history += [(p[i], q[:, i]) for i in range(len(p))]
        seen, best = history[-window:] if window else history, None
        points = [w for w in itertools.product([0, 0.25, 0.5, 0.75, 1], repeat=3) if sum(w) == 1]
        for point in points if order == "released" else reversed(points):
            mixed = [
                (target, sum(w * draft for w, draft in zip(point, drafts, strict=True))) for target, drafts in seen
            ]
            hits = sum(int(m.argmax() == t.argmax()) for t, m in mixed)
            kl = sum(float((t * (t / m).log()).nansum()) for t, m in mixed)
            tvd = sum(float((t - m).abs().sum()) for t, m in mixed)
            key = {"hits-then-kl": (-hits, kl), "hits": (-hits,), "kl": (kl,), "tvd": (tvd,)}[score]
            if best is None or key < best[0]:
                best = key, point
        assert rule.current.tolist() == pytest.approx(best[1])
        chosen.add(best[1])
    assert len(chosen) > 1


@pytest.mark.parametrize("window", [None, 1, 4, 16])
@pytest.mark.parametrize(
    ("form", "temperature"), [("released", 1.0), ("released", 0.25), ("softmax", 2.0), ("softmax", 0.0)]
)
@pytest.mark.parametrize("error", ["kl", "tvd"])
def test_inverse_errors_against_the_whole_history(error, form, temperature, window):
    rule = started(InverseWeights(kind="inverse", error=error, form=form, temperature=temperature, window=window))
    history = []
    for p, q in blocks(2):
        rule.observe(p, q)
        history += [(p[i], q[:, i]) for i in range(len(p))]
        sums = torch.zeros(3, dtype=torch.float64)
        for target, drafts in history[-window:] if window else history:
            each = (target * (target / drafts).log()).nansum(-1) if error == "kl" else (target - drafts).abs().sum(-1)
            sums += each
        if temperature == 0:
            expected = torch.nn.functional.one_hot(sums.argmin(), 3).double()
        elif form == "softmax":
            expected = torch.softmax(1 / sums / temperature, 0)
        else:
            expected = (1 / sums) ** (1 / temperature) / ((1 / sums) ** (1 / temperature)).sum()
        assert rule.current.double().tolist() == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("rule", [GridWeights(kind="grid"), GridWeights(kind="grid", window=16),
                                  InverseWeights(kind="inverse", window=4)], ids=str)  # fmt: skip
def test_memory_does_not_grow(rule):
    built = started(rule)

    def held():
        return sum(v._scores.numel() for v in vars(built).values() if isinstance(v, module.History))

    sizes = []
    for number in range(40):
        for p, q in blocks(number, count=2):
            built.observe(p, q)
        sizes.append(held())
    assert sizes[8] == sizes[-1]


def test_a_request_starts_afresh():
    built = started(GridWeights(kind="grid"))
    (p, q), *rest = blocks(3)
    built.observe(p, q)
    first = built.current
    for p2, q2 in rest:
        built.observe(p2, q2)
    assert not torch.equal(built.current, first)
    built.start(CPU)
    assert built.current.tolist() == pytest.approx([1 / 3] * 3)
    built.observe(p, q)
    assert torch.equal(built.current, first)


def test_a_draft_without_error_and_one_that_is_impossible():
    p = torch.tensor([[0.5, 0.5, 0.0]])
    q = torch.stack([p, torch.tensor([[0.0, 0.0, 1.0]])])
    for rule in (InverseWeights(kind="inverse"), InverseWeights(kind="inverse", form="softmax", temperature=0.1),
                 InverseWeights(kind="inverse", temperature=0.01), GridWeights(kind="grid")):  # fmt: skip
        built = started(rule, 2)
        built.observe(p, q)
        assert built.current.isfinite().all()
        assert built.current.tolist() == pytest.approx([1, 0], abs=1e-6)
    # Two that are right count alike: rounding must not turn an error of nothing into a gain.
    built = started(InverseWeights(kind="inverse"), 2)
    flat = torch.rand(1, 1000).softmax(-1)
    built.observe(flat, torch.stack([flat, flat]))
    assert built.current.tolist() == pytest.approx([0.5, 0.5])


def test_ties_go_to_the_first_of_the_grid():
    same = torch.tensor([[0.7, 0.3]])
    q = torch.stack([same, same])
    for order, first in (("released", [0.0, 1.0]), ("article", [1.0, 0.0])):
        for score in ("hits", "hits-then-kl", "kl"):
            built = started(GridWeights(kind="grid", score=score, order=order, parts=2), 2)
            built.observe(same, q)
            assert built.current.tolist() == first


def test_scoring_in_parts_is_scoring_at_once(monkeypatch):
    (p, q), *_ = blocks(4, members=4, count=3)
    points = torch.tensor(grid(4, 10))
    whole = grid_scores(points, p, q, hits=True, divergence="kl")
    monkeypatch.setattr(module, "_AT_ONCE", 7 * p.numel())
    parts = grid_scores(points, p, q, hits=True, divergence="kl")
    assert torch.equal(whole[0], parts[0])
    assert torch.allclose(whole[1], parts[1])


def test_the_mixture_of_one_is_untouched():
    q = torch.rand(1, 3, 50).softmax(-1)
    assert torch.equal(mixture(torch.ones(1), q), q[0])
    assert torch.equal(mixture(torch.tensor([0.5, 0.5]), q.expand(2, -1, -1)), q[0])


@pytest.mark.parametrize(
    ("name", "members", "weights"),
    [
        ("MT", ("M", "C"), FixedWeights(kind="fixed")),
        ("MT", ("M", "T"), FixedWeights(kind="fixed", values=(3, 1))),
        ("MT*", ("M", "T"), FixedWeights(kind="fixed")),
        ("M", ("T",), FixedWeights(kind="fixed")),
    ],
)
def test_a_name_that_stands_for_a_mode_is_that_mode(name, members, weights):
    """Reports say what the name stands for."""
    fails_with("give another name", EnsembleConfig, name=name, members=members, weights=weights, error=ValueError)
    assert EnsembleConfig(name="MT*", members=("M", "T"), weights=GridWeights(kind="grid", window=4))
    assert EnsembleConfig(name="MT", members=("M", "T"), weights=FixedWeights(kind="fixed", values=(2, 2)))


def test_names():
    assert preset("MT").weights == FixedWeights(kind="fixed")
    assert preset("MT*").weights == GridWeights(kind="grid")
    assert preset("MTCP*").weights == InverseWeights(kind="inverse")
    assert preset("MTC").members == ("M", "T", "C")
    assert preset("T-raw").members == ("T-raw",)
    for wrong in ("MM", "X", "M*", "MTCPT", ""):
        fails_with("no drafting mode", preset, wrong, error=ValueError)
    with pytest.raises(ValidationError, match="one weight for each"):
        EnsembleConfig(name="x", members=("M", "T"), weights=FixedWeights(kind="fixed", values=(1.0,)))
    with pytest.raises(ValidationError, match="one weight for each"):
        EnsembleConfig(name="x", members=("M", "T"), weights=FixedWeights(kind="fixed", values=(1.0, -0.5)))
