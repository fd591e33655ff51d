"""Samples that are too long: told, left out or without their pictures, as the data section says, and counted before."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from draftsmith.core.errors import UserError
from draftsmith.data import lengths
from draftsmith.data.conversations import PromptFormat
from draftsmith.data.lengths import count_long
from draftsmith.data.shapes.scenarios import KINDS
from draftsmith.data.shapes.write import write_dataset
from fails import fails_with
from small_records import log, talk

FORM = PromptFormat(system="", image_rule="verbatim")
LIMIT = 64


def turns(question: str, answer: str = "It is picture 1.") -> list[dict]:
    return talk(question, answer)


def five_pictures(question: str = "<image>\nWhich <image> picture?\n" + "<image>\n" * 3) -> dict:
    return {"id": "five", "image": [f"images/{n}.png" for n in range(5)], "conversations": turns(question)}


SHORT = {"id": "one", "image": "images/1.png", "conversations": turns("<image>\nWhich picture?")}
LONG_TEXT = {"id": "text", "conversations": turns("Which picture?", "It is picture 1. " * 20)}
LONG_BOTH = {"id": "both", "image": "images/1.png", "conversations": turns("<image>\nWhich?", "It is picture. " * 20)}


def write(folder: Path, *records: dict, name: str = "data.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(records))
    return path


def taught(sample, processor) -> str:
    ids = [i for i, m in zip(sample.ids, sample.loss_mask, strict=True) if m]
    return processor.tokenizer.decode(ids, skip_special_tokens=True).strip()


# (over_length, on_error) -> what happens to five pictures, and to what is too long without pictures, too
OUTCOMES = {(None, "strict"): ("error", "error"), (None, "skip"): ("skipped", "skipped"),
            ("error", "strict"): ("error", "error"), ("error", "skip"): ("error", "error"),
            ("skip", "strict"): ("skipped", "skipped"), ("skip", "skip"): ("skipped", "skipped"),
            ("drop_images", "strict"): ("dropped", "error"),
            ("drop_images", "skip"): ("dropped", "skipped")}  # fmt: skip


@pytest.mark.parametrize(("settings", "long"), itertools.product(OUTCOMES, ["five", "text", "both"]))
def test_what_happens_to_a_long_sample(folder, open_data, processor, settings, long):
    record = {"five": five_pictures(), "text": LONG_TEXT, "both": LONG_BOTH}[long]
    outcome = OUTCOMES[settings][long != "five"]
    path = write(folder, SHORT, record)
    dataset = open_data(path, form=FORM, max_length=LIMIT, over_length=settings[0], on_error=settings[1])
    assert taught(dataset[0], processor) == "It is picture 1." and not log(folder)
    if outcome == "error":
        with pytest.raises(UserError, match=rf"more than max_length {LIMIT}") as caught:
            dataset[1]
        assert f"record 1 (id {long!r})" in str(caught.value)
        assert "over_length: skip or drop_images" in caught.value.hint
        assert not log(folder)
        return
    sample = dataset[1]
    assert sample.pixels is None and not sample.pictures
    assert any(sample.loss_mask) == (outcome == "dropped")
    (entry,) = log(folder)
    assert entry["id"] == long and f"more than max_length {LIMIT}" in entry["reason"]
    assert ("its 5 pictures are dropped" in entry["reason"]) == (outcome == "dropped")
    assert [dataset[1].sample_id, len(log(folder))] == ["data.json[1]", 1], "listed once"
    listed = dataset.log.listed()
    assert (listed.left_out, listed.changed) == ((0, 1) if outcome == "dropped" else (1, 0))


def test_without_its_pictures_a_sample_is_its_text(folder, open_data, processor):
    """Marks go with their line break; nothing else of the text is touched."""
    text = {"id": "t", "conversations": turns("Which  picture?")}
    path = write(folder, five_pictures(), text)
    dropped, plain = (open_data(path, form=FORM, max_length=LIMIT, over_length="drop_images")[i] for i in range(2))
    assert (dropped.ids, dropped.loss_mask, dropped.modality) == (plain.ids, plain.loss_mask, plain.modality)
    assert taught(dropped, processor) == "It is picture 1."
    assert "<image>" not in processor.tokenizer.decode(dropped.ids)


def test_a_caption_that_is_too_long_has_no_sample_without_its_picture(folder, open_data):
    path = write(folder, LONG_BOTH)
    form = PromptFormat(template="plain")
    with pytest.raises(UserError, match="more than max_length"):
        open_data(path, form=form, max_length=LIMIT, over_length="drop_images")[0]


def test_other_problems_are_on_error_s_business(folder, open_data):
    record = SHORT | {"image": "images/none.png"}
    with pytest.raises(UserError, match="missing image"):
        open_data(write(folder, record), form=FORM, over_length="skip")[0]
    assert not any(open_data(write(folder, record), form=FORM, over_length="error", on_error="skip")[0].loss_mask)


def test_a_prompt_to_decode_is_never_shortened(folder, open_data):
    dataset = open_data(write(folder, five_pictures()), form=FORM, max_length=LIMIT, over_length="drop_images")
    request, _ = dataset.request(0)
    assert len(request.pixels) == 5 and len(request.ids) > LIMIT


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lengths") / "world"
    write_dataset(folder, seed=0, image_size=48, splits={"train": dict.fromkeys(KINDS, 12)})
    return folder


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize(
    ("template", "kinds"), [("v1", None), ("plain", ["caption", "name", "clip"]), ("v1", ["story", "clip", "edit"])]
)
def test_counts_equal_a_count_of_all(synthetic, open_data, template, kinds, prompts):
    form = PromptFormat(template=template, system="", image_rule="verbatim")
    dataset = open_data(synthetic / "train.json", form=form, aspect="square", kinds=kinds, max_length=1024)
    if prompts:
        every = np.array([len(dataset.request(i)[0].ids) for i in range(len(dataset))])
    else:
        every = np.array([len(dataset[i].ids) for i in range(len(dataset))])
    for limit in (8, 40, 60, 90, 120, 1000):
        too_long = count_long(dataset, limit, prompts=prompts)
        assert (too_long.count, too_long.is_exact) == (int((every > limit).sum()), True)
        assert (too_long.first is None) == (too_long.count == 0)
        if too_long.first is not None:
            assert every[too_long.first] > limit
            assert too_long.is_longest and too_long.longest == every.max()


def test_of_many_samples_some_are_counted_and_the_longest_among_them(synthetic, open_data, monkeypatch):
    form = PromptFormat(system="", image_rule="verbatim")
    dataset = open_data(synthetic / "train.json", form=form, aspect="square", max_length=1024)
    every = np.array([len(dataset[i].ids) for i in range(len(dataset))])
    monkeypatch.setattr(lengths, "LOOKED_AT", 40)
    for limit in (40, 60, 120):
        too_long = count_long(dataset, limit)
        assert not too_long.is_exact and not too_long.is_longest and "about" in str(too_long)
        assert abs(too_long.count - (every > limit).sum()) < 0.25 * len(every)
        assert too_long.longest > 0.9 * every.max() and every[too_long.first] > limit


@pytest.mark.parametrize("way", ["sample", "counted", "prompt", "preflight"])
def test_text_that_is_far_too_long_is_refused_before_it_is_tokenized_whole(
    folder, open_data, processor, monkeypatch, way
):
    """Two megabytes took half a minute in a real tokenizer, also where no blank stands in them."""
    long = ["word " * 400_000, "x" * 2_000_000]
    path = write(folder, SHORT, *({"id": str(n), "conversations": turns(text)} for n, text in enumerate(long)))
    data = open_data(path, form=FORM, max_length=LIMIT, over_length="skip")
    seen, tokenize = [], type(processor.tokenizer).__call__

    def watched(self, text, *arguments, **settings):
        seen.append(len(text))
        return tokenize(self, text, *arguments, **settings)

    monkeypatch.setattr(type(processor.tokenizer), "__call__", watched)
    if way == "preflight":
        counted = count_long(data, data.config.max_length)
        assert (counted.count, counted.is_longest) == (2, False) and "at least" in str(counted)
    for index in (1, 2):
        if way == "prompt":
            fails_with(r"ids, more than max_length", data.request, index, most=data.config.max_length)
        elif way == "counted":
            assert not any(data.counted(index).loss_mask)
        elif way == "sample":
            assert not any(data[index].loss_mask)
            assert re.search(r"at least [\d,]+ ids .in the first [\d,]+ of 2,", log(folder)[-1]["reason"])
    assert sum(seen) < 500_000, seen
    assert any(data[0].loss_mask) and len(data.request(0)[0].ids) < data.config.max_length
