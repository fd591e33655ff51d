"""Divergences against sums written out in float64, and their gradients where a draft or a target is extreme."""

import math

import pytest
import torch
from draftsmith.models.losses import divergence

NAMES = ["soft_ce", "kl", "lk_alpha", "lk_hybrid"]
BANNED = float("-inf")


def scores(seed: int, rows: int = 6, vocab: int = 9, *, spread: float = 2.0, banned: int = 0):
    """Target's and draft's, float32; the last `banned` ids have minus infinity in both."""
    generator = torch.Generator().manual_seed(seed)
    pair = [spread * torch.randn(rows, vocab, generator=generator) for _ in range(2)]
    for one in pair:
        one[:, vocab - banned :] = BANNED
    return pair


def by_sums(name: str, target, draft) -> list[float]:
    """One term at a time, from the papers' formulas."""
    found = []
    for p_scores, q_scores in zip(target.double().tolist(), draft.double().tolist(), strict=True):
        p_total, q_total = (math.fsum(math.exp(s) for s in row) for row in (p_scores, q_scores))
        pairs = [(math.exp(a) / p_total, math.exp(b) / q_total) for a, b in zip(p_scores, q_scores, strict=True)]
        alpha = math.fsum(min(p, q) for p, q in pairs)
        cross = -math.fsum(p * math.log(q) for p, q in pairs if p)
        relative = cross + math.fsum(p * math.log(p) for p, q in pairs if p)
        weight = math.exp(-3 * alpha)
        distance = 0.5 * math.fsum(abs(p - q) for p, q in pairs)
        hybrid = weight * relative + (1 - weight) * distance
        found.append({"soft_ce": cross, "kl": relative, "lk_alpha": -math.log(alpha), "lk_hybrid": hybrid}[name])
    return found


@pytest.mark.parametrize("banned", [0, 3])
@pytest.mark.parametrize("name", NAMES)
def test_formulas(name, banned):
    for seed in range(3):
        target, draft = scores(seed, banned=banned)
        found = divergence(name, target, draft)
        assert found.dtype == torch.float32 and found.shape == (6,)
        torch.testing.assert_close(found, torch.tensor(by_sums(name, target, draft)), atol=2e-6, rtol=1e-5)
        shifted = divergence(name, target + 7, draft - 5)
        torch.testing.assert_close(shifted, found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_scores_are_summed_in_float32(name):
    target, draft = (one.bfloat16() for one in scores(0))
    found = divergence(name, target, draft)
    torch.testing.assert_close(found, torch.tensor(by_sums(name, target, draft)), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("banned", [0, 3])
@pytest.mark.parametrize("name", ["kl", "lk_alpha", "lk_hybrid"])
def test_zero_where_both_agree(name, banned):
    target, _ = scores(1, banned=banned)
    draft = (target + 3).requires_grad_()
    found = divergence(name, target, draft)
    assert found.abs().max() < 1e-6
    assert (divergence(name, *scores(1, banned=banned)) > 0.05).all()
    if name == "kl":
        found.sum().backward()
        assert draft.grad[:, : 9 - banned].abs().max() < 1e-6


def test_soft_ce_is_the_entropy_where_both_agree():
    target, _ = scores(1)
    entropy = torch.distributions.Categorical(logits=target).entropy()
    torch.testing.assert_close(divergence("soft_ce", target, target), entropy)


@pytest.mark.parametrize("spread", [2.0, 60.0])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_finite_and_leave_banned_ids_alone(name, spread):
    """A spread of 60 underflows most probabilities, as guidance does early in training.

    lk_alpha then has nothing to say where it is p that is smaller at both favourites.
    """
    target, draft = scores(2, spread=spread, banned=3)
    draft.requires_grad_()
    divergence(name, target, draft).sum().backward()
    assert draft.grad.isfinite().all() and not draft.grad[:, 6:].any()
    moved = draft.grad[:, :6].abs().sum(-1) > 0
    assert moved.sum() >= 5 if name == "lk_alpha" else moved.all()


@pytest.mark.parametrize("name", ["soft_ce", "kl"])
def test_gradient_of_the_cross_entropies_is_q_less_p(name):
    target, draft = scores(3)
    draft.requires_grad_()
    divergence(name, target, draft).sum().backward()
    torch.testing.assert_close(draft.grad, draft.detach().softmax(-1) - target.softmax(-1), atol=1e-6, rtol=1e-5)


def gradient_of_distance(target, draft):
    """Of TV = 1 - sum min(p, q), written out: -q_j ([q_j < p_j] - sum of q over where q < p)."""
    p, q = target.double().softmax(-1), draft.double().softmax(-1)
    lower = (q < p).double()
    return -q * (lower - (q * lower).sum(-1, keepdim=True)), torch.minimum(p, q).sum(-1, keepdim=True)


@pytest.mark.parametrize("banned", [0, 3])
def test_gradient_of_lk_alpha_is_that_of_the_distance_over_alpha(banned):
    target, draft = scores(4, banned=banned)
    wanted, alpha = gradient_of_distance(target, draft)
    draft.requires_grad_()
    divergence("lk_alpha", target, draft).sum().backward()
    torch.testing.assert_close(draft.grad.double(), wanted / alpha, atol=1e-6, rtol=1e-5)


def test_lk_hybrid_takes_no_gradient_through_its_weight():
    target, draft = scores(5)
    distance, alpha = gradient_of_distance(target, draft)
    weight = torch.exp(-3 * alpha)
    relative = draft.double().softmax(-1) - target.double().softmax(-1)
    draft.requires_grad_()
    divergence("lk_hybrid", target, draft).sum().backward()
    wanted = weight * relative + (1 - weight) * distance
    torch.testing.assert_close(draft.grad.double(), wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("far", [1.0, 30.0, 80.0])
def test_lk_alpha_of_a_point_mass_is_cross_entropy(far):
    """However unlikely the draft finds the token: there the gradient is needed most."""
    target = torch.tensor([[BANNED, 0.0, BANNED, BANNED]])
    values, gradients = [], []
    for name in ("lk_alpha", "soft_ce"):
        draft = torch.tensor([[far, 0.0, 0.5, BANNED]], requires_grad=True)
        value = divergence(name, target, draft)
        value.sum().backward()
        values.append(value.detach())
        gradients.append(draft.grad)
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*gradients)
    assert gradients[0][0, 1] < -0.5
