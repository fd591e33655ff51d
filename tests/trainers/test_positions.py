"""What is said before a run of samples and prompts that are too long: numbers and hints, or nothing."""

import json

import pytest
from draftsmith.core.errors import UserError
from draftsmith.data.conversations import PromptFormat
from draftsmith.data.dataset import ConversationData, ConversationDataset
from draftsmith.data.families.llava import LLAVA
from draftsmith.data.shapes.tokenizer import train_tokenizer
from draftsmith.trainers.evaluate.measuring import before_decoding
from draftsmith.trainers.train.preflight import before_training
from PIL import Image
from small_records import talk

TEXTS = ["USER: ASSISTANT:\n", "USER: Which picture? ASSISTANT: It is picture 1."] * 3
MEAN = (0.5, 0.5, 0.5)


@pytest.fixture(scope="module")
def processor():
    """9 ids a picture."""
    return LLAVA.new(train_tokenizer(TEXTS, 400), image_size=24, patch_size=8, image_mean=MEAN, image_std=MEAN)


@pytest.fixture
def open_pictures(processor, tmp_path):
    """A data section of records with so many pictures each."""

    def open_pictures(*counts: int, **settings) -> ConversationDataset:
        Image.new("RGB", (24, 24)).save(tmp_path / "a.png")
        rows = [
            {"id": str(n), "image": ["a.png"] * count,
             "conversations": talk("<image>\n" * count + "Which picture?", "It is picture 1.")}
            for n, count in enumerate(counts)
        ]  # fmt: skip
        path = tmp_path / "data.json"
        path.write_text(json.dumps(rows))
        form = PromptFormat(system="", image_rule="verbatim")
        return ConversationDataset(
            ConversationData(**{"path": str(path), "aspect": "square"} | settings), form, processor,
            files=[path], skipped_log=tmp_path / "skipped.jsonl", cache=tmp_path / "cache",
        )  # fmt: skip

    return open_pictures


def said(function, *arguments, **options) -> list[str]:
    lines: list[str] = []
    function(*arguments, lines.append, **options)
    return lines


@pytest.mark.parametrize(("settings", "done"), [
    ({"over_length": "skip"}, "they are left out"), ({"on_error": "skip"}, "they are left out"),
    ({"over_length": "drop_images"}, "their pictures are taken away and their text is kept"),
])  # fmt: skip
def test_what_becomes_of_long_samples_is_said_with_numbers(open_pictures, settings, done):
    dataset = open_pictures(1, 1, 5, 1, 5, max_length=64, **settings)
    longest = max(dataset.num_ids(i) for i in range(5))
    (line,) = said(before_training, dataset, 64)
    assert f"longer than max_length 64: 2 of 5 (the longest has {longest} ids)" in line and done in line
    assert "drafter.rope_scaling" in line and "skipped.jsonl" in line
    assert "raise max_length (up to 256 positions)" in said(before_training, dataset, 256)[0], "a simpler hint first"


@pytest.mark.parametrize("settings", [{}, {"over_length": "error", "on_error": "skip"}])
def test_a_section_that_wants_none_stops_before_the_first_step(open_pictures, settings):
    with pytest.raises(UserError, match=r"more than max_length 64\n.*record 2"):
        said(before_training, open_pictures(1, 1, 5, max_length=64, **settings), 64)


def test_prompts_alone_are_counted_where_a_model_writes_the_answers(open_pictures):
    dataset = open_pictures(1, 5, max_length=64)
    prompt, whole = (dataset.num_ids(1, prompt=p) for p in (True, False))
    assert prompt < whole
    fits = open_pictures(1, 5, max_length=prompt)
    assert said(before_training, fits, 64, prompts=True) == [f"no sample is longer than max_length {prompt}"]


def test_prompts_beyond_a_draft_s_positions_are_told_with_hints(open_pictures):
    dataset = open_pictures(1, 5, 5, max_length=512)
    longest = dataset.num_ids(1, prompt=True)
    room = longest + 10
    assert said(before_decoding, "stories", dataset, {"draft": room}, max_new_tokens=10) == []
    (line,) = said(before_decoding, "stories", dataset, {"few": room - 1, "many": 4096}, max_new_tokens=10)
    assert line.startswith("warning: stories:") and "draft few" in line
    assert f"{room - 1} positions" in line and f"2 of 3 (the longest has {longest} ids)" in line
    for hint in ("mode P", "drafter.rope_scaling", "train on several pictures"):
        assert hint in line
