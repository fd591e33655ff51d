"""Records of a question alone: whoever lets the target answer takes them, and whoever learns their answers says so."""

import json

import pytest
import yaml
from command_line import prints
from draftsmith.data.shards.shards import ShardReader
from draftsmith.recipes.commands.cli import main
from draftsmith.trainers.run import progress
from draftsmith.trainers.serve import written_texts
from fails import fails_with
from text_run import FORMAT, QUESTIONS, STEPS, made, questions, recipe, run


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


def test_check_reads_the_prompts_where_the_target_answers(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = recipe(folder) | {"output": "run"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(source, sort_keys=False))
    said = prints(capsys, ["check", "recipe=recipe.yaml"])
    assert said.count(f"{QUESTIONS} usable records") == 2 and "up to the answer" in said
    source["stages"]["states"]["answers"] = None
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(source, sort_keys=False))
    assert main(["check", "recipe=recipe.yaml"]) != 0
    assert "no answer to train on" in capsys.readouterr().out


def test_a_killed_run_of_answers_loses_a_small_shard_and_says_how_far_it_is(folder, tmp_path, monkeypatch, capsys):
    """130 answers are three shards; those that were written are not asked for again."""
    questions(tmp_path / "questions.jsonl", 130)
    source, data = recipe(folder), {"path": str(tmp_path / "questions.jsonl"), "max_length": 64}
    source["stages"] = {"answers": source["stages"]["answers"] | {"data": data}}
    source["stages"]["answers"] |= {"max_new_tokens": 2, "batch_size": 16}
    asked, write = [], written_texts.write_answers

    def killed(decoder, requests, *arguments, **settings):
        asked.append(len(requests))
        if sum(asked) > 100:
            raise KeyboardInterrupt
        return write(decoder, requests, *arguments, **settings)

    monkeypatch.setattr(progress, "_TOLD_S", -1.0)
    monkeypatch.setattr(written_texts, "write_answers", killed)
    fails_with("", run, source, tmp_path / "run", error=KeyboardInterrupt)
    assert "answers answer 64/130 · " in (said := capsys.readouterr().out) and "tokens/s" in said and " cut" in said
    asked.clear()
    monkeypatch.setattr(written_texts, "write_answers", lambda *a, **k: asked.append(len(a[1])) or write(*a, **k))
    run(source, tmp_path / "run")
    assert sum(asked) == 130 - 64 and len(ShardReader(tmp_path / "run" / "answers" / "answers").shards) == 3
