"""Runs benchmark scripts on the code of a commit, and keeps what they print in docs/results/benchmarks.

The scripts are those of this checkout, the package that they measure is a clone's, and tests are the clone's own. What
a command prints is kept as it is, with the clone's commit, the date and the device; `result_tables/benchmarks.py` makes
the pages' tables from its Markdown.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from draftsmith.core.errors import UserError

SCRIPTS = Path(__file__).resolve().parent
RESULTS = SCRIPTS.parent / "docs" / "results" / "benchmarks"
# Results of others are kept, too: their scripts settled their questions and are gone.
# Name -> command, run at the root of the clone; its folders in braces are given as NAME=FOLDER.
COMMANDS = {
    "peers": "python scripts/bench/benchmark_peers.py --peers {peers} --sizes 'demo size'"
    " --only assisted eagle lantern",
    "peers-512": "python scripts/bench/benchmark_peers.py --peers {peers} --sizes 'width 512' --cycles 3 --checked 1"
    " --tokens 8 --only assisted eagle lantern",
    "peers-training": "python scripts/bench/benchmark_peers.py --peers {peers} --only training",
    "peers-speculators-eagle3": "python scripts/bench/benchmark_peers.py --peers {peers} --only speculators-eagle3",
    "peers-specforge": "python scripts/bench/benchmark_peers.py --peers {peers} --only specforge-eagle3",
    "peers-specforge-dflash": "python scripts/bench/benchmark_peers.py --peers {peers} --only specforge-dflash",
    "peers-blocks": "python scripts/bench/benchmark_peers.py --peers {peers} --only blocks",
    "peers-speculators": "python scripts/bench/benchmark_peers.py --peers {peers} --only speculators",
    "ensemble": "python scripts/bench/benchmark_ensemble.py --requests 20",
    "latency": "python scripts/papers/measure_latency.py --quick --output {latency}",
    "lantern": "python -m pytest -q -s -m 'slow or not slow' tests/eval/test_lantern_residual.py",
    "sage": "python -m pytest -q -s tests/eval/test_sage_growth.py",
    "states": "python scripts/bench/benchmark_states.py --repeats 10",
    "torture": "python tests/tools/torture.py --seed 0,1,2 --attempts 500 --jobs 2",
    "starting": "python scripts/bench/benchmark_starting.py",
    "engines": "python scripts/engine_table.py {engines} --drafters eagle eagle3 dflash peagle",
    "engines-own": "DRAFTSMITH_VLLM_PATCHES=1 python scripts/engine_table.py {engines} --targets llama llava"
    " --drafters medusa msd middle sparrow vispec lvlm lvlm_m lvlm_t",
}
# The exit code of a command that measured and found faults, which its table names.
_CODES = {"engines": 3, "torture": 1}


def measure(name: str, clone: Path, folders: Mapping[str, str]) -> Path:
    """Runs a command of `COMMANDS` in `clone` and keeps what it prints. Returns the file.

    Raises:
        UserError: no such command, a folder is not given, the clone has changed files, or the command failed.
    """
    if name not in COMMANDS:
        raise UserError(f"no benchmark {name!r}", where="scripts/result_benchmarks.py",
                        hint=f"one of {', '.join(COMMANDS)}")  # fmt: skip
    try:
        command = COMMANDS[name].format(**folders)
    except KeyError as missing:
        raise UserError(f"{name} needs a folder {missing}", where=name, hint=f"add {missing.args[0]}=FOLDER") from None
    if changed := _git(clone, "status", "--porcelain"):
        raise UserError(f"its code is not that of a commit:\n{changed}", where=str(clone),
                        hint="measure in a clone without changes")  # fmt: skip
    python = clone / ".venv" / "bin"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{python}{os.pathsep}{os.environ['PATH']}"}
    load = [os.getloadavg()[0]]
    words = [word.replace("scripts/", f"{SCRIPTS}/", 1) if word.startswith("scripts/") else word
             for word in shlex.split(command)]  # fmt: skip
    while "=" in words[0]:  # a variable before the command
        name_of, value = words.pop(0).split("=", 1)
        environment[name_of] = value
    done = subprocess.run(words, cwd=clone, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, _CODES.get(name, 0)):
        raise UserError(f"{command} ended with {done.returncode}", where=str(clone), hint="its messages stand above")
    kept: dict[str, Any] = {
        "command": COMMANDS[name],
        "commit": _git(clone, "rev-parse", "HEAD"),
        "date": datetime.date.today().isoformat(),
        "device": f"CPU ({platform.machine()})",
        "torch": metadata.version("torch"),
        "load": [round(one, 1) for one in (*load, os.getloadavg()[0])],
        "output": without_places(done.stdout, clone, folders.values()).rstrip().splitlines(),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    return path


def without_places(printed: str, clone: Path, folders: Iterable[str] = ()) -> str:
    """What was printed, without the places of this machine: scripts, clone, given folders, temporary files."""
    printed = printed.replace(f"{SCRIPTS}/", "scripts/").replace(f"{clone}/", "")
    for folder in folders:
        printed = printed.replace(folder, "FOLDER")
    return printed.replace(tempfile.gettempdir(), "TEMPORARY")


def _git(clone: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=clone, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
