"""A locale without UTF-8, as containers and batch systems have: what a run writes and reads is UTF-8 all the same."""

import json
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


def test_records_of_a_log_keep_their_letters(tmp_path):
    line = {"messages": [{"role": "user", "content": "Größe?"}, {"role": "assistant", "content": "→ 七"}]}
    (tmp_path / "log.jsonl").write_text(json.dumps(line, ensure_ascii=False), encoding="utf-8")
    command("logs", tmp_path / "log.jsonl", tmp_path / "aus")
    (record,) = map(json.loads, (tmp_path / "aus" / "records.jsonl").read_bytes().splitlines())
    assert [turn["value"] for turn in record["conversations"]] == ["Größe?", "→ 七"]
