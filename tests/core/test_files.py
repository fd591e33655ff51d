"""Small files are read in one way: what is wrong with one is said with its name and the cure."""

import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from draftsmith.core import files
from fails import fails_with
from pydantic import BaseModel, TypeAdapter
from pydantic.dataclasses import dataclass


class Entry(BaseModel):
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    step: int
    files: dict[str, Entry]


GOOD = b'{"step": 3, "files": {"a.pt": {"bytes": 5, "sha256": "ab"}}}'
DAMAGES = {
    "empty": (b"", "the file is empty"),
    "only blanks": (b" \n", "the file is empty"),
    "cut in half": (GOOD[: len(GOOD) // 2], "not valid JSON"),
    "not UTF-8": (GOOD.replace(b"ab", b"\xff\xfe"), "not UTF-8: byte 0xff"),
    "another kind": (b"[1, 2]", r"expected a dictionary or an instance of Manifest, found \[1, 2\]"),
    "a field is missing": (b'{"files": {}}', "^step: Field required\n"),
    "a field of another kind": (GOOD.replace(b"3", b'"x"'), "^step: .*expected a valid integer.*, found 'x'"),
    "deeper": (GOOD.replace(b" 5", b'"x"'), "^files.a.pt.bytes: .*expected a valid integer.*, found 'x'"),
    "two of them": (b'{"step": "x"}', r"found 'x' \(and 1 more\)"),
    "NaN": (GOOD.replace(b"3,", b'3, "NaN":\n -Infinity,'), "-Infinity is no JSON.*line 2 column 2"),
    "nested without end": (b"[" * 200_000, "not valid JSON"),
    "a number without end": (b'{"step": ' + b"9" * 5000 + b', "files": {}}', "not valid JSON"),
    "huge": (b" " * (files.SMALL_BYTES + 1), "larger than 67,108,864 bytes"),
}


def test_a_good_file(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    for content in (GOOD, b"\xef\xbb\xbf" + GOOD):
        path.write_bytes(content)
        manifest = files.read_json(path, Manifest, hint="run it again")
        assert manifest == Manifest(3, {"a.pt": Entry(bytes=5, sha256="ab")})
    assert files.read_json(path, dict[str, Any], hint="")["step"] == 3
    either: TypeAdapter[int | dict[str, Any]] = TypeAdapter(int | dict[str, Any])
    assert isinstance(files.read_json(path, either, hint=""), dict)


@pytest.mark.parametrize(("content", "problem"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(content)
    error = fails_with(problem, files.read_json, path, Manifest, hint="run it again")
    assert (error.where, error.hint) == (str(path), "run it again")
    assert len(str(error)) < 400 + len(str(path))


def test_no_file_and_no_regular_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for a writer
    for name, problem in {"none.json": "file not found", ".": "not a regular file", "pipe": "not a regular"}.items():
        assert fails_with(problem, files.read_json, tmp_path / name, Manifest, hint="").where == str(tmp_path / name)
    for name, kind in {"pipe": "a named pipe", ".": "a folder"}.items():
        fails_with(f"not a regular file: {kind}", files.open_data, tmp_path / name)


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path, monkeypatch) -> None:
    """To open a device may already do something."""
    os.mkfifo(tmp_path / "pipe")
    opened: list[object] = []
    monkeypatch.setattr(os, "open", lambda *args: opened.append(args))
    for path in (tmp_path / "pipe", tmp_path, Path(os.devnull)):
        fails_with("not a regular file", files.open_data, path)
    assert not opened


def test_a_key_that_stands_twice_is_refused_where_each_stands_once(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text('{"step": 1, "files": {}, "step": 2}')
    assert files.read_json(path, Manifest, hint="").step == 2
    fails_with("key 'step' stands twice", files.read_json, path, Manifest, hint="", once=True)


def test_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"bytes": 1, "sha256": "a"}\n{"bytes": 2, "sha256": "b"}\n')
    assert [entry.bytes for entry in files.read_json_lines(path, Entry, hint="")] == [1, 2]
    with open(path, "ab") as file:
        file.write(b'{"bytes": 3, "sh')
    assert fails_with("not valid JSON", list, files.read_json_lines(path, Entry, hint="")).where == f"{path}, line 3"


def test_yaml(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("step: 3\nfiles: {}\n")
    assert files.read_yaml(path, Manifest, hint="") == Manifest(3, {})
    damages = {b"step: [": "not valid YAML", b"step: \x00": "not valid YAML",
               b"step: !!python/object/apply:os.getcwd []": "not valid YAML", b"\xff": "not UTF-8", b"- 1": "found",
               b"": "found None", b"[" * 20_000: "not valid YAML"}  # fmt: skip
    for content, problem in damages.items():
        path.write_bytes(content)
        assert fails_with(problem, files.read_yaml, path, Manifest, hint="").where == str(path)


def test_a_power_cut_at_any_moment_finds_the_old_file_or_the_new_one(tmp_path: Path, monkeypatch) -> None:
    """The content is on the disk before it gets its name, and the name is when the writer returns."""
    path, real = tmp_path / "done.json", os.replace
    seen: list[str] = []

    def flush(number: int) -> None:
        place = Path(os.readlink(f"/proc/self/fd/{number}"))
        seen.append("folder" if place == tmp_path else f"{place.suffix} of {place.stat().st_size}")

    def rename(source: Path, target: Path) -> None:
        seen.append(f"renamed to {target.name}")
        real(source, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", rename)
    files.write_whole(path, b"12345")
    assert seen == [".partial of 5", "renamed to done.json", "folder"]


def test_a_new_folder_takes_no_other_ones_place(tmp_path: Path) -> None:
    place = tmp_path / "out"

    def late() -> None:
        with files.new_folder(place) as aside:
            (aside / "mine").touch()
            place.mkdir()  # somebody was quicker
            (place / "theirs").touch()

    fails_with("the destination exists", late)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]
    with files.new_folder(place, replace=True) as aside:
        (aside / "mine").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def test_a_small_file_takes_no_memory_for_all_that_is_allowed(tmp_path):
    """Or a bound on memory (`ulimit -v`, a job's) ends a run that needs little of it."""
    (tmp_path / "log").write_bytes(b"x" * 3_000_000)
    tracemalloc.start()
    assert files.read_small(tmp_path / "log", hint="", max_bytes=1 << 28) == b"x" * 3_000_000
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()
