"""What a publication does not tell: folders of the machine that it was made on, and who works there."""

import json

import pytest
from draftsmith.eval.cells import MethodInfo
from draftsmith.eval.report import build, write
from draftsmith.eval.tables import html_page
from draftsmith.trainers.publish.card import read_evaluation
from draftsmith.trainers.publish.folder import copy_provenance, copy_report, without_places
from PIL import Image
from rows import random_rows

HOME = "/home/alice"


@pytest.mark.parametrize(("text", "shown"), [
    (f"{HOME}/data/mine.json", "mine.json"),
    ("/data/Alice B/mine set.json", "mine set.json"),
    ("../alice/mine.json", "mine.json"),
    ("~/mine/data.json", "data.json"),
    (HOME, "~"),
    ("/Users/alice/", "~"),
    (f"train.py recipe={HOME}/r.yaml 'output=/scratch/alice/x' data=[/a/b.json,/c/d.json]",
     "train.py recipe=r.yaml 'output=x' data=[b.json,d.json]"),
    (f"- suite: {HOME}/sets, rows: all", "- suite: sets, rows: all"),
    (f"file://{HOME}/x", "file://~/x"),
])  # fmt: skip
def test_paths_are_cut_to_their_last_name(text, shown):
    assert without_places(text) == shown


@pytest.mark.parametrize("text", [
    "llava-hf/llava-1.5-7b-hf", "data/coco/{00000..00010}.tar", "https://huggingface.co/a/b/c", "tokens/s",
    "![a](report/a.png)", "tau / (gamma T_q/T_p + 1)", "2026/11/21", "</s>", "a /s", "USER: <image>\nWhat?",
])  # fmt: skip
def test_what_only_has_a_slash_is_kept(text):
    assert without_places({"a": [text, 1, None]}) == {"a": [text, 1, None]}


def test_recipe_and_report(tmp_path):
    """Through the functions that write the folder and read the card's tables."""
    run, folder = tmp_path / "run", tmp_path / "folder"
    (run / "evaluate" / "suite").mkdir(parents=True)
    folder.mkdir()
    about = {"command": f"train.py output={HOME}/run", "suite": f"{HOME}/sets, prompts verbatim", "gamma": 5}
    rows = random_rows(2, drafter="head", method="M", benchmark=f"{HOME}/sets")
    built = build(rows, about=about, methods={"M": MethodInfo("head")}, warnings=[f"read from {HOME}/sets"])
    write(run / "evaluate", built, rows)
    for plot in (run / "evaluate").glob("*.png"):
        plot.unlink()
    (run / "evaluate" / "report.md").write_text(f"- read from {HOME}/sets\n\n![a](a.png)\n")
    Image.effect_noise((40, 40), 90).save(run / "evaluate" / "a.png")
    (run / "evaluate" / "suite" / "a.json").write_text(json.dumps([f"{HOME}/a b.json"]))
    (run / "run.yaml").write_text(f"command: train.py output={HOME}/run\npid: 7\n")
    copy_report(run / "evaluate", folder)
    copy_provenance(run, {"output": f"{HOME}/run", "target": {"path": "org/name"}}, folder)
    for path in folder.rglob("*.*"):
        assert b"alice" not in path.read_bytes(), path
    page = html_page("- read from sets\n\n![a](a.png)\n", run / "evaluate")
    assert (folder / "report" / "report.html").read_text() == page, "with the picture as it was: base64 is no path"
    assert json.loads((folder / "report" / "report.json").read_text())["about"]["gamma"] == 5
    assert "path: org/name" in (folder / "recipe.yaml").read_text()
    result = read_evaluation(run / "evaluate", "head")
    assert result.about["suite"] == "sets, prompts verbatim" and result.findings[-1] == "- **Warning**: read from sets."
    assert HOME not in str(result)
