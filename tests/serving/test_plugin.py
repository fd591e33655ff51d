"""The plugin for vLLM without vLLM: it reads what exports write, refuses versions by name, and its wheel is built."""

import ast
import importlib.util
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from draftsmith.models.formats.plugin import MODULE, PACKAGE, served_by_plugin

FOLDER = Path(__file__).resolve().parents[2] / "serving" / PACKAGE


def module(name):
    spec = importlib.util.spec_from_file_location(f"plugin_{name}", FOLDER / MODULE / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


section, versions = module("section"), module("versions")
LLAMA = {"hidden_size": 8}
GOOD = {"msd": {"fc_bias": True}, "lvlm": {"language_model": LLAMA}}


@pytest.mark.parametrize("drafter", GOOD)
def test_what_an_export_writes_is_what_the_plugin_reads(drafter):
    values = served_by_plugin({"hidden_size": 8}, drafter, **GOOD[drafter])
    read = section.read(values, drafter)
    assert read == section.read(SimpleNamespace(**values), drafter) == section.Section(drafter, **GOOD[drafter])
    classes = (FOLDER / MODULE / "__init__.py").read_text()
    assert f'"{values["architectures"][0]}": "{MODULE}.{drafter}:' in classes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 2}, "draftsmith.format is 2, and this draftsmith-vllm reads 1"),
        ({"drafter": "lvlm"}, "draftsmith.drafter is 'lvlm', not 'msd'"),
        ({"window": "none"}, "draftsmith.window: no such key"),
        ({"fc_bias": None}, "draftsmith.fc_bias is missing"),
        (None, "no section draftsmith"),
    ],
)
def test_other_sections_are_refused_by_their_key(changes, words):
    values = served_by_plugin({}, "msd", fc_bias=True)
    values["draftsmith"] = None if changes is None else values["draftsmith"] | changes
    with pytest.raises(section.WrongSection, match=words):
        section.read(values, "msd")


@pytest.mark.parametrize("found", ["0.33.0", "0.31.9", "1.0", "0.320.1", None])
def test_versions_that_were_not_tried_are_refused_by_name(monkeypatch, found):
    monkeypatch.setattr(versions, "version", lambda: found)
    with pytest.raises(versions.OtherVersion, match=rf"tried with vLLM 0.32, and this is {found or 'no vLLM'}:"):
        versions.check()


@pytest.mark.parametrize("found", ["0.32.0", "0.32.1+cpu", "0.32.0rc1"])
def test_patches_of_a_tried_minor_version_are_taken(found):
    assert versions.refusal(found) is None


def test_a_cut_prompt_ends_where_its_piece_does():
    """Known tokens by row: of a piece one past its end, of a whole prompt and of an answer as before."""
    ends_of_pieces = module("cut_prompts").ends_of_pieces
    known = np.array([50, 50, 61, 7])
    requests = {
        "a": SimpleNamespace(num_computed_tokens=12, num_prompt_tokens=50),
        "b": SimpleNamespace(num_computed_tokens=38, num_prompt_tokens=50),
        "c": SimpleNamespace(num_computed_tokens=60, num_prompt_tokens=50),
    }
    ends = ends_of_pieces(known, ["a", "b", "c"], requests, {"a": 12, "b": 12, "c": 1})
    assert ends.tolist() == [25, 50, 61, 7] and known.tolist() == [50, 50, 61, 7]


def test_values_of_requests_are_repeated_for_their_drafted_tokens():
    """As vLLM's docstring has it, of any type, where a request has none too."""
    repeated = module("drawn_tokens").repeated
    values, sums = torch.tensor([0.7, 0.0, 1.5]), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert repeated(values, sums, 5, replace_to=1).tolist() == pytest.approx([0.7, 0.7, 1.5, 1.5, 1.5])
    assert repeated(values, torch.tensor([1, 2, 3]), 3, replace_to=1).tolist() == pytest.approx([0.7, 1.0, 1.5])
    assert repeated(torch.tensor([4, -1], dtype=torch.int32), torch.tensor([1, 3]), 3, -1, 9).tolist() == [4, 9, 9]


def test_it_imports_nothing_of_draftsmith_and_vllm_only_where_it_is_called():
    for path in (FOLDER / MODULE).glob("*.py"):
        tree = ast.parse(path.read_text())
        names = [n.name for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names]
        names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0]
        assert not any(name.split(".")[0] == "draftsmith" for name in names)
        top = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom) and node.level == 0]
        if path.stem in ("__init__", "section", "versions", "cut_prompts", "drawn_tokens"):
            assert not any(name.split(".")[0] in ("vllm", "torch") for name in top), path


def test_the_wheel_has_the_entry_point_and_every_module(tmp_path):
    copied = tmp_path / "source"
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run(["cp", "-r", str(FOLDER), str(copied)], check=True)  # a build leaves files behind
    subprocess.run([*command, str(copied)], check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("draftsmith_vllm-*.whl")
    with zipfile.ZipFile(wheel) as held:
        names = held.namelist()
        points = next(held.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    assert "[vllm.general_plugins]\ndraftsmith = draftsmith_vllm:register" in points
    assert {f"{MODULE}/{path.name}" for path in (FOLDER / MODULE).glob("*.py")} <= set(names)
    assert tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]["dependencies"] == []
