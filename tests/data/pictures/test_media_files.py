"""What a record names is opened only where it is a regular file inside the folder."""

import os
import re
import signal
import time
from contextlib import contextmanager

import pytest
from draftsmith.data.pictures.media_files import BadMedia, Embedded, located, open_media
from draftsmith.data.pictures.picture_files import image_size, load_image
from draftsmith.data.pictures.videos import Clip, VideoSettings
from fails import fails_with, raising

OUTSIDE = ["/etc/passwd", "../a.png", "a/../../b.png", "a/..", "..", "//a.png", "./../a.png"]
INSIDE = ["a.png", "a/b.png", "./a.png", "a..png", "..a.png", "a/...", "~/a.png", "C:\\a.png", " "]


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_that_lead_out_of_the_folder_need_a_setting(tmp_path, name):
    assert located(tmp_path, name, allow_outside=True) == tmp_path / name
    caught = fails_with(re.escape(repr(name)), located, tmp_path, name, allow_outside=False, error=BadMedia)
    assert caught.where == str(tmp_path) and "allow_outside: true" in caught.hint


@pytest.mark.parametrize("name", INSIDE)
def test_names_inside_the_folder_are_taken_as_they_are(tmp_path, name):
    assert located(tmp_path, name, allow_outside=False) == tmp_path / name
    embedded = Embedded("here", lambda: pytest.fail("opened"))
    assert located(tmp_path, embedded, allow_outside=False) is embedded


def special(folder):
    """name -> (path, what it is)"""
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    paths = {"pipe": "a named pipe", "folder": "a folder", "/dev/zero": "a device"}
    for number, name in enumerate(list(paths)):
        (folder / f"link{number}").symlink_to(folder / name)
        paths[f"link{number}"] = paths[name]
    return {name: (folder / name, about) for name, about in paths.items()}


def test_what_is_no_regular_file_is_refused_at_once(tmp_path, monkeypatch):
    """Also behind a link, by all readers: a pipe would be waited for, a device has no end."""
    monkeypatch.chdir(tmp_path)
    start = time.monotonic()
    for path, about in special(tmp_path).values():
        for read in (load_image, image_size, lambda p: Clip(p, VideoSettings())):
            fails_with(rf"not a regular file: {about}\n.*{re.escape(str(path))}", read, path)
    assert time.monotonic() - start < 5


def test_files_that_cannot_be_opened_are_told_by_name(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(b"x")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "nowhere").symlink_to(tmp_path / "none.png")
    for name, problem, reason in [
        ("none.png", "missing image", "missing image"),
        ("a.png/b.png", "missing image", "missing image"),
        ("nowhere", "missing image", "missing image"),
        ("circle", "cannot be read", "unreadable file"),
        ("a" * 300, "File name too long", "unreadable file"),
        ("a\0.png", "not a file name", "unsafe name"),
        ("\ud800.png", "not a file name", "unsafe name"),
    ]:
        caught = fails_with(problem, open_media, tmp_path / name, "image", error=BadMedia)
        assert caught.reason == reason and caught.hint and str(caught).encode()

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)  # whoever runs tests as root may read everything
    with pytest.raises(BadMedia, match=r"the clip cannot be read: Permission denied\n.*a\.png"):
        open_media(tmp_path / "a.png", "clip")


def test_what_takes_the_place_of_a_file_between_two_looks_is_refused_and_closed(tmp_path, monkeypatch):
    """The first look finds a file, and a pipe is opened: it is not waited for, and not kept open."""
    (tmp_path / "file").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")
    before, real = tmp_path / "file", os.stat
    monkeypatch.setattr(os, "stat", lambda path, **how: real(before if str(path).endswith("pipe") else path, **how))
    open_files = set(os.listdir("/proc/self/fd"))
    with ended_after(5), pytest.raises(BadMedia, match="not a regular file: a named pipe"):
        open_media(tmp_path / "pipe", "image")
    assert set(os.listdir("/proc/self/fd")) == open_files
    with open_media(tmp_path / "file", "image") as file:
        assert file.read() == b"x"


@contextmanager
def ended_after(seconds: int):
    """Raises inside when it takes longer, also inside a call of the system."""

    handler = signal.signal(signal.SIGALRM, raising(TimeoutError))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
