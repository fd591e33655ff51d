"""Losses whose gradients are made in place, against the readable forms; values and gradients."""

import pytest
import torch
from draftsmith.models import losses
from draftsmith.models.fast import in_place

FORMS = {
    "soft_ce": lambda target, draft: soft_ce(target, draft),
    "tvd": lambda *given: losses.divergence("tvd", *given),
}


def soft_ce(target, draft):
    p = losses.log_probs(target).exp()
    return losses.soft_cross_entropy(p, draft[:, None].expand(-1, 2, -1), target.isneginf()).sum(-1)


def scores(rows=7, vocab=9, banned=2, spread=2.0):
    """Target's and draft's; the last `banned` ids have minus infinity in both, and in the first row both agree."""
    generator = torch.Generator().manual_seed(rows)
    target, draft = (spread * torch.randn(rows, vocab, generator=generator) for _ in range(2))
    target[:1] = draft[:1]
    for one in (target, draft):
        one[:, vocab - banned :] = float("-inf")
    return target, draft


def values_and_gradients(name, target, draft):
    own = draft.clone().requires_grad_()
    values = FORMS[name](target, own)
    (values * torch.arange(float(len(draft)))).sum().backward()
    assert own.grad.dtype == draft.dtype
    return values.detach(), own.grad


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("spread", [2.0, 60.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_each_is_its_readable_form(name, dtype, spread, rows, monkeypatch):
    target, draft = (one.to(dtype) for one in scores(rows, spread=spread))
    fast = values_and_gradients(name, target, draft)
    monkeypatch.setenv("DRAFTSMITH_FAST", "0")
    readable = values_and_gradients(name, target, draft)
    torch.testing.assert_close(fast, readable, atol=1e-6, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_values_and_gradients_do_not_depend_on_the_rows_that_are_gone_through_at_once(monkeypatch):
    results = []
    for at_once in (1 << 19, 20, 1):  # all rows, two and one
        monkeypatch.setattr(in_place, "AT_ONCE_ON_CPU", at_once)
        results.append(torch.cat([one.view(7, -1) for one in values_and_gradients("tvd", *scores())], dim=1))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
