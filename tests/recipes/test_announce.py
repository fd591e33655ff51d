"""What a run says before torch is imported."""

import subprocess
import sys

import pytest
from draftsmith.core.errors import MISTAKE
from draftsmith.recipes.commands import cli, demo
from draftsmith.recipes.config.files import KEYS
from draftsmith.recipes.config.launch import announcement

# Ends the process at its first line.
FIRST = """
import builtins, os, sys
def first(*words, **how):
    os.write(1, f"{words[0]}|{'torch' in sys.modules}".encode())
    os._exit(0)
builtins.print = first
from draftsmith.recipes.commands.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("words", ["demo", "train demo/lvlm", "recipe=demo/lvlm"])
def test_the_first_line_does_not_wait_for_torch(words):
    command = [sys.executable, "-c", FIRST, *words.split()]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert said.startswith("demo/lvlm: A draft VLM for a LLaVA") and said.endswith("|False")


@pytest.mark.parametrize("word", ["sed=1", "dryrun=true"])
def test_a_word_that_is_surely_refused_comes_before_the_banner_and_the_launcher(word, monkeypatch, capsys):
    assert announcement(["recipe=demo/lvlm", word]) is None
    monkeypatch.setattr(demo.os, "execve", lambda *words: pytest.fail("the launcher was started"))
    assert cli.main(["demo", "lvlm", word]) == MISTAKE
    said = capsys.readouterr()
    assert said.out == "" and f"command line: {word}" in said.err


def test_keys_at_the_top_are_known_without_the_schema():
    from draftsmith.recipes.config.schema import Recipe

    assert {*Recipe.model_fields} <= {*KEYS}
