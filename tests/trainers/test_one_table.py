"""Drafters of every kind on one target, in one table: outputs, ensembles, old keys, and what is refused by name."""

import json
import shutil
from types import SimpleNamespace

import pytest
from draftsmith.core.errors import Refused, UserError
from draftsmith.trainers.evaluate.resume_log import ResumeLog
from draftsmith.trainers.stages.evaluate import EvaluateStage
from fails import fails_with
from pydantic import ValidationError
from table_run import METHODS, loaded, run


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    run(folder)
    return folder


def rows_of(output, temperature="0"):
    log = ResumeLog(output / "evaluate" / "rows" / "held out" / f"T{temperature}-6")
    return [row for rows in log.values.values() for row in rows]


def test_a_draft_lvlm_heads_and_ensembles_stand_in_one_table(output):
    report = json.loads((output / "evaluate" / "report.json").read_text())
    cells = {cell["method"]: cell for cell in report["cells"]}
    assert {*METHODS} <= {*cells}
    assert all(cells[name]["identical"] == cells[name]["requests"] == 4 for name in METHODS)
    assert cells["M"]["num_accepted"] > 0 and any(cell["rejected_somewhere"] for cell in cells.values())
    page = (output / "evaluate" / "report.md").read_text()
    assert all(f"| {name} | 4 |" in page for name in METHODS)
    assert page.count("](example-") > 0 and " tau: " in (output / "evaluate" / "examples.txt").read_text()


def test_an_ensemble_drafts_as_its_members_do_where_they_agree(output):
    """M with a head that is wrong everywhere: what both would draft is what M drafts, or less of it."""
    accepted = {row["method"]: 0 for row in rows_of(output)}
    for row in rows_of(output):
        accepted[row["method"]] += sum(row["accepted"])
    assert 0 < accepted["M with EAGLE-3"] <= accepted["M"]


def stage(**changes):
    section = {
        "kind": "evaluate", "methods": {"M": {}}, "benchmarks": {"seen": {"data": {"path": "seen.json"}}},
    }  # fmt: skip
    return EvaluateStage.model_validate(section | changes)


DRAWN = {"benchmarks": {"captions": {"prompts": {"classes": 3, "max_samples": 2}}}}
LANTERN = {"kind": "lantern", "k": 4, "delta": 0.2}
REFUSED = {
    "lantern on text": ({"methods": {"M": {"rule": LANTERN}}}, "rule: lantern reads which image codes are similar"),
    "adt on text": ({"methods": {"M": {"tree": {"kind": "adt", "preset": "anole"}}}}, "follows the rows of an image"),
    "block at temperature 0": (
        {"methods": {"M": {"rule": "block", "draw": "sample"}}}, "fits none of the temperatures"
    ),
    "block on a tree": (
        {"methods": {"M": {"rule": "block", "draw": "sample", "tree": "static"}}, "temperatures": [1.0]},
        "rule: block with tree 'static'",
    ),
    "sampled draws on a pruned tree": (
        {"methods": {"M": {"draw": "sample", "tree": "30-4-8"}}, "temperatures": [1.0]}, "not lossless"
    ),
    "the clock of a pruned drafter": (
        {"methods": {"M": {"drafter": {"kind": "pruned", "model": "target"}}}, "clock": "thread"},
        "times its pruning by the wall's clock",
    ),
    "the clock of a captioner": (
        {"methods": {"M": {"mode": "C"}}, "captioner": {"kind": "blip"}, "clock": "thread"},
        "times its captions by the wall's clock",
    ),
    "a mode of a pruned drafter": (
        {"methods": {"M": {"drafter": {"kind": "pruned", "model": "target"}, "mode": "T"}}},
        "mode is no decoding setting",
    ),
    "drafter and drafters": ({"methods": {"M": {"drafter": "a", "drafters": ["b"]}}}, "give drafter .one. or drafters"),
    "an unused drafter": (
        {"drafters": {"mine": {"kind": "lvlm", "path": "x"}}}, "drafters.mine drafts in no method"
    ),
    "answers of an image generator": (DRAWN | {"max_new_tokens": 8}, "max_new_tokens.*image generators have no use"),
    "ViSkip of an image generator": (
        DRAWN | {"methods": {"M": {"visual_skip": 0.3}}}, "attention on the prompt's pictures"
    ),
    "a preset for text": ({"preset": "adt"}, "follows the rows of an image|have no use"),
    "probes of answers, drawn": (DRAWN | {"probes": {"states": True}}, "probes.states: nothing reads it"),
    "probes of pictures, said": ({"probes": {"analysis": True}}, "probes.analysis: nothing reads it"),
    "two sets of one name": (
        {"benchmarks": {
            "COCO": {"data": {"path": "x"}}, "sets": {"kind": "sets", "data": {"path": "hub"}, "sets": ["COCO"]},
        }},
        "two benchmarks are called COCO",
    ),
    "two benchmarks of one name": (
        {"benchmarks": [{"name": "a", "data": {"path": "x"}}, {"name": "a", "data": {"path": "y"}}]},
        "two benchmarks are called 'a'",
    ),
    "text and drawn": (
        {"benchmarks": {"a": {"data": {"path": "x"}}, **DRAWN["benchmarks"]}}, "want an evaluation each"
    ),
    "an ensemble of itself": (
        {"methods": {"M": {}, **{name: {"drafter": {"kind": "ensemble", "members": ["M", other]}}
                                 for name, other in ("ab", "ba")}}}, "methods.a: an ensemble is a member of itself",
    ),
    "contrasts of nobody": ({"contrasts": {"x": ["M", "N"]}}, r"contrasts names \['N'\]"),
    "contrasts of other numbers": (
        {"methods": {"M": {"drafters": ["a", "b"]}, "N": {"drafter": "c"}}, "contrasts": {"x": ["M", "N"]}},
        "compares 2 drafters with 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_by_name(changes, words):
    with pytest.raises((ValidationError, UserError), match=words):
        stage(**changes)


@pytest.mark.parametrize(("setting", "words"), [
    ("drafters.mine={path: x}", r"drafters\.mine: its kind is missing"),
    ("methods.M={drafter: null, vata: true}", r"vata is no decoding setting of this drafter \(kind lvlm has mode\)"),
])  # fmt: skip
def test_what_a_drafter_lacks_or_does_not_read_is_refused_when_the_recipe_loads(setting, words, tmp_path):
    fails_with(words, loaded, tmp_path, f"stages.evaluate.{setting}")


@pytest.mark.parametrize(("section", "draws"), [(DRAWN, False), ({}, True)])
def test_benchmarks_of_another_kind_of_target_are_refused(section, draws):
    with pytest.raises(Refused, match="draws pictures" if draws else "writes text"):
        stage(**section).check(SimpleNamespace(kind="any", draws_images=draws), None)


def test_members_are_methods_drafters_and_sections(output, tmp_path):
    """Whatever names them, the same members draft the same."""
    members = {"by method": ["M", "EAGLE-3"], "by stage": ["draft", "eagle3"],
               "by section": [{"kind": "lvlm", "path": str(output / "draft")}, "eagle3"]}  # fmt: skip
    methods = {name: {"drafter": {"kind": "ensemble", "members": names}} for name, names in members.items()}
    methods |= {"M": METHODS["M"], "EAGLE-3": METHODS["EAGLE-3"]}
    copy = shutil.copytree(output, tmp_path / "run", ignore=shutil.ignore_patterns("evaluate"))
    run(copy, "stages.evaluate.methods=null", f"stages.evaluate.methods={json.dumps(methods)}", stages=["evaluate"])
    result = {name: [row["accepted"] for row in rows_of(copy) if row["method"] == name] for name in members}
    assert result["by method"] == result["by stage"] == result["by section"]
    with pytest.raises(UserError, match="'eagle4', which is no earlier stage"):
        run(copy, "stages.evaluate.methods.M with EAGLE-3.drafter.members=[M, eagle4]", stages=["evaluate"])


def test_a_plain_recipe_needs_benchmarks_and_methods_alone():
    plain = stage(methods={"M": {}, "T": {"mode": "T"}})
    assert plain.temperatures == [0.0] and plain.needs() == {"processor": None, "target": None, "drafter": None}
    assert [method.tree.gamma for method in plain.methods.values()] == [5, 5]
    assert stage(tree="30-4-8", methods={"M": {}, "N": {"tree": "sage"}}).methods["M"].tree.total == 30
    # What is written down is read again as it is.
    assert EvaluateStage.model_validate(plain.model_dump(mode="json", by_alias=True)) == plain
