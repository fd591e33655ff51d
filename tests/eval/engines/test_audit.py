"""The audit's verdicts on toy servers: each planted fault is seen, right servers pass, and its tests are exact."""

import itertools
import math
import os
import re
from collections import Counter

import numpy as np
import pytest
from draftsmith.eval.engines.audit import END, NEEDED, Answer, Walk, audit, contexts, differences, speculation, walk
from draftsmith.eval.engines.exact_law import TESTS, Evidence, Law, Sampling, law_of
from toy_servers import FAULTS, VOCABULARY, Toy, cut, scores

DRAWN, CUT = Sampling(), Sampling(top_k=8, top_p=0.8)
FIRST = int(os.environ.get("AUDIT_SEED", "0"))  # of models and draws in the slow tier: another one is another proof
# Noise of right servers, and whether both have one of their own: the last two are as of flash attention and a q8 cache.
RIGHT = ((0.0, False), (0.004, False), (0.02, False), (0.05, False), (0.008, True), (0.05, True))


def audited(fault, model=0, noise=0.0, prompts=12, count=48, draws=1600, seed=0, samplings=(DRAWN, CUT), apart=False):
    rng = np.random.default_rng(model + 7)
    texts = [tuple(map(int, rng.integers(1, VOCABULARY, 6))) for _ in range(prompts)]
    servers = Toy(fault, model, noise, " here" * apart), Toy("plain", model, noise)
    return audit(*servers, texts, samplings, count=count, most_draws=draws, seed=seed, at_once=(1,),
                 say=lambda text: None)  # fmt: skip


# Fault -> how it is seen: greedy answers, or at most so many draws. Models of several seeds: the slow tier.
SEEN = {
    "first drafted token unverified": "greedy", "1 of 50 unverified": "greedy", "bonus of the draft": "greedy",
    "stop tokens skipped": "greedy", "greedy under sampling": 100, "typical acceptance": 400, "top-p before top-k": 400,
    "draft's temperature": 1600, "a sibling kept twice": 1600, "residual not used": 1600,
    "acceptance threshold": 1600,
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_seen(fault):
    how = SEEN[fault]
    found = audited(fault, prompts=24, draws=0) if how == "greedy" else audited(fault, draws=how)
    wrong = [one for one in found.differences if one.verdict == "fault"]
    assert bool(wrong) == (how == "greedy") and bool(found.draws.faults) == (how != "greedy") and found.faults
    assert how == "greedy" or found.draws.number <= how
    assert all(group == "drafted" for group, _, _ in found.draws.faults)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_seen_in_other_models_with_noise(fault):
    took = []
    for model in range(FIRST + 1, FIRST + 6):
        found = audited(fault, model, noise=0.01, prompts=24, count=96, draws=3200, seed=FIRST)
        unseen = not found.ended if fault == "stop tokens skipped" else found.missing
        assert found.faults or unseen, "or the page says that too little was tried"
        greedy = sum(one.verdict == "fault" for one in found.differences)
        drawn = f"{found.draws.number} draws" if found.draws.faults else "too little tried" if not greedy else "-"
        took.append(f"{greedy} of {found.tokens}; {drawn}")
    print(f"\n| {fault} | {' | '.join(took)} |")


@pytest.mark.parametrize("fault", ["plain", "siblings", None])
def test_a_right_server_passes_with_noise(fault):
    found = audited(fault, model=1, noise=0.02, draws=200)
    assert not found.faults and {one.verdict for one in found.differences} <= {"tie", "arithmetic"}
    assert 0.01 < found.noise < 0.04 and found.draws.number == 200
    assert [len(some.seen) > 4 for some in found.draws.evidence.values()] == [True, True]


@pytest.mark.slow
def test_a_hundred_right_servers_raise_at_most_one_alarm():
    alarms, ties = [], Counter()
    for repeat in range(100):
        noise, apart = RIGHT[repeat % len(RIGHT)]
        kind, model = (None, "siblings", "plain")[repeat // len(RIGHT) % 3], FIRST + 100 + repeat
        found = audited(kind, model, noise, seed=10_000 * (FIRST + repeat), apart=apart)
        alarms += [(repeat, noise, apart, kind, found.faults)] if found.faults else []
        ties[noise, apart] += len(found.differences)
    print(f"\nalarms: {alarms}; places where right answers part: {dict(ties)}")
    assert len(alarms) <= 1 and sum(ties.values()) > 200


@pytest.mark.parametrize("sampling", [DRAWN, CUT, Sampling(top_k=5), Sampling(top_p=0.7), Sampling(0.6, 12)], ids=str)
def test_the_law_is_what_a_server_draws_from(sampling):
    for context in range(30):
        values = scores(3, (context, 1), "prompt", 0.0)
        shown = {int(token): float(values[token]) for token in np.argsort(-values)[:20]}
        law, expected = law_of(shown, sampling, 0.0), cut(values, sampling)
        if law is None:
            assert sampling.top_p < 1 and not sampling.top_k, "the top 20 do not reach top-p"
            continue
        assert law.p.sum() == pytest.approx(1) and law.symbol(99) == len(law.tokens)
        assert law.p[:-1] == pytest.approx(expected[list(law.tokens)], rel=2e-4)
        assert law.p[-1] == pytest.approx(max(1 - expected[list(law.tokens)].sum(), 1e-4), abs=1e-6)


def logs(*p):
    return {token: math.log(one) for token, one in enumerate(p)}


def test_what_noise_moves_across_a_cut_is_one_symbol_or_no_law():
    law = law_of(logs(0.5, 0.2, 0.1001, 0.1, 0.0999), Sampling(top_k=4), 0.01)
    assert law.tokens == (0, 1) and law.p[-1] == pytest.approx(0.2001 / 0.9001, abs=1e-3), "2 to 4 may change places"
    assert law_of(logs(0.5, 0.2, 0.1001, 0.1, 0.0999), Sampling(top_k=4), 1e-6).tokens == (0, 1, 2, 3)
    assert law_of(logs(0.5, 0.2001, 0.2, 0.1), Sampling(top_p=0.7), 0.01) is None, "0.7001 may be below 0.7"
    assert law_of(logs(0.5, 0.2001, 0.1999, 0.1), Sampling(top_p=0.65), 0.01).tokens == (0,), "1 or 2 is kept"
    assert law_of(logs(0.5, 0.2), Sampling(0.5), 0.0) is None, "of the whole vocabulary at another temperature"
    assert law_of({0: 0.0, 1: -9999.0}, DRAWN, 0.0).tokens == (0,), "an engine's zero"


def test_a_right_server_is_seldom_called_faulty_however_few_the_draws_and_however_often_one_looks():
    """P(p <= a after any of 20 draws) <= a, exactly: by counts of three symbols, of which one is rare."""
    law, p_values = Law((0, 1), np.array([0.6, 0.39, 0.01])), {}
    for a, test in itertools.product((0.3, 0.1, 0.01, 1e-3), TESTS):
        called, alive = 0.0, {(0, 0, 0): 1.0}
        for _ in range(20):
            after = Counter()
            for counts, chance in alive.items():
                for symbol, p in enumerate(law.p):
                    after[tuple(np.add(counts, np.eye(3, dtype=int)[symbol]).tolist())] += chance * p
            for counts in after.keys() - p_values.keys():
                p_values[counts] = Evidence({"here": (law, np.array(counts))}).p_values(0.0)
            called += sum(chance for counts, chance in after.items() if p_values[counts][test] <= a)
            alive = {counts: chance for counts, chance in after.items() if p_values[counts][test] > a}
        assert called <= a and (called or a < 0.01), (a, test, called)


def test_a_rule_of_the_least_share_is_seen():
    """In 95% of audits, as the page says."""
    laws = [Law((0, 1, 2), np.array(p)) for p in ([0.5, 0.3, 0.15, 0.05], [0.7, 0.2, 0.0999, 1e-4])]
    rng, bound, seen = np.random.default_rng(0), 1e-4, 0
    evidence = [Evidence() for _ in range(60)]
    for one in evidence:
        for number in range(600):
            one.add(number % 2, laws[number % 2], 0)
    share = evidence[0].least_share(bound, 0.0)
    for _ in evidence:
        one = Evidence()
        for number in range(600):
            law = laws[number % 2]
            one.add(number % 2, law, 0 if rng.random() < share else int(rng.choice(4, p=law.p)))
        seen += one.p_values(0.0)["rank"] < bound
    assert 0.1 < share < 0.4 and seen >= 54
    assert Evidence().least_share(bound, 0.0) == math.inf


class Scripted:
    """Writes a text whatever it is asked; its law is sure, but for places where two tokens are nearly as likely."""

    def __init__(self, text, near=(), ends=False):
        self.text, self.near, self.ends, self.asked = text, dict(near), ends, []

    def answer(self, prompt, said, count, sampling, *, seed=0, shown=0):
        self.asked.append((said, count))
        places = range(len(said), min(len(said) + count, len(self.text)))
        tokens = tuple(self.text[place] for place in places)
        laws = [{self.text[n]: -0.1} | ({self.near[n]: -0.1 - 1e-6} if n in self.near else {}) for n in places]
        return Answer((*tokens, END) if self.ends and len(said) + count >= len(self.text) else tokens, tuple(laws))


def test_a_fault_behind_an_early_tie_is_seen():
    plain = Scripted([5, 6, 7, 8, 9], near={1: 60})
    found = walk(plain, plain, (), (5, 60, 7, 80, 9))
    assert [(one.place, one.drafting, one.plain, one.verdict) for one in differences([found])] == [
        (1, 60, 6, "tie"), (3, 80, 8, "fault"),
    ]  # fmt: skip
    assert ((5, 60), 3) in plain.asked and len(found.laws) == 5, "it goes on from the drafting server's prefix"


def test_an_answer_that_ends_elsewhere():
    plain = Scripted([5, 6, 7], ends=True)
    assert [one.verdict for one in differences([walk(plain, plain, (), (5, 6, 7, END))])] == []
    late = differences([walk(plain, plain, (), (5, 6, 7, 8))])
    early = differences([walk(plain, plain, (), (5, 6, END))])
    assert [(one.place, one.drafting, one.plain, one.verdict) for one in late] == [(3, 8, END, "fault")]
    assert [(one.place, one.drafting, one.plain, one.verdict) for one in early] == [(2, END, 7, "fault")]
    assert math.isinf(late[0].gap)


def test_an_answer_that_ends_with_a_tied_token():
    """Nobody knows whether the plain server would have ended behind it: asked from there, it goes on."""
    plain = Scripted([5, 6, 7, 8], near={2: 60})
    assert [(one.place, one.verdict) for one in differences([walk(plain, plain, (), (5, 6, 60, END))])] == [(2, "tie")]


def test_draws_begin_before_sure_tokens_that_an_uncertain_one_follows():
    sure, open_ = {1: math.log(0.99)}, {1: math.log(0.3), 2: math.log(0.3), 3: math.log(0.3)}
    found = contexts([Walk((1,) * 9, [open_, sure, open_, open_, sure, sure, sure, open_, sure])])
    assert [(len(one.said), one.count) for one in found[:3]] in ([(6, 4), (5, 5), (4, 6)], [(1, 4), (5, 5), (4, 6)])
    assert contexts([Walk((1,), [sure])])[0].said == (), "answers of one token: from their begin"


def test_counters_of_speculation():
    names = ["spec_decode_num_drafts", *(f"spec_decode_num_accepted_tokens_per_pos/{n}" for n in range(3))]
    part = speculation(dict.fromkeys(names, 10.0), dict(zip(names, (50.0, 40.0, 30.0, 15.0), strict=True)))
    assert part == {"drafts": 40, "tau": 1 + 55 / 40, "accepted": [0.75, 0.5, 0.125], "rejected": 1 - 55 / 90}
    assert speculation({}, {}) == {} and math.isnan(speculation({}, {names[0]: 0.0})["tau"])


def test_power_is_told():
    little = audited(None, prompts=2, count=8, draws=30)
    assert len(little.missing) == 2 and not little.faults and little.seen["greedy"] < 5
    none = audited("plain", prompts=2, count=8, draws=30)
    assert "drafted nothing" in none.missing[0] and none.seen == {"greedy": 0.0, "drawn": 0.0}
    cured = audited(None, prompts=2, count=8, draws=int(re.search(r"about ([\d,]+) draws", little.missing[1])[1]))
    assert 0.7 < cured.seen["drawn"] / NEEDED["drawn"] < 1.5, "by so many draws it is"
