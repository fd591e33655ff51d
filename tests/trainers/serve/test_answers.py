"""An engine's files: what cannot be an answer is refused by its file."""

import json
import os
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.trainers.evaluate import engine_measuring
from draftsmith.trainers.evaluate.engine_measuring import ServedMeasuring
from draftsmith.trainers.run.stopping import Stop
from draftsmith.trainers.serve import engine_process as process
from draftsmith.trainers.serve.engine_answers import Asked, Job, read_answers, read_states
from draftsmith.trainers.serve.engine_process import EngineProcess
from draftsmith.trainers.serve.workers.draftsmith_jobs import prompt_hash
from fails import fails_with
from safetensors.torch import save_file

PROMPTS = (torch.tensor([1, 5, 6]), torch.tensor([1, 5]))
ENDS = (2, 90)
JOB = Job([Asked("a.json[0]", PROMPTS[0], 4), Asked("a.json[1]", PROMPTS[1], 4)], 100, never={50}, ends=ENDS)
HASHES = [prompt_hash(number, prompt.tolist()) for number, prompt in enumerate(PROMPTS)]
GOOD = [{"prompt_tokens": 3, "prompt": HASHES[0], "tokens": [7, 8, 90], "stop": "eos"},
        {"prompt_tokens": 2, "prompt": HASHES[1], "tokens": [7, 8, 9, 10], "stop": "length"}]  # fmt: skip


def first(**changes):
    """The good file with other values in its first answer; None removes one."""
    line = {key: value for key, value in (GOOD[0] | changes).items() if value is not ...}
    return json.dumps({"answers": [line, GOOD[1]]})


def tokens(*ids, **more):
    return first(tokens=list(ids), **more)


WRONG = {
    "a float": (tokens(7, 8.5, 2), r"answers.0.tokens.1: .*integer, found 8.5"),
    "negative": (tokens(7, -1, 2), r"answers.0.tokens.1: .*greater than or equal to 0, found -1"),
    "too large": (tokens(7, 100, 2), "wrote id 100, which has no token"),
    "without a token": (tokens(7, 50, 2), "wrote id 50, which has no token"),
    "true": (tokens(7, True, 2), "answers.0.tokens.1"),
    "no tokens": (first(tokens=[]), "answers.0.tokens"),
    "more than asked for": (tokens(7, 8, 9, 10, 2), "wrote 5 of 4 tokens"),
    "fewer, for length": (tokens(7, 8, stop="length"), "wrote 2 of 4 tokens, and 8 is no end"),
    "fewer, at no end": (tokens(7, 8), "wrote 2 of 4 tokens, and 8 is no end"),
    "an unknown reason": (first(stop="abort"), r"answers.0.stop: expected 'eos' or 'length', found 'abort'"),
    "another prompt": (first(prompt_tokens=4), "prompt has 4 tokens, and ours 3"),
    "to other ids": (first(prompt=prompt_hash(0, [1, 6, 5])), "is to another request, or to other ids"),
    "to the same ids of another request": (first(prompt=prompt_hash(1, [1, 5, 6])), "is to another request"),
    "no prompt": (first(prompt=...), "answers.0.prompt: Field required"),
    "a key is missing": (first(stop=...), "answers.0.stop: Field required"),
    "a key too many": (first(logprobs=[]), "answers.0.logprobs"),
    "one answer too few": (json.dumps({"answers": GOOD[:1]}), "asked 2 requests, and answered 1"),
    "in another order": (json.dumps({"answers": GOOD[::-1]}), "prompt has 2 tokens, and ours 3"),
    "answers by name": (json.dumps({"answers": {"0": GOOD[0]}}), "answers: "),
    "cut": (json.dumps({"answers": GOOD})[:-20], "not valid JSON"),
    "empty": ("", "the file is empty"),
    "other bytes": (b"\xff\xfe\x00", "UTF-16 text"),
    "huge": (lambda path: os.truncate(path, 1 << 40), "larger than 67,108,864 bytes"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "a named pipe"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "a folder"),
}  # fmt: skip


def put(path, content):
    path.write_bytes(b"" if callable(content) else content if isinstance(content, bytes) else content.encode())
    if callable(content):
        content(path)


@pytest.mark.parametrize(("content", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_answer_is_refused_by_its_file(tmp_path, content, words):
    path = tmp_path / "000000003.json"
    put(path, content)
    caught = fails_with(words, read_answers, path, JOB)
    assert caught.where.startswith(str(path)) and "engine" in caught.problem and caught.hint


def test_a_right_answer_is_read(tmp_path):
    """Also one whose last token is an end, and the last that it may write: engines call that the length."""
    path = tmp_path / "000000003.json"
    path.write_text(json.dumps({"answers": GOOD}))
    assert [(a.tokens, a.stop) for a in read_answers(path, JOB)] == [([7, 8, 90], "eos"), ([7, 8, 9, 10], "length")]
    path.write_text(tokens(7, 8, 9, 2, stop="length"))
    assert read_answers(path, JOB)[0].stop == "eos"


def test_answers_of_equal_length_cannot_change_places(tmp_path):
    """Reversed or turned, each is an answer that could be the other's: of like questions about several pictures."""
    prompts = [torch.tensor(ids) for ids in ([1, 5, 6], [1, 5, 7], [1, 5, 6])]
    job = Job([Asked(f"a.json[{n}]", prompt, 4) for n, prompt in enumerate(prompts)], 100, ends=ENDS)
    lines = [GOOD[1] | {"prompt_tokens": 3, "prompt": prompt_hash(n, p.tolist())} for n, p in enumerate(prompts)]
    path = tmp_path / "000000003.json"
    path.write_text(json.dumps({"answers": lines}))
    assert len(read_answers(path, job)) == 3
    for other in (lines[::-1], [*lines[1:], lines[0]], [lines[1], lines[0], lines[2]], [lines[0]] * 3):
        path.write_text(json.dumps({"answers": other}))
        fails_with("the engine's answer is to another request", read_answers, path, job)


STATES = {"hidden_states": torch.randn(3, 2, 8), "token_ids": PROMPTS[0]}
WRONG_STATES = {
    "one place fewer": (STATES | {"hidden_states": torch.randn(2, 2, 8)}, r"shape \(2, 2, 8\), and \(3, 2, 8\)"),
    "another order": (STATES | {"hidden_states": torch.randn(2, 3, 8)}, "shape"),
    "flat": (STATES | {"hidden_states": torch.randn(48)}, "shape"),
    "not finite": (STATES | {"hidden_states": torch.full((3, 2, 8), float("nan"))}, "not finite numbers"),
    "whole numbers": (STATES | {"hidden_states": torch.zeros(3, 2, 8, dtype=torch.int32)}, "not finite numbers"),
    "a layer of zeros": (STATES | {"hidden_states": torch.tensor([1.0, 0.0])[:, None].expand(3, 2, 8).contiguous()},
                         "a layer of the engine's states is zero at every place"),
    "other ids": (STATES | {"token_ids": torch.tensor([1, 5, 7])}, "of other ids"),
    "no ids": ({"hidden_states": STATES["hidden_states"]}, "lack token_ids"),
    "no states": ({"token_ids": PROMPTS[0]}, "lack hidden_states"),
    "cut": (lambda path: os.truncate(path, path.stat().st_size - 9), "cannot be read"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "a named pipe"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "a folder"),
    "gone": (lambda path: path.unlink(), "file not found"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "words"), WRONG_STATES.values(), ids=WRONG_STATES)
def test_wrong_states_are_refused_by_their_file(tmp_path, content, words):
    path = tmp_path / "000000003-0.safetensors"
    save_file({k: v.contiguous() for k, v in (STATES if callable(content) else content).items()}, path)
    if callable(content):
        content(path)
    caught = fails_with(words, read_states, path, JOB.requests[0], (2, 8))
    assert caught.where.startswith(str(path)) and caught.hint


@pytest.mark.parametrize("kind", ["half", "bfloat16", "float", "double"])
def test_states_of_any_float_are_read(tmp_path, kind):
    path = tmp_path / "000000003-0.safetensors"
    states = getattr(STATES["hidden_states"], kind)()
    save_file({"hidden_states": states, "token_ids": PROMPTS[0].int()}, path)
    assert torch.equal(read_states(path, JOB.requests[0], (2, 8)), states)


@pytest.mark.parametrize("way", ["pipe", "text"])
def test_a_wrong_answer_ends_at_once_and_is_kept(tmp_path, monkeypatch, way):
    """A pipe once held the run for ever."""
    monkeypatch.setattr(process, "_WORKERS", tmp_path)
    write = {
        "pipe": "os.mkfifo(folder / 'done/000000000.json')",
        "text": "(folder / 'done/000000000.json').write_text('none')",
    }[way]
    (tmp_path / "vllm_worker.py").write_text(f"""
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
print("what it said")
{write}
time.sleep(600)
""")
    job, began = Job(JOB.requests[:1], 100, states=(2, 8)), time.monotonic()
    with (
        pytest.raises(UserError) as caught,
        EngineProcess(tmp_path / "engine-0", {}, python=sys.executable, stop=Stop()) as running,
    ):
        running.wait(running.submit([{"ids": [1, 5, 6], "pictures": []}], {}), job)
    assert time.monotonic() - began < 60
    kept = tmp_path / "engine-0" / "done" / "000000000.json"
    assert caught.value.where.startswith(str(kept)) and kept.exists()
    assert (tmp_path / "engine-0" / "log.txt").read_text().startswith("what it said")


def test_each_request_of_an_engine_evaluation_has_its_own_seed(monkeypatch):
    """That of our own loop for the same request, so that an answer can be made again alone."""
    monkeypatch.setattr(engine_measuring, "engine_job", lambda requests, processor: ([{} for _ in requests], {}))
    jobs = []
    measuring = object.__new__(ServedMeasuring)
    vars(measuring).update(
        context=SimpleNamespace(seed=3), stage=SimpleNamespace(top_k=0, top_p=1.0), eos_ids=[2],
        processor=SimpleNamespace(num_token_ids=9),
        section=SimpleNamespace(sampling=lambda warp, **how: {"seed": how["seed"]}),
        process=SimpleNamespace(submit=lambda lines, pictures: jobs.extend(lines), wait=lambda name, job: []),
    )  # fmt: skip
    request = SimpleNamespace(name="one", ids=torch.tensor([1, 5]))
    measuring._ask({number: SimpleNamespace(request=request) for number in (0, 4, 7)}, 1.0, 8, 2)
    assert [line["sampling"]["seed"] for line in jobs] == [3 * 1_000_003 + number for number in (0, 4, 7)]
