"""Where greedy answers part: ties of bfloat16 by a provoked difference, and planted faults."""

from dataclasses import replace

import pytest
import tiny
import torch
from draftsmith.eval.cells import cells_of
from draftsmith.eval.findings import findings
from draftsmith.eval.first_difference import TIE_ULPS, first_difference
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import Greedy
from draftsmith.models.decoding.warp import Warp
from rows import a_row

PLAINLY = Decoding(Chain(1), Greedy(), Draw("top-k"), Warp(), 10, ())


@pytest.fixture(scope="module")
def answered():
    """A bfloat16 target, a request and its plain answer."""
    target = tiny.target(tiny.llava(0).to(torch.bfloat16))
    request = tiny.request(1)
    return target, request, generate(target, None, request, PLAINLY).tokens


def second(target, request, tokens, place):
    """The runner-up of token `place`, and the two scores, from one pass over the answer before it."""
    scores = None
    real = target.verify

    def verify(session, token, tree):
        nonlocal scores
        step = real(session, token, tree)
        scores = step.logits[0].float()
        return step

    target.verify = verify
    try:
        assert generate(target, None, request, replace(PLAINLY, max_new_tokens=place + 1)).tokens == tokens[: place + 1]
    finally:
        del target.verify
    best = scores.topk(2)
    assert int(best.indices[0]) == tokens[place]
    return int(best.indices[1]), best.values.tolist()


@pytest.mark.parametrize("place", [1, 4, 9])
def test_the_gap_is_that_of_plain_decodings_own_scores(answered, place):
    target, request, tokens = answered
    other, (top, low) = second(target, request, tokens, place)
    difference = first_difference(target, request, tokens, [*tokens[:place], other], PLAINLY)
    assert (difference.place, difference.plain, difference.drafted) == (place, tokens[place], other)
    assert difference.gap == pytest.approx(top - low)
    unit = 2.0 ** (torch.tensor(max(abs(top), abs(low))).log2().floor().item() - 7)
    assert difference.ulps == pytest.approx((top - low) / unit)
    assert difference.tie == ((top - low) / unit <= TIE_ULPS[torch.bfloat16])


def test_the_first_token_comes_from_the_prefill(answered):
    target, request, tokens = answered
    difference = first_difference(target, request, tokens, [tokens[0] + 1, *tokens[1:]], PLAINLY)
    assert difference.place == 0 and difference.gap > 0


def test_an_answer_that_is_cut_is_a_fault(answered):
    target, request, tokens = answered
    difference = first_difference(target, request, tokens, tokens[:-1], PLAINLY)
    assert (difference.place, difference.drafted, difference.gap, difference.tie) == (9, None, None, False)


def nearly_tied(shift):
    """A target whose first two ids score the same but for `shift` in passes over several tokens (rounding's part)."""
    target = tiny.target(tiny.llava(0).to(torch.bfloat16))
    real = target.verify

    def verify(session, token, tree):
        step = real(session, token, tree)
        logits = step.logits.clone()
        top = logits.max(-1, keepdim=True).values.abs() + 1
        logits[:, 10:11], logits[:, 11:12] = top, top
        unit = 2.0 ** (top.log2().floor() - 7)
        logits[:, 11:12] -= unit  # plain decoding takes 10
        if tree.num_nodes:
            logits[:, 11:12] += shift * unit
        return replace(step, logits=logits)

    target.verify = verify
    return target


def test_a_provoked_tie_is_called_one_and_a_planted_fault_is_not():
    request, results = tiny.request(1), {}
    for name, shift in {"tie": 2, "same": 0}.items():
        target = nearly_tied(shift)
        plain = generate(target, None, request, PLAINLY).tokens
        chain = replace(PLAINLY, policy=Chain(2))
        drafted = generate(target, tiny.proposal(tiny.llava(3)), request, chain).tokens
        results[name] = (target, plain, drafted)
    assert results["same"][1] == results["same"][2]
    target, plain, drafted = results["tie"]
    assert plain != drafted
    difference = first_difference(target, request, plain, drafted, PLAINLY)
    assert difference.tie and difference.ulps == pytest.approx(1.0)
    # A rule that takes a token which the target gives no such score.
    fault = first_difference(target, request, plain, [plain[0], 20, *plain[2:]], PLAINLY)
    assert not fault.tie and fault.ulps > TIE_ULPS[torch.bfloat16]


def told(*differences):
    rows = [a_row(request="same")]
    for number, difference in enumerate(differences):
        rows.append(replace(a_row(request=f"r{number}"), identical=False, details={"difference": difference}))
    (cell,) = cells_of(rows, {})
    return cell, [line for line in findings([cell]) if "differ" in line or "identical" in line]


TIE = {"place": 3, "plain": 1, "drafted": 2, "gap": 0.125, "ulps": 2.0, "tie": True}
FAULT = {"place": 5, "plain": 1, "drafted": 2, "gap": 4.0, "ulps": 64.0, "tie": False}


def test_the_report_calls_it_a_tie_or_a_fault():
    cell, (line,) = told(TIE)
    assert "differ from plain decoding in 1 requests" in line and "0.125 (2.0 units" in line and "**" not in line
    assert cell.ties == 1 and cell.to_json()["differences"][0]["request"] == "r0"
    _, (line,) = told(TIE, FAULT)
    assert (
        "**Outputs differ**" in line and "at r1, token 5, by 4 (64.0 units" in line and "1 differ at near ties" in line
    )
    cell, (line,) = told()
    assert "identical" in line and cell.to_json()["differences"] == []
