"""Records of a question alone: whoever lets the target answer takes them, and whoever learns their answers says so."""

import json

import pytest
from draftsmith.data.shards.shards import ShardReader
from fails import fails_with
from text_run import FORMAT, QUESTIONS, STEPS, made, recipe, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made(tmp_path_factory.mktemp("questions"))


@pytest.fixture(scope="module")
def finished(folder):
    output = folder / "run"
    return output, run(recipe(folder), output)


def test_from_questions_to_a_report(finished):
    output, _ = finished
    answers = ShardReader(output / "answers" / "answers")
    assert len(answers) == QUESTIONS == len(ShardReader(output / "states" / "states"))
    asked = [info["conversations"][-1]["from"] for _, _, info in answers]
    assert asked == ["human"] * QUESTIONS, "the question is kept whole"
    report = json.loads((output / "evaluate" / "report.json").read_text())
    assert {cell["requests"] for cell in report["cells"]} == {3}


@pytest.mark.parametrize("changes", [
    {"states": {"answers": None}}, {"train": {"source": {"kind": "online"}, "data": True}},
    {"states": {"answers": {"shares": {"data": 1.0}}}},
])  # fmt: skip
def test_who_learns_the_records_answers_says_so(folder, tmp_path, changes):
    source = recipe(folder)
    (name, change), = changes.items()  # fmt: skip
    data = source["stages"]["answers"]["data"]
    stage = source["stages"][name] | change
    stage |= {"data": data} if stage.get("data") is True else {}
    source["stages"] = {name: stage}
    error = fails_with("", run, source, tmp_path / "run")
    assert error.problem == "no answer to train on" and "questions.jsonl, record 0" in error.where
    assert "regenerate" in error.hint and "answers: {from:" in error.hint


def test_online_states_take_the_targets_answers(finished, folder):
    source = recipe(folder)
    data = source["stages"]["answers"]["data"]
    source["stages"]["online"] = {
        "kind": "train", "format": FORMAT, "data": data, "answers": {"from": "answers"}, "steps": 1, "from": "scratch",
        **STEPS,
    }  # fmt: skip
    output, _ = finished
    assert any("saved" in line or "online" in line for line in run(source, output, stages=["online"]))
