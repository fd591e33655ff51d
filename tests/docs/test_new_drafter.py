"""The tutorial's drafter, put into a copy of the package as its page says, and compared with EAGLE-3 and TABED."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adding-a-drafter.md").read_text()
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
def test_the_drafter_of_the_page_enters_the_package(tmp_path):
    copy = tmp_path / "draftsmith"
    names = subprocess.run(["git", "-C", str(ROOT), "ls-files", "*.py", "*.yaml", "*.json", "*.toml", "*.txt"],
                           capture_output=True, text=True, check=True).stdout.split("\n")  # fmt: skip
    for name in filter(None, names):
        if not name.startswith(("tests/", "docs/", "scripts/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    code = [
        block
        for number in (1, 2, 3, 4)
        for block in re.findall(r"^```python run\n(.*?)^```", section(number), re.M | re.S)
    ]
    (copy / "recurrent.py").write_text("\n\n".join(code))
    subprocess.run(["bash", "-euo", "pipefail", "-c", fenced(section(7), "bash")], cwd=copy, check=True)
    line, member = fenced(section(7), "python").rstrip().split("\n")
    union = copy / "models" / "drafters" / "__init__.py"
    text = union.read_text().replace("from .sibling", f"{line}\nfrom .sibling")
    union.write_text(text.replace("    | PrunedConfig", f"{member.split('#')[0].rstrip()}\n    | PrunedConfig"))
    assert yaml.safe_load(fenced(section(8), "yaml"))["extends"] == "demo/compare"
    (tmp_path / "recurrent.yaml").write_text(fenced(section(8), "yaml"))
    words = re.search(r"(stages=\[\S+\])", fenced(section(8), "bash"))[1]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def call(*more: str) -> str:
        command = [sys.executable, "-m", "draftsmith", "recipe=recurrent.yaml", words, *more]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
        return done.stdout

    said = call("dry_run=true")
    assert "trains the head (recurrent), 32,896 parameters" in said
    assert "not counted: activations and scores, which recurrent does not estimate" in said
    call(*FEW)
    report = (tmp_path / "runs" / "recurrent" / "table" / "report.md").read_text()
    for name in ("recurrent, chain", "recurrent, tree", "EAGLE-3, chain", "draft LVLM, MT*"):
        assert name in report
    assert "8/8" in report  # every method's outputs are plain decoding's
