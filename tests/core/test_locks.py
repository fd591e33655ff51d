"""A lock is held by one, keeps its file's content, ends with its process, and wants a file system that has locks."""

import errno
import fcntl
import os
import subprocess
import sys
import threading

import pytest
from draftsmith.core.locks import locked, take_lock
from fails import fails_with, raising


def test_one_holds_it_at_a_time_and_the_file_keeps_its_content(tmp_path):
    place = tmp_path / "a"
    place.write_text("12345")
    first = take_lock(place)
    assert take_lock(place, 0.1) is None and place.read_text() == "12345"
    first.release()
    second = take_lock(place, 0.1)
    assert second is not None
    second.release()
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and place.read_text() == "12345"


def test_many_threads_count_as_one_would(tmp_path):
    count = tmp_path / "count"
    count.write_text("0")

    def work():
        for _ in range(10):
            with locked(tmp_path / "lock"):
                count.write_text(str(int(count.read_text()) + 1))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert count.read_text() == "30"


OWNER = """
import sys, time
from pathlib import Path
from draftsmith.core.locks import take_lock
lock = take_lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path / "a")], stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "held\n" and take_lock(tmp_path / "a", 0.3) is None
    owner.kill()
    owner.wait()
    take_lock(tmp_path / "a", 0.3).release()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_refused(number, monkeypatch, tmp_path):
    """filelock would lock by a file in one of the three cases, which nobody removes where a process was killed."""
    monkeypatch.setattr(fcntl, "flock", raising(OSError(number, os.strerror(number))))
    caught = fails_with("has no locks", take_lock, tmp_path / "a", 0.3)
    assert str(tmp_path) in str(caught) and "a local disk" in str(caught)
