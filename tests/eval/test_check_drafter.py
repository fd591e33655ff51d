"""`draftsmith.check_drafter`: shipped drafters pass, and each fault is found by its name; so it is in the loop."""

import warnings

import draftsmith
import pytest
import torch
import visual_tiny
from draftsmith.core.batch import Request
from draftsmith.core.errors import UserError
from draftsmith.core.finite import NotFinite
from draftsmith.eval.check_drafter import tiny_target
from draftsmith.eval.first_proposals import NothingTaken, WrongProposal
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Dynamic, Static
from draftsmith.eval.rules import RULES
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.medusa import MedusaConfig
from heads_tiny import config_of


class Broken(MedusaConfig):
    kind: str
    fault: str = ""

    def drafter(self, module, target, options=None):
        return Proposal(super().drafter(module, target), self.fault)

    def training_objective(self, module, target, settings=None):
        objective = super().training_objective(module, target)
        if self.fault == "gradient":
            objective.head.heads[4].forward = lambda states: states.detach()
        return objective

    def save(self, module, folder, manifest):
        super().save(module, folder, manifest)
        if self.fault == "files":
            module.load_state_dict({name: value + 0.5 for name, value in module.state_dict().items()})


class Proposal:
    """A good proposal with one fault."""

    def __init__(self, inner, fault):
        self.inner, self.fault = inner, fault
        self.taps, self.max_levels = inner.taps, inner.max_levels

    def start(self, *arguments, **more):
        self.inner.start(*arguments, **more)

    def begin(self, first):
        self.inner.begin(first)

    def root(self):
        return self.wrong(self.inner.root())

    def expand(self, parents, tokens):
        return self.wrong(self.inner.expand(parents, tokens))

    def accept(self, verified):
        if self.fault != "accept":
            self.inner.accept(verified)

    def wrong(self, q):
        if self.fault == "nan":
            return q * float("nan")
        return {"logits": q.log(), "short": q[..., :10], "sum": q * 0.9}.get(self.fault, q)


@pytest.mark.parametrize("kind", ["medusa", "eagle", "sparrow", "peagle"])
def test_shipped_drafters_pass(kind):
    seen = draftsmith.check_drafter(config_of(kind=kind))
    assert set(seen) == {"settings", "loss and gradients", "q", "accept", "greedy", "files", "by heart"}
    assert "not formed" not in " ".join(seen.values()), seen


FAULTS = {
    "logits": r"q: Proposal.root returned q that is -.* scores \(logits\) in place of probabilities",
    "sum": "misses the sum of 1 by 0.1",
    "accept": "accept: .* accepted paths have not changed the proposal",
    "gradient": "no finite gradient reaches 2 of 10 weights",
    "files": "files: what was saved and loaded proposes something else",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_by_its_name(fault):
    with pytest.raises(UserError, match=f"Broken does not keep to the protocol(?s:.*){FAULTS[fault]}"):
        draftsmith.check_drafter(Broken(fault=fault), steps=120)


def test_without_a_fault_the_same_class_passes():
    assert "100%" in draftsmith.check_drafter(Broken(num_heads=2))["by heart"]


def test_no_drafter_of_images_is_checked():
    with pytest.raises(UserError, match="drafters of image generators are not checked here"):
        draftsmith.check_drafter(config_of(kind="medusa"), visual_tiny.target(visual_tiny.llamagen()))


def medium_of(name):
    """A target, a request and a head for it."""
    if name == "language":
        target, asked = tiny_target(), Request(torch.arange(3, 15), torch.zeros(12, dtype=torch.int8), None)
    else:
        model = visual_tiny.llamagen()
        target = visual_tiny.target(model, 3.0 if name == "guided images" else 1.0)
        asked = visual_tiny.request(model)
    config = MedusaConfig(kind="medusa", num_heads=3)
    torch.manual_seed(0)
    return target, asked, config.drafter(config.build(target), target)


POLICIES = {"chain": Chain(3), "tree": Static([(0,), (1,), (0, 0)]), "dynamic tree": Dynamic(8, 2, 3)}
IN_THE_LOOP = {
    "logits": r"Proposal\.root returned q that is -.* scores \(logits\) in place of probabilities",
    "short": r"Proposal\.root returned q of shape \[10\], expected \[(64|24)\]",
    "sum": r"Proposal\.root returned q that misses the sum of 1 by 0\.1",
    "nan": r"Proposal\.root proposes from are not finite",
}


def decode(medium, policy, fault, temperature=0.0):
    target, asked, drafter = medium_of(medium)
    warp, rule = Warp(temperature), RULES["sampling" if temperature else "greedy"]
    decoding = Decoding(POLICIES[policy], rule, Draw("sample" if temperature else "top-k"), warp, 14, ())
    return generate(target, Proposal(drafter, fault), asked, decoding, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("fault", IN_THE_LOOP)
@pytest.mark.parametrize("medium", ["language", "images", "guided images"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_loop_refuses_wrong_proposals_in_the_first_cycle(policy, medium, fault):
    for temperature in (0.0,) if policy == "dynamic tree" else (0.0, 1.0):
        with pytest.raises(NotFinite if fault == "nan" else WrongProposal, match=IN_THE_LOOP[fault]):
            decode(medium, policy, fault, temperature)


@pytest.mark.parametrize("medium", ["language", "images", "guided images"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_loop_names_an_accept_that_does_nothing(policy, medium):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(decode(medium, policy, "").cycles) > 2, "without a fault it says nothing"
    with pytest.warns(NothingTaken, match=r"Proposal\.accept: the first 3 proposals of a request are the same"):
        decode(medium, policy, "accept")


def test_the_tiny_target_is_always_the_same():
    state = torch.get_rng_state()
    first, second = (tiny_target().embedding for _ in range(2))
    assert torch.equal(first, second) and torch.equal(state, torch.get_rng_state())
