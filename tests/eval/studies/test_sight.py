"""What a target and its drafters owe to the picture, against transformers' own forward and sums by hand."""

from dataclasses import replace
from statistics import fmean

import pytest
import tiny
import torch
from decodings import greedy
from draftsmith.core.errors import UserError
from draftsmith.eval.loop import Cycle, Generation
from draftsmith.eval.policies import Chain
from draftsmith.eval.studies import sight
from draftsmith.models.decoding.warp import Warp
from test_head_decoding import drafter_of

NAMES = ["red apple", "apples", "blue cup", "mug with straw"]
ANSWERS = [(11, 12, 2), (11, 13, 2), (11, 12, 14, 2), (15, 2)]  # three begin alike


@pytest.fixture(scope="module")
def model():
    return tiny.llava(0)


@pytest.fixture(scope="module")
def target(model):
    return tiny.target(model)


def records(target, names=NAMES):
    kinds = ["naming", "using", "naming", "using"]
    each = zip(names, kinds, ANSWERS, strict=True)
    return [
        sight.shown(target, tiny.request(seed), name=name, kind=kind, answer=answer)
        for seed, (name, kind, answer) in enumerate(each)
    ]


def by_hand(model, record, other, ids):
    """Sum of an answer's log-probabilities, token by token, after a record's question with another one's picture."""
    request = replace(record.request, pixels=other.request.pixels)
    scores = [tiny.next_scores(model, request, ids[:n]).log_softmax(-1)[token] for n, token in enumerate(ids)]
    return float(sum(scores))


def test_names_are_scored_with_the_prior_of_other_pictures_taken_off(model, target):
    nouns = ["apple", "apple", "cup", "cup"]
    of = records(target, ["red apple", "apples", "blue cup", "cup with straw"])
    scores = [[by_hand(model, of[0], one, ids) for ids in ANSWERS] for one in of]
    measured = {what: value for what, _, _, value in sight.naming(target, of, iter, title="t", candidates=3, seed=0)}
    raw, less, gaps = [], [], []
    for i in range(4):
        rest = [j for j in range(4) if nouns[j] != nouns[i]]
        # The picture's own score is no part of a candidate's prior, nor are pictures of the candidate's noun.
        prior = {u: fmean(scores[j][u] for j in range(4) if j != i and nouns[j] != nouns[u]) for u in (i, *rest)}
        raw.append(all(scores[i][i] > scores[i][u] for u in rest))
        less.append(all(scores[i][i] - prior[i] > scores[i][u] - prior[u] for u in rest))
        gaps.append((scores[i][i] - prior[i]) / len(ANSWERS[i]))
    assert measured["the right name is the likeliest of 3"][0] == fmean(raw)
    assert measured["the right name is the likeliest of 3, prior taken off"][0] == fmean(less) != fmean(raw)
    middle, low, high = measured["the name, right - another's picture"]
    assert middle == pytest.approx(fmean(gaps), abs=1e-4) and low < middle < high
    with pytest.raises(UserError, match="at most 3"):
        sight.naming(target, of, iter, title="t", candidates=4, seed=0)


def test_right_answers_lose_by_the_next_picture_of_another_thing(model, target):
    of = records(target)
    others = [2, 2, 3, 0]  # an apple's next is no apple
    gaps = [
        (by_hand(model, of[i], of[i], ids) - by_hand(model, of[i], of[others[i]], ids)) / len(ids)
        for i, ids in enumerate(ANSWERS)
    ]
    measured = {(what, on): (n, value) for what, on, n, value in sight.right_answers(target, of, iter)}
    count, value = measured["right answers, right - another's picture", "all"]
    assert count == 4 and value[0] == pytest.approx(fmean(gaps), abs=1e-4)
    count, value = measured["right answers, right - another's picture", "using"]
    assert count == 2 and value[0] == pytest.approx((gaps[1] + gaps[3]) / 2, abs=1e-4)
    alike = [replace(record, features=of[0].features) for record in of]
    measured = {(what, on): value for what, on, _, value in sight.right_answers(target, alike, iter)}
    assert measured["right answers, right - mean picture", "all"] == pytest.approx((0, 0, 0), abs=1e-6)


def test_own_answers_by_hand():
    texts = ["A red cat, a red cat.", "A red cat sits.", "It is blue."]
    (p_max, loops, openings) = sight.own_answers([[0.5, 0.7], [0.9], [0.1]], texts)
    assert p_max[3][0] == pytest.approx(2.2 / 4) and loops[3][0] == pytest.approx(1 / 3) == openings[3] / 2


@pytest.mark.parametrize("reading", ["another's", "none"])
def test_a_misled_draft_reads_other_pictures_or_a_newline(model, target, reading):
    record, other, *_ = records(target)
    _, step = target.prefill(record.request, sight.Taps(), capacity=8)
    draft, request = tiny.near(model), sight.without_pictures(record.request, 5)
    shows = sight.mean_picture([record, other])
    if reading == "another's":
        request, shows = replace(record.request, pixels=other.request.pixels), other
    misled = sight.Misled(tiny.proposal(draft), target, record, shows, newline_id=5)
    misled.start(record.request, step, Warp(1.0), capacity=8)
    misled.begin(11)
    torch.testing.assert_close(misled.root(), tiny.next_scores(draft, request, [11]).softmax(-1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["eagle", "vispec"])
def test_a_misled_head_reads_the_prompts_states_with_other_pictures(target, kind):
    record, other, *_ = records(target)
    swapped = replace(record.request, pixels=other.request.pixels)
    roots = []
    for request, shows in (record.request, other), (swapped, None):
        head = drafter_of(kind, target)
        head = head if shows is None else sight.Misled(head, target, record, shows, newline_id=5)
        _, step = target.prefill(request, head.taps, capacity=8)
        head.start(request, step, Warp(1.0), capacity=8)
        head.begin(11)
        roots.append(head.root())
    torch.testing.assert_close(*roots)


def test_cycles_count_by_place_and_by_what_the_picture_adds():
    cycles = [Cycle(2, 2, accepted, accepted + 1, 0, 0, 0) for accepted in (2, 0, 1, 2)]
    # Tokens 2 to 4, 5, 6 and 7, and 8 to 10; token 4 was not drafted, nor is the tenth's acceptance known.
    gaps = [9.0, 0.6, 0.0, 9.0, 0.7, -1.0, 0.2, 3.0, 0.1]
    counts = sight.counts_of(Generation([], cycles, 0, 0, 0, "eos"), "using", gaps)
    assert counts[sight.ALL] == counts["using"] == (9, 4) and counts[sight.FIRST] == (3, 1)
    assert counts[sight.EARLY] == (6, 3) and sight.LATER not in counts
    assert counts[sight.HANGS] == (2, 3) and counts[sight.HANGS_NOT] == (3, 4)
    assert counts["below 0"] == (1, 1) and counts["from 2 on"] == (1, 1)


def test_readings_keep_the_answers_and_only_what_sees_loses(model, target):
    of, decoding = records(target), greedy(Chain(3), 12, (tiny.EOS,))
    methods = {mode: (tiny.self_draft(model, mode), decoding) for mode in "MT"}
    results = sight.swapped_pictures(target, of, methods, 5, iter)
    lines = {(name, group): values for name, _, group, _, *values in sight.swapped_table(results).rows}
    tau, others, none, less = lines["M", "all"]
    emitted, cycles = zip(*(right for right, *_ in results["M", "all"]), strict=True)
    assert tau[0] == sum(emitted) / sum(cycles) > max(others[0], none[0]) and less[0] == tau[0] - others[0]
    assert lines["T", "all"][3] == (0, 0, 0)
    assert all(
        share[0] == 1 for group in (sight.HANGS, sight.HANGS_NOT) if (share := lines.get(("M", group), [(1,)])[0])
    )
