"""Scores of a draft's own vocabulary, made a part of the target's LM head at a time."""

from types import SimpleNamespace

import pytest
import torch
from draftsmith.core.section import kinds, sections
from draftsmith.models.drafters import AnyDrafter, draft_vocabulary
from draftsmith.models.drafters.draft_vocabulary import GoalScores
from draftsmith.models.targets.base import ShapeAlone
from family_checks import Draft, check_goal_scores
from heads_tiny import case_for, config_of
from live_tensors import Watched
from tensors import loud
from tiny import llava
from tiny import target as language

CONFIDENCE = {"confidence": {}}
KINDS = {
    "eagle": {}, "eagle3": {}, "msd": {}, "sparrow": {}, "vispec": {"num_queries": 3}, "hivis": {"num_steps": 2},
    "peagle": {"parallel_tokens": 4}, "medusa": {"num_heads": 2}, "dflash": {"loss": {"token_divergence": "kl"}},
    "dspark": CONFIDENCE, "dflash2": {},
}  # fmt: skip
SMALL = {
    "taps": {"taps": (1, 2, 4)}, "block_size": {"block_size": 4}, "num_layers": {"num_layers": 1},
}  # fmt: skip


@pytest.mark.parametrize("rows", [7, 64, 1000])
def test_they_are_the_scores_of_the_whole(rows, monkeypatch):
    check_goal_scores(language(llava(0)), rows, monkeypatch)


def test_without_a_vocabulary_of_its_own_they_are_all():
    target, states = language(llava(0)), torch.randn(5, 32)
    found = GoalScores(target, Draft(None, 64))(states, sums=True)
    assert torch.equal(found.scores, target.scores(states)) and found.known.all() and found.log_sum is None


def test_a_head_whose_rows_cannot_be_read_is_run_whole():
    target = language(llava(0))
    assert [first for first, _ in target.score_parts(30)] == [0, 30, 60]
    head = target.decoder.model.lm_head
    for other in (
        type("Quantised", (torch.nn.Linear,), {})(32, 64, bias=False),
        SimpleNamespace(weight=SimpleNamespace(full_tensor=None)),
        torch.nn.Linear(32, 64),  # whose bias is no row (Phi)
    ):
        target.decoder.model._modules["lm_head"] = other
        assert target.score_parts(30) == [(0, target.scores)]
    target.decoder.model._modules["lm_head"] = head


def test_the_memory_of_a_step_is_counted_in_parts(monkeypatch):
    monkeypatch.setattr(draft_vocabulary, "ROWS", 40)
    target, draft = language(llava(0)), Draft(torch.arange(9), 64).to("meta")
    widths = []

    def note(func, made):
        """The last dimensions of the float tables [R,V] that anything makes."""
        widths.extend(t.shape[1] for t in made if t.is_floating_point() and t.dim() == 2 and func.is_view is False)

    with Watched(note):
        found = GoalScores(ShapeAlone(target.shape), draft)(torch.empty(4, 32, device="meta"))
    assert found.scores.shape == (4, 9) and max(widths) == 40


def test_every_kind_with_a_vocabulary_of_its_own_is_here():
    those = (kinds(section) for section in sections(AnyDrafter) if "draft_vocab_size" in section.model_fields)
    # That of mtp is refused: the head is the target's own.
    assert {kind for some in those for kind in some} - {"mtp"} == KINDS.keys()


def never(*arguments):
    raise AssertionError("the whole vocabulary was scored")


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_the_whole(kind, monkeypatch):
    target = language(llava(0, layers=5))
    section = type(config_of(kind=kind, **KINDS[kind]))
    small = {name: value for key, one in SMALL.items() if key in section.model_fields for name, value in one.items()}
    config = config_of(kind=kind, draft_vocab_size=20, **small | KINDS[kind])
    torch.manual_seed(0)
    counts = torch.randperm(target.vocab_size)
    head = config.build(target, count_tokens=lambda: counts)
    loud(head)
    batch, states = case_for(config, target, everything=True)
    found = []
    for whole in (True, False):
        if whole:
            monkeypatch.setattr(type(target), "score_parts", lambda self, size: [(0, self.scores)])
        else:
            monkeypatch.undo()
            monkeypatch.setattr(draft_vocabulary, "ROWS", 7)
            monkeypatch.setattr(type(target.decoder), "logits", never)
        head.zero_grad()
        loss = config.training_objective(head, target).train()(batch, states)
        loss.loss_sum.backward()
        found.append((loss, {name: p.grad for name, p in head.named_parameters() if p.grad is not None}))
    (whole, expected), (parts, gradients) = found
    torch.testing.assert_close(parts.loss_sum, whole.loss_sum, rtol=1e-6, atol=0)
    assert whole.loss_sum > 0 and expected.keys() == gradients.keys() and len(expected) > 3
    for name, value in whole.metrics.items():
        torch.testing.assert_close(parts.metrics[name], value, rtol=1e-5, atol=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
