"""The tutorial's drafter in a package outside of the checkout, as its page says, compared with EAGLE-3 and TABED."""

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest
import yaml
from own_package import PAGE, write_package

FEW = [
    "stages.world.splits.words={name: 8, caption: 8, colors: 4, attribute: 8, conversation: 4, place: 4, "
    "difference: 4, edit: 4, clip: 4, sums: 4, fact: 4}",
    "stages.world.splits.single={name: 8, colors: 4, caption: 4, attribute: 8, conversation: 4, place: 4}",
    "stages.world.splits.text={sums: 4, fact: 4}", "stages.world.splits.pairs={difference: 4, edit: 4}",
    "stages.world.splits.clips.clip=4", "stages.world.splits.align.caption=16",
    "stages.world.splits.seen_single={attribute: 2, conversation: 1, place: 1}",
    "stages.world.splits.seen_pairs={difference: 2, edit: 2}", "stages.world.splits.seen_clips.clip=1",
    "stages.target.optim.warmup_steps=1", "stages.recurrent.optim.warmup_steps=1",
    "stages.eagle3.optim.warmup_steps=1", "stages.answers.max_new_tokens=8", "stages.table.max_new_tokens=8",
    *(f"stages.{name}.steps=3" for name in ("target", "language", "align", "draft", "eagle3", "recurrent")),
]  # fmt: skip


def section(number: int) -> str:
    return re.search(rf"^## {number}\. .*?(?=^## |\Z)", PAGE, re.M | re.S)[0]


def fenced(text: str, language: str) -> str:
    """The first block of a language, whatever it is indented by."""
    return textwrap.dedent(re.search(rf"^ *```{language}\n(.*?)^ *```", text, re.M | re.S)[1])


@pytest.mark.slow
def test_the_drafter_of_the_page_is_named_from_its_own_package(tmp_path):
    package = write_package(tmp_path / "elsewhere" / "my_package")
    assert yaml.safe_load(fenced(section(8), "yaml"))["extends"] == "demo/compare"
    (tmp_path / "recurrent.yaml").write_text(fenced(section(8), "yaml"))
    words = re.search(r"(stages=\[\S+\])", fenced(section(8), "bash"))[1]
    path = os.pathsep.join(filter(None, [str(package.parent), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def call(*more: str) -> str:
        command = [sys.executable, "-m", "draftsmith", "recipe=recurrent.yaml", words, *more]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
        return done.stdout

    said = call("dry_run=true")
    assert "trains the head (my_package.recurrent:RecurrentConfig), 32,896 parameters" in said
    assert "not counted: activations and scores, which my_package.recurrent:RecurrentConfig does not estimate" in said
    call(*FEW)
    report = (tmp_path / "runs" / "recurrent" / "table" / "report.md").read_text()
    for name in ("recurrent, chain", "recurrent, tree", "EAGLE-3, chain", "draft LVLM, MT*"):
        assert name in report
    assert "8/8" in report  # every method's outputs are plain decoding's
    about = yaml.safe_load((tmp_path / "runs" / "recurrent" / "run.yaml").read_text())
    manifest = json.loads((tmp_path / "runs" / "recurrent" / "recurrent" / "draftsmith.json").read_text())
    kind = "my_package.recurrent:RecurrentConfig"
    assert manifest["drafter"]["kind"] == manifest["method"] == kind
    assert about["code"][kind] == manifest["code"] and len(manifest["code"]["sha256"]) == 64
