"""Drafters that our plugin patches vLLM for, in a real vLLM (scripts/test_engines): chains as here, mistakes flagged.

A patch can go when the cases that its file names pass without it.
"""

import json
import os
import tempfile
from pathlib import Path

import pytest
from draftsmith.eval.engines import engine_check as verify
from draftsmith.eval.engines.program import PYTHON, find_python, run_program
from draftsmith.models.drafters.manifest import MANIFEST
from draftsmith.models.formats import export_drafter
from draftsmith.models.formats.plugin import PATCHES
from served_heads import save_draft, save_drawn
from served_pair import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON not in os.environ, reason="no vLLM: scripts/test_engines makes its environment"),
]
# Case -> what our loop is told beside the same answers of the engine, as if it were the other one.
OTHERWISE = {
    "M": {"mode": "T"},
    "T": {"mode": "M"},  # its projector, which is not exported, is a drawn one
    "M on projected": {"mode": "T"},
    "sparrow": {"vata": False, "ivsb": False, "train_visual_share": 1.0},
    "vispec": {"vata": True},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    build(folder, steps=2, rows=4)
    return folder / "target"


@pytest.fixture(autouse=True)
def patched(monkeypatch):
    monkeypatch.setenv(PATCHES, "1")


def exported(case, target, tmp_path):
    if case in ("sparrow", "vispec"):
        save_drawn(case, target, tmp_path / "draft")
    else:
        reads = "projected" if "projected" in case else "tower"
        save_draft(target, tmp_path / "draft", projector_input=reads, first_token=True)
    export_drafter(tmp_path / "draft", tmp_path / "out", "vllm", mode=case[0] if case[0] in "MT" else None)
    return tmp_path / "out"


def verified(folder, tmp_path, tokens=16):
    scratch = Path(tempfile.mkdtemp(dir=tmp_path))
    found = verify.verify_engine(folder, scratch, python=find_python(), max_new_tokens=tokens)
    return found, {cell.group: cell for cell in found.cells}


@pytest.mark.parametrize("case", OTHERWISE)
def test_every_chain_is_as_here(target, tmp_path, monkeypatch, case):
    """Alone, three at once, and with prompts in pieces, some of which end inside a picture. The same answers of the
    engine differ at pictures, and there alone, from what our loop drafts when it is shown something else of them.
    """
    folder, said = exported(case, target, tmp_path), []

    def noted(*arguments, **named):
        said.append(run_program(*arguments, **named))
        return said[-1]

    monkeypatch.setattr(verify, "run_program", noted)
    found, cells = verified(folder, tmp_path)
    assert not found.faults and len(cells) == 6
    assert all(cell.chains > 30 and cell.equal == cell.chains for cell in cells.values() if cell.group[:3] != "res")

    again = iter(said)
    monkeypatch.setattr(verify, "run_program", lambda *arguments, **named: next(again))
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["drafter"] |= OTHERWISE[case]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    found, cells = verified(folder, tmp_path)
    assert cells["text"].good and not cells["one picture"].good and not cells["two pictures"].good and found.faults
