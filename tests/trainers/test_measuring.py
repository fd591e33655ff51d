"""What each request of an evaluation is decoded with, and under which name its rows are kept."""

from types import SimpleNamespace

import pytest
from draftsmith.core.batch import ImageRequest
from draftsmith.eval.policies import Chain
from draftsmith.trainers.evaluation import measuring
from draftsmith.trainers.evaluation.measuring import Measuring

NUMBER = 4  # of the request


class Drafting:
    """A method, as far as decoding by it asks for it."""

    name, drafter_name, mode, members = "M", "draft", "M", ("M",)
    drafter, policy = object(), Chain(2)
    method = SimpleNamespace(draw="top-k", allowed=lambda temperature: True)

    def rule(self, temperature):
        return measuring.RULES["sampling" if temperature else "greedy"]

    def details(self, opened, max_new_tokens):
        return {}


@pytest.fixture
def decoded(monkeypatch):
    """(drafter, temperature, top-k, top-p, length, seed) of each call of `generate`, and what measures."""
    calls = []

    def generate(target, drafter, request, decoding, generator, *, embedded):
        warp = decoding.warp
        seed = generator.initial_seed()
        calls.append((drafter, warp.temperature, warp.top_k, warp.top_p, decoding.max_new_tokens, seed))
        return SimpleNamespace(
            tokens=[1], cycles=[], prefill_s=1.0, draft_prefill_s=0.0, pruning_s=0.0, total_s=1.0, stop="eos"
        )

    monkeypatch.setattr(measuring, "generate", generate)
    stage = SimpleNamespace(
        temperatures=[0.0, 0.7], max_new_tokens=[8, 16], top_k=5, top_p=0.9, repeats=2, warmup=0, kind="evaluate"
    )
    return calls, stage


def of(stage, folder):
    context = SimpleNamespace(seed=3, folder=folder, say=lambda line: None, stop=SimpleNamespace(check=lambda: None))
    return Measuring(stage, context, None, [Drafting()], (), tokenizer=object())


def requests(**about):
    opened = SimpleNamespace(request=ImageRequest("r", 0), prompt_tokens=1, visual_tokens=0, answer=None)
    known = {"benchmark": "b", "turn": "", "budget": "", "medium": "drawn", "open": lambda index, target: opened}
    return SimpleNamespace(**(known | about))


def test_draws_follow_from_the_request_and_settings_from_the_cell(decoded, tmp_path):
    """By every method and repeat alike: other draws would make their answers differ for nothing."""
    calls, stage = decoded
    one = of(stage, tmp_path)
    opened = requests().open(0, None)
    common = {"benchmark": "b", "request": "r", "temperature": 0.7, "max_new_tokens": 16, "medium": "drawn"}
    one._rows(NUMBER, opened, one.decodings(0.7, 16), common)
    seed = 3 * 1_000_003 + NUMBER
    assert calls == 2 * [(None, 0.7, 5, 0.9, 16, seed), (Drafting.drafter, 0.7, 5, 0.9, 16, seed)]
    assert one.seed(NUMBER) != one.seed(NUMBER + 1)


def test_rows_are_kept_apart_by_all_that_a_cell_differs_in(decoded, tmp_path):
    _, stage = decoded
    one = of(stage, tmp_path)
    sets = [requests(), requests(benchmark="c"), requests(turn="next"), requests(budget="54")]
    stems = {one.stem(some, temperature, length) for some in sets for temperature in (0.0, 0.7) for length in (8, 16)}
    assert len(stems) == 4 * 2 * 2


@pytest.mark.parametrize(("rule", "explained"), [("greedy", True), ("another", False)])
def test_a_greedy_answer_that_is_not_plain_decodings_is_explained(decoded, tmp_path, monkeypatch, rule, explained):
    """A relaxed rule's answers may differ, and nothing is decoded again for them."""
    plain = measuring.generate

    def generate(target, drafter, request, decoding, generator, *, embedded):
        answer = plain(target, drafter, request, decoding, generator, embedded=embedded)
        return answer if drafter is None else SimpleNamespace(**(vars(answer) | {"tokens": [2]}))

    drafting = Drafting()
    drafting.rule = lambda temperature: measuring.RULES.get(rule, rule)
    asked = []
    monkeypatch.setattr(measuring, "generate", generate)
    monkeypatch.setattr(measuring, "first_difference", lambda *a: asked.append(a[2:4]) or SimpleNamespace(to_json=dict))
    measured = of(decoded[1], tmp_path)
    measured.drafting[0] = drafting
    opened = requests().open(0, None)
    common = {"benchmark": "b", "request": "r", "temperature": 0.0, "max_new_tokens": 8, "medium": "drawn"}
    rows = measured._rows(0, opened, measured.decodings(0.0, 8), common)
    assert [row.identical for row in rows] == [True, False]
    assert ("difference" in rows[1].details) == explained and asked == [([1], [2])] * explained
