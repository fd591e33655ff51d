"""Prompts of every kind of file, as published; and every file that is not one told in words."""

import json
from pathlib import Path

import pytest
from draftsmith.data.captioned.prompts import ImagePrompt, PromptSource, read_prompts
from draftsmith.data.shapes.captioned import write_captioned
from fails import fails_with
from pydantic import ValidationError
from small_records import tar_of

COCO_2014 = [("COCO_val2014_000000000042.jpg", 42), ("COCO_val2014_000000000007.jpg", 7)]
COCO_2017 = [("000000000042.jpg", 42), ("000000000007.jpg", 7)]
# As PartiPrompts.tsv has them: quotes are part of a prompt, also at its start and without an end.
PARTI = """Prompt\tCategory\tChallenge\tNote
bond\tAbstract\tBasic\tBiology-inspired concepts with multiple meanings
Salvador Dalí\tPeople\tBasic\t
A robot. The words "Fly an airplane" are written on the wall.\tOutdoor Scenes\tComplex\t
"Hello" is what a sign says\tArtifacts\tComplex\t
"an open quote\tArtifacts\tComplex\t
peace\tAbstract\tBasic\t
"""


def coco(path: Path, images, captions) -> Path:
    content = {
        "info": {"year": 2014},
        "images": [{"id": number, "file_name": name, "height": 4, "width": 4} for name, number in images],
        "annotations": [
            {"id": number, "image_id": image, "caption": caption} for number, image, caption in captions
        ],
    }  # fmt: skip
    path.write_text(json.dumps(content))
    return path


def prompts(path, **settings) -> list[ImagePrompt]:
    return read_prompts(PromptSource(path=str(path), **settings))


def captions(path, **settings) -> list[str]:
    return [prompt.caption for prompt in prompts(path, **settings)]


@pytest.mark.parametrize("images", [COCO_2014, COCO_2017], ids=["2014", "2017"])
def test_coco(tmp_path, images):
    rows = [(30, 42, "a dog"), (10, 42, "a cat "), (20, 42, "the longest caption"), (5, 7, "seven")]
    path = coco(tmp_path / "captions.json", images, rows)
    assert prompts(path) == [ImagePrompt("7", "seven"), ImagePrompt("42", "the longest caption")]
    assert captions(path, which="first") == ["seven", "a cat"]
    every = prompts(path, which="all")
    assert [p.caption for p in every] == ["seven", "a cat", "the longest caption", "a dog"]
    assert len({p.key for p in every}) == 4 and captions(path, max_samples=1) == ["seven"]


def test_coco_images_without_a_caption_are_no_prompts(tmp_path):
    path = coco(tmp_path / "captions.json", COCO_2017, [(1, 42, "a dog"), (2, 7, "  ")])
    assert captions(path) == ["a dog"]


def test_parti_prompts(tmp_path):
    path = tmp_path / "PartiPrompts.tsv"
    path.write_text(PARTI, encoding="utf-8")
    result = prompts(path)
    assert [p.caption for p in result] == [line.split("\t")[0] for line in PARTI.splitlines()[1:]]
    assert len({p.key for p in result}) == 6
    # With Windows' line ends and a byte order mark, as spreadsheets leave it.
    path.write_bytes(b"\xef\xbb\xbf" + PARTI.replace("\n", "\r\n").encode())
    assert captions(path) == [p.caption for p in result]


def test_json_lines(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"caption": "a dog", "id": "d"}, {"prompt": "a cat"}, {"label": 3}, {"caption": "a fox", "label": 0}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    assert prompts(path) == [ImagePrompt("d", "a dog"), ImagePrompt("line-1", "a cat"), ImagePrompt("line-2", "", 3),
                             ImagePrompt("line-3", "a fox", 0)]  # fmt: skip


def test_lines(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a dog\n\n  a cat \r\nein Fuß\n", encoding="utf-8")
    assert captions(path) == ["a dog", "a cat", "ein Fuß"]
    assert captions(path, max_samples=2) == ["a dog", "a cat"]


def test_a_tar_of_the_synthetic_dataset(tmp_path):
    write_captioned(tmp_path / "world", seed=0, image_size=16, grain=1.0, pairs=0.5, splits={"held_out": 5})
    prompts = read_prompts(
        PromptSource(**{"from": "world", "path": "held_out-00000.tar", "max_samples": 4}).resolved(tmp_path / "world")
    )
    assert [p.key for p in prompts] == [f"held_out-{n:06d}" for n in range(4)]
    assert all(" at the " in p.caption for p in prompts)


def test_prompts_in_an_order_that_a_seed_draws(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("".join(f"prompt {n}\n" for n in range(50)))
    whole = read_prompts(PromptSource(path=str(file)))
    drawn = {seed: read_prompts(PromptSource(path=str(file), shuffle=seed)) for seed in (0, 1)}
    assert drawn[0] != drawn[1] and all(sorted(d, key=whole.index) == whole != d for d in drawn.values())
    # Few of them are the first of all of them: more prompts keep those that were there.
    assert read_prompts(PromptSource(path=str(file), shuffle=0, max_samples=7)) == drawn[0][:7]


def test_classes_come_in_turn():
    prompts = read_prompts(PromptSource(classes=3, max_samples=5))
    assert [p.label for p in prompts] == [0, 1, 2, 0, 1]
    assert {p.caption for p in prompts} == {""} and len({p.key for p in prompts}) == 5


@pytest.mark.parametrize(("settings", "words"), [
    ({}, "give path .captions. or classes"),
    ({"path": "a.txt", "classes": 3, "max_samples": 2}, "give path .captions. or classes"),
    ({"classes": 3}, "max_samples"),
    ({"classes": 3, "max_samples": 2, "from": "world"}, "from"),
    ({"path": "a.txt", "which": "best"}, "longest"),
    ({"classes": 3, "max_samples": 2, "shuffle": 0}, "classes come in turn"),
    ({"path": "a.tar", "shuffle": 0}, "in its order"),
])  # fmt: skip
def test_settings_that_mean_nothing_are_refused(settings, words):
    fails_with(words, PromptSource, **settings, error=ValidationError)


def broken(path: Path, name: str, content: bytes | None) -> Path:
    file = path / name
    if content is not None:
        file.write_bytes(content)
    return file


# name of the file, what it holds (None: it is not there), what the message says.
BROKEN = {
    "missing": ("no.txt", None, "no such file"),
    "unknown kind": ("prompts.csv", b"a dog", r"prompts in a \.csv file"),
    "no suffix": ("prompts", b"a dog", "nameless"),
    "empty text": ("a.txt", b"\n \n", "no prompt"),
    "text of another encoding": ("a.txt", "Fuß".encode("latin-1"), "UTF-8"),
    "empty jsonl": ("a.jsonl", b"", "no prompt"),
    "not json": ("a.jsonl", b'{"caption": "a"}\n{"caption": \n', "line 2"),
    "no caption": ("a.jsonl", b'{"text": "a dog"}\n', "a caption or prompt"),
    "half a character": ("a.jsonl", b'{"caption": "a \\ud83d"}\n', "line 1"),
    "caption is no text": ("a.jsonl", b'{"caption": 7}\n', "line 1"),
    "empty caption": ("a.jsonl", b'{"caption": " "}\n', "line 1"),
    "label is no number": ("a.jsonl", b'{"label": "dog"}\n', "line 1"),
    "label is a truth": ("a.jsonl", b'{"label": true}\n', "line 1"),
    "label below 0": ("a.jsonl", b'{"label": -1}\n', "line 1"),
    "a list": ("a.jsonl", b"[1]\n", "line 1"),
    "jsonl of another encoding": ("a.jsonl", '{"caption": "Fuß"}\n'.encode("latin-1"), "UTF-8"),
    "no column": ("a.tsv", b"Text\tCategory\na dog\tAnimals\n", "no column Prompt"),
    "empty tsv": ("a.tsv", b"", "no column Prompt"),
    "no prompt in a row": ("a.tsv", b"Category\tPrompt\nAnimals\ta dog\nAnimals\n", "line 3"),
    "tsv of another encoding": ("a.tsv", "Prompt\nFuß\n".encode("latin-1"), "UTF-8"),
    "no coco": ("a.json", b'{"images": []}', "not MS-COCO captions"),
    "coco is a list": ("a.json", b'["a dog"]', "expected a valid dictionary"),
    "instances": (
        "a.json",
        b'{"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": [{"id": 1, "image_id": 1, "bbox": [1]}]}',
        "not MS-COCO captions",
    ),
    "empty coco": ("a.json", b'{"images": [], "annotations": []}', "no prompt"),
    "cut coco": ("a.json", b'{"images": [', "not valid JSON"),
    "no tar": ("a.tar", b"something else" * 100, "not a tar"),
    "tar without captions": ("a.tar", tar_of(("a.png", b"x"), ("b.png", b"x")), "no prompt"),
}


@pytest.mark.parametrize(("name", "content", "words"), BROKEN.values(), ids=BROKEN)
def test_broken_files_are_told(tmp_path, name, content, words):
    file = broken(tmp_path, name, content)
    told = fails_with(words, prompts, file)
    # The file is named, and a hint is given.
    assert str(file) in str(told) and "hint:" in str(told)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_end_as_any_system_ends_them(tmp_path, end):
    for name, text in (
        ("a.txt", "one\ntwo\n"),
        ("a.jsonl", '{"caption": "one"}\n{"prompt": "two"}\n'),
        ("a.tsv", "Category\tPrompt\nx\tone\nx\ttwo\n"),  # the column of prompts at the end of its line
    ):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.replace("\n", end).encode())
        assert [p.caption for p in prompts(tmp_path / name)] == ["one", "two"]
