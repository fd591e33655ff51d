"""Sets of conversations in an evaluate stage: turns behind the target's answers, resumed runs, tables, ViSkip rows."""

import json
import shutil

import pytest
from draftsmith.data.suites.suite import clean
from draftsmith.eval.measured_rows import PLAIN, read_rows
from draftsmith.recipes.config.plan import plan
from draftsmith.trainers.evaluate.resume_log import ResumeLog
from PIL import Image
from ranks_run import run_recipe
from suite_run import loaded, run
from transformers import AutoTokenizer

pytestmark = pytest.mark.usefixtures("undrawn")
ROWS = [
    ("m1", ["what color is the circle ?"], "default", "general vqa"),
    ("m2", ["what is red ?", "where is it ?", "and what is blue ?"], "Astronomy", "multi-turn conversation"),
    ("m3", ["what is green ?", "where is it ?"], "charts", "multi-turn conversation"),
]
METHODS = {"M": {}, "T": {"mode": "T"}, "M, off": {"visual_skip": 1e-9}}


def published(folder):
    (folder / "images").mkdir(parents=True)
    rows = [{"id": name, "image": f"{name}.png", "turns": turns, "category": sub, "topic": topic}
            for name, turns, sub, topic in ROWS]  # fmt: skip
    (folder / "mmspec.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number, (name, *_) in enumerate(ROWS):
        Image.new("RGB", (24, 24), (90 * number, 200, 60)).save(folder / "images" / f"{name}.png")
    return folder


def settings(folder):
    data = {"path": str(folder), "aspect": "square", "max_length": 256}
    benchmark = {"own": {"kind": "sets", "data": data, "sets": ["mmspec"]}}
    return [
        text
        for key, value in (("benchmarks", benchmark), ("methods", METHODS))
        for text in (f"stages.evaluate.{key}=null", f"stages.evaluate.{key}={json.dumps(value)}")
    ]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("turns")
    run(folder / "run", *settings(published(folder / "set")))
    return folder


def kept(output, part=""):
    log = ResumeLog(output / "evaluate" / "rows" / "MMSpec" / f"{part}T0-6")
    return {int(number): rows for number, rows in log.values.items()}


def test_every_turn_is_measured_behind_the_targets_own_answers(measured):
    output = measured / "run"
    tokenizer = AutoTokenizer.from_pretrained(output / "world")
    turns = {1: kept(output), 2: kept(output, "turn-2-"), 3: kept(output, "turn-3-")}
    assert [len(turns[turn]) for turn in turns] == [3, 2, 1]
    for turn in (2, 3):
        file = output / "evaluate" / "suite" / "MMSpec" / "T0-6" / f"turn-{turn}.json"
        before = [number for number, row in enumerate(ROWS) if len(row[1]) >= turn - 1]
        for record in json.loads(file.read_text()):
            plain = turns[turn - 1][before.index(record["row"])][0]
            assert plain["method"] == PLAIN
            said = tokenizer.decode(plain["tokens"], skip_special_tokens=True)
            conversation = [entry["value"] for entry in record["conversations"]]
            assert conversation[-3] == clean(said) != ""
            asked = ROWS[record["row"]][1]
            assert conversation[::2] == [f"<image>\n{asked[0]}", *asked[1:turn]]
    rows = read_rows(output / "evaluate" / "rows.jsonl")
    assert len(rows) == 6 * (1 + len(METHODS)) and all(row.identical for row in rows)
    grown = {row.request: row.prompt_tokens for row in rows}
    assert len(grown) == 6 and {row.visual_tokens for row in rows} == {9}, "the picture stays in the first turn"
    labels = {(row.details["row_id"], row.details["turn"]): row.details["category"] for row in rows}
    assert labels["m2", 3] == "multi-turn conversation" and labels["m1", 1] == "general vqa"


def test_tables_by_category(measured):
    report = json.loads((measured / "run" / "evaluate" / "report.json").read_text())
    (section,) = (section for section in report["sections"] if section["name"] == "turns")
    tables = {table["title"]: table for table in section["tables"]}
    *by_label, last = tables
    assert by_label == ["By category", "By sub category", "By turn"], "no row has a difficulty"
    table = tables["By category"]
    assert [row[:4] for row in table["rows"]] == [
        ["MMSpec", category, method, n]
        for category, n in (("general vqa", 1), ("multi-turn conversation", 5))
        for method in METHODS
    ]
    rows = read_rows(measured / "run" / "evaluate" / "rows.jsonl")
    names = [column["name"] for column in table["columns"]]
    for line in table["rows"]:
        mine = [row for row in rows if row.method == line[2] and row.details["category"] == line[1]]
        cycles = sum(row.num_cycles for row in mine)
        value = dict(zip(names, line, strict=True))
        assert value["MAT"] == pytest.approx(sum(sum(row.accepted) for row in mine) / cycles)
        assert value["tau"] == pytest.approx(value["MAT"] + 1)
        each = [row.plain_total_s / row.total_s for row in mine]  # equal answers
        assert value["walltime ratio"] == pytest.approx(sum(each) / len(each))
    lengths = tables[last]
    assert [column["name"] for column in lengths["columns"][2:]] == [f"{method}, T = 0" for method in METHODS]
    for _, category, *values in lengths["rows"]:  # each turn counts alike
        for method, value in zip(METHODS, values, strict=True):
            mine = [row for row in rows if row.method == method and row.details["category"] == category]
            assert value == pytest.approx(sum(row.num_emitted / row.num_cycles for row in mine) / len(mine))
    # One cell of all turns, as MMSpec counts.
    cells = {cell["method"]: cell for cell in report["cells"]}
    assert {cell["requests"] for cell in cells.values()} == {6} and cells["M"]["tau"] > 1


def test_rows_of_viskip_say_what_was_skipped(measured):
    report = json.loads((measured / "run" / "evaluate" / "report.json").read_text())
    cells = {cell["method"]: cell for cell in report["cells"]}
    assert cells["M, off"]["skipped"] == 1 and cells["M, off"]["tau"] == 1, "each token hangs on the picture a little"
    assert cells["M"]["skipped"] is None and report["methods"]["M, off"]["visual_skip"] == 1e-9
    assert report["methods"]["M"]["visual_skip"] is None
    for row in read_rows(measured / "run" / "evaluate" / "rows.jsonl"):
        on = row.method == "M, off"
        assert on == ("skipped_cycles" in row.details)
        if on:
            assert row.details["skipped_cycles"] == row.num_cycles and 0 < row.details["visual_attention"] < 1
    assert "skipped by ViSkip" in (measured / "run" / "evaluate" / "report.md").read_text()


@pytest.mark.slow
def test_two_ranks_ask_the_same_turns(measured, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(measured / "run", output)
    shutil.rmtree(output / "evaluate")
    loaded(output)  # writes the recipe
    run_recipe(2, f"recipe={output / 'suite-test.yaml'}", *settings(measured / "set"), cwd=tmp_path)
    logs = {path.name for path in (output / "evaluate" / "rows" / "MMSpec").iterdir()}
    assert {"T0-6-0.jsonl", "T0-6-1.jsonl", "turn-2-T0-6-1.jsonl"} <= logs, "both ranks decoded"

    def told(folder):
        rows = read_rows(folder / "evaluate" / "rows.jsonl")
        return sorted((row.request, row.method, row.accepted, row.prompt_tokens) for row in rows)

    assert told(output) == told(measured / "run")
    for part in ("", "turn-2-", "turn-3-"):
        assert {n: [row["tokens"] for row in rows] for n, rows in kept(output, part).items()} == {
            n: [row["tokens"] for row in rows] for n, rows in kept(measured / "run", part).items()
        }


def test_changed_files_are_another_set(measured, tmp_path):
    folder = tmp_path / "set"
    shutil.copytree(measured / "set", folder)
    one, two = (loaded(tmp_path / "run", *settings(place)) for place in (measured / "set", folder))
    assert one.recipe.stages["evaluate"].benchmarks["own"].names == ["MMSpec"]

    def fingerprint(found):
        return {stage.name: stage.fingerprint for stage in plan(found.recipe, found.path)}["evaluate"]

    same = fingerprint(two)
    (folder / "mmspec.jsonl").write_text((folder / "mmspec.jsonl").read_text().replace("red", "blue"))
    assert fingerprint(two) != same and fingerprint(one) == fingerprint(one)
