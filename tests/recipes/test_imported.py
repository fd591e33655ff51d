"""Which modules a command imports, and garbage: what waits for torch or for the code of models waits for seconds."""

import functools
import gc
import json
import subprocess
import sys

import pytest
from draftsmith.recipes.config.load import uncollected

# Runs commands, and prints after each which modules are there then; at the exit, how many objects no search for garbage
# looks at.
RUN = """
import atexit, contextlib, gc, io, json, sys
out = sys.stdout
atexit.register(lambda: print(json.dumps([gc.get_freeze_count(), gc.isenabled()]), file=out))
from draftsmith.recipes.commands.cli import main
for words in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(words.split()) == 0
    print(json.dumps([len(said.getvalue()), *sys.modules]))
"""
SHOWN = ["show llava15-68m", "show sparrow-qwen3-vl-8b", "show eagle-llamagen-xl-stage1"]
DRY_RUN = "train recipe=llava15-68m dry_run=true"
# Models, and what their code brings of torch.
MODELS = {"transformers", "huggingface_hub", "tokenizers", "torch._dynamo", "torch.distributed.tensor"}


@functools.cache
def run(*commands: str) -> tuple[list[set[str]], int, bool]:
    """By a fresh Python: the modules after each command; frozen objects and whether garbage is searched at the exit."""
    command = [sys.executable, "-c", RUN, *commands]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    *after, (frozen, enabled) = map(json.loads, result.stdout.splitlines())
    assert len(after) == len(commands) and all(said > 100 for said, *_ in after), "a command printed nothing"
    return [set(modules) for _, *modules in after], frozen, enabled


@pytest.mark.parametrize("words", ["--help", "recipes", "train --help"])
def test_help_and_lists_import_no_torch(words):
    (modules,), *_ = run(words)
    assert "pydantic" in modules and not modules & {
        "torch",
        "transformers",
        "numpy",
        "draftsmith.recipes.config.schema",
    }


def test_a_recipe_is_read_without_the_code_of_models():
    """Recipes that name published models. transformers checks a config that a recipe spells out."""
    for words, modules in zip(SHOWN, run(*SHOWN)[0], strict=True):
        assert "draftsmith.recipes.config.schema" in modules and not modules & MODELS, words


def test_a_dry_run_imports_the_models_of_its_recipe_alone():
    (modules,), *_ = run(DRY_RUN)
    models = {
        name.split(".")[2] for name in modules if name.startswith("transformers.models.") and ".modeling_" in name
    }
    assert {"llava", "llama"} <= models <= {"auto", "llava", "llama", "clip"}
    assert not modules & {"deepspeed", "torchvision", "pandas", "matplotlib", "datasets", "peft", "wandb"}


@pytest.mark.parametrize("commands", [SHOWN, [DRY_RUN]], ids=["show", "dry run"])
def test_what_has_only_read_leaves_without_a_search(commands):
    _, frozen, enabled = run(*commands)
    assert frozen > 100_000 and enabled


@uncollected()
def failing() -> None:
    with uncollected():
        assert not gc.isenabled()
    assert not gc.isenabled(), "the outer one goes on"
    raise KeyError


def test_garbage_is_searched_for_again_behind_an_error():
    assert gc.isenabled()
    with pytest.raises(KeyError):
        failing()
    assert gc.isenabled()
