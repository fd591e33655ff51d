"""The suite of an evaluate stage, end to end at tiny size: two turns, resumed runs, trees, drafts by path, quality."""

import json
import math
import shutil

import datasets
import pytest
from draftsmith.core import ranks
from draftsmith.data.suites.suite import clean
from draftsmith.eval import text_quality
from draftsmith.eval.measured_rows import PLAIN
from draftsmith.trainers.evaluate.resume_log import ResumeLog
from fails import fails_with
from stages_run import list_anew
from suite_run import BEFORE, run
from transformers import AutoTokenizer

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A synthetic dataset with a suite, a target and a draft."""
    folder = tmp_path_factory.mktemp("suite-run") / "run"
    run(folder, stages=BEFORE)
    return folder


@pytest.fixture
def output(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def cells(output):
    """(benchmark, turn, method, drafter) -> what does not depend on the clock."""
    names = ("tau", "tau_interval", "requests", "answers", "identical", "num_accepted")
    return {
        (cell["benchmark"], cell["turn"], cell["method"], *cell["drafters"]): {name: cell[name] for name in names}
        for cell in read(output)["cells"]
        if cell["method"] != PLAIN
    }


def read(output, name="report.json"):
    return json.loads((output / "evaluate" / name).read_text())


def suite_tables(output):
    (section,) = (section for section in read(output)["sections"] if section["name"] == "suite")
    return {table["title"]: table for table in section["tables"]}


@pytest.fixture(scope="module")
def first(trained, tmp_path_factory):
    """The stage as the recipe has it."""
    folder = tmp_path_factory.mktemp("first") / "run"
    shutil.copytree(trained, folder)
    run(folder)
    return folder


def test_the_table_of_two_turns(first):
    tables = suite_tables(first)
    assert list(tables) == ["First turn", "Second turn", "Averages"]
    headings = {title: [column["name"] for column in table["columns"]] for title, table in tables.items()}
    assert headings["First turn"][-4:] == ["POPE (probe)", "Spot (difference)", "Avg.", "PSV (story)"]
    assert headings["Second turn"][-4:] == ["POPE (probe)", "Spot (difference)", "Avg.", "NQ"]
    assert {"Eq. 1", "expected", "DSR"} <= set(headings["Averages"]), "the expected speedups beside the measured one"
    for table in tables.values():
        assert [row[:2] for row in table["rows"]] == [["draft", "M"], ["draft", "T"], ["draft", "MT*"]]
        assert all(value is not None for row in table["rows"] for value in row)
    every = cells(first)
    assert {turn for name, turn, *_ in every if name == "POPE"} == {"first", "next", "caption", "NQ"}
    assert {turn for name, turn, *_ in every if name == "PSV"} == {"first"}
    assert all(cell["identical"] == cell["requests"] == 2 for cell in every.values())
    assert {cell["tau"] for cell in every.values()} != {1.0}
    page = (first / "evaluate" / "report.md").read_text()
    assert "prompts verbatim" in page and "chain of 5" in page and "Local substitutes" in page
    assert (first / "evaluate" / "suite.png").is_file()


def answers(output, turn):
    """Plain decoding's row of each request."""
    log = ResumeLog(output / "evaluate" / "rows" / "POPE" / f"{turn}-T0-6")
    return {key: rows[0] for key, rows in log.values.items()}


def test_second_turns_go_on_from_the_targets_own_answers(first):
    kept = answers(first, "first")
    folder = first / "evaluate" / "suite"
    tokenizer = AutoTokenizer.from_pretrained(first / "world")
    records = json.loads((folder / "T0-6" / "POPE" / "next.json").read_text())
    for number, record in enumerate(records):
        said = tokenizer.decode(kept[str(number)]["tokens"], skip_special_tokens=False)
        assert record["conversations"][1]["value"] == clean(said) != ""
        assert len(kept[str(number)]["tokens"]) <= 6


SUITE = {"kind": "tabed", "sets": ["Spot"], "turns": 1, "convention": "verbatim"}
SUITE["data"] = {"from": "world", "path": "suite", "aspect": "square", "max_length": 256}


def only(key, value):
    """Settings that put `value` in the place of all that the recipe has under a key."""
    return [f"stages.evaluate.{key}=null", f"stages.evaluate.{key}={json.dumps(value)}"]


MODES = ["M", "T", "C", "P", "MT", "MT*", "MTCP", "MTCP*"]
TREES = {"static": {"kind": "static", "choices": "mc_sim_7b_63"},
         "dynamic": {"kind": "dynamic", "total": 9, "depth": 2, "width": 3}}  # fmt: skip


def test_modes_and_trees_on_a_suite_and_files_stand_in_one_report(output):
    """All exact; and the weights of ensembles over time are kept for the suite, too."""
    methods = {mode: {"mode": mode} for mode in MODES} | {name: {"tree": tree} for name, tree in TREES.items()}
    benchmarks = {"suite": SUITE, "seen": {"data": SUITE["data"] | {"path": "train", "max_samples": 2}}}
    settings = [*only("methods", methods), *only("benchmarks", benchmarks), "stages.evaluate.record_weights=1"]
    run(output, *settings, "stages.evaluate.captioner={kind: lvlm, max_new_tokens: 4}")
    every = cells(output)
    assert {key[:2] for key in every} == {("Spot", "first"), ("seen", "")}
    assert all(cell["identical"] == cell["requests"] == 2 for cell in every.values())
    assert all(every["Spot", "first", name, "draft"]["tau"] > 1 for name in ("M", *TREES))
    tables = suite_tables(output)
    assert [row[1] for row in tables["First turn"]["rows"]] == [*methods] and "Second turn" not in tables
    names = {path.stem for path in (output / "evaluate" / "weights").glob("*.json")}
    assert {"seen-draft-MT-adaptive", "Spot-first-draft-MT-adaptive"} <= names


def test_what_several_ranks_kept_is_read_by_all(tmp_path, monkeypatch):
    for rank in (0, 1):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        ResumeLog(tmp_path / "a" / "first").add(str(rank), {"rank": rank})
    monkeypatch.setattr(ranks, "rank", lambda: 0)
    ResumeLog(tmp_path / "a" / "first-class").add("x", 1)  # another stem
    result = ResumeLog(tmp_path / "a" / "first")
    assert result.values == {"0": {"rank": 0}, "1": {"rank": 1}}
    # Cut off within a line: that value is not there, and what is added later is.
    path = tmp_path / "a" / "first-0.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    result = ResumeLog(tmp_path / "a" / "first")
    assert set(result.values) == {"1"}
    result.add("2", "new")
    assert set(ResumeLog(tmp_path / "a" / "first").values) == {"1", "2"}


def test_a_changed_digit_in_the_resume_log_is_worked_on_again(tmp_path, capsys):
    """It is valid JSON still: only the line's own checksum tells."""
    stem = tmp_path / "rows"
    for key, value in (("0", {"tokens": [11, 12], "total_s": 0.1}), ("1", {"tokens": [21], "s": math.nan})):
        ResumeLog(stem).add(key, value)
    path = tmp_path / "rows-0.jsonl"
    assert ResumeLog(stem).values == {"0": {"tokens": [11, 12], "total_s": 0.1}, "1": {"tokens": [21], "s": None}}
    path.write_text(path.read_text().replace("12]", "13]"))
    assert ResumeLog(stem).values == {"1": {"tokens": [21], "s": None}}
    assert "line 1 is damaged" in capsys.readouterr().err
    # Lines of earlier versions have no checksum.
    path.write_text('["0", {"tokens": [1]}]\n')
    assert ResumeLog(stem).values == {"0": {"tokens": [1]}}


def test_published_drafts_and_another_target_need_no_stage(output):
    """A run of its own, on what another run left: the paths stand for Hub ids."""
    folders = {name: str(output / name) for name in ("world", "target", "draft")}
    suite = SUITE | {
        "data": {"from": None, "path": f"{folders['world']}/world/suite", "aspect": "square", "max_length": 256}
    }
    drafts = {name: {"kind": "lvlm", "path": folders[of]} for name, of in (("mine", "draft"), ("twin", "target"))}
    settings = [
        f"stages.evaluate.drafters={json.dumps(drafts)}",
        f"stages.evaluate.target={ {'kind': 'llava', 'path': folders['target']} }",
        *only("benchmarks", {"suite": suite}),
        *only("methods", {"M": {"drafters": ["mine", "twin"]}}),
    ]
    run(output / "other", *settings, stages=["evaluate"])
    tables = suite_tables(output / "other")
    assert [row[0] for row in tables["First turn"]["rows"]] == ["mine", "twin"]
    # The target as its own draft is accepted whole: five drafts and the target's token in the only cycle.
    (mine,), (twin,) = ([row[2] for row in tables["First turn"]["rows"] if row[0] == name] for name in drafts)
    assert twin >= mine
    (cell,) = cells(output / "other").values()
    assert cell["identical"] == cell["answers"] == 2 * cell["requests"] == 4, "two requests by two drafts"


def test_published_sets_out_of_reach_are_said_before_a_model_is_loaded(output, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    hub = {"kind": "tabed", "data": {"from": None, "path": "hub"}, "sets": ["POPE"]}
    hub |= {"convention": "verbatim", "transcript": "training"}
    (output / "target" / "model.safetensors").unlink()
    list_anew(output / "target")
    caught = fails_with("cannot load set POPE", run, output, *only("benchmarks", {"suite": hub}), stages=["evaluate"])
    assert "directory with suite.json" in caught.hint


def test_quality_of_target_and_draft_seeing_and_blind(output, monkeypatch):
    def overlap():
        return lambda answer, record: float(bool(set(answer) & set(record["references"][0])))

    quality = {"sets": ["OCRBench", "MB"], "max_new_tokens": 8, "samples": 1}
    settings = only("benchmarks", {"suite": SUITE | {"quality": quality}})
    monkeypatch.setitem(text_quality.QUALITY_MODULES, "ROUGE-L", "torchmetrics.no_such_module")
    fails_with("needs torchmetrics", run, output, *settings)
    assert not (output / "evaluate" / "suite").exists()  # said before anything was decoded
    monkeypatch.setattr(text_quality, "rouge_l", overlap)
    run(output, *settings)
    built = read(output, "quality.json")
    names = ["target", "target (text only)", "draft", "draft (text only)"]
    assert built["models"] == names
    assert all(built["tables"]["OCRBench"]["accuracy"][name]["n"] == 2 for name in names)
    (sample,) = built["samples"]["MB"]
    assert sample["answers"]["target"] != sample["answers"]["target (text only)"]
    page = (output / "evaluate" / "quality.md").read_text()
    assert "![](samples/MB-0000-0.png) ![](samples/MB-0000-1.png)" in page
    assert (output / "evaluate" / "samples" / "MB-0000-1.png").is_file()
