"""Exported pairs in a real vLLM (scripts/test_engines): every chain as here, and each kind of mistake is flagged."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from draftsmith.eval.engines import engine_check as verify
from draftsmith.eval.engines.ours import Exported, make_requests
from draftsmith.eval.engines.program import VLLM, find_python, run_program
from draftsmith.models.formats import export
from draftsmith.models.formats.export import Target, export_drafter, find_target
from draftsmith.models.formats.target import export_target
from engine_targets import TARGETS
from fails import fails_with
from served_heads import save_drawn
from served_pair import build
from vllm_server import IN_VLLM

ROOT = Path(__file__).resolve().parents[3]
pytestmark = IN_VLLM


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    build(folder)
    return folder


def verified(folder, tmp_path, **settings):
    scratch = Path(tempfile.mkdtemp(dir=tmp_path))
    return verify.verify_engine(folder, scratch, python=find_python(), max_new_tokens=32, **settings)


def test_every_chain_is_as_here(pair, tmp_path):
    found = verified(pair / "eagle3", tmp_path)
    groups = ["text", "one picture", "two pictures", "resized picture", "three at once", "prompts in pieces"]
    assert not found.faults and [cell.group for cell in found.cells] == groups
    assert all(cell.chains > 30 and cell.accepted[0] == cell.accepted[1] > 10 for cell in found.cells)


def copy(pair, tmp_path, change):
    folder = tmp_path / "changed"
    shutil.copytree(pair / "eagle3", folder)
    change(folder)
    return folder


def test_wrong_taps_are_flagged(pair, tmp_path, monkeypatch):
    """By our own reader where it reads the changed folder, and by the chains where only the engine does."""

    def change(folder):
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}))

    folder = copy(pair, tmp_path, change)
    fails_with("trained with layers that it reads", verified, folder, tmp_path)
    opened = Exported._drafter
    monkeypatch.setattr(Exported, "_drafter", lambda self: opened(Exported(pair / "eagle3")))
    found = verified(folder, tmp_path)
    assert found.cells[0].plain == found.cells[0].requests and not found.cells[0].good
    assert "tapped layers" in " ".join(hint for _, hint in found.faults)


def test_another_input_at_pictures_is_flagged(pair, tmp_path):
    """A head that was trained on projected pictures, beside an engine that embeds the placeholder."""

    def change(folder):
        manifest = json.loads((folder / "draftsmith.json").read_text())
        manifest["drafter"]["image"] = "projected"
        manifest["reads"]["visual_embedding"] = "projected"
        (folder / "draftsmith.json").write_text(json.dumps(manifest))

    found = verified(copy(pair, tmp_path, change), tmp_path)
    by_group = {cell.group: cell for cell in found.cells}
    assert by_group["text"].good and not by_group["one picture"].good
    assert "the placeholder's row, or projected pictures" in " ".join(hint for _, hint in found.faults)


def test_swapped_pictures_are_flagged(pair, tmp_path, monkeypatch):
    def swapped(*arguments, **named):
        return [
            asked if len(asked.pictures) < 2 else type(asked)(**vars(asked) | {"pictures": asked.pictures[::-1]})
            for asked in make_requests(*arguments, **named)
        ]

    monkeypatch.setattr(verify, "make_requests", swapped)
    found = verified(pair / "eagle3", tmp_path)
    by_group = {cell.group: cell for cell in found.cells}
    assert by_group["one picture"].good and by_group["two pictures"].plain < by_group["two pictures"].requests
    assert "swapped" in " ".join(hint for _, hint in found.faults)


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash"])
def test_what_speculators_reads_is_served_too(pair, tmp_path, monkeypatch, kind):
    """vLLM maps the package's settings to its own, some of them by other defaults (docs/exports.md)."""
    monkeypatch.setattr(export, "find_target", lambda *words: Target(**vars(find_target(*words)) | {"name": "a/b"}))
    save_drawn(kind, pair / "target", tmp_path / "head")
    export_drafter(tmp_path / "head", tmp_path / "out", "speculators", target=str(pair / "target"))
    found = verified(tmp_path / "out", tmp_path, target=str(pair / "target"))
    assert not found.faults and all(cell.chains > 30 for cell in found.cells)


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_the_norms_of_eagle31_are_served(pair, tmp_path, monkeypatch, layout):
    """Each joined state has a norm, and passes read normed states; without the second, chains are others."""
    monkeypatch.setattr(export, "find_target", lambda *words: Target(**vars(find_target(*words)) | {"name": "a/b"}))
    save_drawn("eagle3", pair / "target", tmp_path / "head", fc_norm=True, norm_output=True)
    served = tmp_path / "served"
    export_drafter(tmp_path / "head", served, layout, target=str(pair / "target"))
    found = verified(served, tmp_path, target=str(pair / "target"))
    assert not found.faults and all(cell.chains > 30 for cell in found.cells)
    if layout == "speculators":
        return
    opened = Exported._drafter
    shutil.copytree(served, tmp_path / "whole")
    values = json.loads((served / "config.json").read_text())
    (served / "config.json").write_text(json.dumps(values | {"norm_output": False}))
    named = str(pair / "target")
    monkeypatch.setattr(Exported, "_drafter", lambda self: opened(Exported(tmp_path / "whole", named)))
    assert not any(cell.good for cell in verified(served, tmp_path, target=named).cells)


def test_the_norm_op_of_a_cpu_is_named(pair, tmp_path):
    """A DFlash draft of two layers: the engine's fault, and no other one beside it."""
    save_drawn("dflash", pair / "target", tmp_path / "head", num_layers=2)
    export_drafter(tmp_path / "head", tmp_path / "out", "vllm")
    found = verified(tmp_path / "out", tmp_path)
    assert found.faults and all("vLLM's norm op" in hint for _, hint in found.faults)
    assert not verified(tmp_path / "out", tmp_path, without_known_faults=True).faults


def test_the_slots_of_the_v1_runner_are_named(tmp_path):
    """Pictures of a Qwen-VL: the engine's fault, and text is as here."""
    target = qwen(tmp_path)
    save_drawn("eagle3", target, tmp_path / "head")
    export_drafter(tmp_path / "head", tmp_path / "out", "vllm")
    found = verified(tmp_path / "out", tmp_path)
    assert found.cells[0].good and found.faults and all("vLLM's V1 runner" in hint for _, hint in found.faults)
    assert not verified(tmp_path / "out", tmp_path, without_known_faults=True).faults


def qwen(folder):
    """A tiny Qwen2.5-VL after a few steps, as vLLM reads it."""
    stages = {
        "world": {"kind": "generate", "splits": {"train": {"caption": 60, "colors": 40, "sums": 40}}, "patch_size": 8},
        "target": {
            "kind": "train", "from": "scratch", "model": "target", "steps": 40, "batch_size": 16,
            "trainable": ["vision_tower", "projector", "language_model"],
            "format": {"system": "", "image_rule": "verbatim", "template": "qwen_vl"},
            "data": {"from": "world", "path": "train", "max_length": 256},
            "optim": {"lr": 1.0e-3, "betas": [0.9, 0.95], "warmup_steps": 20, "clip_norm": 1.0},
        },
    }  # fmt: skip
    drafter = {"kind": "eagle3", "taps": [2, 4, 6], "visual_slots": "read", "image": "placeholder"}
    recipe = {"target": TARGETS["qwen2_5_vl"], "drafter": drafter, "stages": stages, "output": str(folder / "run")}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    command = [sys.executable, str(ROOT / "trains" / "train.py"), f"recipe={folder / 'recipe.yaml'}"]
    subprocess.run(command, check=True, timeout=900)
    export_target(folder / "run" / "target", folder / "target")
    return folder / "target"


def test_a_text_draft_that_is_the_target_stands_whole(pair, tmp_path):
    exported = Exported(pair / "eagle3")
    requests = [{"name": a.name, "ids": a.ids, "pictures": []}
                for a in make_requests(exported.processor, tmp_path, pictures=False)]  # fmt: skip
    draft = {"method": "draft_model", "model": str(pair / "text"), "num_speculative_tokens": 3}
    asked = {"model": str(pair / "target"), "engine": {"dtype": "float32", "max_model_len": 128}, "speculative": draft,
             "max_new_tokens": 24, "without_known_faults": False, "together": [1], "requests": requests}  # fmt: skip
    _, *answers = run_program(VLLM, tmp_path, asked, python=find_python())
    for answer in answers:
        chains = verify.by_start(answer["tokens"], answer["chains"])
        whole = {start: chain for start, chain in chains.items() if start + len(chain) <= len(answer["tokens"])}
        assert len(whole) >= 5
        assert all(answer["tokens"][start : start + len(chain)] == chain for start, chain in whole.items())
