"""What a target and its drafters owe to the picture, against transformers' own forward and sums by hand."""

from dataclasses import replace
from statistics import fmean

import pytest
import tiny
from draftsmith.core.errors import UserError
from draftsmith.eval.studies import sight

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
