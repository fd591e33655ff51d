"""What a command imports: words for people need no torch, and a dry run nothing that trains, draws or logs."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "deepspeed", "datasets", "wandb", "matplotlib", "peft", "accelerate", "webdataset"}
# A dry run counts the parameters of real models, which are torch's and transformers'.
COUNTS = {"torch", "transformers", "accelerate"}


def imported(*arguments: str) -> set[str]:
    """Packages that a fresh process has loaded at its end."""
    code = "import sys\nfrom draftsmith.recipes.cli import main\ncode = main(sys.argv[1:])\n"
    code += "print('LOADED', *{name.split('.')[0] for name in sys.modules})\nsys.exit(code)"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize(
    "words", [("--help",), ("--version",), ("recipes",), ("train", "--help"), ("doctor", "--help")]
)
def test_help_imports_nothing_heavy(words):
    loaded = imported(*words)
    assert "draftsmith" in loaded and not HEAVY & loaded


@pytest.mark.parametrize("recipe", ["demo/lvlm", "demo/visual-ar"])
def test_a_dry_run_imports_only_what_counts_parameters(recipe):
    loaded = imported(f"recipe={recipe}", "dry_run=true")
    assert "torch" in loaded and not (HEAVY - COUNTS) & loaded
