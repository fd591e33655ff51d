"""Answers written many at a time are those of the decoding loop, whatever stands beside them."""

from dataclasses import replace

import pytest
import torch
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import RULES
from draftsmith.models.decoding.batched import write_answers
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.distillation import keep_scores
from draftsmith.models.losses import log_probs
from draftsmith.models.targets.llava.model import LlavaDecoder
from tiny import EOS, IMAGE_ID, SIZES, TOKENS, llava, num_tokens, reference, request, target

# Of unequal lengths, with one picture, two and none.
ASKED = [request(n, images=n % 3, words=3 + 2 * n) for n in range(6)]
OTHER = [request(n, images=n % 3, words=3 + 2 * n, sizes=SIZES["other"]) for n in range(6)]
LIMITS = [12, 3, 12, 1, 9, 12]


@pytest.fixture(scope="module")
def model():
    return llava(4)


def decoder(model) -> LlavaDecoder:
    return LlavaDecoder(model, num_token_ids=num_tokens(model), never=(IMAGE_ID,))


def write(model, numbers, warp, *, eos=(EOS,), keep=None):
    seeds, limits = [100 + n for n in numbers], [LIMITS[n] for n in numbers]
    return write_answers(
        decoder(model), [ASKED[n] for n in numbers], warp, limits=limits, seeds=seeds, eos_ids=eos, keep=keep
    )


@pytest.mark.parametrize(("sizes", "asked"), [(SIZES["small"], ASKED), (SIZES["other"], OTHER)], ids=SIZES)
def test_greedy_answers_are_those_of_transformers(sizes, asked):
    model = llava(4, sizes=sizes)
    seeds = [100 + n for n in range(6)]
    result = write_answers(decoder(model), asked, Warp(), limits=LIMITS, seeds=seeds, eos_ids=())
    for number, written in enumerate(result):
        assert written.ids == reference(model, asked[number], LIMITS[number])
        assert written.stop == "length" and written.top_log_probs is None


def test_rows_end_at_their_own_end_token_and_limit(model):
    end = reference(model, ASKED[0], 12)[4]  # greedy answers hold it in the middle, so that rows end at different steps
    greedy = Decoding(Chain(1), RULES["greedy"], Draw("top-k"), Warp(), 12, (end,))
    result = write(model, range(6), Warp(), eos=(end,))
    stops = set()
    for number, written in enumerate(result):
        limited = replace(greedy, max_new_tokens=max(2, LIMITS[number]))
        alone = generate(target(model), None, ASKED[number], limited)
        assert written.ids == alone.tokens[: LIMITS[number]]
        assert written.stop == ("eos" if written.ids[-1] == end else "length")
        stops.add(written.stop)
    assert stops == {"eos", "length"}


@pytest.mark.parametrize("warp", [Warp(1.0), Warp(0.7, top_k=9), Warp(1.3, top_p=0.8)])
def test_draws_depend_on_the_seed_alone(model, warp):
    """Not on the rows beside, their order or their number."""
    together = write(model, range(6), warp, eos=(7,))
    for numbers in ([3, 0], [5, 4, 1, 2], [0], [2, 0, 1, 3, 5, 4]):
        for number, written in zip(numbers, write(model, numbers, warp, eos=(7,)), strict=True):
            assert written.ids == together[number].ids
    other = write_answers(decoder(model), ASKED, warp, limits=LIMITS, seeds=range(6), eos_ids=(7,))
    assert [w.ids for w in other] != [w.ids for w in together]
    assert not any(i == IMAGE_ID or i >= TOKENS for w in together for i in w.ids)


def test_sampled_tokens_are_distributed_as_the_warped_scores(model):
    """4,000 first tokens of one prompt, in one batch: within four standard errors of p at every id."""
    warp, count = Warp(1.0, top_k=8), 4000
    asked = ASKED[3]
    seen = torch.zeros(64)
    for start in range(0, count, 500):
        written = write_answers(
            decoder(model), [asked] * 500, warp, limits=[1] * 500, seeds=range(start, start + 500), eos_ids=()
        )
        seen += torch.bincount(torch.tensor([w.ids[0] for w in written]), minlength=64)
    scores = model(input_ids=asked.ids[None]).logits[0, -1]
    scores[TOKENS:], scores[IMAGE_ID] = float("-inf"), float("-inf")
    p = warp(scores).detach()
    assert ((seen / count - p).abs() < 4 * (p * (1 - p) / count).sqrt() + 1e-9).all()


def test_kept_scores_are_those_of_a_pass_over_the_whole_answer(model):
    for number, written in enumerate(write(model, range(6), Warp(1.0), eos=(7,), keep=lambda s: keep_scores(s, 5))):
        asked, n = ASKED[number], len(written.ids)
        whole = torch.cat([asked.ids, torch.tensor(written.ids)])[None]
        pictures = {} if asked.pixels is None else {"pixel_values": asked.pixels}
        scores = model(input_ids=whole, **pictures).logits[0, -n - 1 : -1]
        scores[:, TOKENS:], scores[:, IMAGE_ID] = float("-inf"), float("-inf")
        logs = log_probs(scores).detach()
        best = logs.topk(5, dim=-1)
        torch.testing.assert_close(written.top_log_probs.log_probs, best.values, atol=1e-4, rtol=1e-4)
        assert torch.equal(written.top_log_probs.ids, best.indices)
        rest = 1 - best.values.exp().sum(-1)
        torch.testing.assert_close(written.top_log_probs.log_rest.exp(), rest, atol=1e-5, rtol=1e-4)
