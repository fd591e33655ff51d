"""A rank that waits names the one it waits for, and in what; after the bound it ends. Two real ranks of gloo."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from draftsmith.core import ranks
from draftsmith.core.heartbeat import ALONE, ENDED, STEPS, WORKS, Heartbeat, Pulse, _Peer
from training import free_port

FORK = multiprocessing.get_context("fork")
BOUND_S = 2.0


@dataclass(frozen=True)
class Ended:
    """How a rank ended, and what it said."""

    code: int | None
    said: str


def two_ranks(folder, work, *, bound_s=BOUND_S, meanwhile=lambda pids: None, lives=()) -> list[Ended]:
    """`work(rank)` on two ranks that know each other's places.

    Args:
        meanwhile: is called with their processes.
        lives: ranks whose end nobody waits for.
    """
    port = free_port()
    started = [FORK.Process(target=_rank, args=(n, port, folder, work, bound_s), daemon=True) for n in range(2)]
    for process in started:
        process.start()
    meanwhile([process.pid for process in started])
    for number, process in enumerate(started):
        if number not in lives:
            process.join(90)
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
        process.join()
    return [Ended(code, (folder / f"said-{number}").read_text()) for number, code in enumerate(codes)]


def _rank(number, port, folder, work, bound_s):
    sys.stderr = open(folder / f"said-{number}", "w", buffering=1)  # noqa: SIM115
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if dist.is_initialized():  # a fork of a test run in which an earlier test began a group
        dist.destroy_process_group()
    ranks.pulse.cache_clear()
    dist.init_process_group("gloo")
    ranks.watch(bound_s)
    ranks.pulse().enter("target")
    ranks.barrier()
    try:
        work(number)
    except Exception as error:
        print(f"lost: {ranks.lost_by(error)}", file=sys.stderr)
        os._exit(1)
    ranks.barrier()
    ranks.leave(said=False)
    os._exit(0)


def test_a_rank_that_lives_and_hangs_in_a_step_is_named_too(tmp_path):
    def work(number):
        ranks.pulse().begin("step 3 of 9", is_step=True)
        if number == 0:
            ranks.pulse().begin("step 4 of 9", is_step=True)
            ranks.barrier()
        threading.Event().wait()

    ended = two_ranks(tmp_path, work, lives=[1])[0]
    assert ended.code == 1 and "for rank 1, which lives and is in stage target, step 3 of 9" in ended.said


def test_a_rank_that_works_alone_is_waited_for_longer_and_named(tmp_path):
    """Even where others wait for several bounds; so is one that goes on with its share, however long it takes."""

    def work(number):
        ranks.on_main(time.sleep, 3 * BOUND_S)
        if number == 1:
            for done in range(12):
                ranks.pulse().advance(f"request {done} of 12")
                time.sleep(BOUND_S / 4)

    first, second = two_ranks(tmp_path, work)
    assert (first.code, second.code) == (0, 0), (first.said, second.said)
    assert "rank 1 has waited" in second.said and "for rank 0, which lives and is in stage target" in second.said
    assert "for rank 1, which lives and is in stage target, request" in first.said
    assert "error" not in first.said + second.said


def test_who_was_suspended_has_not_waited(tmp_path):
    """A scheduler that stops all ranks of a job and lets them go on ends none of them."""

    def work(number):
        (tmp_path / f"here-{number}").touch()
        for step in range(12):
            ranks.pulse().begin(f"step {step} of 12", is_step=True)
            time.sleep(BOUND_S / 20)
            ranks.any_rank(False)

    def suspended(pids):
        while not all((tmp_path / f"here-{number}").exists() for number in range(2)):
            time.sleep(0.01)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5 * BOUND_S)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    ended = two_ranks(tmp_path, work, meanwhile=suspended)
    assert [one.code for one in ended] == [0, 0] and not any("error" in one.said for one in ended), ended


def test_a_rank_that_ended_with_a_message_of_its_own_is_named_at_once(tmp_path):
    def work(number):
        if number == 1:
            ranks.leave()
            os._exit(2)
        time.sleep(0.5)
        ranks.barrier()

    ended = two_ranks(tmp_path, work)
    assert "lost: rank 1\n" in ended[0].said


def test_a_rank_that_has_left_watches_no_longer():
    """Else it would end a process that goes on after its run, for ranks that have ended."""
    before = set(threading.enumerate())
    heartbeat = Heartbeat(Pulse(), 0, 4, dist.HashStore(), bound_s=60.0, end=sys.exit)
    heartbeat.start()
    threads = set(threading.enumerate()) - before
    heartbeat.leave(said=False)
    for thread in threads:
        thread.join(5)
    assert len(threads) == 2 and not any(thread.is_alive() for thread in threads)


def test_the_last_beat_of_a_rank_says_that_it_has_ended(monkeypatch):
    """Though it was writing another one just then; and of two ranks that are gone, who said so comes before rank 0."""
    store, heartbeat = dist.HashStore(), watching()
    writes: list[str] = []

    def write(key, place):
        writes.append(place)
        if len(writes) == 1:
            threading.Thread(target=heartbeat.leave, kwargs={"said": True}).start()
            while not heartbeat._over.is_set():
                time.sleep(0.01)
        store.set(key, place)

    monkeypatch.setattr(heartbeat, "_store", SimpleNamespace(set=write, multi_get=store.multi_get))
    heartbeat.start()
    heartbeat._writer.join(5)
    assert [ENDED in place for place in writes] == [False, True]
    other = Heartbeat(Pulse(), 2, 4, store, bound_s=60.0, end=sys.exit)
    other._is_lost, other._peers = True, {1: _Peer(0, 0, state=ENDED)}
    assert other.lost() == "rank 1"


def watching() -> Heartbeat:
    """Rank 0 of four, without its threads: the test is its clock."""
    return Heartbeat(Pulse(), 0, 4, dist.HashStore(), bound_s=60.0, end=sys.exit)


def waited(heartbeat: Heartbeat, seconds: float, peers: dict[int, _Peer]) -> None:
    """In a meeting since second 0, with the others as they were seen last."""
    with heartbeat._pulse.meeting():
        heartbeat._look()
        heartbeat._peers, heartbeat._clock, heartbeat._answered = peers, seconds, seconds
        heartbeat._look()


@pytest.mark.parametrize(
    ("state", "is_silent", "bound_s"),
    # Silent or in a step: the bound. At work of its own: far longer. Ended with a message: soon.
    [(STEPS, True, 60), (WORKS, True, 60), (STEPS, False, 60), (WORKS, False, 60 * ALONE), (ENDED, True, 20 / 3)],
)
def test_how_long_a_rank_is_waited_for(capfd, state, is_silent, bound_s):
    waited(watching(), bound_s, {3: _Peer(0 if is_silent else bound_s, 0, state=state)})
    assert "error" not in capfd.readouterr().err
    with pytest.raises(SystemExit):
        waited(watching(), bound_s + 1, {3: _Peer(0 if is_silent else bound_s, 0, state=state)})
    assert "error: rank 0 has waited" in capfd.readouterr().err
