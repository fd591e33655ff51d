"""A locale without UTF-8, as containers and batch systems have: what a run writes and reads is UTF-8 all the same."""

import os
import subprocess
import sys

import yaml
from stages_run import TINY_DATASET

PLAIN = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHONUTF8"))}


def command(*words):
    done = subprocess.run([sys.executable, "-m", "draftsmith", *map(str, words)], capture_output=True, timeout=300,
                          env=PLAIN | {"LC_ALL": "C", "PYTHONUTF8": "0"}, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_a_run_in_the_c_locale_trains(tmp_path):
    output = tmp_path / "Läufe →"
    small = [word for word in TINY_DATASET if not word.startswith("stages=")]
    said = command("recipe=demo/lvlm-from-nothing", f"output={output}", *small, "stages=[world,seeing]")
    assert str(output) in said and (output / "seeing" / "done.json").is_file()
    assert yaml.safe_load((output / "recipe.yaml").read_bytes())["output"] == str(output)
