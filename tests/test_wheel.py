"""The wheel: it holds what recipes name, and works without a checkout, outside of one."""

import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from draftsmith.data.records.patterns import FOLDER as MIXTURES
from draftsmith.models.hub import PINNED
from draftsmith.recipes.config.files import recipe_names
from own_package import KIND, RECIPE, write_package
from stages_run import FEW

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def packaged() -> set[Path]:
    """Files that the package's settings put into the wheel, beside modules."""
    folders = {name: ROOT.joinpath(*name.split(".")[1:]) for name in SETTINGS["packages"]}
    data = SETTINGS["package-data"]
    return {path for name, patterns in data.items() for pattern in patterns for path in folders[name].glob(pattern)}


def texts(tree) -> set[str]:
    """Every text in a recipe."""
    if isinstance(tree, dict | list):
        return set().union(*(texts(value) for value in (tree.values() if isinstance(tree, dict) else tree)))
    return {tree} if isinstance(tree, str) else set()


def test_the_wheel_holds_what_recipes_name():
    files = packaged()
    assert set(recipe_names().values()) <= files
    named = set().union(*(texts(yaml.safe_load(path.read_text())) for path in recipe_names().values()))
    # As the package's mixtures are named: in folders below lie those of others, and what was fetched.
    mixtures = {name for name in named if Path(name).match("data/*.yaml") and len(Path(name).parts) == 2}
    assert {MIXTURES / Path(name).name for name in mixtures} == set(MIXTURES.glob("*.yaml")) <= files
    assert set(PINNED.glob("*.json")) <= files and ROOT / "constraints.txt" in files
    # Whatever else lies beside modules is read by them.
    tops = {name.split(".")[1] for name in SETTINGS["packages"] if "." in name}
    beside = {
        path
        for top in tops
        for path in (ROOT / top).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and not path.name.startswith(".")
    }
    assert beside <= files, beside - files


@pytest.mark.slow
def test_the_wheel_works_alone_in_a_fresh_environment(tmp_path):
    """Built from a copy, installed under the pins, and run in an empty folder: the demo, and a recipe."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def call(*command: str, code: int = 0, **more: str) -> str:
        done = subprocess.run(command, cwd=elsewhere, env=environment | more, capture_output=True, text=True,
                              timeout=1800, check=False)  # fmt: skip
        assert done.returncode == code, f"{command}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
        return done.stdout

    # Of the checkout what git knows: building leaves folders behind.
    archive = tmp_path / "checkout.zip"
    files = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"], capture_output=True,
                           text=True, check=True).stdout.split("\n")  # fmt: skip
    with zipfile.ZipFile(archive, "w") as out:
        for name in filter(None, files):
            if (ROOT / name).is_file():
                out.write(ROOT / name, name)
    with zipfile.ZipFile(archive) as stored:
        stored.extractall(tmp_path / "checkout")
    call(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(tmp_path / "checkout"))
    (wheel,) = tmp_path.glob("draftsmith-*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    pins = tmp_path / "checkout" / "constraints.txt"
    torch = next(line for line in pins.read_text().splitlines() if line.startswith("torch=="))
    call(python, "-m", "pip", "install", "-q", torch)
    call(python, "-m", "pip", "install", "-q", "-c", str(pins), str(wheel))
    draftsmith = str(tmp_path / "venv" / "bin" / "draftsmith")
    where = call(python, "-c", "import draftsmith; print(draftsmith.__file__)")
    assert str(tmp_path / "venv") in where
    named = re.search(r"(\S+exports\.md)", call(draftsmith, "export", "--help"))
    assert named and Path(named[1]).is_file(), "pages that messages name are in the wheel, too"

    few = [word for word in FEW if not word.startswith(("stages.seeing", "stages.target"))]
    call(draftsmith, "demo", "lvlm", "output=by-demo", *few)
    assert "identical" in (elsewhere / "by-demo" / "evaluate" / "report.md").read_text()
    said = call(draftsmith, "train", "recipe=demo/lvlm-from-nothing", "output=by-train", *FEW)
    assert "measure it: draftsmith evaluate" in said
    assert (elsewhere / "by-train" / "finetune" / "model.safetensors").is_file()
    call(draftsmith, "publish", "by-demo")
    folder = elsewhere / "by-demo" / "publish" / "repository"
    assert "the same tokens and accepted drafts" in call(draftsmith, "verify", str(folder))
    _use_from_another_package(tmp_path, elsewhere, call, python, draftsmith)
    # The mixture is in the wheel, and says how to fetch what lies behind it; without a network the target is a fault.
    missing = call(draftsmith, "check", "eagle-llava15-7b", f"output={elsewhere / 'real'}", code=3)
    assert "hf download Aeala/ShareGPT_Vicuna_unfiltered" in missing


def _use_from_another_package(folder: Path, runs: Path, call, python: str, draftsmith: str) -> None:
    """The drafter of docs/adding-a-drafter.md in a package that only PYTHONPATH knows: checked, trained, published."""
    package = write_package(folder / "hers" / "her_package")
    path = {"PYTHONPATH": str(package.parent)}
    code = "import draftsmith, her_package.recurrent as hers; print(draftsmith.check_drafter(hers.RecurrentConfig()))"
    assert "by heart" in call(python, "-c", code, **path)
    (runs / "own.yaml").write_text(yaml.safe_dump(RECIPE | {"output": "by-hers"}, sort_keys=False))
    assert f"trains the head ({KIND})" in call(draftsmith, "train", "own.yaml", "dry_run=true", **path)
    call(draftsmith, "recipe=own.yaml", **path)
    verify = [draftsmith, "verify", "by-hers/publish/repository", "--target", "by-hers/target"]
    assert "her_package.others is not imported" in call(*verify, code=3, **path)
    assert "there is no module her_package" in call(*verify, "--allow-import", code=3)
    assert "the same tokens and accepted drafts" in call(*verify, "--allow-import", **path)
    assert "hers" in call(draftsmith, "compare", "by-hers")
