"""Broken data is refused or listed by name, never replaced; good data is the same in every file format."""

import json
import os
from pathlib import Path

import pytest
from draftsmith.core.errors import UserError
from draftsmith.data.conversations import PromptFormat
from draftsmith.data.records import records, scan
from fails import fails_with
from small_records import log, record, talk

BROKEN = 2  # place of the broken record among five


def write(path: Path, rows: list) -> Path:
    """A JSON list, or JSONL where the name says so."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(lines if path.suffix == ".jsonl" else json.dumps(rows))
    return path


def five(folder: Path, broken) -> Path:
    """Records 0 to 4 with `broken` in the place of number 2."""
    return write(folder / "data.json", [broken if n == BROKEN else record(n) for n in range(5)])


def lessons(dataset, processor) -> dict[str, tuple[str, float]]:
    """name -> (supervised text, first pixel) of the samples that supervise anything."""
    result = {}
    for index in range(len(dataset)):
        sample = dataset[index]
        taught = [i for i, m in zip(sample.ids, sample.loss_mask, strict=True) if m]
        if taught:
            pixel = round(float(sample.pixels[0, 0, 12, 12]), 3) if sample.pixels is not None else 0.0
            result[sample.sample_id] = (processor.tokenizer.decode(taught, skip_special_tokens=True).strip(), pixel)
        else:
            assert sample.pixels is None and len(set(sample.ids)) == 1, "an unusable record keeps no content"
    return result


def read_all(open_data, path: Path) -> None:
    dataset = open_data(path, max_length=64)
    for index in range(len(dataset)):
        dataset[index]


# name -> (broken record, what the reason must say)
PROBLEMS = {
    "over-length": (record(2, conversations=talk("<image>\nWhich?", "It is " * 100)), "ids, more than max_length 64"),
    "empty answer": (record(2, conversations=talk("<image>\nWhich?", " ")), "empty answer"),
    "no answer": (record(2, conversations=talk("<image>\nWhich?", "")[:1]), "no answer to train on"),
    "missing image": (record(2, image="images/none.png"), "missing image"),
    "corrupt image": (record(2, image="data.json"), "corrupt image"),
    "image is a folder": (record(2, image="images"), "not a regular file: a folder"),
    "image is outside": (record(2, image="../elsewhere.png"), "leads out of the folder"),
    "image is absolute": (record(2, image="/etc/hostname"), "is an absolute path"),
    "image has no name": (record(2, image="images/a\0.png"), "not a file name"),
    "lone surrogate in a text": (record(2, conversations=talk("<image>\nWhich \ud83d?", "Two.")), "half a character"),
    "lone surrogate in a path": (record(2, image="images/\udc80.png"), "half a character"),
    "image is a number": (record(2, image=2), "image is neither a path nor a list of paths"),
    "no mark": (record(2, conversations=talk("Which picture?", "Two.")), "0 <image> marks for 1 images"),
    "two marks": (record(2, conversations=talk("<image><image>\nWhich?", "Two.")), "2 <image> marks for 1 images"),
    "two marks of which llava15 keeps one": (
        record(2, image=["images/2.png"] * 2, conversations=talk("<image><image>\nWhich?", "Two.")),
        "1 <image> marks for 2 images",
    ),
    "mark without image": (record(2, image=None), "1 <image> marks for 0 images"),
    "mark beside images": (record(2, image=None, images=["a.png"]), "for 0 images (key images is not read: call it"),
    "unknown role": (record(2, conversations=[{"from": "narrator", "value": "<image>"}]), "unknown role 'narrator'"),
    "turn is a text": (record(2, conversations=["<image>"]), "unknown role None"),
    "value is a number": (record(2, conversations=[{"from": "human", "value": 2}]), "a turn without text"),
    "roles in a row": (record(2, conversations=talk("<image>", "a") + talk("b", "c")[1:]), "do not alternate"),
    "no conversations": ({"id": "r2", "image": "images/2.png"}, "no conversations"),
    "not an object": (["r2"], "not an object"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_strict_names_file_record_and_hint(folder, open_data, name):
    broken, reason = PROBLEMS[name]
    path = five(folder, broken)
    caught = fails_with("", read_all, open_data, path)
    text = str(caught)
    assert reason in text and f"{path}, record {BROKEN}" in text
    assert ("'r2'" in text) == isinstance(broken, dict)
    assert caught.hint and f"hint:  {caught.hint}" in text
    assert ("image_rule: next" in text) == (name == "two marks of which llava15 keeps one")
    assert not log(folder)


@pytest.mark.parametrize(("broken", "reason"), PROBLEMS.values(), ids=PROBLEMS)
def test_skip_lists_the_record_and_yields_the_good_ones(folder, open_data, processor, broken, reason):
    whole = lessons(open_data(five(folder, record(BROKEN))), processor)
    assert len(set(whole.values())) == 5, "five pictures and answers to tell apart"
    dataset = open_data(five(folder, broken), max_length=64, on_error="skip")
    result = lessons(dataset, processor)
    del whole[f"data.json[{BROKEN}]"]
    assert result == whole
    (entry,) = log(folder)
    assert (entry["file"], entry["record"]) == (str(folder / "data.json"), BROKEN)
    assert entry["id"] == ("r2" if isinstance(broken, dict) else None) and reason in entry["reason"]


def test_a_skipped_record_is_listed_once(folder, open_data):
    """Whatever the number of epochs, and when the stage is started again."""
    rows = [record(n) for n in range(5)]
    rows[1]["conversations"][1]["value"] = ""  # seen when the file is opened
    rows[3]["image"] = "images/none.png"  # seen when it is read
    path = write(folder / "data.json", rows)
    for _ in range(2):
        dataset = open_data(path, on_error="skip")
        for _ in range(2):
            samples = [dataset[i] for i in range(len(dataset))]
        assert [s.sample_id for s in samples] == [f"data.json[{n}]" for n in (0, 2, 3, 4)]
        assert [any(s.loss_mask) for s in samples] == [True, True, False, True]
    assert sorted(entry["record"] for entry in log(folder)) == [1, 3]


def test_a_wrong_folder_is_an_error_also_under_skip(folder, open_data):
    """With every record left out, training would stop at a batch that teaches nothing, and name no folder."""
    path, wrong = write(folder / "data.json", [record(n) for n in range(5)]), folder / "elsewhere"
    fails_with(f"5 of 5 pictures missing in {wrong}, first: 0.png", open_data, path, on_error="skip", images=str(wrong))
    (folder / "images" / "0.png").unlink()
    assert len(open_data(path, on_error="skip")) == 5, "one that is missing is a record's own fault"
    long = write(folder / "long.json", [record(0) | {"image": "x" * 300}, *(record(n) for n in range(1, 5))])
    assert len(open_data(long, on_error="skip")) == 5, "and so is a name that no file system takes"


def test_a_wrong_folder_of_one_of_two_files_is_one_error(folder, open_data):
    """Else every record of that file is left out one by one, and the run trains on the other alone."""
    good = write(folder / "good.json", [record(n) for n in range(5)])
    (folder / "other").mkdir()
    lost = write(folder / "other" / "lost.json", [record(n) for n in range(5)])
    with pytest.raises(UserError, match=r"5 of 5 pictures of lost\.json missing in \S*other, first: 0.png") as caught:
        open_data(good, lost, on_error="skip")
    assert caught.value.where == f"{lost}, key images" and "images" in (caught.value.hint or "")
    rows = [record(n, image=f"../images/{n}.png") for n in range(5)]
    outside = write(folder / "other" / "outside.json", rows)
    with pytest.raises(UserError, match=r"no record of 5 .* of outside\.json names pictures inside the folder"):
        open_data(good, outside, on_error="skip")
    (folder / "other" / "images").symlink_to(folder / "images", target_is_directory=True)
    assert len(open_data(good, lost, on_error="skip")) == 10


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_json_that_is_nested_too_deep_is_told_by_its_place(folder, open_data, name):
    deep = '{"id": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    (folder / name).write_text(deep if name.endswith("l") else f"[{deep}]")
    caught = fails_with("not valid JSON", open_data, folder / name)
    assert str(folder / name) in (caught.where or "")


def test_paths_outside_the_folder_are_read_only_where_the_section_allows_it(folder, open_data, processor):
    """Also a whole file of them stops at the start, whatever `on_error` says: that is a setting, and no bad record."""
    inner = folder / "inner"
    inner.mkdir()
    rows = [record(n, image=f"../images/{n}.png" if n % 2 else str(folder / f"images/{n}.png")) for n in range(5)]
    path = write(folder / "data.json", rows)
    with pytest.raises(UserError, match=r"is an absolute path\n.*\n.*allow_outside: true"):
        open_data(path, images=str(inner))[0]
    with pytest.raises(UserError, match=r"no record of 5 that were looked at names pictures inside the folder"):
        open_data(path, images=str(inner), on_error="skip")
    outside = open_data(path, images=str(inner), allow_outside=True)
    within = open_data(write(folder / "good.json", [record(n) for n in range(5)]))
    assert list(lessons(outside, processor).values()) == list(lessons(within, processor).values())
    assert outside.identity() != open_data(path, images=str(inner)).identity()


def test_links_inside_the_folder_are_followed(folder, open_data, processor):
    """Folders of links to a shared disk are common, and links are the folder's owner's, not the records'."""
    disk = folder / "disk"
    (folder / "images").rename(disk)
    (folder / "images").mkdir()
    for number in range(4):
        (folder / "images" / f"{number}.png").symlink_to(disk / f"{number}.png")
    (folder / "images" / "more").symlink_to(disk, target_is_directory=True)
    rows = [*(record(n) for n in range(4)), record(4, image="images/more/4.png")]
    assert len(lessons(open_data(write(folder / "data.json", rows)), processor)) == 5


def test_a_pipe_among_the_pictures_is_a_bad_record(folder, open_data, processor):
    os.mkfifo(folder / "images" / "pipe.png")
    (folder / "images" / "link.png").symlink_to(folder / "images" / "pipe.png")
    rows = [record(0), record(1, image="images/pipe.png"), record(2, image="images/link.png")]
    assert list(lessons(open_data(write(folder / "data.json", rows), on_error="skip"), processor)) == ["data.json[0]"]
    assert {entry["reason"] for entry in log(folder)} == {"not a regular file: a named pipe"}


def test_ids_that_cannot_tell_records_apart(folder, open_data, processor):
    """`skip` says so and leaves none of them out: it goes by places, so no record is taken for another."""
    problem, where = "2 records repeat", "record 3 (id 6) repeats record 1"
    path = write(folder / "data.json", [record(n, id=i) for n, i in enumerate([5, 6, 7, 6, 5])])
    for _ in range(2):  # from the file, and from the cached index
        caught = fails_with("", open_data, path)
        assert problem in str(caught) and where in str(caught) and str(path) in str(caught)
        assert caught.hint
    assert not log(folder)
    result = lessons(open_data(path, on_error="skip"), processor)
    assert [answer for answer, _ in result.values()] == [f"It is picture {n}." for n in range(5)]
    (entry,) = log(folder)
    assert entry["record"] is None and problem in entry["reason"] and where in entry["reason"]
    assert "all are kept" in entry["reason"]


def test_records_without_ids_are_no_duplicates(folder, open_data):
    rows = [{k: v for k, v in record(n).items() if k != "id"} for n in range(5)]
    assert len(open_data(write(folder / "data.jsonl", rows))) == 5


def test_an_index_notes_what_is_wrong_and_which_ids_repeat(folder):
    rows = [record(n, note='}, {"id": "', id=n % 70 if n % 9 else str(n)) for n in range(200)]
    rows[77]["conversations"] = [{"id": "deceit", "from": "human", "value": "a"}, {"id": "deceit", "from": "nobody"}]
    rows[150]["conversations"][1]["value"] = "日本 \u3000 wide"
    rows[199]["image"] = None  # unusable: its id is free to be anything
    made = records.open_records(write(folder / "data.json", rows), folder / "cache")
    kept = records.open_records(folder / "data.json", folder / "cache")
    for file in (made, kept):
        assert sorted(file.problems) == [77, 199] and file.first_duplicate == (70, 0)
        assert [file.read(n) for n in (0, 150, 199)] == [rows[n] for n in (0, 150, 199)]


DAMAGES = {
    "data.json": lambda text: text.replace('"r120"', "r120"),
    "data.jsonl": lambda text: text.replace('"r120"', "r120"),
    "two_lists.json": lambda text: text.replace(', {"id": "r120"', '] [{"id": "r120"'),
    "cut_off.json": lambda text: text[: text.index('"r121"')],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_large_broken_file_is_refused_alike(folder, monkeypatch, name):
    monkeypatch.setattr(scan, "CHUNK", 2000)
    path = write(folder / name, [record(n) for n in range(200)])
    path.write_text(DAMAGES[name](path.read_text()))
    fails_with(r"not valid JSON[\s\S]*(record 12[01]|line 121)\n", records.open_records, path, folder / "cache")


def test_an_unchanged_file_is_indexed_once(folder, open_data, monkeypatch):
    path = five(folder, record(BROKEN))
    first = open_data(path)
    index = records.indexed
    monkeypatch.setattr(records, "indexed", lambda *_: pytest.fail("indexed again"))
    assert open_data(path).lengths.tolist() == first.lengths.tolist()
    monkeypatch.setattr(records, "indexed", index)
    five(folder, record(BROKEN, conversations=talk("<image>\nWhich of the six?", "Two.")))
    assert open_data(path).lengths.tolist() != first.lengths.tolist()


def test_identity_covers_content_settings_and_format(folder, open_data):
    path = five(folder, record(BROKEN))
    first = open_data(path).identity()
    assert open_data(path).identity() == first
    others = [
        open_data(path, images=str(folder)).identity(),
        open_data(path, aspect="square").identity(),
        open_data(path, form=PromptFormat()).identity(),
    ]
    five(folder, record(BROKEN, image="images/5.png"))
    others.append(open_data(path).identity())
    assert len({first, *others}) == 5


def test_images_folder_max_samples_and_several_files(folder, open_data, processor):
    (folder / "images").rename(folder / "pictures")
    flat = [record(n, image=f"{n}.png") for n in range(5)]
    paths = [write(folder / "a.json", flat[:2]), write(folder / "b.jsonl", flat[2:])]
    dataset = open_data(*paths, images=str(folder / "pictures"), max_samples=4)
    assert list(lessons(dataset, processor)) == ["a.json[0]", "a.json[1]", "b.jsonl[0]", "b.jsonl[1]"]
    assert dataset.record(2) == flat[2]


def test_what_is_put_behind_the_last_question(folder, open_data, processor):
    """In samples and in prompts, after the last of several questions, with the picture where it was."""
    two = talk("<image>\nWhich picture?", "It is picture 1.") + talk("Which picture?", "It is picture 2.")
    path = write(folder / "data.json", [record(1, conversations=two)])
    plain, asked = open_data(path), open_data(path, question_end="USER: picture")
    texts = [processor.tokenizer.decode(d[0].ids) for d in (plain, asked)]
    last = "? ASSISTANT: It is picture 2"
    assert texts[1] == texts[0].replace(last, last.replace("?", "? USER: picture")) != texts[0]
    assert sum(asked[0].loss_mask) == sum(plain[0].loss_mask), "it is no answer"
    request, answer = asked.request(0)
    assert processor.tokenizer.decode(request.ids).endswith("USER: picture ASSISTANT:") and answer == "It is picture 2."
    assert asked.num_ids(0, prompt=True) == len(request.ids) and asked.identity() != plain.identity()
