"""Sets of videos, pictures and texts: how rows of the Hub become records, which rows, and how they are asked."""

import io
import json
import random
from dataclasses import replace

import datasets
import numpy as np
import pytest
from draftsmith.core.errors import UserError
from draftsmith.data.conversations import PromptFormat
from draftsmith.data.dataset import ConversationData, ConversationDataset
from draftsmith.data.pictures.media_files import Embedded
from draftsmith.data.pictures.picture_files import load_image
from draftsmith.data.pictures.videos import write_clip
from draftsmith.data.records.record import check_record
from draftsmith.data.suites.benchmark_hub import chosen, fetch_benchmarks, record
from draftsmith.data.suites.benchmark_sets import (
    BENCHMARK_SETS,
    EXPLAIN,
    LETTER,
    WORD,
    BenchmarkSet,
    Join,
    wording,
)
from draftsmith.data.suites.suite import Suite
from fails import fails_with
from PIL import Image
from small_records import talk

OWN_WORDS = PromptFormat(system="", image_rule="verbatim")


def test_prompts_ask_for_long_answers_or_for_short_ones():
    options = ("a cat", "a dog")
    assert wording("describe", "What is it?", options, describe="Describe it.") == "Describe it."
    assert wording("own", "What is it?", options, describe="") == "What is it?"
    assert wording("letter", "What is it?", options, describe="") == f"What is it?\nA. a cat\nB. a dog\n{LETTER}"
    assert wording("word", "What is it?", describe="") == f"What is it?\n{WORD}"
    assert wording("explain", "Why?", options, describe="", hint="Lamps.") == (
        f"Context: Lamps.\nWhy?\nA. a cat\nB. a dog\n{EXPLAIN}"
    )
    # MME's questions end with what would end the answer; scored ones keep it.
    asked = "Is it red? Please answer yes or no."
    assert wording("explain", asked, describe="") == f"Is it red?\n{EXPLAIN}"
    assert wording("own", asked, describe="") == asked
    assert wording("explain", "", describe="Describe it.") == "Describe it.", "a set without questions"


@pytest.mark.parametrize(("name", "row", "options", "letter"), [
    # The answer "3" is the text of the first option, not the fourth one.
    ("MVBench", {"video": "a.mp4", "question": "How many?", "candidates": ["3", "1", "0"], "answer": "3"},
     ["3", "1", "0"], "A"),
    ("LongVideoBench", {"video_path": "a.mp4", "question": "Who?", "correct_choice": 2, "option0": "x",
                        "option1": "y", "option2": "z", "option3": "N/A", "option4": "N/A"}, ["x", "y", "z"], "C"),
    ("LongVideoBench", {"video_path": "a.mp4", "question": "Who?", "correct_choice": -1, "option0": "x",
                        "option1": "y", "option2": "N/A", "option3": "N/A", "option4": "N/A"}, ["x", "y"], None),
    ("VideoMME", {"videoID": "a", "question": "Who?", "options": ["A. Me.", "B. You.", "C. B."], "answer": "B"},
     ["Me.", "You.", "B."], "B"),
    ("MLVU", {"video_name": "a.mp4", "question": "Who?\n(A) me\n(B) you", "answer": "B"}, None, "B"),
    ("SEED-Bench", {"image": [], "question": "Who?", "choice_a": "a", "choice_b": "b", "choice_c": "c",
                    "choice_d": "d", "answer": "D"}, ["a", "b", "c", "d"], "D"),
    ("ScienceQA", {"image": None, "question": "Who?", "choices": ["a", "b"], "hint": "", "answer": 0}, ["a", "b"],
     "A"),
    ("AI2D", {"image": None, "question": "Who?", "options": ["0", "1", "2", "3"], "answer": "2"},
     ["0", "1", "2", "3"], "C"),
    ("GQA", {"image": None, "question": "Who?", "answer": "cat"}, None, None),
])  # fmt: skip
def test_options_and_the_right_letter(name, row, options, letter, tmp_path):
    result = record(name, BENCHMARK_SETS[name], None, row, 0, tmp_path)
    assert (result.get("options"), result.get("letter")) == (options, letter)
    if letter is not None and options:
        assert result["references"] == [options["ABCD".index(letter)]], "good answers are texts"


def encoded(image: Image.Image, form: str = "PNG", **settings) -> Embedded:
    data = io.BytesIO()
    image.save(data, form, **settings)
    return Embedded("here", lambda: io.BytesIO(data.getvalue()))


def test_questions_in_other_columns_and_several_answers(tmp_path):
    row = {"video_name": "v", "question_1": "None", "question_2": "What moves?", "answer": "A cat."}
    result = record("VideoChatGPT", BENCHMARK_SETS["VideoChatGPT"], "Consistency", row, 4, tmp_path)
    assert result["conversations"][0]["value"] == "<video>\nWhat moves?"
    assert result["video"] == "media/VideoChatGPT/Test_Videos/v.mp4" and result["id"] == "VideoChatGPT-00004"
    assert check_record(result) is None
    pictures = [encoded(Image.new("RGB", (4, 4), (value, 0, 0))) for value in (10, 20)]
    row = {"image": pictures, "question": "Who?", "answer": "A"} | {f"choice_{c}": c for c in "abcd"}
    result = record("SEED-Bench", BENCHMARK_SETS["SEED-Bench"], None, row, 0, tmp_path)
    assert result["conversations"][0]["value"] == "<image>\n<image>\nWho?" and check_record(result) is None
    with Image.open(tmp_path / result["image"][1]) as second:
        assert second.getpixel((0, 0)) == (20, 0, 0)
    result = record("COCO", BENCHMARK_SETS["COCO"], None, {"image": pictures[0], "answer": ["a", "b"]}, 0, tmp_path)
    assert result["references"] == ["a", "b"] and result["conversations"][0]["value"] == "<image>\n"
    with pytest.raises(UserError, match="outside of its folder"):
        record("MVBench", BENCHMARK_SETS["MVBench"], "vlnqa", {"video": "../../etc/a.mp4"}, 0, tmp_path)


def test_the_rows_are_those_that_datasets_shuffles_to_the_front():
    table = datasets.Dataset.from_dict({"n": list(range(499))})
    assert chosen(499, 100, 42) == table.shuffle(seed=42).select(range(100))["n"]
    assert chosen(5, 100, 42) != list(range(5)) and sorted(chosen(5, 100, 42)) == list(range(5))
    assert chosen(5, None, 42) == list(range(5))


def parquet(folder, rows, name="test-0.parquet", images=()):
    folder.mkdir(parents=True, exist_ok=True)
    table = datasets.Dataset.from_list(rows)
    for column in images:
        table = table.cast_column(column, datasets.Image())
    table.to_parquet(str(folder / name))
    return str(folder)


def clip(path, frames=4):
    path.parent.mkdir(parents=True, exist_ok=True)
    write_clip(path, [Image.new("RGB", (32, 32), (60 * n, 0, 0)) for n in range(frames)], fps=1)


def test_clips_are_found_where_archives_unpack_them_and_a_missing_one_is_met_by_the_reader(tmp_path, processor):
    rows = [{"video_name": f"v{n}", "question": "What is in it?", "answer": f"It is picture {n}."} for n in range(3)]
    about = replace(BENCHMARK_SETS["VideoDetailCaption"], ids=("nobody/gone", parquet(tmp_path / "hub", rows)))
    published, media = {"VideoDetailCaption": about}, tmp_path / "media"
    with pytest.raises(UserError, match="no clips of VideoDetailCaption") as caught:
        fetch_benchmarks(tmp_path / "suite", ["VDC"], media=media, published=published)
    assert "hf download nobody/gone --repo-type dataset" in caught.value.hint
    (media / "VideoDetailCaption" / "Test_Videos").mkdir(parents=True)
    with pytest.raises(UserError, match="none of the clips of VideoDetailCaption is there") as caught:
        fetch_benchmarks(tmp_path / "suite", ["VDC"], media=media, published=published, samples=1)
    assert "/Test_Videos/v" in caught.value.where
    clip(media / "VideoDetailCaption" / "Test_Videos" / "v0.MP4")
    clip(media / "VideoDetailCaption" / "v1.mp4")
    (media / "VideoDetailCaption" / "Test_Videos" / "v2.mp4").write_text("no clip")
    folder = fetch_benchmarks(tmp_path / "suite", ["VDC"], media=media, samples=None, published=published)
    suite = Suite(folder, tmp_path / "cache")
    records = suite.first_turns("VideoDetailCaption", "describe", None)
    assert [r["video"][0].removeprefix("media/VideoDetailCaption/") for r in records] == [
        "Test_Videos/v0.MP4", "v1.mp4", "Test_Videos/v2.mp4",
    ]  # fmt: skip
    assert records[0]["conversations"][0]["value"] == "<video>\nWhat is in it?"
    assert suite.group("VideoDetailCaption") == "video"

    file = tmp_path / "asked.json"
    file.write_text(json.dumps(records))
    data = ConversationData(path=str(file), images=str(folder), aspect="square", on_error="skip",
                            video={"newline": "none"})  # fmt: skip
    log = tmp_path / "skipped.jsonl"
    dataset = ConversationDataset(data, OWN_WORDS, processor, files=[file], skipped_log=log, cache=tmp_path / "cache")
    request, answer = dataset.request(0)
    assert answer == "It is picture 0." and len(request.pixels) == 4 and request.pictures[0].num_tokens == 4 * 4
    # As of a broken picture: named, and with on_error: skip left out and listed.
    broken = fails_with("corrupt clip", dataset.request, 2)
    (media / "VideoDetailCaption" / "v1.mp4").unlink()
    missing = fails_with(r"missing clip[\s\S]*v1\.mp4", dataset.request, 1)
    for index, error in ((2, broken), (1, missing)):
        dataset.leave_out(index, error)
    assert [json.loads(line)["record"] for line in log.read_text().splitlines()] == [2, 1]


def test_configurations_are_one_set_and_pictures_are_joined(tmp_path):
    hub = tmp_path / "hub"
    parquet(hub / "a", [{"question": f"a{n}", "imageId": f"p{n}", "answer": "x"} for n in range(3)])
    parquet(hub / "b", [{"question": f"b{n}", "imageId": f"p{n}", "answer": "x"} for n in range(2)])
    pictures = [{"id": f"p{n}", "image": Image.new("RGB", (4, 4), (n, 0, 0))} for n in range(3)]
    parquet(hub / "pictures", pictures, images=["image"])
    lines = [
        f"- config_name: {c}\n  data_files: [{{split: test, path: {c}/*.parquet}}]" for c in ("a", "b", "pictures")
    ]
    (hub / "README.md").write_text("---\nconfigs:\n" + "\n".join(lines) + "\n---\n")
    about = BenchmarkSet("image", (str(hub),), "test", "explain", "word", configs=("a", "b"),
                         join=Join("pictures", "test", "imageId"))  # fmt: skip
    folder = fetch_benchmarks(tmp_path / "suite", ["GQA"], samples=4, published={"GQA": about})
    suite = Suite(folder, tmp_path / "cache")
    records = suite.first_turns("GQA", "stock", None)
    order = ["a0", "a1", "a2", "b0", "b1"]
    assert [r["conversations"][0]["value"] for r in records] == [
        f"<image>\n{order[place]}\n{WORD}" for place in chosen(5, 4, 42)
    ]
    for place, result in zip(chosen(5, 4, 42), records, strict=True):
        with Image.open(folder / result["image"][0]) as image:
            assert image.getpixel((0, 0))[0] == int(order[place][1])
    # What is there is taken as it is.
    assert fetch_benchmarks(folder, ["GQA"], published={}) == folder
    other = replace(about, configs=("a",), join=None, answer=("reply",))
    fails_with(r"no column reply", fetch_benchmarks, tmp_path / "other", ["GQA"], published={"GQA": other})


def test_pictures_of_published_sets_pass_the_one_reader(tmp_path, monkeypatch):
    """`datasets` decodes none. Written upright and scaled; what cannot be read is a bad record for whoever reads it."""
    monkeypatch.setattr(datasets.Image, "decode_example", lambda *_, **__: pytest.fail("decoded"))
    turned = Image.Exif()
    turned[0x0112] = 6
    half = np.zeros((4, 8), np.uint8)
    half[:, :4] = 200
    pictures = [
        encoded(Image.fromarray(half), exif=turned), encoded(Image.new("I;16", (4, 4), 0x8000)),
        encoded(Image.new("L", (4, 4)), "EPS"), Embedded("here", lambda: io.BytesIO(b"no picture")),
    ]  # fmt: skip
    rows = [{"question": f"q{n}", "answer": "x", "image": {"bytes": p.open().read(), "path": None}}
            for n, p in enumerate(pictures)]  # fmt: skip
    hub = parquet(tmp_path / "hub", [*rows, rows[0] | {"image": None}], images=["image"])
    about = BenchmarkSet("image", (hub,), "test", "explain", "word")
    folder = fetch_benchmarks(tmp_path / "suite", ["GQA"], samples=None, published={"GQA": about})
    records = Suite(folder, tmp_path / "cache").first_turns("GQA", "stock", None)
    files = [folder / record["image"][0] for record in records[:4]]
    assert np.array_equal(np.asarray(load_image(files[0]))[..., 0], np.rot90(half, -1))
    assert load_image(files[1]).getpixel((0, 0)) == (128, 128, 128)
    for file in files[2:]:
        fails_with("none of BMP", load_image, file)
    assert "image" not in records[4]
    named = parquet(tmp_path / "named", [rows[0] | {"image": {"bytes": None, "path": "/etc/hostname"}}])
    with pytest.raises(UserError, match="set GQA, row 0: a picture is str"):
        fetch_benchmarks(tmp_path / "other", ["GQA"], published={"GQA": replace(about, ids=(named,))})


def test_a_directory_of_ones_own_says_how_its_sets_are_asked(tmp_path):
    turns = talk("<image>\nWho?", "Me.")
    (tmp_path / "mine.json").write_text(json.dumps([{"id": "a", "image": "a.png", "conversations": turns}]))

    def suite(**about):
        index = {"sets": {"mine": {"file": "mine.json", "group": "image", **about}}, "prompts": {"image": "Tell me."}}
        (tmp_path / "suite.json").write_text(json.dumps(index))
        return Suite(tmp_path, tmp_path / f"cache{random.random()}")

    fails_with("no prompt for set 'mine'", suite().first_turns, "mine", "describe", None)
    assert suite(describe="describe").first_turns("mine", "describe", None)[0]["conversations"][0]["value"] == (
        "<image>\nTell me."
    )
    assert suite(stock="word").first_turns("mine", "stock", None)[0]["conversations"][0]["value"].endswith(WORD)
    assert suite().first_turns("mine", "verbatim", None)[0]["conversations"][0]["value"] == "<image>\nWho?"
