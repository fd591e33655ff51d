"""What each request of an evaluation is decoded with, and under which name its rows are kept."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from draftsmith.core.batch import ImageRequest
from draftsmith.eval.first_difference import Difference
from draftsmith.eval.policies import Chain
from draftsmith.trainers.evaluate import measuring
from draftsmith.trainers.evaluate.measuring import Measuring, clock_of
from draftsmith.trainers.evaluate.requests import Opened, RequestSet
from draftsmith.trainers.run.progress import StageLine
from draftsmith.trainers.run.stopping import Stop
from fails import fails_with

NUMBER = 4  # of the request


class Drafting:
    """A method, as far as decoding by it asks for it."""

    name, drafter_name, mode, members = "M", "draft", "M", ("M",)
    drafter, policy = object(), Chain(2)
    method = SimpleNamespace(draw="top-k", visual_skip=None, allowed=lambda temperature: True)

    def rule(self, temperature):
        return measuring.RULES["sampling" if temperature else "greedy"]

    def details(self, opened, max_new_tokens):
        return {}


@pytest.fixture
def decoded(monkeypatch):
    """(drafter, temperature, top-k, top-p, length, seed) of each call of `generate`, and what measures."""
    calls, clocks = [], []

    def generate(target, drafter, request, decoding, generator, *, embedded, clock):
        clocks.append(clock)
        warp = decoding.warp
        seed = generator.initial_seed()
        calls.append((drafter, warp.temperature, warp.top_k, warp.top_p, decoding.max_new_tokens, seed))
        times = {"prefill_s": 1.0, "draft_prefill_s": 0.0, "pruning_s": 0.0, "captioning_s": 0.0, "total_s": 1.0}
        return SimpleNamespace(tokens=[1], cycles=[], **times, stop="eos", replayed=(0, 0))

    monkeypatch.setattr(measuring, "generate", generate)
    stage = SimpleNamespace(
        temperatures=[0.0, 0.7], max_new_tokens=[8, 16], top_k=5, top_p=0.9, repeats=2, warmup=0, kind="evaluate",
        clock="wall", clocks=clocks,
    )  # fmt: skip
    return calls, stage


def of(stage, folder):
    context = SimpleNamespace(seed=3, folder=folder, say=lambda line: None, stop=Stop(), progress=StageLine("evaluate"))
    return Measuring(stage, context, None, [Drafting()], (), tokenizer=object())


OPENED = Opened(ImageRequest("r", 0), prompt_tokens=1)


def requests(**about):
    return RequestSet(**({"benchmark": "b", "medium": "drawn"} | about))


def test_draws_follow_from_the_request_and_settings_from_the_cell(decoded, tmp_path):
    """By every method and repeat alike: other draws would make their answers differ for nothing."""
    calls, stage = decoded
    one = of(stage, tmp_path)
    common = {"benchmark": "b", "request": "r", "temperature": 0.7, "max_new_tokens": 16, "medium": "drawn"}
    one._rows(NUMBER, OPENED, one.decodings(0.7, 16), common, {})
    seed = 3 * 1_000_003 + NUMBER
    assert calls == 2 * [(None, 0.7, 5, 0.9, 16, seed), (Drafting.drafter, 0.7, 5, 0.9, 16, seed)]
    assert one.seed(NUMBER) != one.seed(NUMBER + 1)


@pytest.mark.parametrize(("name", "counts"), [("wall", None), ("thread", time.thread_time)])
def test_plain_decoding_and_methods_are_timed_by_the_same_clock(decoded, tmp_path, monkeypatch, name, counts):
    _, stage = decoded
    stage.clock = name
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    one = replace(of(stage, tmp_path), target=SimpleNamespace(device=torch.device("cpu")))
    common = {"benchmark": "b", "request": "r", "temperature": 0.7, "max_new_tokens": 16, "medium": "drawn"}
    one._rows(NUMBER, OPENED, one.decodings(0.7, 16), common, {})
    assert stage.clocks == [counts] * 4


@pytest.mark.parametrize(("device", "threads", "found"), [("cpu", 2, "2 threads"), ("cuda:1", 1, "cuda:1")])
def test_seconds_of_one_thread_need_all_work_on_it(monkeypatch, device, threads, found):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    target = SimpleNamespace(device=torch.device(device))
    assert clock_of("wall", target) is None
    fails_with(found, clock_of, "thread", target)


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

    def generate(target, drafter, request, decoding, generator, **named):
        answer = plain(target, drafter, request, decoding, generator, **named)
        return answer if drafter is None else SimpleNamespace(**(vars(answer) | {"tokens": [2]}))

    drafting = Drafting()
    drafting.rule = lambda temperature: measuring.RULES.get(rule, rule)
    asked = []
    monkeypatch.setattr(measuring, "generate", generate)
    tie = Difference(1, 5, 6, 0.5, 2.0, True)
    monkeypatch.setattr(measuring, "first_difference", lambda *a: asked.append(a[2:4]) or tie)
    measured = of(decoded[1], tmp_path)
    measured.drafting[0] = drafting
    common = {"benchmark": "b", "request": "r", "temperature": 0.0, "max_new_tokens": 8, "medium": "drawn"}
    rows = measured._rows(0, OPENED, measured.decodings(0.0, 8), common, {})
    assert [row.identical for row in rows] == [True, False]
    assert ("difference" in rows[1].details) == explained and asked == [([1], [2])] * explained


def clips(opened, *budgets, count=3):
    """One set at several lengths; `opened` notes (budget, index) of each request that is opened."""

    def at(budget):
        def one(index, target):
            opened.append((budget, index))
            return Opened(ImageRequest("r", 0, name=f"r{index}"), None, 1, int(budget))

        names = {"__len__": lambda self: count, "open": staticmethod(one)}
        return type("Set", (RequestSet,), names)(benchmark="clips", budget=budget, medium="video")

    return [at(budget) for budget in budgets]


def test_lengths_of_clips_take_turns_request_by_request(decoded, tmp_path):
    """Not length after length: what was measured later would look slower for it on a machine that grows busy."""
    calls, stage = decoded
    stage.temperatures, stage.max_new_tokens, stage.repeats, stage.warmup = [0.0], [8], 1, 1
    opened = []
    rows = of(stage, tmp_path).all(clips(opened, "36", "288"))
    warm_up = [("36", 0), ("288", 0)]
    assert opened == warm_up + [(budget, index) for index in range(3) for budget in ("36", "288")]
    assert [(row.budget, row.request) for row in rows if row.method == "M"] == [
        (budget, f"r{index}") for budget in ("36", "288") for index in range(3)
    ]
    seeds = [seed for drafter, *_, seed in calls if drafter is None]
    assert seeds[2:] == [3 * 1_000_003 + index for index in (0, 0, 1, 1, 2, 2)], "draws of the request, at any length"


def test_lengths_measured_alone_and_in_turn_are_kept_alike(decoded, tmp_path):
    """A run that was begun length by length goes on in turn, and rows are those of each length alone."""
    _, stage = decoded
    opened, alone = [], []
    short, long = clips(alone, "36", "288")
    apart = [*of(stage, tmp_path / "apart").all([short]), *of(stage, tmp_path / "apart").all([long])]
    begun = of(stage, tmp_path / "begun")
    begun.at(clips([], "36"), 0.0, 8)
    together = begun.all(clips(opened, "36", "288"))
    assert together == apart
    # Two temperatures, two lengths of answers: of eight cells one was there.
    assert opened.count(("36", 0)) == 3 and opened.count(("288", 0)) == 4
