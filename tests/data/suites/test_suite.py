"""The suite as a directory: prompts of both conventions, second turns, and published sets in the same layout."""

import json

import datasets
import pytest
from draftsmith.core.errors import UserError
from draftsmith.data.conversations import PromptFormat, render
from draftsmith.data.records.record import check_record
from draftsmith.data.shapes.suites import QUESTIONS as SHAPES_QUESTIONS
from draftsmith.data.shapes.suites import SUBSTITUTES
from draftsmith.data.shapes.write import sample, write_dataset
from draftsmith.data.suites.suite import BENCHMARK, OOD, QUALITY, TASKS, Suite, clean, prompt, suite_identity
from draftsmith.data.suites.suite_hub import NO_REFERENCE, Published, fetch
from fails import fails_with
from PIL import Image
from small_records import talk

REASON = "For the following question, provide a detailed explanation of your reasoning leading to the answer."


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    write_dataset(folder / "world", seed=3, image_size=24, splits={"train": {"name": 1}}, suite=3)
    return folder


@pytest.fixture
def suite(synthetic):
    return Suite(synthetic / "world" / "suite", synthetic / "cache")


# Each set in its own words -> the prompts of TABED's appendix I and of its released code.
@pytest.mark.parametrize(("name", "own", "images", "paper", "released"), [
    ("LLaVA-W", "Who?", 1, f"<image> {REASON} Who?", "<image>\nWho?"),
    ("DocVQA", "<image>\nWho?", 1, f"<image> {REASON} Who?", f"<image>\n{REASON}\nWho?"),
    ("POPE", "Who?", 1, f"<image> {REASON} Who?", f"<image>\n{REASON}\nWho?"),
    ("MMVet", "Who?", 1, f"<image> {REASON} Who?", f"<image>\n{REASON}\nWho?"),
    (
        "MB",
        "What was done? Source Image: <image> Target Image: <image> Instruction:",
        2,
        "Please provide instructions for editing the source image to match the target image. "
        "Source Image: <image> Target Image: <image> Instruction:",
        "What was done? Source Image: <image> Target Image: <image> Instruction:",
    ),
    (
        "IEdit",
        "How? <image><image>",
        2,
        "Please provide instructions for editing the source image to match the target image. "
        "Source Image: <image> Target Image: <image> Instruction:",
        "How? <image><image>",
    ),
    (
        "VIST",
        "End it. <image> Caption #1: We met. <image> Caption #2:",
        2,
        "With the narratives paired with the initial images, how would you conclude the story using the last "
        "picture? <image> Caption #1: We met. <image> Caption #2:",
        "End it. <image> Caption #1: We met. <image> Caption #2:",
    ),
    (
        "Spot",
        "How do they differ? <image><image>",
        2,
        "Explain the disparities between the first and second image. <image> <image> Difference:",
        "How do they differ? <image><image>",
    ),
    (
        "PSV",
        "End it. <image> Caption #1: Pororo runs. <image> Caption #2:",
        2,
        "Given the progression of the story with the first few images, can you write a fitting end considering the "
        "last image? <image> Caption #1: Pororo runs. <image> Caption #2:",
        "End it. <image> Caption #1: Pororo runs. <image> Caption #2:",
    ),
])  # fmt: skip
def test_prompts_of_both_conventions(name, own, images, paper, released):
    assert prompt(name, own, "paper", num_images=images) == paper
    assert prompt(name, own, "released", num_images=images) == released
    verbatim = own if "<image>" in own else "<image>\n" + own
    assert prompt(name, own, "verbatim", num_images=images) == verbatim


def test_a_set_of_ones_own_has_no_published_prompt():
    assert prompt("mine", "Who?", "verbatim", num_images=1) == "<image>\nWho?"
    fails_with("verbatim", prompt, "mine", "Who?", "released", num_images=1)


def test_the_synthetic_dataset_stands_in_for_every_set(suite):
    assert set(SUBSTITUTES) == {*BENCHMARK, *OOD, *QUALITY} == set(suite.about.sets)
    for name in suite.about.sets:
        for convention in ("paper", "released", "verbatim"):
            records = suite.first_turns(name, convention, 2)
            assert len(records) == 2
            assert [check_record(record) for record in records] == [None, None], (name, convention)
            for record in records:
                pictures = record.get("image", [])
                assert all((suite.folder / path).is_file() for path in pictures)
                assert len(pictures) == {"IEdit": 2, "MB": 2, "Spot": 2, "PSV": 5, "VIST": 5}.get(name, 1)
    assert suite.first_turns("IEdit", "verbatim", 3) != suite.first_turns("MB", "verbatim", 3)
    assert suite.group("PSV") == "ood" and suite.group("MB") == "benchmark" and suite.group("OCRBench") == "quality"
    word = sample(3, "suite-OCRBench", "word", 1).scenes[0].word
    assert suite.first_turns("OCRBench", "verbatim", None)[1]["references"] == [word]


def test_second_turns_follow_the_protocol(suite):
    answers = ["it is</s>", "<s> red, because <image> ", "   </s>"]
    for task in TASKS:
        records = suite.second_turns("Spot", task, "released", None, answers)
        # The third answer is empty: nothing to go on from.
        assert [record["row"] for record in records] == [0, 1]
        assert [check_record(record) for record in records] == [None, None], task
        assert [record["conversations"][1]["value"] for record in records] == ["it is", "red, because"]
        assert len(records[0]["image"]) == (4 if task == "next" else 2)
    first, _ = suite.first_turns("Spot", "released", 2)
    _, last = suite.second_turns("Spot", "next", "released", 2, answers[:2])
    # After the last row comes the first one, with its own pictures after the row's.
    assert last["conversations"][2] == first["conversations"][0]
    assert last["image"][2:] == first["image"]

    def asked(task, convention):
        return suite.second_turns("Spot", task, convention, 2, answers[:2])[1]["conversations"][2]["value"]

    assert asked("caption", "released") == "Provide a detailed caption for the provided image."
    assert asked("summary", "paper") == "Summarize the previous answer."
    assert asked("story", "released") == "Can you use the previous responses to write a long story for children?"
    own = {t: sample(3, f"suite-{t}", kind, 1).turns[0][0] for t, kind in SHAPES_QUESTIONS.items()}
    assert asked("NQ", "verbatim") == own["NQ"] and asked("GSM8K", "verbatim") == own["GSM8K"]
    assert asked("NQ", "released") == (
        own["NQ"].capitalize() + ". Provide a comprehensive and detailed explanation, including the reasoning and "
        "background information."
    )
    assert asked("GSM8K", "released") == own["GSM8K"] + ". Provide a detailed explanation.\nLet's think step by step."
    assert asked("caption", "verbatim") == "Describe the picture."


def test_released_transcripts_lose_the_end_token_and_training_never_does():
    turns = talk("<image>\nWho?", "Me.", "Why?", "(open)")
    form = PromptFormat(system="", image_rule="verbatim")
    blank = form.model_copy(update={"answer_end": "blank"})
    kept = "USER: <image>\nWho? ASSISTANT: Me.</s>USER: Why? ASSISTANT:"
    assert render(turns, form, has_image=True, open_ended=True).text == kept
    assert render(turns, blank, has_image=True, open_ended=True).text == kept.replace("</s>", " ")
    assert render(turns, blank, has_image=True) == render(turns, form, has_image=True)
    fails_with("v1", PromptFormat, template="plain", answer_end="blank", error=ValueError)


def test_what_reads_like_a_mark_opens_no_picture():
    assert clean("<s> look at <image> there</s>") == "look at  there"


def test_a_directory_that_is_none(tmp_path, synthetic):
    fails_with("no suite here", Suite, tmp_path, tmp_path / "cache")
    (tmp_path / "suite.json").write_text(json.dumps({"sets": {"a": {"file": "a.json", "groop": "ood"}}}))
    fails_with(r"sets\.a\.groop", Suite, tmp_path, tmp_path / "cache")
    (tmp_path / "suite.json").write_text(json.dumps({"sets": {}, "questions": {"next": "a.json"}}))
    fails_with("questions are of NQ and GSM8K", Suite, tmp_path, tmp_path / "cache")
    (tmp_path / "suite.json").write_text(json.dumps({"sets": {"../a": {"file": "a.json"}}}))
    fails_with("names of files", Suite, tmp_path, tmp_path / "cache")
    fails_with("did you mean 'POPE'", Suite(synthetic / "world" / "suite", tmp_path / "cache").rows, "POP")


def test_identity_follows_the_records(synthetic, tmp_path):
    import shutil

    copy = tmp_path / "suite"
    shutil.copytree(synthetic / "world" / "suite", copy)
    before = suite_identity(copy)
    assert before == suite_identity(copy)
    (copy / "POPE.json").write_text((copy / "POPE.json").read_text().replace("pink", "rosy") + "\n")
    assert suite_identity(copy) != before


def hub_folder(folder, rows):
    """A data set as the Hub holds it: parquet files by split."""
    folder.mkdir()
    datasets.Dataset.from_list(rows).cast_column("image_0", datasets.Image()).cast_column(
        "image_1", datasets.Image()
    ).to_parquet(str(folder / "test-00000-of-00001.parquet"))
    return str(folder)


def test_fetching_writes_the_same_layout(tmp_path):
    def picture(value):
        return Image.new("RGB", (4, 4), (value, 0, 0))

    rows = [
        {
            "sub_task": "IEdit" if number % 2 else "VIST", "question": f"Edit {number}: <image> to <image>",
            "answer": f"paint {number}", "image_0": picture(number), "image_1": picture(100 + number),
        }
        for number in range(6)
    ]  # fmt: skip
    repository = hub_folder(tmp_path / "hub", rows)
    published = {"IEdit": Published(repository, "test", sub_task="IEdit", rows=2)}
    texts = tmp_path / "nq"
    texts.mkdir()
    datasets.Dataset.from_list([{"question": "who wrote it"}, {"question": "when"}]).to_parquet(
        str(texts / "validation-0.parquet")
    )
    questions = {"NQ": Published(str(texts), "validation", rows=1)}
    folder = fetch(tmp_path / "suite", {"IEdit": None}, ["next", "NQ"], published=published, questions=questions)
    suite = Suite(folder, tmp_path / "cache")
    records = suite.first_turns("IEdit", "released", None)
    assert [record["conversations"][0]["value"] for record in records] == [
        "Edit 1: <image> to <image>", "Edit 3: <image> to <image>",
    ]  # fmt: skip
    assert [record["references"] for record in records] == [["paint 1"], ["paint 3"]]
    with Image.open(folder / records[1]["image"][1]) as second:
        assert second.getpixel((0, 0)) == (103, 0, 0)
    (turn,) = suite.second_turns("IEdit", "NQ", "released", 1, ["yes"])
    assert turn["conversations"][2]["value"].startswith("Who wrote it. Provide")
    assert suite.rows("IEdit", 1)[0]["id"] == "IEdit-00000"
    # What is there is taken as it is, also without the source.
    assert fetch(folder, {"IEdit": None}, [], published={}) == folder

    other = {"IEdit": Published(repository, "test", question="prompt")}
    fails_with("no column prompt", fetch, tmp_path / "other", {"IEdit": None}, [], published=other)
    fails_with("no published set", fetch, tmp_path / "other", {"Iedit": None}, [])
    assert not (tmp_path / "other").exists()


def test_without_a_network_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"cannot load set POPE \(nobody/such-a-set\)") as caught:
        fetch(tmp_path / "suite", {"POPE": 1}, [], published={"POPE": Published("nobody/such-a-set", "test")})
    assert "suite.json" in caught.value.hint


def test_rows_without_an_answer_have_a_reference_that_says_so(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    datasets.Dataset.from_list([{"question": "why", "answer": None}]).to_parquet(str(folder / "test-0.parquet"))
    published = {"POPE": Published(str(folder), "test")}
    suite = Suite(fetch(tmp_path / "suite", {"POPE": 5}, [], published=published), tmp_path / "cache")
    assert suite.first_turns("POPE", "verbatim", None)[0]["references"] == [NO_REFERENCE]
