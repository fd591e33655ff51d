"""Asked to stop at any moment, a run stops there, and the same command ends as if nobody had asked."""

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from called_ranks import call_two_ranks
from draftsmith.core.results import DONE
from draftsmith.trainers.evaluate.resume_log import ResumeLog, resumed
from draftsmith.trainers.run.run import run_stages
from draftsmith.trainers.run.stage import Planned, Stage
from draftsmith.trainers.run.stopping import Stop, Stopped
from draftsmith.trainers.train.checkpoint import CheckpointConfig
from draftsmith.trainers.train.fit import OptimConfig
from draftsmith.trainers.train.loop import Training, train
from fails import fails_with
from ranks_run import FORKS, run_ranks
from stages_run import contexts
from training import Samples, engine, loader, module, weights

STEPS, EVERY = 5, 2  # a validation after steps 2, 4 and 5
ROOT = Path(__file__).resolve().parents[2]


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def trained(folder: Path, *, asked=lambda place: False):
    """One life of a training with validations of three batches, which draw at random as a module in training does.

    Returns what was logged, and the weights. `asked` is told each place that a signal could come at.
    """
    logged = []

    def at(*place) -> None:
        if asked(place):
            terminate()

    with Stop() as stop:

        def validate(engine, step):
            drawn = []
            for batch in range(3):
                stop.agree("in a validation")
                drawn.append(float(torch.rand(())))
                at("validation", step, batch)
            return {"val": sum(drawn)}

        def log(values, step):
            logged.append((step, values.get("loss", values.get("val"))))
            at("step" if "loss" in values else "validated", step)

        torch.manual_seed(0)
        model, optim = module(), OptimConfig(lr=1e-2)
        built = engine(model, optim, steps=STEPS)
        make = functools.partial(loader, Samples(), STEPS)
        training = Training(torch.nn.Module(), make, STEPS, lambda _: None, validate=validate, validate_every=EVERY)
        train(
            built, training, CheckpointConfig(every=None), log_every=1, folder=folder, fingerprint="f", log=log,
            rewind=lambda step: logged.clear(), say=lambda text: None, stop=stop,
        )  # fmt: skip
        return logged, weights(built), stop


# Where the signal comes -> the step that the run stops after: the all-reduce of the next step carries the flag.
PLACES = {
    ("step", 3): 4, ("validated", 4): 5, ("step", 5): 5, ("validation", 2, 0): 2, ("validation", 5, 1): 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_around_a_validation_the_run_stops_and_validates_when_it_comes_back(alone, place, tmp_path):
    """A signal in the last step or the last validation was swallowed, and the run went on into the next stage."""
    logged, result, _ = alone
    stopped = fails_with("", trained, tmp_path, asked=lambda at: at == place, error=Stopped)
    assert stopped.step == PLACES[place]
    again, weights_again, _ = trained(tmp_path)
    cut = len(logged) - len(again)
    assert again == logged[cut:]
    assert [step for step, _ in again][:1] == [stopped.step], "the validation that was due comes first"
    assert result.keys() == weights_again.keys()
    assert all(torch.equal(weights_again[name], result[name]) for name in result)


def test_behind_the_last_validation_the_training_is_done_and_the_flag_stays(alone, tmp_path):
    """The stage writes its result, which is less than a checkpoint; the runner then looks at the flag."""
    logged, _, stop = trained(tmp_path, asked=lambda at: at == ("validated", STEPS))
    assert logged == alone[0] and stop.raised and not alone[2].raised


class Work(Stage):
    """A stage whose export gets the signal."""

    text: str = "done"
    asks: bool = False

    def run(self, context) -> None:
        if self.asks:
            terminate()
        (context.folder / "note.txt").write_text(self.text)


def stages(output: Path, *, asks: bool) -> list[str]:
    said: list[str] = []
    plan = [Planned("first", Work(asks=asks), {}, "f", None), Planned("second", Work(), {}, "g", None)]
    run_stages(plan, contexts(said.append), output=output, chosen=None, restart=None, say=said.append)
    return said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_between_two_stages_the_run_stops(number, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "terminate", lambda: os.kill(os.getpid(), number))
    handler, wakeup = signal.getsignal(number), signal.set_wakeup_fd(-1)
    fails_with("stopped before stage second", stages, tmp_path, asks=True, error=Stopped)
    assert signal.getsignal(number) is handler and signal.set_wakeup_fd(-1) == wakeup
    assert (tmp_path / "first" / DONE).is_file() and not (tmp_path / "second").exists()
    assert stages(tmp_path, asks=False) == ["stage first: finished before, same inputs", "stage second"]
    # Asked in the last stage there is nothing left to stop.
    other = [Planned("first", Work(asks=True), {}, "f", None)]
    run_stages(other, contexts(print), output=tmp_path / "other", chosen=None, restart=None, say=lambda text: None)
    assert (tmp_path / "other" / "first" / DONE).is_file()


def test_requests_that_were_answered_are_kept(tmp_path):
    done: list[int] = []

    def work(index: int) -> int:
        done.append(index)
        if index == 3 and len(done) == 4:
            terminate()
        return index * index

    with Stop() as stop, pytest.raises(Stopped, match=r"in rows, 4 of 10 are kept"):
        resumed(tmp_path / "rows", 10, work, stop)
    assert done == [0, 1, 2, 3] and len(ResumeLog(tmp_path / "rows").values) == 4
    assert resumed(tmp_path / "rows", 10, work, Stop()) == [index * index for index in range(10)]
    assert done == list(range(10))


def test_behind_a_signal_nothing_is_begun():
    stop, done = Stop(), []
    for item in stop.watch(range(2), "in a loop"):
        done.append(item)
    stop.raised = True
    fails_with("stopped in a loop", done.extend, stop.watch(range(2, 4), "in a loop"), error=Stopped)
    assert done == [0, 1]


@pytest.mark.parametrize("damage", [(b'["1"', b'\xff"1"'), (b'["1", 1', b'["1", 7')], ids=["no JSON", "checksum"])
def test_a_damaged_line_is_said_once(tmp_path, capsys, damage):
    """Though the log is read again at the end, for what other ranks kept."""
    resumed(tmp_path / "rows", 3, lambda index: index, Stop())
    path = tmp_path / "rows-0.jsonl"
    path.write_bytes(path.read_bytes().replace(*damage))
    assert resumed(tmp_path / "rows", 3, lambda index: -index, Stop()) == [0, -1, 2]
    assert capsys.readouterr().err.count("line 2 is damaged, and its item is worked on again") == 1


# Rank 0 has two requests and waits in a collective for rank 1, which has fifty. Which rank gets the signal is given.
APART = """
import os, signal, sys, threading, time
from pathlib import Path
from draftsmith.core import ranks
from draftsmith.trainers.train.engine import init_distributed
from draftsmith.trainers.run.stopping import Stop, Stopped

init_distributed()
ranks.barrier()
start = time.monotonic()
if ranks.rank() == int(sys.argv[1]):
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
done = 0
try:
    with Stop(lambda text: print(f"rank {ranks.rank()}: {text}", flush=True)) as stop, stop.together():
        for _ in stop.watch(range(2 if ranks.rank() == 0 else 200), "while it worked"):
            time.sleep(0.1)
            done += 1
except Stopped as stopped:
    print(f"{stopped} after {done}", flush=True)
    ranks.barrier()
    sys.exit(143 if time.monotonic() - start < 10 else 1)
sys.exit(2)
"""


@pytest.mark.parametrize("asked", [0, 1])
def test_ranks_with_different_numbers_of_requests_stop_together(asked):
    """Whichever gets the signal, also one that waits inside a collective; nobody waits for ever."""
    result = run_ranks(2, APART, str(asked), cwd=ROOT, timeout=60)
    assert [code for code, _ in result] == [143, 143], result
    assert "stopped while it worked after 2" in result[0][1] and "stopped while it worked after" in result[1][1]
    assert [f"rank {asked}: asked to stop" in text for _, text in result] == [asked == 0, asked == 1]


def asked_alone(number: int) -> list[str]:
    """Rank 1 alone was asked, and has told nobody yet."""
    stop, said = Stop(), []
    stop.raised = number == 1

    def apart() -> None:
        with stop.together():
            stop.check("apart")

    for work in (lambda: stop.agree("agreed"), apart):
        try:
            work()
            said.append("went on")
        except Stopped as stopped:
            said.append(str(stopped))
    dist.barrier()
    return said


def test_where_one_rank_was_asked_all_stop(tmp_path):
    answers = call_two_ranks(tmp_path, asked_alone, context=FORKS)
    assert list(answers.values()) == [["stopped agreed", "stopped apart"]] * 2


TWICE = """
import os, sys, time
from draftsmith.trainers.run import stopping
stopping._SAME_S = 60
class Stop(stopping.Stop):
    def _signalled(self, number, frame):
        super()._signalled(number, frame)
        os.write(1, b"handled\\n")  # a handler may interrupt a print
with Stop(lambda text: os.write(1, f"{text}\\n".encode())):
    os.write(1, b"ready\\n")
    sys.stdin.readline()
    stopping._SAME_S = 0
    os.write(1, b"later\\n")
    while True:
        time.sleep(0.01)
"""


def test_a_second_ctrl_c_ends_at_once():
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", TWICE], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    first = sorted(process.stdout.readline() for _ in range(2))  # of two threads
    assert "asked to stop" in first[0] and first[1] == "handled\n"
    for again in (signal.SIGINT, signal.SIGTERM):  # the terminal's and, at once, torchrun's are one
        process.send_signal(again)
        assert process.stdout.readline() == "handled\n"
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "later\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == -signal.SIGINT
    assert "asked to stop" not in process.stdout.read(), "said once"
