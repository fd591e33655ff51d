"""Codes replaced by near ones: drawn as the target draws, then uniformly among the nearest."""

import pytest
import torch
from draftsmith.core.batch import ImageRequest
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.replaced import Replaced, ReplacedConfig
from draftsmith.eval.rules import Codes
from draftsmith.models.decoding.tree import no_tree
from draftsmith.models.decoding.warp import Warp
from draftsmith.trainers.evaluate.methods import Method
from fails import fails_with
from visual_tiny import EAGLE, anole, llamagen, request, target

CODEBOOK = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))


def rule(k: int, offset: int = 0, codebook=CODEBOOK) -> Replaced:
    return ReplacedConfig(kind="replaced", k=k).build_for_codes(1.0, Codes(codebook, offset))


@pytest.mark.parametrize(("k", "offset"), [(2, 0), (5, 3), (24, 0)])
def test_a_uniform_draw_among_the_nearest_follows_the_targets_own(k, offset):
    p = (3 * torch.randn(24 + offset, generator=torch.Generator().manual_seed(1))).softmax(-1).double()
    p[offset + 4] = 0.0
    p /= p.sum()
    expected = torch.zeros(24 + offset, dtype=torch.float64)
    expected[:offset] = p[:offset]  # no code, so nothing is near
    for code in range(24):
        near = (CODEBOOK - CODEBOOK[code]).norm(dim=-1).argsort()[:k]
        expected[near + offset] += p[code + offset] / k
    count, replaced = 4000, rule(k, offset)
    drawn = torch.bincount(
        torch.tensor([replaced(no_tree(), p[None], [(place + 0.5) / count]).bonus for place in range(count)]),
        minlength=24 + offset,
    )
    assert (drawn / count - expected).abs().sum() < 2 * 24 * k / count  # each share of a share is off by a place


def test_no_draft_is_accepted_and_ids_stay_codes():
    """Of a target whose ids are codes plus an offset, and one whose ids are codes."""
    for drawer, offset, codes in ((target(llamagen()), 0, 24), (anole(), 4, 16)):
        config = EAGLE
        torch.manual_seed(0)
        drafter = config.drafter(config.build(drawer), drawer)
        decoding = Decoding(Chain(2), rule(8, offset, CODEBOOK[:codes]), Draw("top-k"), Warp(1.0), drawer.num_codes, ())
        asked = request(drawer.model) if offset == 0 else ImageRequest(torch.tensor([24, 25, 26]), name="text")
        result = generate(drawer, drafter, asked, decoding, torch.Generator().manual_seed(0))
        assert len(result.tokens) == drawer.num_codes and set(result.tokens) <= set(range(offset, offset + codes))
        assert all(cycle.num_accepted == 0 for cycle in result.cycles)


def test_where_it_has_no_meaning_it_is_refused():
    method = Method.model_validate({"rule": {"kind": "replaced", "k": 25}})
    assert method.allowed(1.0) and not method.allowed(0.0)
    fails_with("words have no such neighbours", method.check, "text", 1.0)
    fails_with("k is 25, in a codebook of 24", method.rule.check_codebook, 24)
