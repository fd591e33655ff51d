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

NOUNS, NAMES = ["apple", "apple", "cup", "cup"], ["red apple", "apples", "blue cup", "cup with straw"]
ANSWERS = [(11, 12, 2), (11, 13, 2), (11, 12, 14, 2), (15, 2)]  # three begin alike
MODEL = tiny.llava(0)


@pytest.fixture(scope="module")
def target():
    return tiny.target(MODEL)


@pytest.fixture(scope="module")
def records(target):
    each = enumerate(zip(NAMES, ["naming", "using"] * 2, ANSWERS, strict=True))
    return [sight.shown(target, tiny.request(n), name=name, kind=kind, answer=ids, turns=1 + n // 3)
            for n, (name, kind, ids) in each]  # fmt: skip


def by_hand(record, other, ids):
    """Sum of an answer's log-probabilities, token by token, after a record's question with another one's picture."""
    request = replace(record.request, pixels=other.request.pixels)
    return float(sum(tiny.next_scores(MODEL, request, ids[:n]).log_softmax(-1)[token] for n, token in enumerate(ids)))


def test_names_are_scored_with_the_prior_of_other_pictures_taken_off(target, records):
    scores = [[by_hand(records[0], one, ids) for ids in ANSWERS] for one in records]
    rows = sight.naming(target, records, iter, title="t", candidates=3, seed=0)
    raw, less, gaps = [], [], []
    for i in range(4):
        rest = [j for j in range(4) if NOUNS[j] != NOUNS[i]]
        # The picture's own score is no part of a candidate's prior, nor are pictures of the candidate's noun.
        prior = {u: fmean(scores[j][u] for j in range(4) if j != i and NOUNS[j] != NOUNS[u]) for u in (i, *rest)}
        raw.append(all(scores[i][i] > scores[i][u] for u in rest))
        less.append(all(scores[i][i] - prior[i] > scores[i][u] - prior[u] for u in rest))
        gaps.append((scores[i][i] - prior[i]) / len(ANSWERS[i]))
    assert [value[0] for *_, value in rows[:2]] == [fmean(less), fmean(raw)] and less != raw
    assert rows[2][3][0] == pytest.approx(fmean(gaps), abs=1e-4) and rows[2][3][1] < rows[2][3][0] < rows[2][3][2]
    with pytest.raises(UserError, match="at most 3"):
        sight.naming(target, records, iter, title="t", candidates=4, seed=0)
    with pytest.raises(UserError, match="too few things"):
        sight.naming(target, records[:3], iter, title="t", candidates=2, seed=0)


def test_right_answers_lose_by_the_next_picture_of_another_thing(target, records):
    others = [2, 2, 0, 0]  # an apple's next is no apple
    gaps = [
        (by_hand(one, one, one.answer) - by_hand(one, records[other], one.answer)) / len(one.answer)
        for one, other in zip(records, others, strict=True)
    ]
    measured = {(what, on): value[0] for what, on, _, value in sight.right_answers(target, records, iter)}
    what = "right answers, right - another's picture"
    assert measured[what, "all"] == pytest.approx(fmean(gaps), abs=1e-4)
    assert measured[what, "using"] == pytest.approx((gaps[1] + gaps[3]) / 2, abs=1e-4)
    assert measured[what, "first turns"] == pytest.approx(fmean(gaps[:3]), abs=1e-4)


def test_own_answers_by_hand():
    texts = ["A red cat, a red cat.", "A red cat sits.", "It is blue."]
    p_max, loops, openings = (value for *_, value in sight.own_answers([[0.5, 0.7], [0.9], [0.1]], texts, [""] * 3))
    assert p_max[0] == pytest.approx(2.2 / 4) and loops[0] == pytest.approx(1 / 3) == openings / 2


def test_intervals_draw_pictures_of_one_thing_together():
    assert sight.value_of([1.0, 0.0, 1.0, 0.0], [""] * 4) == (0.5, 0.0, 1.0)
    assert sight.value_of([1.0, 0.0, 1.0, 0.0], ["red apple", "green apple", "owl", "an owl"]) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("reading", ["another's", "none"])
def test_a_misled_draft_reads_other_pictures_or_a_newline(target, records, reading):
    record, other, *_ = records
    shows, request = other, replace(record.request, pixels=other.request.pixels)
    if reading == "none":
        shows, request = sight.mean_picture(records), sight.without_pictures(record.request, 5)
    _, step = target.prefill(record.request, sight.Taps(), capacity=8)
    misled = sight.Misled(tiny.proposal(tiny.near(MODEL)), target, record, shows, newline_id=5)
    misled.start(record.request, step, Warp(1.0), capacity=8)
    misled.begin(11)
    wanted = tiny.next_scores(tiny.near(MODEL), request, [11]).softmax(-1)
    torch.testing.assert_close(misled.root(), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["eagle", "vispec"])
def test_a_misled_head_reads_the_prompts_states_with_other_pictures(target, records, kind):
    record, other, *_ = records
    drafter, roots = drafter_of(kind, target), []
    misled = sight.Misled(drafter, target, record, other, newline_id=5)
    right, others = record.request.pixels, other.request.pixels
    for head, pixels in (misled, right), (drafter, others), (drafter, right):
        request = replace(record.request, pixels=pixels)
        head.start(request, target.prefill(request, head.taps, capacity=8)[1], Warp(1.0), capacity=8)
        head.begin(11)
        roots.append(head.root())
    torch.testing.assert_close(*roots[:2])
    assert not torch.allclose(*roots[1:])


def test_cycles_count_by_place_and_by_what_the_picture_adds():
    cycles = [Cycle(2, 2, accepted, accepted + 1, 0, 0, 0) for accepted in (2, 0, 1, 2)]
    # Tokens 2 to 4, 5, 6 and 7, 8 to 10. The fourth was not drafted, and of the tenth nothing is known.
    gaps = [9.0, 0.6, 0.0, 9.0, 0.7, -1.0, 0.2, 3.0, 0.1]
    counts = sight.counts_of(Generation([], cycles, 0, 0, 0, "eos"), "using", gaps)
    assert counts[sight.ALL] == counts["using"] == (9, 4) and counts[sight.FIRST] == (3, 1)
    assert counts[sight.EARLY] == (6, 3) and sight.LATER not in counts
    assert counts[sight.HANGS] == (2, 3) and counts[sight.HANGS_NOT] == (3, 4)
    assert counts["below 0"] == (1, 1) and counts["from 2 on"] == (1, 1)


def test_only_a_draft_that_sees_loses_by_other_pictures(target, records):
    decoding = greedy(Chain(3), 12, (tiny.EOS,))
    methods = {mode: (tiny.self_draft(MODEL, mode), decoding) for mode in "MT"}
    results = sight.swapped_pictures(target, records, methods, 5, iter)
    lines = {(name, group): values for name, _, group, _, *values in sight.swapped_table(results).rows}
    right, others, none, less, blind = lines["M", "all"]
    emitted, cycles = zip(*(of[0] for of in results["M", "all"]), strict=True)
    assert right[0] == sum(emitted) / sum(cycles) > max(others[0], none[0]) and less[0] == right[0] - others[0]
    assert blind[0] == right[0] - none[0] and blind[1] > 0
    assert lines["T", "all"][3] == (0, 0, 0) and lines["M", sight.HANGS][0][0] == 1 > lines["T", sight.HANGS][0][0]
