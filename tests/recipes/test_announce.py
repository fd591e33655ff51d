"""What a run says before torch is imported."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from draftsmith.core import ranks
from draftsmith.recipes.commands import cli, demo
from draftsmith.recipes.commands.demo import environment
from draftsmith.recipes.config.announce import ANNOUNCED, announcement
from draftsmith.recipes.config.exit_codes import MISTAKE
from draftsmith.recipes.config.files import KEYS, demo_names

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


def test_it_says_what_runs_how_long_and_where(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a checkout in which the demo has run has its results
    first, where = announcement(["recipe=demo/lvlm"]).splitlines()
    assert "minutes" in first and "results: runs/demo-lvlm;" in where
    large = announcement(["recipe=llava15-68m", f"--output={tmp_path}"]).splitlines()
    assert large[0].startswith("llava15-68m: 68M draft") and len(large) == 2, "no time that nobody has measured"
    assert f"results: {tmp_path};" in large[1]
    alone = announcement(["recipe=demo/compare", "stages=[world]"]).splitlines()
    assert "15 minutes" in alone[1] and alone[2] == "  of all stages; here only: world"
    assert "of all stages; here only: world" in announcement(["recipe=demo/lvlm", "stages=world"]), (
        "a time in its title"
    )
    assert "of all stages" not in announcement(["recipe=llava15-68m", "stages=[pretrain]"])
    (tmp_path / "run.yaml").touch()
    assert "goes on with what is there" in announcement(["recipe=llava15-68m", f"output={tmp_path}"])
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: demo/lvlm\noutput: there\n")
    assert announcement([f"recipe={mine}"]).splitlines()[0] == str(mine), "its base's time is not its own"
    assert announcement(["recipe=demo/lvlm", "dry_run=true"]) is None
    assert announcement(["recipe=demo/lvml"]) is None, "the error says more"


def test_every_demo_says_how_long_it_takes():
    for name in demo_names():
        said = announcement([f"recipe=demo/{name}"])
        assert "minutes" in said or name in ("adapt", "sage"), name


@pytest.mark.parametrize("word", ["sed=1", "dryrun=true"])
def test_a_word_that_is_surely_refused_comes_before_the_banner_and_the_launcher(word, monkeypatch, capsys):
    assert announcement(["recipe=demo/lvlm", word]) is None
    monkeypatch.setattr(demo.os, "execve", lambda *words: pytest.fail("the launcher was started"))
    assert cli.main(["demo", "lvlm", word]) == MISTAKE
    said = capsys.readouterr()
    assert said.out == "" and f"command line: {word}" in said.err


def test_examples_with_another_seed_go_to_a_folder_of_their_own():
    """In the demo's own folder another seed is refused once the demo has run there."""
    header = (Path(__file__).parents[2] / "scripts" / "demo").read_text().split("set -euo")[0]
    shown = [*(example for example, _ in demo.COMMAND.examples), *re.findall(r"scripts/demo (.*seed=.*)", header)]
    seeded = [example for example in shown if "seed=" in example]
    assert len(seeded) == 2 and all(" output=" in example for example in seeded)


def test_keys_at_the_top_are_known_without_the_schema():
    from draftsmith.recipes.config.schema import Recipe

    assert {*Recipe.model_fields} <= {*KEYS}


def test_demos_are_listed_by_their_names():
    """By their files "lvlm-distilled" stood before "lvlm"."""
    assert demo_names() == sorted(demo_names())


def test_no_bars_of_other_packages_fill_a_log():
    """transformers' own bar over a GGUF is tqdm's, which its switch does not reach."""
    code = "from draftsmith.recipes.commands.cli import main; main(['--version'])\n"
    code += "from tqdm.auto import tqdm; print(sum(tqdm(range(3))))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.endswith("3\n") and run.stderr == ""


def test_it_is_said_once(monkeypatch, capsys):
    monkeypatch.setattr(cli, "run_recipe", lambda arguments, command: MISTAKE)
    monkeypatch.delenv(ANNOUNCED, raising=False)
    cli.main(["recipe=demo/lvlm"])
    assert capsys.readouterr().out.startswith("demo/lvlm: ")
    monkeypatch.setenv(ANNOUNCED, environment()[ANNOUNCED])  # a rank of `draftsmith demo`
    cli.main(["recipe=demo/lvlm"])
    monkeypatch.delenv(ANNOUNCED)
    monkeypatch.setattr(ranks, "is_main", lambda: False)
    cli.main(["recipe=demo/lvlm"])
    assert capsys.readouterr().out == ""
