"""Sets of conversations as their authors publish them: MMSpec's JSON lines and pictures, SPEED-Bench's parquet."""

import json

import datasets
import pytest
from draftsmith.data.records.record import check_record
from draftsmith.data.suites.benchmark_hub import chosen, fetch_benchmarks, read_published
from draftsmith.data.suites.benchmark_sets import TURN_SETS, turn_set
from draftsmith.data.suites.suite import Suite
from draftsmith.data.suites.turn_files import published_records, set_at
from fails import fails_with
from PIL import Image

# Rows in the layout of dataset/MMSpec/test/mmspec.jsonl, whose `topic` is one of six tasks.
MMSPEC = [
    {"id": "mmspec_001", "image": "mmspec_001.jpg", "turns": ["Is it red?"], "category": "default",
     "topic": "general vqa"},
    {"id": "mmspec_401", "image": "mmspec_401.jpg", "turns": ["The <image 1> shows a law.\nOptions: ['a', 'b']"],
     "category": "Physics", "topic": "complex reasoning pro"},
    {"id": "mmspec_501", "image": "mmspec_501.jpg", "turns": ["What is it?", "Why so?", "And <image> then?"],
     "category": "Astronomy", "topic": "multi-turn conversation"},
]  # fmt: skip
# The columns of nvidia/SPEED-Bench, config qualitative.
SPEED = [
    {"question_id": f"q{n}", "category": category, "sub_category": sub, "turns": turns, "source": "own", "src_id": None,
     "difficulty": difficulty, "multiturn": len(turns) > 1}
    for n, (category, sub, turns, difficulty) in enumerate([
        ("coding", "python", ["Sort a list.", "Now in place."], "easy"),
        ("writing", None, ["Write a <video> tag."], None),
        ("coding", "rust", ["Own a string."], "hard"),
    ])
]  # fmt: skip


def mmspec(folder, rows=MMSPEC):
    (folder / "images").mkdir(parents=True)
    (folder / "mmspec.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number, row in enumerate(rows):
        if isinstance(row, dict) and isinstance(row.get("image"), str):
            Image.new("RGB", (6, 4), (number, 0, 0)).save(folder / "images" / row["image"].replace("/", "-"))
    return folder


def speed(folder, rows=SPEED, name="test.parquet"):
    folder.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(folder / name)
    return folder


def test_names_as_recipes_write_them():
    assert [turn_set(called) for called in ("mmspec", "MMSpec", "speed-bench", "nvidia/SPEED-Bench")] == [
        "MMSpec", "MMSpec", "SPEED-Bench", "SPEED-Bench",
    ]  # fmt: skip
    assert turn_set("SEED-Bench") is None and TURN_SETS["MMSpec"].repository is None


def test_mmspec_from_its_files(tmp_path):
    suite = Suite(read_published(tmp_path / "suite", "MMSpec", mmspec(tmp_path / "set")), tmp_path / "cache")
    first = suite.first_turns("MMSpec", "describe", None)
    assert [record["row_id"] for record in first] == [row["id"] for row in MMSPEC] and suite.has_turns("MMSpec")
    assert [record["category"] for record in first] == [row["topic"] for row in MMSPEC]
    assert [record["sub_category"] for record in first] == ["default", "Physics", "Astronomy"]
    # MMMU-Pro's own words stay, as in MMSpec's code: the picture itself stands first.
    assert first[1]["conversations"][0]["value"] == f"<image>\n{MMSPEC[1]['turns'][0]}"
    for record in first:
        assert check_record(record) is None
        with Image.open(suite.folder / record["image"][0]) as picture:
            assert picture.size == (6, 4)
    assert suite.group("MMSpec") == "image"


def test_further_turns_follow_the_answers_and_pictures_stay_in_the_first(tmp_path):
    suite = Suite(read_published(tmp_path / "suite", "MMSpec", mmspec(tmp_path / "set")), tmp_path / "cache")
    first = suite.first_turns("MMSpec", "describe", None)
    second = suite.next_turns(first, 2, ["Yes.", "b", "A comet.</s>"])
    (third,) = suite.next_turns(second, 3, ["Its tail."])
    assert [turn["value"] for turn in third["conversations"]] == [
        "<image>\nWhat is it?", "A comet.", "Why so?", "Its tail.", "And  then?", "(open)",
    ]  # fmt: skip
    assert check_record(third) is None and third["image"] == first[2]["image"]
    assert [r["id"] for r in (first[2], second[0], third)] == [
        f"MMSpec/0002{part}" for part in ("", "/turn-2", "/turn-3")
    ]
    assert third["category"] == "multi-turn conversation" and suite.next_turns([third], 4, ["So."]) == []
    assert suite.next_turns(first, 2, ["Yes.", "b", ""]) == [], "without an answer a conversation ends"


def test_speed_bench_from_parquet_and_from_the_hub(tmp_path, monkeypatch):
    files = published_records("SPEED-Bench", speed(tmp_path / "set" / "qualitative").parent)
    assert [record["id"] for record in files] == ["q0", "q1", "q2"] and files[0]["turns"] == ["Now in place."]
    assert files[0] | {"category": "coding", "sub_category": "python", "difficulty": "easy"} == files[0]
    assert not {"sub_category", "difficulty", "image"} & files[1].keys(), "what a row leaves open is no label"
    assert files[1]["conversations"][0]["value"] == "Write a  tag.", "no clip stands there"
    asked = []

    def load(name, repository, config, split):
        asked.append((name, repository, config, split))
        return SPEED

    monkeypatch.setattr("draftsmith.data.suites.turn_files.load_rows", load)
    folder = fetch_benchmarks(tmp_path / "hub", ["speed-bench"], samples=None)
    assert asked == [("SPEED-Bench", "nvidia/SPEED-Bench", "qualitative", "test")]
    assert json.loads((folder / "SPEED-Bench.json").read_text()) == files


def test_fewer_rows_are_drawn_and_keep_their_order(tmp_path):
    rows = [MMSPEC[0] | {"id": f"m{n:02d}"} for n in range(20)]
    folder = read_published(tmp_path / "suite", "MMSpec", mmspec(tmp_path / "set", rows), samples=6)
    kept = [record["id"] for record in json.loads((folder / "MMSpec.json").read_text())]
    assert kept == [f"m{n:02d}" for n in sorted(chosen(20, 6, 42))] != [f"m{n:02d}" for n in range(6)]


@pytest.mark.parametrize(("row", "problem"), [
    ({"turns": []}, "'turns' is no list of questions"),
    ({"turns": "Is it red?"}, "'turns' is no list of questions"),
    ({"turns": ["Is it red?", " "]}, "'turns' is no list of questions"),
    ({"image": "../../etc/passwd"}, "'image' names no picture of the set: '../../etc/passwd'"),
    ({"image": None}, "'image' names no picture of the set: None"),
    ({"topic": ...}, "no key 'topic'; the row has id, image, turns, category"),
    (["a"], "dict"),
])  # fmt: skip
def test_a_row_that_cannot_be_asked_is_told_with_file_row_and_key(row, problem, tmp_path):
    bad = row if isinstance(row, list) else {k: v for k, v in (MMSPEC[1] | row).items() if v is not ...}
    folder = mmspec(tmp_path / "set", [MMSPEC[0]])
    with (folder / "mmspec.jsonl").open("a") as file:
        file.write(json.dumps(bad) + "\n")
    error = fails_with("", published_records, "MMSpec", folder)
    told = f"{error} {error.where}"
    assert problem in told and "mmspec.jsonl" in told and ("row 2" in told or "line 2" in told) and error.hint


def test_placeholders_damage_and_absence_have_a_cure(tmp_path):
    held = SPEED[0] | {
        "turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\n{article}"]
    }
    error = fails_with("placeholder", published_records, "SPEED-Bench", speed(tmp_path / "held", [SPEED[1], held]))
    assert "row 2" in str(error.where) and "prepare_data.py" in str(error.hint)
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"no parquet")
    fails_with("no parquet file", published_records, "SPEED-Bench", broken)
    error = fails_with(r"no mmspec.jsonl of MMSpec here", published_records, "MMSpec", tmp_path / "nowhere")
    assert "killthefullmoon/MMSpec" in str(error.hint)
    fails_with("MMSpec is not on the Hub", fetch_benchmarks, tmp_path / "hub", ["mmspec"])


def test_a_folder_that_is_called_like_a_sets_file_is_none(tmp_path):
    for name, about in TURN_SETS.items():
        (tmp_path / about.files.replace("*", "x")).mkdir(parents=True)
        fails_with(f"no .* of {name} here", published_records, name, tmp_path)
    assert set_at(tmp_path) is None
