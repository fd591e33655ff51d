"""Divergences against sums written out in float64, and their gradients where a draft or a target is extreme."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from draftsmith.models import losses
from draftsmith.models.drafters.distillation import DistillObjective, DistillTraining
from draftsmith.models.losses import divergence, list_mle
from torch.nn import functional as F

NAMES = ["soft_ce", "kl", "reverse_kl", "jsd", "tvd", "tvd_plus", "lk_alpha", "lk_hybrid"]
BETA = 0.2  # of jsd
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
    result = []
    for p_scores, q_scores in zip(target.double().tolist(), draft.double().tolist(), strict=True):
        p_total, q_total = (math.fsum(math.exp(s) for s in row) for row in (p_scores, q_scores))
        pairs = [(math.exp(a) / p_total, math.exp(b) / q_total) for a, b in zip(p_scores, q_scores, strict=True)]
        alpha = math.fsum(min(p, q) for p, q in pairs)
        cross = -math.fsum(p * math.log(q) for p, q in pairs if p)
        relative = cross + math.fsum(p * math.log(p) for p, q in pairs if p)
        weight = math.exp(-3 * alpha)
        distance = 0.5 * math.fsum(abs(p - q) for p, q in pairs)
        hybrid = weight * relative + (1 - weight) * distance
        reverse = math.fsum(q * math.log(q / p) for p, q in pairs if q)
        middles = [(p, q, BETA * p + (1 - BETA) * q) for p, q in pairs if p or q]
        jensen = math.fsum(BETA * p * math.log(p / m) + (1 - BETA) * q * math.log(q / m) for p, q, m in middles)
        values = {"soft_ce": cross, "kl": relative, "lk_alpha": -math.log(alpha), "lk_hybrid": hybrid}
        values |= {"reverse_kl": reverse, "jsd": jensen, "tvd": distance, "tvd_plus": distance}
        result.append(values[name])
    return result


@pytest.mark.parametrize("banned", [0, 3])
@pytest.mark.parametrize("name", NAMES)
def test_formulas(name, banned):
    for seed in range(3):
        target, draft = scores(seed, banned=banned)
        result = divergence(name, target, draft, beta=BETA)
        assert result.dtype == torch.float32 and result.shape == (6,)
        torch.testing.assert_close(result, torch.tensor(by_sums(name, target, draft)), atol=2e-6, rtol=1e-5)
        shifted = divergence(name, target + 7, draft - 5, beta=BETA)
        torch.testing.assert_close(shifted, result, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_scores_are_summed_in_float32(name):
    target, draft = (one.bfloat16() for one in scores(0))
    result = divergence(name, target, draft, beta=BETA)
    torch.testing.assert_close(result, torch.tensor(by_sums(name, target, draft)), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("banned", [0, 3])
@pytest.mark.parametrize("name", NAMES[1:])
def test_zero_where_both_agree(name, banned):
    target, _ = scores(1, banned=banned)
    draft = (target + 3).requires_grad_()
    result = divergence(name, target, draft)
    assert result.abs().max() < 1e-6
    assert (divergence(name, *scores(1, banned=banned)) > 0.03).all()
    if name in ("kl", "reverse_kl", "jsd"):
        result.sum().backward()
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
    # Far apart the bounded ones say little, down to nothing in float32: what kl and lk_hybrid are there for.
    assert moved.sum() >= {"lk_alpha": 5, "tvd": 2, "tvd_plus": 2, "jsd": 2, "reverse_kl": 2}.get(name, 6)


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


@pytest.mark.parametrize(
    ("name", "banned", "atol", "rtol"),
    [("lk_alpha", 0, 1e-6, 1e-5), ("lk_alpha", 3, 1e-6, 1e-5), ("lk_hybrid", 0, 1e-6, 1e-5),
     ("tvd_plus", 0, 1e-5, 1e-4)],
)  # fmt: skip
def test_gradients_that_point_where_the_distances_does(name, banned, atol, rtol):
    """lk_alpha's over alpha, tvd_plus's over its rewards' spread; lk_hybrid takes none through its weight."""
    target, draft = scores({"lk_alpha": 4, "lk_hybrid": 5, "tvd_plus": 8}[name], banned=banned)
    distance, alpha = gradient_of_distance(target, draft)
    p, q = target.double().softmax(-1), draft.double().softmax(-1)
    weight, mean = torch.exp(-3 * alpha), (q * (q < p)).sum(-1, keepdim=True)
    wanted = {
        "lk_alpha": distance / alpha,
        "lk_hybrid": weight * (q - p) + (1 - weight) * distance,
        "tvd_plus": distance / (mean * (1 - mean)).sqrt(),
    }[name]
    draft.requires_grad_()
    divergence(name, target, draft).sum().backward()
    torch.testing.assert_close(draft.grad.double(), wanted, atol=atol, rtol=rtol)


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


VECTORS = np.load(Path(__file__).parent / "vectors_distill" / "distill_losses.npz")
# Our name, its settings, and the name in the file.
RECORDED = [
    ("kl", {}, "forward_kl"),
    ("reverse_kl", {}, "reverse_kl"),
    ("jsd", {}, "jsd_half"),
    ("jsd", {"beta": 0.1}, "jsd_beta0.1"),
    ("tvd", {}, "tvd"),
    ("lk_alpha", {}, "neg_log_alpha"),
    ("lk_hybrid", {}, "lk_hybrid_eta3"),
]


def recorded(name: str) -> torch.Tensor:
    return torch.from_numpy(VECTORS[name])


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("name", "settings", "file"), RECORDED)
def test_recorded_values_and_gradients(name, settings, file, dtype, atol):
    target, draft = recorded("p_logits").to(dtype), recorded("q_logits").to(dtype).requires_grad_()
    result = divergence(name, target, draft, **settings)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), recorded(file), atol=atol, rtol=atol)
    if f"{file}_grad" in VECTORS:
        result.sum().backward()
        torch.testing.assert_close(draft.grad.double()[1:], recorded(f"{file}_grad")[1:], atol=atol, rtol=atol)
        mask = recorded("mask")
        mean = result.detach()[mask].double().mean()
        torch.testing.assert_close(mean, recorded(f"{file}_masked_mean"), atol=atol, rtol=atol)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "tvd", "jsd_half", "lk_hybrid_eta3"])
def test_recorded_values_without_the_last_columns(name):
    target, draft = (recorded(side).clone() for side in ("p_logits", "q_logits"))
    for side in (target, draft):
        side[:, -int(VECTORS["excluded_tail"]) :] = BANNED
    ours = next(own for own, _, file in RECORDED if file == name)
    torch.testing.assert_close(divergence(ours, target, draft), recorded(f"tail_excluded_{name}"), atol=1e-9, rtol=0)


def test_recorded_values_at_temperature_two():
    target, draft = recorded("p_logits") / 2, recorded("q_logits") / 2
    torch.testing.assert_close(divergence("kl", target, draft), recorded("forward_kl_temp2"), atol=1e-9, rtol=1e-9)


def test_recorded_alpha_and_the_lambda_that_lk_hybrid_takes_from_it():
    """alpha = 1 - TV; lambda is what weighs KL against TV in each row where the two differ."""
    target, draft = recorded("p_logits"), recorded("q_logits")
    kl, tvd, hybrid = (divergence(name, target, draft) for name in ("kl", "tvd", "lk_hybrid"))
    torch.testing.assert_close(1 - tvd, recorded("alpha"), atol=1e-9, rtol=0)
    apart = (kl - tvd).abs() > 1e-3
    assert apart.sum() >= 10 and not apart[0]
    found = ((hybrid - tvd) / (kl - tvd))[apart]
    torch.testing.assert_close(found, recorded("lambda_per_position")[apart], atol=1e-9, rtol=1e-9)
    for side in (target, draft):
        side[:, -int(VECTORS["excluded_tail"]) :] = BANNED
    torch.testing.assert_close(1 - divergence("tvd", target, draft), recorded("tail_excluded_alpha"), atol=1e-9, rtol=0)


def test_recorded_agreement_and_alpha_are_what_distillation_reports():
    target, draft = recorded("p_logits").float(), recorded("q_logits").float()
    nothing = torch.zeros(target.shape[1], dtype=torch.bool)
    training = SimpleNamespace(objective=DistillObjective(kind="distill"), banned=nothing)
    labels = torch.zeros(len(target), dtype=torch.int64)
    for row, (agrees, alpha) in enumerate(zip(recorded("greedy_agreement"), recorded("alpha"), strict=True)):
        piece = slice(row, row + 1)
        _, (_, agreed, found) = DistillTraining._compare(
            training, target.__getitem__, None, labels, piece, draft[piece]
        )
        assert bool(agreed) == bool(agrees)
        assert float(found) == pytest.approx(float(alpha), abs=1e-5)


def test_gradient_of_tvd_plus_is_the_policy_gradient_with_normalised_rewards():
    """Five tokens, everything by sums: -E_q[A(x) grad log q(x)], A = (r - mean) / sigma, r = 1 where q < p."""
    target, draft = scores(7, rows=4, vocab=5)
    draft = draft.double().requires_grad_()
    divergence("tvd_plus", target.double(), draft).sum().backward()
    for row in range(4):
        p, q = target[row].double().softmax(-1).tolist(), draft[row].detach().softmax(-1).tolist()
        rewards = [float(b < a) for a, b in zip(p, q, strict=True)]
        mean = math.fsum(b * r for b, r in zip(q, rewards, strict=True))
        sigma = math.sqrt(math.fsum(b * (r - mean) ** 2 for b, r in zip(q, rewards, strict=True)))
        for token in range(5):
            # d log q(x) / d score(token) = [x is token] - q(token)
            wanted = -math.fsum(
                q[x] * (rewards[x] - mean) / sigma * ((x == token) - q[token]) for x in range(5)
            )  # fmt: skip
            assert draft.grad[row, token].item() == pytest.approx(wanted, abs=1e-9)


def test_one_over_the_number_of_tokens_is_not_rounded_to_16_bits():
    torch.manual_seed(0)
    weight, hidden = torch.randn(7, 4), torch.randn(5, 4).bfloat16().requires_grad_()
    head = losses.FrozenHead(lambda states: F.linear(states.float(), weight), 3, torch.bfloat16)
    gradients = []
    for tokens in (1, 333):
        loss, _ = head(hidden, lambda piece, ours: (ours.square().sum(), torch.zeros(1)))
        gradients += torch.autograd.grad(loss / tokens, hidden)
    assert torch.equal(gradients[1], (gradients[0].float() / 333).bfloat16())


def test_list_mle_is_plackett_luce():
    """Minus the logarithm of the chance to draw the target's best tokens in their order, one after the other."""
    generator = torch.Generator().manual_seed(0)
    target, ours = (torch.randn(3, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    target[0, 2] = ours[0, 2] = float("-inf")
    for row in range(3):
        best = [i for i in target[row].argsort(descending=True).tolist() if target[row, i].isfinite()][:4]
        chance = 1.0
        for place in range(4):
            left = ours[row, best[place:]].exp()
            chance *= float(left[0] / left.sum())
        assert float(list_mle(target, ours, 4)[row]) == pytest.approx(-torch.tensor(chance).log().item(), abs=1e-6)
    assert list_mle(target, ours, 50).isfinite().all(), "fewer tokens than asked for"
