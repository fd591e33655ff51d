"""scripts/demo and scripts/test share one environment, in both orders and from any folder. Nothing is installed."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# An interpreter that makes a folder with itself in it for `-m venv`, and writes down what pip, pytest and the
# package's own command are asked for. `-c` is Python's.
PYTHON = f"""#!/usr/bin/env bash
case "$1 $2" in
    "-c import ensurepip, venv") [ -z "${{NO_ENSUREPIP:-}}" ] ;;
    "-c "*) exec {sys.executable} "$@" ;;
    "-m venv") mkdir -p "$3/bin" && {{ [ "$0" -ef "$3/bin/python" ] || cp "$0" "$3/bin/python"; }}
        cp "$0" "$3/bin/draftsmith" ;;
    "-m pip")
        echo "pip ${{*: -1}}" >> "$CALLS"
        [ "${{*: -1}}" != "${{CUT:-}}" ] || exit 9 ;;
    "demo "*) echo "$1" >> "$CALLS"
        echo "from ${{DRAFTSMITH_CALLED_FROM:-here}} as ${{DRAFTSMITH_SHOWN_AS:-draftsmith}}" ;;
    "-m pytest") echo "${{1/-m/tests}}" >> "$CALLS"
        echo "$*" ;;
    *) echo "not expected: $*" >&2; exit 3 ;;
esac
"""
TORCH = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
BARE, DEV, DEMO, TESTS = "pip .[gguf]", "pip .[dev]", "demo", "tests"


@pytest.fixture
def clone(tmp_path):
    """A clone's two commands, and a function that runs one and returns the new calls and the finished process."""
    folder = tmp_path / "clone"
    (folder / "recipes" / "demo").mkdir(parents=True)
    (folder / "recipes" / "demo" / "lvlm.yaml").touch()
    (folder / "scripts").mkdir()
    for name in ("scripts/environment.sh", "scripts/demo", "scripts/test", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(PYTHON)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)

    def call(*words, cwd=tmp_path, **environment):
        calls.write_text("")
        name, *more = words
        given = {k: v for k, v in os.environ.items() if k not in ("DRAFTSMITH_VENV", "CXX")}
        given |= {"PYTHON": str(python), "CALLS": str(calls), **environment}
        command = [os.path.join(".", os.path.relpath(folder / "scripts" / name, cwd)), *more]
        done = subprocess.run(command, cwd=cwd, env=given, capture_output=True, text=True, check=False)
        return calls.read_text().splitlines(), done

    call.folder = folder
    return call


def the_demo(call, **more):
    return call("demo", "lvlm", "dry_run=true", **more)


def the_tests(call, **more):
    return call("test", "tests/core", **more)


@pytest.mark.parametrize("venv", ["default", "relative", "absolute"])
def test_the_readmes_order_and_the_other_one_share_an_environment(clone, tmp_path, venv):
    place = {"default": {}, "relative": {"DRAFTSMITH_VENV": "env"}, "absolute": {"DRAFTSMITH_VENV": f"{tmp_path}/env"}}
    settings = place[venv]
    assert the_demo(clone, **settings)[0] == [f"pip {TORCH}", BARE, DEMO]
    assert the_demo(clone, **settings)[0] == [DEMO]
    calls, done = the_tests(clone, cwd=clone.folder / "recipes", **settings)
    assert calls == [DEV, TESTS] and "adding what the tests need" in done.stdout, "torch is there"
    for cwd in (tmp_path, clone.folder, clone.folder / "scripts"):
        assert the_tests(clone, cwd=cwd, **settings)[0] == [TESTS]
        assert the_demo(clone, cwd=cwd, **settings)[0] == [DEMO], "what the tests have, the demo can use"

    shutil.rmtree({"default": clone.folder / ".venv", "relative": clone.folder / "env"}.get(venv, tmp_path / "env"))
    assert the_tests(clone, **settings)[0] == [f"pip {TORCH}", DEV, TESTS]
    assert the_demo(clone, **settings)[0] == [DEMO]


@pytest.mark.parametrize("cut", [TORCH, ".[gguf]"])
def test_an_install_that_was_cut_is_finished_by_the_other_command(clone, cut):
    calls, done = the_demo(clone, CUT=cut)
    assert calls[-1] == f"pip {cut}" and done.returncode == 9
    half = clone.folder / ".venv" / "lib" / "python3.11" / "site-packages" / "half-1.0.dist-info"
    whole = half.with_name("whole-1.0.dist-info")
    for info in (half, whole):
        info.mkdir(parents=True)
    (whole / "RECORD").touch()
    assert the_tests(clone)[0] == [f"pip {TORCH}", DEV, TESTS]
    assert whole.is_dir() and not half.exists(), "pip would take a package without its list of files for installed"


@pytest.mark.parametrize("threads", [{}, {"OMP_NUM_THREADS": "1"}])
def test_the_tests_have_a_worker_more_than_cores(clone, threads):
    """nproc takes OMP_NUM_THREADS for the number of cores: there were two workers on every machine."""
    said = clone("test", "--tier=core", **threads)[1].stdout.split()
    assert said[said.index("--numprocesses") + 1] == str(len(os.sched_getaffinity(0)) + 1)


def test_an_addition_that_was_cut_is_finished(clone):
    the_demo(clone)
    assert the_tests(clone, CUT=".[dev]")[1].returncode == 9
    assert the_demo(clone)[0] == [f"pip {TORCH}", BARE, DEMO], "the package itself may have been cut"
    assert the_tests(clone)[0] == [DEV, TESTS]


def test_other_pins_are_installed_anew(clone):
    the_tests(clone)
    with (clone.folder / "constraints.txt").open("a") as pins:
        pins.write("zstandard==1.0\n")
    assert the_demo(clone)[0] == [f"pip {TORCH}", BARE, DEMO]


def test_what_a_fresh_machine_lacks_is_said_before_anything_is_installed(clone, tmp_path):
    calls, done = the_demo(clone, NO_ENSUREPIP="1")
    assert (calls, done.returncode) == ([], 2) and "apt install python3-venv" in done.stderr
    # A disk that is nearly full: df is another's.
    (tmp_path / "bin").mkdir()
    df = tmp_path / "bin" / "df"
    df.write_text("#!/bin/sh\nprintf 'Filesystem 1024-blocks Used Available\\n/dev/a 9 9 900000 1%% /\\n'\n")
    df.chmod(0o755)
    full = f"{df.parent}:{os.environ['PATH']}"
    calls, done = the_tests(clone, PATH=full)
    assert (calls, done.returncode) == ([], 2) and "900 MB are free" in done.stderr
    calls, done = the_tests(clone, CXX="no-such-compiler")
    assert calls[-1] == TESTS and "no C++ compiler (no-such-compiler)" in done.stdout
    assert the_demo(clone, PATH=full)[0] == [DEMO], "nothing is installed any more"


def test_the_demo_knows_from_where_and_how_it_was_called(clone, tmp_path):
    assert (
        f"from {tmp_path} as {clone.folder}/.venv/bin/draftsmith\n" in the_demo(clone, PATH="/usr/bin:/bin")[1].stdout
    )
    (tmp_path / "bin").mkdir()
    shutil.copy(tmp_path / "python", tmp_path / "bin" / "draftsmith")
    activated = the_demo(clone, cwd=clone.folder, PATH=f"{tmp_path}/bin:/usr/bin:/bin")[1]
    assert "from here as draftsmith\n" in activated.stdout
