"""Drafters that our plugin patches vLLM for, in a real vLLM (scripts/test_engines): chains as here, mistakes flagged.

A patch can go when the cases that its file names pass without it.
"""

import json
import tempfile
from pathlib import Path

import pytest
from draftsmith.eval.engines import engine_check as verify
from draftsmith.eval.engines.ours import Exported
from draftsmith.eval.engines.program import VLLM, find_python, run_program
from draftsmith.models.drafters.manifest import MANIFEST
from draftsmith.models.formats.export import export_drafter
from draftsmith.models.formats.plugin import PATCHES
from served_heads import save_draft, save_drawn, save_itself
from vllm_server import IN_VLLM

pytestmark = IN_VLLM
# Case -> what our loop is told beside the same answers of the engine, as if it were the other one.
OTHERWISE = {
    "M": {"mode": "T"},
    "T": {"mode": "M"},  # its projector, which is not exported, is a drawn one
    "M on projected": {"mode": "T"},
    "M of the target itself": {"mode": "T"},
    "sparrow": {"vata": False, "ivsb": False, "train_visual_share": 1.0},
    "vispec": {"vata": True},
}


@pytest.fixture(autouse=True)
def patched(monkeypatch):
    monkeypatch.setenv(PATCHES, "1")


def exported(case, target, tmp_path):
    if case in ("sparrow", "vispec"):
        save_drawn(case, target, tmp_path / "draft")
    elif "itself" in case or case == "T":
        save_itself(target, tmp_path / "draft")
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
    exact = [cell for cell in found.cells if cell.group[:3] != "res"]
    assert all(cell.chains > 9 and cell.equal == cell.chains for cell in exact)
    if "itself" in case:
        assert all(cell.accepted[1] > 3 * cell.chains for cell in exact)
    if case == "T":
        text, seen = cells["text"], cells["one picture"]
        assert text.accepted[1] > 3 * text.chains and seen.accepted[1] < 3 * seen.chains

    again = iter(said)
    monkeypatch.setattr(verify, "run_program", lambda *arguments, **named: next(again))
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["drafter"] |= OTHERWISE[case]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    found, cells = verified(folder, tmp_path)
    assert cells["text"].good and not cells["one picture"].good and not cells["two pictures"].good and found.faults


@pytest.mark.parametrize(("engine", "on", "words"), [
    ({}, "0", rf"patches of vLLM, which are off: serve it with {PATCHES}=1"),
    ({"enable_prefix_caching": True}, "1", "serve it with --no-enable-prefix-caching"),
])  # fmt: skip
def test_vllm_itself_refuses_what_it_would_serve_wrongly(target, tmp_path, monkeypatch, engine, on, words):
    folder = exported("T", target, tmp_path)
    monkeypatch.setenv(PATCHES, on)
    asked = {"model": str(target), "engine": {"dtype": "float32", "max_model_len": 128} | engine, "requests": [],
             "speculative": Exported(folder, str(target)).speculative, "max_new_tokens": 4, "together": [1],
             "without_known_faults": False}  # fmt: skip
    with pytest.raises(verify.UserError, match=words):
        run_program(VLLM, tmp_path, asked, python=find_python())
