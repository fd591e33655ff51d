"""Lists of files in `done.json`: what passes for the file that was listed, and what a mark may say."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from draftsmith.core import results
from draftsmith.core.results import Mark, faults, read_mark, sums_of, write_mark
from fails import fails_with


@pytest.fixture(params=[10, results._LARGE], ids=["small", "large"])
def file(request, tmp_path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(request.param))
    return path


def flip_last(path: Path) -> None:
    """In place, so that size and inode stay."""
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")


def test_an_edit_that_sets_the_time_of_writing_back_is_found(file):
    listed = sums_of(file.parent, [file.name])
    about = file.stat()
    assert faults(file.parent, listed) == []
    flip_last(file)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert file.stat().st_mtime_ns == about.st_mtime_ns and file.stat().st_size == about.st_size
    (fault,) = faults(file.parent, listed)
    assert fault.name == file.name and "its checksum differs" in fault.problem


def test_large_files_are_on_the_disk_before_they_are_listed(file, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda number: flushed.append(os.readlink(f"/proc/self/fd/{number}")))
    (entry,) = sums_of(file.parent, [file.name]).values()
    assert entry.bytes == file.stat().st_size
    assert flushed == ([str(file)] if entry.bytes == results._LARGE else [])


@pytest.mark.parametrize("name", ["../model.safetensors", "a/../../b", "/etc/passwd", ".."])
def test_a_list_leads_nowhere_else(name, tmp_path):
    done = tmp_path / "done.json"
    entry = {"bytes": 1, "xxh3": "0" * 16}
    for listed, is_read in (("a..b/c", True), (name, False)):
        done.write_text(json.dumps({"fingerprint": "f", "files": {listed: entry}}))
        if is_read:
            assert read_mark(done) is not None
        else:
            fails_with("is not inside the folder", read_mark, done)


@pytest.mark.parametrize(
    "settings", [{"inputs": {}}, {"data": []}, {"inputs": [], "data": []}, {"inputs": {}, "data": {}}]
)
def test_settings_without_inputs_or_data_are_no_fingerprint(settings, tmp_path):
    mark = tmp_path / "fingerprint.json"
    write_mark(mark, Mark("f", settings={"inputs": {}, "data": []}))
    assert read_mark(mark) == Mark("f", settings={"inputs": {}, "data": []})
    mark.write_text(json.dumps({"fingerprint": "f", "settings": settings}))
    fails_with("settings without inputs or data", read_mark, mark)


def test_a_file_is_read_once_and_again_when_it_changed(file, monkeypatch):
    read: Counter[str] = Counter()
    digest = results.hashlib.file_digest

    def noted(opened, how):
        read[opened.name] += 1
        return digest(opened, how)

    monkeypatch.setattr(results.hashlib, "file_digest", noted)
    listed = sums_of(file.parent, [file.name])
    for _ in range(3):
        assert faults(file.parent, listed) == []
    assert read == {str(file): 1}
    flip_last(file)
    assert len(faults(file.parent, listed)) == 1 and read == {str(file): 2}


@pytest.mark.parametrize("name", ["._config.json", ".nfs0001.bin"])
def test_a_hidden_file_is_none_that_a_loader_picks_up(name, tmp_path):
    """A copy from a Mac, or a file that was deleted on NFS while it was open."""
    (tmp_path / "config.json").write_text("{}")
    write_mark(tmp_path / results.DONE, Mark("f", files=sums_of(tmp_path, ["config.json"])))
    (tmp_path / name).write_bytes(b"x")
    results.check_written(tmp_path)
    (tmp_path / "other.json").write_text("{}")
    fails_with(r"other\.json .* is not one of its files", results.check_written, tmp_path)


def test_a_note_of_a_script_in_the_folder_above_is_no_record(tmp_path):
    (tmp_path / results.DONE).write_text('{"downloaded": true}')
    (tmp_path / "model").mkdir()
    results.check_written(tmp_path / "model")
