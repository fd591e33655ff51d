"""Files that other people take for records: each is read right, or told as what it is, with what to do."""

import gzip
import io
import json
import zipfile

import pyarrow
import pyarrow.parquet
import pytest
from draftsmith.data.records import scan
from draftsmith.data.records.record import check_record
from draftsmith.data.records.records import name_of, open_records
from fails import fails_with
from small_records import talk, tar_of

TURNS = talk("What?", "A café.")
ROWS = [{"id": str(number), "conversations": TURNS} for number in range(3)]
LIST = json.dumps(ROWS, ensure_ascii=False)
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def table() -> bytes:
    data = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), data)
    return data.getvalue()


def zipped() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("a.json", LIST)
    return data.getvalue()


READ = {
    "with a byte order mark.json": LIST.encode("utf-8-sig"),
    "with a byte order mark.jsonl": LINES.encode("utf-8-sig"),
    "lines of Windows.jsonl": LINES.replace("\n", "\r\n").encode(),
    "a list by the name of lines.jsonl": LIST.encode(),
    "lines by the name of a list.json": LINES.encode(),
    "a list of Windows.json": ("\r\n" + json.dumps(ROWS, indent=2)).replace("\n", "\r\n").encode(),
    "gaps and no last line break.jsonl": LINES.replace("\n", "\r\n\n").rstrip().encode(),
    "a comma too many.json": (LIST[:-1] + ",]").encode(),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_records_is_read_whatever_wrote_it(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(READ[name])
    file = open_records(path, tmp_path / "cache")
    assert len(file) == 3 and not file.problems and [file.read(n) for n in range(3)] == ROWS


@pytest.mark.parametrize("separator", [", ", "\n"])
def test_a_record_with_nan_is_unusable_and_no_other(tmp_path, monkeypatch, separator):
    """Under a key that nobody reads, too, and wherever a chunk ends."""
    monkeypatch.setattr(scan, "CHUNK", 7)
    rows = separator.join(json.dumps(row) for row in (ROWS[0], ROWS[1] | {"NaN": [float("-inf")]}, ROWS[2]))
    (tmp_path / "a.json").write_text(rows if separator == "\n" else f"[{rows}]")
    file = open_records(tmp_path / "a.json", tmp_path / "cache")
    assert file.problems == {1: "-Infinity is no JSON (write null)"} and name_of(file, 1) == "record 1 (id None)"
    assert [file.read(n) for n in (0, 2)] == [ROWS[0], ROWS[2]]


# Name -> bytes, what the message says it is, and a part of the hint.
TOLD = {
    "utf16.json": (LIST.encode("utf-16"), "UTF-16 text", "iconv -f UTF-16"),
    "utf16le.json": (LIST.encode("utf-16-le"), "UTF-16 text", "UTF-16LE"),
    "utf16be.jsonl": (LINES.encode("utf-16-be"), "UTF-16 text", "UTF-16BE"),
    "utf32.json": (LIST.encode("utf-32"), "UTF-32 text", "iconv"),
    "latin1.json": (LIST.encode("latin-1"), "not UTF-8", "iconv -f LATIN1"),
    "latin1.jsonl": (LINES.encode("latin-1"), "not UTF-8", "iconv -f LATIN1"),
    "one.json": (json.dumps(ROWS[0], indent=1).encode(), "not valid JSON", "jq -c"),
    "some.jsonl": ("\n".join(json.dumps(r, indent=1) for r in ROWS).encode(), "not valid JSON", "jq -c"),
    "carriage.jsonl": (LINES.replace("\n", "\r").encode(), "not valid JSON", "JSON lines"),
    "two lists.jsonl": ((LIST + "\n" + LIST).encode(), "more follows the end of the list", "JSON lines"),
    "packed.json": (gzip.compress(LIST.encode()), "compressed with gzip", "gunzip"),
    "table.json": (table(), "a Parquet table", "kind: datasets"),
    "zip.json": (zipped(), "a zip archive", "unzip"),
    "tar.json": (tar_of(("0.json", b"{}")), "a tar archive", "kind: webdataset"),
    "csv.json": (b"id,question\n1,What?\n", "not valid JSON", "JSON lines"),
    "tsv.jsonl": (b"id\tquestion\n1\tWhat?\n", "not valid JSON", "JSON lines"),
    "yaml.json": (b"- id: 1\n", "not valid JSON", "JSON lines"),
    "zeros.jsonl": (LINES.encode() + b"\0" * 4096, "zero bytes", "fetch it again"),
    "zeros far in.jsonl": (LINES.encode() * 60 + b"\0\n", "zero bytes", "repair"),
    "zeros far in.json": (json.dumps(ROWS * 60).encode() + b"\0", "zero bytes", "repair"),
    "page.json": (b"<!DOCTYPE html><html>404</html>", "a web page", "download"),
    "pointer.json": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "a pointer of Git LFS", "git lfs"),
    "pickle.json": (b"\x80\x04\x95\x10\0\0", "a Python pickle, which is not opened", "JSON lines"),
    "picture.json": (b"\x89PNG\r\n\x1a\n", "a picture", "name the file of records"),
    "empty.json": (b"", "no records", "a JSON list"),
    "cut.json": (LIST.encode()[:-40], "not valid JSON", "repair"),
}


@pytest.mark.parametrize("name", TOLD)
def test_another_kind_of_file_is_told_as_what_it_is(tmp_path, name):
    data, kind, cure = TOLD[name]
    path = tmp_path / name
    path.write_bytes(data)
    caught = fails_with("", open_records, path, tmp_path / "cache")
    assert kind in caught.problem and cure in caught.hint and str(path) in str(caught.where)


def test_records_of_other_layouts_are_told_by_what_they_hold(tmp_path):
    assert "a list of 3 items" in check_record(ROWS)
    messages = {"messages": [{"role": "user", "content": "a"}]}
    assert check_record(messages) == "no conversations, but messages: a chat log, which `draftsmith logs` reads"
    assert check_record({"instruction": "a", "output": "b"}) == "no conversations (it has instruction, output)"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert "role and content, as in a chat log; they have from" in check_record({"conversations": turns})
    for key, mark in (("images", "<image>"), ("videos", "<video>"), ("images", "")):  # LLaMA-Factory's names
        shown = {key: ["a"], "conversations": talk(f"{mark}\nWhat?", "A square.")}
        assert f"(key {key} is not read: call it {key[:-1]}, or read the file by kind: datasets)" in check_record(shown)
    for count in (2, [None], []):
        assert check_record(ROWS[0] | {"images": count}) is None, "names no picture"
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"data": ROWS}))
    assert open_records(path, tmp_path / "cache").problems[0] == "no conversations (it has data)", "an object around"
    path.write_text(json.dumps(messages) + "\n")
    assert "draftsmith logs" in open_records(path, tmp_path / "cache").problems[0], "a log of one line is no wrapper"
