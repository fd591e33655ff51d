"""Full disks: what does not fit is not written in half, and the error says which folder, what is needed and what is
there."""

import errno
import os
import resource
import signal
import sqlite3
import stat
import subprocess
from contextlib import contextmanager

import pytest
from draftsmith.core.errors import UserError
from draftsmith.core.files import (
    append_lines,
    full_disk_is_told,
    is_full,
    share_as_usual,
    sweep,
    write_whole,
)
from fails import fails_with


@contextmanager
def small_disk(folder, size: int):
    """A disk of `size` bytes: a real one where this user may mount it, else files of that size at most."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode == 0:
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)
        return
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def append_many(log, line):
    for _ in range(100):
        append_lines(log, line)


def test_lines_are_appended_whole_or_not_at_all(tmp_path):
    with small_disk(tmp_path / "disk", 64 << 10):
        log, line = tmp_path / "disk" / "rows.jsonl", b"x" * 9_999 + b"\n"
        caught = fails_with("", append_many, log, line)
        whole = log.read_bytes()
        assert whole and whole == line * (len(whole) // len(line)), "no half of a line"
        assert str(log) == caught.where and "bytes are needed" in caught.problem
        assert "are there" in caught.problem and "goes on from what is saved" in caught.hint
        append_lines(log, b"short\n")  # what fits still goes
        assert log.read_bytes() == whole + b"short\n"


def test_a_line_that_was_cut_off_is_ended_first(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"whole\ncut o")
    append_lines(log, b"next\n")
    assert log.read_bytes() == b"whole\ncut o\nnext\n"


def test_a_small_file_that_does_not_fit_leaves_the_old_one(tmp_path):
    with small_disk(tmp_path / "disk", 64 << 10):
        path = tmp_path / "disk" / "report.json"
        write_whole(path, b"old")
        fails_with(r"100,000 bytes are needed, and .* are there", write_whole, path, b"x" * 100_000)
        assert path.read_bytes() == b"old" and [p.name for p in path.parent.iterdir()] == ["report.json"]


@pytest.mark.parametrize("error", [
    OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "Disk quota exceeded"),
    sqlite3.OperationalError("database or disk is full"),
    RuntimeError("[enforce fail at inline_container.cc:668] . unexpected pos 787840 vs 787728"),
], ids=["disk", "quota", "sqlite", "torch"])  # fmt: skip
def test_whatever_a_library_says_of_a_full_disk_the_folder_is_named(error, tmp_path):
    with pytest.raises(UserError, match="bytes are there") as caught, full_disk_is_told(tmp_path):
        raise error
    assert caught.value.where == str(tmp_path) and is_full(caught.value)
    with pytest.raises(OSError, match="denied"), full_disk_is_told(tmp_path):
        raise PermissionError(errno.EACCES, "denied")


def test_a_full_disk_is_seen_behind_the_error_that_it_led_to(tmp_path):
    """A library may raise an error of its own while it cleans up, without `from`."""
    for cause, context in [(None, None), (full(), None), (None, full())]:
        error = RuntimeError("the writer failed")
        error.__cause__, error.__context__ = cause, context
        expected = UserError if cause or context else RuntimeError
        with pytest.raises(expected) as caught, full_disk_is_told(tmp_path):
            raise error
        if cause or context:
            assert str(caught.value).startswith("cannot be written: No space left on device; ")


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_a_private_file_gets_the_rights_that_the_umask_gives(tmp_path, umask, mode):
    """safetensors 0.8 writes to a private temporary file."""
    private, own = tmp_path / "model.safetensors", tmp_path / "own"
    private.write_text("")
    private.chmod(0o600)
    own.write_text("")
    own.chmod(0o400)
    before = os.umask(umask)
    try:
        for path in (private, own):
            share_as_usual(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(private.stat().st_mode) == mode and stat.S_IMODE(own.stat().st_mode) == 0o400


def test_what_killed_writers_left_is_swept(tmp_path):
    (tmp_path / "a" / ".step-00000004.partial" / "engine").mkdir(parents=True)
    deep = tmp_path / "a" / "shards" / "deep"
    deep.mkdir(parents=True)
    for name in ("shard-000001.tar.partial", "shard-000001.tar"):
        (deep / name).write_text("")
    for name in ("shard-000001.tar.partial", "done.json.3f.partial", ".tmpXr3tPz", "rows.jsonl", "partial"):
        (tmp_path / "a" / name).write_text("")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("")
    os.symlink(outside, tmp_path / "a" / "link.partial")
    sweep(tmp_path / "a")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["partial", "rows.jsonl", "shards"]
    assert [path.name for path in deep.iterdir()] == ["shard-000001.tar"]
    assert (outside / "kept").is_file()
