"""The suite of an evaluate stage, end to end at tiny size: two turns, resumed runs, trees, drafts by path, quality."""

import json
import shutil

import datasets
import pytest
from draftsmith.core import ranks
from draftsmith.core.errors import UserError
from draftsmith.data.suite import clean
from draftsmith.eval import text_quality
from draftsmith.trainers.stages.kept import Kept
from suite_run import BEFORE, loaded, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A world with a suite, a target and a draft."""
    folder = tmp_path_factory.mktemp("suite-run") / "run"
    run(folder, stages=BEFORE)
    return folder


@pytest.fixture
def output(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def untimed(built):
    """What of the tables does not depend on the clock."""
    tables = {n: [r["values"][: -1 if n == "summary" else None] for r in t["rows"]] for n, t in built["tables"].items()}
    return tables, built["cells"], built["notes"]


def read(output, name="suite.json"):
    return json.loads((output / "evaluate" / name).read_text())


@pytest.fixture(scope="module")
def first(trained, tmp_path_factory):
    """The stage as the recipe has it."""
    folder = tmp_path_factory.mktemp("first") / "run"
    shutil.copytree(trained, folder)
    run(folder)
    return folder


def test_the_table_of_two_turns(first):
    built = read(first)
    assert built["tables"]["first"]["columns"] == ["POPE (probe)", "Spot (difference)", "Avg.", "PSV (story)"]
    assert built["tables"]["second"]["columns"] == ["POPE (probe)", "Spot (difference)", "Avg.", "NQ"]
    for table in built["tables"].values():
        assert [row["mode"] for row in table["rows"]] == ["M", "T", "MT*"]
        assert all(value is not None for row in table["rows"] for value in row["values"])
    cells = built["cells"]["draft"]["M"]
    assert set(cells["POPE"]) == {"first", "next", "caption", "NQ"} and set(cells["PSV"]) == {"first"}
    every = [c for modes in built["cells"]["draft"].values() for turns in modes.values() for c in turns.values()]
    assert all(c["identical"] == c["requests"] == 2 for c in every)
    assert {c["tau"] for c in every} != {1.0}
    page = (first / "evaluate" / "suite.md").read_text()
    assert "prompts verbatim" in page and "chain of 5" in page and "Local stand-ins" in page
    assert not (first / "evaluate" / "report.md").exists()  # no benchmarks were asked for


def test_second_turns_go_on_from_the_targets_own_answers(first):
    kept = Kept(first / "evaluate" / "suite" / "POPE" / "first").values
    records = json.loads((first / "evaluate" / "suite" / "POPE" / "next.json").read_text())
    for number, record in enumerate(records):
        assert record["conversations"][1]["value"] == clean(kept[str(number)]["answer"]) != ""
        assert len(kept[str(number)]["ids"]) <= 6


def test_a_killed_run_goes_on_behind_what_is_kept(first, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(first, output)
    before, file = read(output), output / "evaluate" / "suite" / "POPE" / "caption-0.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    # Killed while it wrote the second line; everything later is gone.
    file.write_bytes(lines[0] + lines[1][: len(lines[1]) // 2])
    shutil.rmtree(output / "evaluate" / "suite" / "PSV")
    for name in ("done.json", "suite.json", "suite.md"):
        (output / "evaluate" / name).unlink()
    run(output)
    assert untimed(read(output)) == untimed(before)
    again = file.read_bytes().splitlines(keepends=True)
    assert again[0] == lines[0]  # not decoded again
    assert json.loads(again[2])[1]["ids"] == json.loads(lines[1])[1]["ids"]
    kept = (output / "evaluate" / "suite" / "POPE" / "first-0.jsonl").read_bytes()
    assert kept == (first / "evaluate" / "suite" / "POPE" / "first-0.jsonl").read_bytes()


SUITE = {"sets": ["Spot"], "turns": 1, "convention": "verbatim"}
SUITE["data"] = {"from": "world", "path": "suite", "aspect": "square", "max_length": 256}


@pytest.mark.parametrize(
    "tree", ["{kind: static, choices: mc_sim_7b_63}", "{kind: dynamic, total: 9, depth: 2, width: 3}"]
)
def test_trees_are_exact(tree, output):
    run(output, f"stages.evaluate.tree={tree}", "stages.evaluate.gamma=null", f"stages.evaluate.suite={SUITE}")
    built = read(output)
    taus = {}
    for mode, sets in built["cells"]["draft"].items():
        found = sets["Spot"]["first"]
        assert found["identical"] == found["requests"] == 2
        taus[mode] = found["tau"]
    assert taus["M"] > 1 and "tree" in built["about"] and "kind=" in built["about"]["tree"]
    assert "second" not in built["tables"]


def test_all_methods_stand_in_one_table(output):
    modes = "[M, T, C, P, MT, MT*, MTCP, MTCP*]"
    settings = [f"stages.evaluate.modes={modes}", "stages.evaluate.captioner={kind: lvlm, max_new_tokens: 4}"]
    run(output, *settings, f"stages.evaluate.suite={SUITE}")
    built = read(output)
    assert [row["mode"] for row in built["tables"]["first"]["rows"]] == modes.strip("[]").split(", ")
    for mode, sets in built["cells"]["draft"].items():
        assert sets["Spot"]["first"]["identical"] == 2, mode


def test_what_several_ranks_kept_is_read_by_all(tmp_path, monkeypatch):
    for rank in (0, 1):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        Kept(tmp_path / "a" / "first").add(str(rank), {"rank": rank})
    monkeypatch.setattr(ranks, "rank", lambda: 0)
    Kept(tmp_path / "a" / "first-class").add("x", 1)  # another stem
    found = Kept(tmp_path / "a" / "first")
    assert found.values == {"0": {"rank": 0}, "1": {"rank": 1}}
    # Cut off within a line: that value is not there, and what is added later is.
    path = tmp_path / "a" / "first-0.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    found = Kept(tmp_path / "a" / "first")
    assert set(found.values) == {"1"}
    found.add("2", "new")
    assert set(Kept(tmp_path / "a" / "first").values) == {"1", "2"}


def test_combinations_that_make_no_sense_are_refused(tmp_path):
    def refused(*settings, match):
        with pytest.raises(UserError, match=match):
            loaded(tmp_path, *settings)

    dynamic = "stages.evaluate.tree={kind: dynamic, total: 9, depth: 2, width: 3}"
    refused(dynamic, "stages.evaluate.gamma=3", match="gamma is of tree: chain")
    refused("stages.evaluate.gamma=null", match="a chain needs its length")
    sampled = ("stages.evaluate.draw=sample", "stages.evaluate.rule=sampling", "stages.evaluate.temperature=1")
    refused(dynamic, "stages.evaluate.gamma=null", *sampled, match="not lossless")
    refused("stages.evaluate.tree={kind: adt}", "stages.evaluate.gamma=null", match="adt")
    refused("stages.evaluate.suite=null", match="give benchmarks or a suite")
    refused("stages.evaluate.suite.turns=3", match="turns")
    refused("stages.evaluate.suite.data.path=[a,b]", match="names one directory")
    refused("stages.evaluate.suite.data.kinds=[word]", match="chosen by `sets`")
    refused(
        "stages.evaluate.target={kind: llava, language_model: {}, vision_tower: {}}", match="target.path is missing"
    )


def test_published_drafts_and_another_target_need_no_stage(output):
    """A run of its own, on what another run left: the paths stand for Hub ids."""
    folders = {name: str(output / name) for name in ("world", "target", "draft")}
    suite = SUITE | {
        "data": {"from": None, "path": f"{folders['world']}/world/suite", "aspect": "square", "max_length": 256}
    }
    settings = [
        f"stages.evaluate.drafters={ {'mine': {'path': folders['draft']}, 'twin': {'path': folders['target']}} }",
        f"stages.evaluate.target={ {'kind': 'llava', 'path': folders['target']} }",
        f"stages.evaluate.suite={json.dumps(suite)}",
        "stages.evaluate.modes=[M]",
    ]
    run(output / "other", *settings, stages=["evaluate"])
    built = read(output / "other")
    assert list(built["cells"]) == ["mine", "twin"]
    # The target as its own draft is accepted whole: five drafts and the target's token in the only cycle.
    twin = built["cells"]["twin"]["M"]["Spot"]["first"]
    assert twin["tau"] == max(found["M"]["Spot"]["first"]["tau"] for found in built["cells"].values())
    assert twin["identical"] == 2


def test_published_sets_out_of_reach_are_said_before_a_model_is_loaded(output, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    hub = {"data": {"from": None, "path": "hub"}, "sets": ["POPE"]}
    (output / "target" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot load set POPE") as caught:
        run(output, f"stages.evaluate.suite={json.dumps(hub)}", stages=["evaluate"])
    assert "directory with suite.json" in caught.value.cure


def test_quality_of_target_and_draft_seeing_and_blind(output, monkeypatch):
    def overlap():
        return lambda answer, record: float(bool(set(answer) & set(record["references"][0])))

    settings = [
        f"stages.evaluate.suite={SUITE | {'quality': {'sets': ['OCRBench', 'MB'], 'max_new_tokens': 8, 'samples': 1}}}"
    ]
    monkeypatch.setitem(text_quality.QUALITY_MODULES, "ROUGE-L", "torchmetrics.no_such_module")
    with pytest.raises(UserError, match="needs torchmetrics"):
        run(output, *settings)
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
