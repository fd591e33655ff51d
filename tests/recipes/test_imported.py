"""Which modules a command imports, and garbage: what waits for torch or for the code of models waits for seconds."""

import gc
import json
import subprocess
import sys

import pytest
from draftsmith.recipes.uncollected import uncollected

# Runs a command, and prints which modules are there then.
RUN = """
import contextlib, io, json, sys
from draftsmith.recipes.commands.cli import main
with contextlib.redirect_stdout(io.StringIO()) as said:
    assert main(sys.argv[1:]) == 0
print(json.dumps([len(said.getvalue()), *sys.modules]))
"""
# Models, and what their code brings of torch.
MODELS = {"transformers", "huggingface_hub", "tokenizers", "torch._dynamo", "torch.distributed.tensor"}


def imported(words: str) -> set[str]:
    """By a fresh Python that runs a command."""
    command = [sys.executable, "-c", RUN, *words.split()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    said, *modules = json.loads(result.stdout)
    assert said > 100, "the command printed nothing"
    return set(modules)


@pytest.mark.parametrize("words", ["--help", "recipes", "train --help", "completion bash"])
def test_help_and_lists_import_no_torch(words):
    modules = imported(words)
    assert "pydantic" in modules and not modules & {"torch", "transformers", "numpy", "draftsmith.recipes.schema"}


@pytest.mark.parametrize("recipe", ["llava15-68m", "sparrow-qwen3-vl-8b", "eagle-llamagen-xl-stage1"])
def test_a_recipe_is_read_without_the_code_of_models(recipe):
    """Recipes that name published models. transformers checks a config that a recipe spells out."""
    modules = imported(f"show {recipe}")
    assert "draftsmith.recipes.schema" in modules and not modules & MODELS


def test_a_dry_run_imports_the_models_of_its_recipe_alone():
    modules = imported("train recipe=llava15-68m dry_run=true")
    models = {
        name.split(".")[2] for name in modules if name.startswith("transformers.models.") and ".modeling_" in name
    }
    assert {"llava", "llama"} <= models <= {"auto", "llava", "llama", "clip"}
    assert not modules & {"deepspeed", "torchvision", "pandas", "matplotlib", "datasets", "peft", "wandb"}


# Runs a command, and prints at its exit how many objects no search for garbage looks at.
FROZEN = """
import atexit, contextlib, gc, io, sys
out = sys.stdout
atexit.register(lambda: print(gc.get_freeze_count(), gc.isenabled(), file=out))
from draftsmith.recipes.commands.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    main(sys.argv[1:])
"""


@pytest.mark.parametrize("words", ["show llava15-68m", "train recipe=llava15-68m dry_run=true"])
def test_what_has_only_read_leaves_without_a_search(words):
    command = [sys.executable, "-c", FROZEN, *words.split()]
    count, enabled = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.split()
    assert int(count) > 100_000 and enabled == "True"


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
