"""`check_drafter` on a head whose levels depend on each other, the one of the page: what a reader broke in his own."""

import importlib
import re
from dataclasses import replace

import draftsmith
import pytest
import torch
from draftsmith.core.states import Taps
from draftsmith.models.decoding.tree import ROOT
from draftsmith.models.drafters.plain_module import ModuleDrafter
from fails import fails_with
from own_package import forget, write_package


@pytest.fixture(scope="module", name="page")
def _page(tmp_path_factory):
    folder = write_package(tmp_path_factory.mktemp("elsewhere") / "checked_package")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder.parent))
        yield importlib.import_module("checked_package.recurrent")
    forget("checked_package")


def proposals(page):
    """Fault -> the good proposal with it."""
    good = page.RecurrentProposal

    class Draws(good):
        def expand(self, parents, tokens):
            return torch.rand_like(super().expand(parents, tokens)).softmax(-1)

    class IgnoresTokens(good):
        def expand(self, parents, tokens):
            return super().expand(parents, torch.zeros_like(tokens))

    class MixesParents(good):
        def expand(self, parents, tokens):
            last = range(len(self.states) - len(parents), len(self.states))
            return super().expand([p if p == ROOT else q for p, q in zip(parents, last, strict=True)], tokens)

    class ForgetsBonus(good):
        def accept(self, verified):
            self.state = verified.step.feature[0, -1:]

    class ThreeLevels(good):
        def expand(self, parents, tokens):
            q = super().expand(parents, tokens)
            self.depths = [*getattr(self, "depths", ())][: len(self.states) - len(parents)]
            self.depths += [0 if parent == ROOT else self.depths[parent] + 1 for parent in parents]
            return q if self.depths[-1] < 2 else [][self.depths[-1]]

    class NoExpand(good):
        expand = property(lambda self: self.there_is_none)

    return {name: value for name, value in locals().items() if isinstance(value, type) and issubclass(value, good)}


PROPOSALS = {
    "Draws": "q: of the same request it proposes something else the second time",
    "IgnoresTokens": r"by heart: training knows the answer, decoding has \d+% of the drafts of level [23] accepted",
    "MixesParents": "q: expand returns another q after the same tokens in a tree than in a chain",
    "ForgetsBonus": r"by heart: training guesses the next token .* decoding has \d+% of the drafts of level 1 accepted",
    "ThreeLevels": r"q: max_levels is None, but a chain of 8 cannot be drafted: IndexError: .*test_check_recurrent.py",
    "NoExpand": r"q: what drafter\(\) returned \(NoExpand\) has no expand",
}


def checked(page, *, training=None, proposal=None, **members):
    """Check the page's drafter with another objective, proposal or members."""

    class Mine(page.RecurrentConfig):
        def training_objective(self, module, target, settings=None):
            return (training or page.RecurrentTraining)(module, target, self.levels)

        def drafter(self, module, target, options=None):
            return (proposal or page.RecurrentProposal)(module, target)

    return draftsmith.check_drafter(type("Mine", (Mine,), {"__module__": __name__, **members})(), steps=120)


def fault(page, **changed):
    """The lines of what it finds."""
    caught = fails_with("", checked, page, **changed)
    assert "help(draftsmith.models.drafters.base.Drafter)" in caught.hint
    return caught.problem.splitlines()[1:]


def losses(page):
    good = page.RecurrentTraining

    class Mean(good):
        def forward(self, batch, states):
            loss = super().forward(batch, states)
            return replace(loss, loss_sum=loss.loss_sum / loss.num_tokens)

    class OneToken(good):
        def forward(self, batch, states):
            return replace(super().forward(batch, states), num_tokens=torch.tensor(1))

    class Bare(good):
        def forward(self, batch, states):
            return super().forward(batch, states).loss_sum

    class NoParts(good):
        parts = None

    class NoMetrics(good):
        def forward(self, batch, states):
            return replace(super().forward(batch, states), metrics={})

    return {name: value for name, value in locals().items() if isinstance(value, type) and issubclass(value, good)}


LOSSES = {
    "Mean": "loss and gradients: loss_sum is .* of one sample and .* of a batch that holds it twice",
    "OneToken": "loss and gradients: num_tokens is 1 where 32 tokens are supervised: forward returns sums",
    "Bare": r"loss and gradients: forward\(\) of the training objective returned a Tensor, expected a StepLoss",
    "NoParts": r"loss and gradients: parts\(\) of the training objective returned nothing \(None\), expected a dict",
}


def test_without_metrics_acceptance_alone_says_that_it_knows_the_answer(page):
    assert "are accepted: 100%" in checked(page, training=losses(page)["NoMetrics"])["by heart"]


VERBS = {
    "build": r"loss and gradients: Mine does not write build\(\)",
    "training_objective": r"loss and gradients: Mine does not write training_objective\(\)",
    "drafter": r"q: Mine does not write drafter\(\)",
    "taps_for": r"not subscriptable \(recurrent.py:\d+\). States that are not asked for are None: taps_for asks",
}


@pytest.mark.parametrize("name", PROPOSALS | LOSSES | VERBS)
def test_a_fault_is_found_once_by_its_name(page, name):
    if name in VERBS:
        changed = {name: getattr(ModuleDrafter, name)}  # as if it had left the verb out
    else:
        changed = {"proposal": proposals(page)[name]} if name in PROPOSALS else {"training": losses(page)[name]}
    (line,) = fault(page, **changed)
    assert re.search((PROPOSALS | LOSSES | VERBS)[name], line), line


def test_taps_of_the_proposal_without_the_feature_are_named(page):
    (line,) = fault(page, proposal=type("Blind", (page.RecurrentProposal,), {"taps": Taps()}))
    assert "the proposal's taps are Taps(" in line
