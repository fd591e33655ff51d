"""demo/lvlm with the target that ships, and demo/lvlm-from-nothing, which makes such a target."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import draftsmith.data.shapes.write as writing
import pytest
import yaml
from draftsmith.core.errors import UserError
from draftsmith.data.processor_files import load_processor
from draftsmith.models.folders import FOLDER
from draftsmith.recipes.commands.demo import environment
from draftsmith.recipes.config.load import load
from draftsmith.trainers.stages import generate
from fails import fails_with
from safetensors import safe_open
from stages_run import FEW, run_loaded

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = FOLDER / "shapes-llava"
DRAFT = [word for word in FEW if not word.startswith(("stages.seeing", "stages.target"))]


@pytest.fixture(scope="module")
def shipping():
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("ship_target")
    sys.path.remove(str(ROOT / "scripts"))


def told_by(folder: Path) -> tuple:
    """What must be equal of two targets that were made alike: config, tensors' names, types and shapes, tokenizer."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    config = json.loads((folder / "config.json").read_text())
    return config, tensors, load_processor(folder).tokenizer_hash


def committed(run: Path) -> None:
    """As if its code had been a commit's, whatever state this checkout is in."""
    git = {"commit": "a" * 40, "changed_files": 0}
    (run / "run.yaml").write_text(yaml.safe_dump({"recipe": "lvlm-from-nothing.yaml", "git": git}))


def test_the_recipe_makes_such_a_target(tmp_path, monkeypatch, shipping):
    """Its tokenizer from all of the recipe's words, and its weights from two steps on a few records."""
    rest = [word for word in FEW if word.startswith("stages.world.") and ".train=" not in word]
    with monkeypatch.context() as without_pictures:
        without_pictures.setattr(writing, "draw", lambda scene, size: SimpleNamespace(save=lambda path: None))
        whole = load(["recipe=demo/lvlm-from-nothing", f"output={tmp_path / 'words'}", *rest])
        run_loaded(whole, tmp_path / "words", stages=["world"])
    tokenizer = load_processor(tmp_path / "words" / "world").tokenizer
    monkeypatch.setattr(generate, "train_tokenizer", lambda texts, size: tokenizer)
    run = tmp_path / "run"
    few = [f"stages.{name}.{key}" for name in ("seeing", "target") for key in ("steps=1", "batch_size=2")]
    found = load(["recipe=demo/lvlm-from-nothing", f"output={run}", *FEW, *few])
    run_loaded(found, run, stages=["world", "seeing", "target"])
    committed(run)
    made = shipping.ship(run / "target", tmp_path / "made")
    assert told_by(tmp_path / "made") == told_by(SHIPPED)
    assert sorted(p.name for p in (tmp_path / "made").iterdir()) == sorted(p.name for p in SHIPPED.iterdir())
    recorded = json.loads((SHIPPED / "made.json").read_text())
    assert made.keys() == recorded.keys() and made["tokenizer_hash"] == recorded["tokenizer_hash"]
    steps = load(["recipe=demo/lvlm-from-nothing"]).recipe.stages["target"].steps
    assert (recorded["stage"], recorded["seed"], recorded["steps"]) == ("target", 0, steps)

    about = yaml.safe_load((run / "run.yaml").read_text())
    about["git"]["changed_files"] = 1
    (run / "run.yaml").write_text(yaml.safe_dump(about))
    fails_with("its code is not that of a commit", shipping.ship, run / "target", tmp_path / "other")


def test_the_first_demo_reads_the_shipped_target_and_its_words(tmp_path):
    run = tmp_path / "run"
    found = load(
        ["recipe=demo/lvlm", f"output={run}", *DRAFT, "stages.world.splits.binding.attribute=16",
         "stages.evaluate.warmup=0"]
    )  # fmt: skip
    run_loaded(found, run)
    assert sorted(path.name for path in run.iterdir() if path.is_dir()) == [
        "evaluate", "finetune", "language", "pretrain", "world"
    ]  # fmt: skip
    processor = load_processor(run / "world")
    assert processor.tokenizer_hash == load_processor(SHIPPED).tokenizer_hash, "not one of the few words drawn here"
    report = json.loads((run / "evaluate" / "report.json").read_text())
    assert report["binding"]["accuracy"] >= 0.75 and report["binding"]["blind_accuracy"] <= 0.3
    assert report["about"]["target"] == "shipped:shapes-llava"
    assert all(cell["identical"] == cell["requests"] > 0 for cell in report["cells"])
    manifest = json.loads((run / "finetune" / "draftsmith.json").read_text())
    assert manifest["target"] == "shipped:shapes-llava", "a name that means the same on every machine"


@pytest.mark.parametrize("key", ["vocab_size=500", "patch_size=8"])
def test_what_the_target_brings_is_not_chosen(key):
    with pytest.raises(UserError, match=r"nothing reads it: the weights at target\.path bring their processor"):
        load(["recipe=demo/lvlm", f"stages.world.{key}"])


@pytest.mark.slow
def test_a_target_that_is_made_again_sees_as_well(tmp_path, shipping):
    """By the README's commands, and then as the target of the first demo."""
    run = tmp_path / "run"

    def demo(*words: str) -> None:
        command = [sys.executable, "-m", "draftsmith", "demo", *words]
        subprocess.run(command, cwd=tmp_path, env=environment(), check=True, timeout=3600)

    demo("lvlm-from-nothing", "stages=[world,seeing,target]", f"output={run}")
    committed(run)
    shipping.ship(run / "target", tmp_path / "made")
    assert told_by(tmp_path / "made") == told_by(SHIPPED)
    binding = "stages.world.splits.binding.attribute=500"
    demo("lvlm", f"target.path={tmp_path / 'made'}", f"output={tmp_path / 'draft'}", *DRAFT, binding)
    report = json.loads((tmp_path / "draft" / "evaluate" / "report.json").read_text())
    assert report["binding"]["accuracy"] >= 0.75 and report["binding"]["blind_accuracy"] <= 0.25
