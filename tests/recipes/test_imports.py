"""What a command imports: words for people need no torch, and a dry run nothing that trains, draws or logs."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "deepspeed", "datasets", "wandb", "matplotlib", "peft", "accelerate", "webdataset",
         "pandas", "jinja2"}  # fmt: skip
# A dry run counts the parameters of real models, which are torch's and transformers'; these import jinja2.
COUNTS = {"torch", "transformers", "accelerate", "jinja2"}


def imported(*commands: tuple[str, ...]) -> set[str]:
    """Packages that a fresh process has loaded at the end of these commands."""
    code = "import sys\nfrom draftsmith.recipes.commands.cli import main\n"
    code += "".join(f"code = main({list(words)})\nassert code == 0, code\n" for words in commands)
    code += "print('LOADED', *{name.split('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize(
    "words", [("--help",), ("--version",), ("recipes",), ("train", "--help"), ("doctor", "--help")]
)
def test_help_imports_nothing_heavy(words):
    loaded = imported(words)
    assert "draftsmith" in loaded and not HEAVY & loaded


def test_a_dry_run_imports_only_what_counts_parameters():
    """Of both tracks, one after the other: what neither of them loads."""
    loaded = imported(*((f"recipe={recipe}", "dry_run=true") for recipe in ("demo/lvlm", "demo/visual-ar")))
    assert "torch" in loaded and not (HEAVY - COUNTS) & loaded
