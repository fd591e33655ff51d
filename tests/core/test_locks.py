"""Locks with flock, and without it: held by one, let go when their process dies, taken over from the dead."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time

import pytest
from draftsmith.core import locks
from draftsmith.core.locks import Lock

WITHOUT = [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP]


@pytest.fixture(params=[None, *WITHOUT], ids=lambda number: errno.errorcode.get(number, "flock"))
def disk(request, monkeypatch):
    """A file system with flock, or one that answers so."""
    if request.param is not None:
        without_flock(monkeypatch, request.param)
    return request.param


def without_flock(monkeypatch, number=errno.ENOSYS):
    def flock(handle, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


def test_one_holds_it_at_a_time(disk, tmp_path):
    first, second = Lock(tmp_path / "a"), Lock(tmp_path / "a")
    assert first.take() is None
    assert first.by_file == (disk is not None)
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
    assert "unknown" in mine.take(0.05)
    assert mine.take(10) is None
    mine.release()
