"""An engine as a process beside a rank: jobs done once, restarts, hangs, full disks, shared folders, and no orphans.

The engines are a few lines of Python behind the package's own files.
"""

import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.trainers.run.stopping import Stop, Stopped
from draftsmith.trainers.serve import engine_process as process
from draftsmith.trainers.serve import engine_section
from draftsmith.trainers.serve.engine_answers import Asked, Job
from draftsmith.trainers.serve.engine_process import EngineProcess
from draftsmith.trainers.serve.workers import draftsmith_jobs
from fails import fails_with

JOBS = Path(draftsmith_jobs.__file__).parent
HEAD = f"""
import os, pathlib, signal, subprocess, sys, time
sys.path.append({str(JOBS)!r})
from draftsmith_jobs import InTurn, prompt_hash, serve
folder = pathlib.Path(sys.argv[1])
first = not (folder.parent / "mark").exists()
(folder.parent / "mark").touch()
"""
ANSWER = """
def answer(name, requests, pictures):
    return [{'prompt_tokens': len(r['ids']), 'prompt': prompt_hash(n, r['ids']), 'tokens': r['ids'], 'stop': 'length'}
            for n, r in enumerate(requests)]
serve(folder, InTurn(answer))
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """engine(text of the program, ...) -> EngineProcess."""
    monkeypatch.setattr(process, "_WORKERS", tmp_path)

    def make(text, **settings):
        (tmp_path / "vllm_worker.py").write_text(HEAD + text)
        known = {"python": sys.executable, "stop": Stop(), "key": "stages.x.engine"}
        return EngineProcess(tmp_path / "engine-0", {}, **(known | settings))

    return make


def request(*ids):
    return [{"ids": list(ids), "pictures": []}]


def answers(running, job, *ids, **how):
    """The ids of the answer to `request(*ids)`: `ANSWER` repeats the prompt."""
    (answer,) = running.wait(job, Job([Asked("one", torch.tensor(ids), len(ids))], 100, ends=()), **how)
    return answer.tokens


def test_jobs_come_back_in_the_order_in_which_they_are_waited_for(engine, tmp_path):
    with engine(ANSWER) as running:
        running.start()
        names = [running.submit(request(n), {}) for n in range(3)]
        assert [answers(running, names[n], n) for n in (2, 1, 0)] == [[2], [1], [0]]
        assert running.num_starts == 1 and not list((tmp_path / "engine-0" / "jobs").iterdir())
    assert not (tmp_path / "engine-0").exists()


def test_a_job_is_done_once_though_its_answer_is_read_first(tmp_path):
    """An answer is removed before its job is, or both between two looks: neither is a new job."""
    for name in ("jobs", "done"):
        (tmp_path / name).mkdir()
    done = []
    doing = threading.Thread(
        target=draftsmith_jobs.serve,
        args=(tmp_path, draftsmith_jobs.InTurn(lambda name, *job: done.append(name) or [])),
    )
    doing.start()
    for name in ("000000000", "000000001"):
        (tmp_path / "jobs" / f"{name}.partial").write_text('{"requests": []}')
        (tmp_path / "jobs" / f"{name}.partial").rename(tmp_path / "jobs" / f"{name}.json")
        while not (tmp_path / "done" / f"{name}.json").exists():
            time.sleep(0.002)
        (tmp_path / "done" / f"{name}.json").unlink()
        time.sleep(0.05)  # ten looks
    (tmp_path / "jobs" / "end").touch()
    doing.join(5)
    assert done == ["000000000", "000000001"]


class Requests:
    """vLLM 0.32's ids: with a random end where they are handed out, and without it in what comes back."""

    def __init__(self, *steps):
        self.llm_engine, self.steps, self.count = self, list(steps), 0

    def enqueue(self, prompts, sampling, use_tqdm):
        self.count += len(prompts)
        return [f"{number}-{uuid.uuid4().hex[:8]}" for number in range(self.count - len(prompts), self.count)]

    def step(self):
        answer = {"token_ids": [4], "finish_reason": "stop"}
        return [
            SimpleNamespace(finished=True, request_id=str(n), prompt_token_ids=[1] * (n + 1),
                            outputs=[SimpleNamespace(**answer)]) for n in self.steps.pop(0)
        ]  # fmt: skip


def test_requests_of_several_jobs_end_in_any_order(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    monkeypatch.setitem(sys.modules, "draftsmith_jobs", draftsmith_jobs)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # which the program sets before vLLM is imported
    batches = importlib.import_module("draftsmith.trainers.serve.workers.vllm_worker").Batches
    jobs = batches(Requests([1], [2, 0], [3]), tmp_path, None)
    for name in ("a", "b"):
        jobs.begin(name, [request(1)[0] | {"sampling": {}}, request(2)[0] | {"sampling": {}}], [[], []])
    done = [{name: [line["prompt_tokens"] for line in lines] for name, lines in jobs.step().items()} for _ in range(3)]
    assert done == [{}, {"a": [1, 2]}, {"b": [3, 4]}]
    assert not jobs.open and not jobs.places


@pytest.mark.parametrize(("dies", "words"), [
    ("os.kill(os.getpid(), signal.SIGKILL)",
     r"killed by signal 9 \(SIGKILL\)(.|\n)*stages.x.engine.gpu_memory_util"),
    ("raise OSError(28, 'No space left on device')", r"exit code 1(.|\n)*Errno 28(.|\n)*stages.x.engine.scratch"),
    ("time.sleep(600)", r"gave no sign for 0.5 s(.|\n)*stages.x.engine.timeout_s"),
    ("(folder / 'alive').touch(); os.utime(folder / 'alive', (2**33, 2**33)); time.sleep(600)", "gave no sign for"),
], ids=["memory", "disk", "hang", "hang of tomorrow"])  # fmt: skip
def test_an_engine_that_never_answers_is_a_fault_with_its_cure(engine, dies, words):
    with pytest.raises(UserError, match=words) as caught, engine(dies, timeout_s=0.5 if "sleep" in dies else 60) as one:
        one.start()
    assert "3 times in a row" in str(caught.value) and "log.txt" in str(caught.value)
    left = sorted(path.name for path in one.folder.iterdir() if path.name != "alive")
    assert left == ["done", "engine.json", "lock", "log-1.txt", "log-2.txt", "log.txt"], "what it said is kept alone"


def test_an_engine_that_hangs_once_is_started_again(engine):
    said = []

    def say(line):
        said.append(line)
        running.timeout_s = 600  # a busy machine

    with engine("if first: time.sleep(600)\n" + ANSWER, timeout_s=1.0, say=say) as running:
        assert answers(running, running.submit(request(7), {}), 7) == [7]
        assert running.num_starts == 2
    assert len(said) == 1 and "gave no sign for 1 s" in said[0] and "log-1.txt" in said[0]


def test_a_full_disk_names_the_folder_and_the_key(engine, tmp_path):
    with engine(ANSWER) as running:
        (tmp_path / "engine-0" / "jobs" / "000000000.partial").symlink_to("/dev/full")
        fails_with(r"No space left(.|\n)*stages.x.engine.scratch", running.submit, request(1), {})
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written(.|\n)*stages.x.engine.scratch"):
        EngineProcess(tmp_path / "file" / "0", {}, python="", stop=Stop(), key="stages.x.engine")


def test_two_runs_never_share_a_folder(engine, tmp_path):
    with engine(ANSWER) as running:
        job = running.submit(request(1), {})
        fails_with(rf"another run's engine(.|\n)*process {os.getpid()}(.|\n)*x.engine.scratch", engine, ANSWER)
        assert answers(running, job, 1) == [1]
    scratch, places = SimpleNamespace(scratch=str(tmp_path / "scratch")), set()
    for above in ("a", "b"):
        with engine_section._place(
            scratch, SimpleNamespace(folder=tmp_path / above / "run" / "head"), "engine"
        ) as place:
            places.add(place)
    assert len(places) == 2 and all(place.name.startswith("run-head-") for place in places)


def test_a_stop_ends_the_loading_and_not_the_step_in_hand(engine):
    """Other ranks are inside the step, and its state is saved after it."""
    stop = Stop()
    with engine("time.sleep(0.3)\n" + ANSWER, stop=stop) as running:
        running.start()
        job = running.submit(request(1), {})
        stop.raised = True
        assert answers(running, job, 1, stops=False) == [1]
        fails_with("while an engine answered", answers, running, running.submit(request(2), {}), 2, error=Stopped)
    loading = engine("time.sleep(600)", stop=stop)
    with pytest.raises(Stopped, match="while an engine was loaded"), loading:
        loading.start()
    assert loading._process.poll() == -signal.SIGKILL


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("while_it", ["loads", "works"])
def test_no_process_outlives_its_rank(engine, tmp_path, how, while_it):
    """Whatever it is doing, and with the processes that it started."""
    own = "(folder.parent / 'own').write_text(str(subprocess.Popen(['sleep', '600']).pid))\n"
    text = own + ("time.sleep(600)" if while_it == "loads" else "serve(folder, InTurn(lambda *job: time.sleep(600)))")

    def rank():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        running = engine(text)
        running.submit(request(1), {})
        (tmp_path / "engine").write_text(str(running._process.pid))
        time.sleep(600)

    parent = multiprocessing.get_context("fork").Process(target=rank)
    parent.start()
    while not ((tmp_path / "own").is_file() and (tmp_path / "own").read_text() and (tmp_path / "engine").is_file()):
        time.sleep(0.01)
    time.sleep(0.1)
    pids = [int((tmp_path / name).read_text()) for name in ("engine", "own")]
    assert all(psutil.pid_exists(pid) for pid in pids)
    os.kill(parent.pid, how)
    parent.join(5)
    until = time.monotonic() + 10
    while any(map(_lives, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(map(_lives, pids))


def _lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
