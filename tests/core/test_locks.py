"""Locks with flock, and without it: held by one, let go when their process dies, taken over from the dead."""

import errno
import fcntl
import json
import os
import re
import subprocess
import sys
import threading
import time

import pytest
from draftsmith.core import locks
from draftsmith.core.locks import Lock
from fails import raising
from filelock import Timeout
from huggingface_hub.utils import WeakFileLock

WITHOUT = [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP]


@pytest.fixture(params=[None, *WITHOUT], ids=lambda number: errno.errorcode.get(number, "flock"))
def disk(request, monkeypatch):
    """A file system with flock, or one that answers so."""
    if request.param is not None:
        without_flock(monkeypatch, request.param)
    return request.param


def without_flock(monkeypatch, number=errno.ENOSYS):
    monkeypatch.setattr(fcntl, "flock", raising(OSError(number, os.strerror(number))))


def test_one_holds_it_at_a_time(disk, tmp_path):
    first, second = Lock(tmp_path / "a"), Lock(tmp_path / "a")
    assert first.take() is None and first.by_file == (disk is not None)
    first.sign()
    told = []
    assert str(os.getpid()) in second.take(0.1, waiting=told.append)
    assert len(told) == 1 and not second.by_file
    first.release()
    assert second.take(0.1) is None
    second.release()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_many_threads_count_as_one_would(disk, tmp_path):
    count = tmp_path / "count"
    count.write_text("0")

    def work():
        for _ in range(10):
            with Lock(tmp_path / "lock").held():
                count.write_text(str(int(count.read_text()) + 1))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert count.read_text() == "30"


OWNER = """
import errno, fcntl, os, sys, time
def flock(handle, operation):
    raise OSError(errno.ENOLCK, "no locks available")
fcntl.flock = flock
from pathlib import Path
from draftsmith.core.locks import Lock
lock = Lock(Path(sys.argv[1]))
lock.take()
print("held", flush=True)
time.sleep(60)
"""


def test_the_lock_of_a_killed_process_is_taken_over_at_once(monkeypatch, tmp_path):
    without_flock(monkeypatch)
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path / "a")], stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "held\n"
    mine = Lock(tmp_path / "a")
    assert f"{owner.pid} on " in mine.take(0.3)
    owner.kill()
    owner.wait()
    assert mine.take(0.3) is None
    mine.release()


def of_another_host(path):
    """A lock as a machine whose processes this one cannot see leaves it."""
    path.write_text(json.dumps({"host": "node-7", "within": "", "pid": 1, "started": 0.0, "token": "t"}))


def test_a_lock_of_another_host_is_waited_for_while_its_heart_beats(monkeypatch, tmp_path):
    without_flock(monkeypatch)
    monkeypatch.setattr(locks, "STALE_S", 0.5)
    held, mine = tmp_path / "a.held", Lock(tmp_path / "a")
    of_another_host(held)
    start = time.monotonic()
    beating = threading.Thread(target=lambda: [(time.sleep(0.1), os.utime(held)) for _ in range(10)])
    beating.start()
    assert mine.take(20) is None
    assert time.monotonic() - start > 1.3, "its heart beat for a second"
    assert [path.name for path in tmp_path.glob("*.taken")] == []
    mine.release()


def test_who_lost_its_lock_is_told(monkeypatch, tmp_path):
    without_flock(monkeypatch)
    monkeypatch.setattr(locks, "BEAT_S", 0.05)
    lost = threading.Event()
    mine = Lock(tmp_path / "a", lost=lost.set)
    assert mine.take() is None
    of_another_host(tmp_path / "a.held")
    assert lost.wait(10)
    mine.release()
    assert (tmp_path / "a.held").exists(), "another's by now"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"host": 3}'])
def test_a_lock_nobody_can_read_is_taken_over_when_it_stays_so(content, monkeypatch, tmp_path):
    without_flock(monkeypatch)
    monkeypatch.setattr(locks, "STALE_S", 1.0)
    (tmp_path / "a.held").write_bytes(content)
    mine = Lock(tmp_path / "a")
    assert "unknown" in mine.take(0.05) and mine.take(10) is None
    mine.release()


def of_this_host(path, **changes):
    """A lock as a process of this machine leaves it that does not beat."""
    path.write_text(json.dumps(locks._about_us() | {"token": "t", **changes}))


def test_a_number_that_is_another_process_s_by_now_keeps_no_lock(monkeypatch, tmp_path):
    without_flock(monkeypatch)
    of_this_host(tmp_path / "a.held", started=0.0)  # our number, before this machine was started
    mine = Lock(tmp_path / "a")
    assert mine.take(0.1) is None
    mine.release()
    of_this_host(tmp_path / "a.held")  # a live process
    assert mine.take(0.1) == f"{os.getpid()} on {locks._about_us()['host']}"


def test_a_process_of_another_container_cannot_be_seen_and_is_not_dead(monkeypatch, tmp_path):
    """Containers may have one host's name, and process numbers of their own."""
    without_flock(monkeypatch)
    of_this_host(tmp_path / "a.held", within="pid:[1]", started=0.0)
    assert str(os.getpid()) in Lock(tmp_path / "a").take(0.1)


def test_of_two_that_find_it_abandoned_one_takes_it(monkeypatch, tmp_path):
    """The other one was quicker: its file stands there when ours would take the place of the dead one's."""
    without_flock(monkeypatch)
    held = tmp_path / "a.held"
    of_this_host(held, started=0.0)

    def is_dead(text):
        of_another_host(held)
        return b"node-7" not in text

    monkeypatch.setattr(locks, "_is_dead", is_dead)
    assert Lock(tmp_path / "a").take(0.3) == "1 on node-7"
    assert b"node-7" in held.read_bytes() and not list(tmp_path.glob("*.taken"))


def test_the_mark_of_one_who_died_while_it_took_over_goes(monkeypatch, tmp_path):
    without_flock(monkeypatch)
    monkeypatch.setattr(locks, "STALE_S", 0.2)
    of_another_host(tmp_path / "a.held")
    (tmp_path / "a.held.t.taken").touch()
    mine = Lock(tmp_path / "a")
    assert mine.take(0.05) == "1 on node-7" and mine.take(10) is None
    mine.release()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_heart_beats_until_the_lock_is_let_go(monkeypatch, tmp_path):
    without_flock(monkeypatch)
    monkeypatch.setattr(locks, "BEAT_S", 0.02)
    mine, before = Lock(tmp_path / "a"), set(threading.enumerate())
    assert mine.take() is None
    (heart,) = (t for t in threading.enumerate() if t.name == "lock-heartbeat" and t not in before)
    os.utime(tmp_path / "a.held", (0, 0))
    start = time.monotonic()
    while (tmp_path / "a.held").stat().st_mtime == 0:
        assert time.monotonic() - start < 10, "no heartbeat"
        time.sleep(0.01)
    mine.release()
    heart.join(10)
    assert not heart.is_alive()


def test_a_process_that_ends_leaves_no_lock(tmp_path):
    """Machines that cannot see this one's processes would wait a minute for its heart."""
    ends = OWNER.replace("time.sleep(60)", "")
    subprocess.run([sys.executable, "-c", ends, str(tmp_path / "a")], capture_output=True, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_who_holds_it_is_written_whole(tmp_path):
    (tmp_path / "a").write_text("9" * 30)  # a longer number of an earlier process
    mine = Lock(tmp_path / "a")
    assert mine.take() is None
    mine.sign()
    assert Lock(tmp_path / "a").take(0) == str(os.getpid())
    mine.release()


@pytest.mark.parametrize("number", WITHOUT, ids=errno.errorcode.get)
def test_libraries_lock_by_file_where_there_is_no_flock(number, monkeypatch, tmp_path):
    """huggingface_hub's downloads and datasets' caches, by filelock."""
    without_flock(monkeypatch, number)
    if number != errno.ENOSYS:  # else this test could not fail
        with pytest.raises(OSError, match=re.escape(os.strerror(number))), WeakFileLock(tmp_path / "a.lock", timeout=5):
            pass
    locks.let_libraries_lock()
    locks.let_libraries_lock()  # twice changes nothing
    with WeakFileLock(tmp_path / "b.lock", timeout=5):
        assert (tmp_path / "b.lock").exists()
        with pytest.raises(Timeout), WeakFileLock(tmp_path / "b.lock", timeout=0.3):
            pass
    with WeakFileLock(tmp_path / "b.lock", timeout=5):
        pass
    mine = Lock(tmp_path / "mine")
    assert mine.take(0.1) is None and mine.by_file
    mine.release()


def test_libraries_lock_with_flock_where_there_is_one(monkeypatch, tmp_path):
    monkeypatch.setattr(fcntl, "flock", fcntl.flock)
    locks.let_libraries_lock()
    with WeakFileLock(tmp_path / "b.lock", timeout=5), pytest.raises(Timeout), \
            WeakFileLock(tmp_path / "b.lock", timeout=0.3):  # fmt: skip
        pass
