"""Fenced blocks of README.md and of docs/ that are tagged `run` run, in order, in a folder of its own for each page.

    ```bash run           each command must exit with 0 (`run exit-2`: with 2)
    ```python run         one namespace for a page
    ```yaml run FILE      is saved as FILE for the blocks after it (any other language, too)
    ```text output        each line stands in the output of the block before it, in this order; "..." leaves lines out
    ```bash dry-run       lines for a cluster: the launcher's own parser reads its part, the rest runs with dry_run=true
    ```bash slow          as `run`, in a real shell, in the slow tier alone
    ```bash engine        as `slow`, where vLLM's environment is at hand (scripts/test_engines)

Commands of ours run in this process, because a new one imports torch for many seconds: `draftsmith ...`, a script of
scripts/ written in Python, and what stands after `trains/train.py` of a launcher's line. Other lines go to bash.
"""

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed.run as torch_launcher
from deepspeed.launcher import runner as deepspeed_runner
from draftsmith.eval.engines.program import PYTHON
from draftsmith.recipes.commands.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)((?: +\S+)*) *\n(.*?)^``` *$", re.M | re.S)
LAUNCHER = "trains/train.py"
# Of the checkout what commands of a page name; results land beside it.
LINKED = ("scripts", "trains", "recipes", "docs", "constraints.txt", "pyproject.toml")


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    tags: tuple[str, ...]
    text: str

    @property
    def exit_code(self) -> int:
        return next((int(tag.removeprefix("exit-")) for tag in self.tags if tag.startswith("exit-")), 0)

    @property
    def file(self) -> str | None:
        """The name that a block of data is saved under."""
        return None if self.language in ("bash", "python") else self.tags[1]


def blocks(page: str, also: str = "") -> list[Block]:
    """Tagged blocks in order; slow ones and engines', and what they are expected to say, where `also` names them."""
    result = [
        Block(page.count("\n", 0, fence.start()) + 1, fence[1], tuple(fence[2].split()), fence[3])
        for fence in FENCE.finditer(page)
        if {"run", "output", "slow", "dry-run", "engine"} & set(fence[2].split()[:1])
    ]
    kept: list[Block] = []
    heard = True  # whether the block that an output belongs to is among them
    for block in result:
        heard = heard if block.tags[0] == "output" else block.tags[0] in ("run", "dry-run", also)
        kept += [block] if heard else []
    return kept


def commands(text: str) -> list[str]:
    """Logical lines: continued ones joined, comments and empty ones left out."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def run_command(line: str) -> tuple[int, str]:
    """Exit code and output of one command, in this process where it is one of ours."""
    words = shlex.split(line, comments=True)
    destination = words[words.index(">") + 1] if ">" in words else None
    words = words[: words.index(">")] if destination else words
    script = Path(words[0])
    ours = LAUNCHER in words or words[0] == "draftsmith"
    python = script.parts[0] == "scripts" and "python" in script.read_text().splitlines()[0]
    if not (ours or python):
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", line], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        if ours:
            start = words.index(LAUNCHER) if LAUNCHER in words else 0
            code = main(words[start + 1 :])
        else:
            code = run_script(words)
    if destination:
        Path(destination).write_text(output.getvalue())
    return code, output.getvalue()


def launched(words: list[str]) -> list[str]:
    """What a launcher hands to the ranks."""
    launcher, *rest = words
    if launcher == "deepspeed":
        result = deepspeed_runner.parse_args(rest)
        assert "--hostfile" not in rest or deepspeed_runner.fetch_hostfile(result.hostfile)
        script, given, module = result.user_script, result.user_args, result.module
    elif launcher == "torchrun":
        result = torch_launcher.parse_args(rest)
        script, given, module = result.training_script, result.training_script_args, result.module
    else:
        assert launcher in ("python", "sbatch")
        script, *given = [word for word in rest if not word.startswith("--")]
        module = False
    assert script == "draftsmith" if module else Path(script).is_file(), f"no {script}"
    return given


def run_script(words: list[str]) -> int:
    before = sys.argv
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv = before
    return 0


def run_shell(block: Block) -> tuple[int, str]:
    """The whole block in bash, with this interpreter's commands."""
    names = {"draftsmith": "draftsmith.recipes.commands.cli", "deepspeed": "deepspeed.launcher.runner"}
    functions = [f'{name}() {{ {shlex.quote(sys.executable)} -m {module} "$@"; }}' for name, module in names.items()]
    text = "\n".join([*functions, block.text])
    # Scripts ask the environment for python.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], capture_output=True, text=True, check=False, env=environment
    )
    return done.returncode, done.stdout + done.stderr


def missing(expected: str, output: str) -> str | None:
    """The first line of `expected` that is not found in `output` after the one before it."""
    rest = [" ".join(line.split()) for line in output.splitlines()]
    for line in expected.splitlines():
        wanted = " ".join(line.split())
        if wanted in ("", "..."):
            continue
        place = next((number for number, actual in enumerate(rest) if wanted in actual), None)
        if place is None:
            return line
        rest = rest[place + 1 :]
    return None


def run_page(page: str, also: str = "") -> None:
    """Raises `AssertionError` naming the line of the page that does not do what it says."""
    names: dict[str, object] = {"__name__": "docs"}
    output = ""
    for block in blocks(page, also):
        if block.tags[0] == "output":
            line = missing(block.text, output)
            assert line is None, f"line {block.line}: the output holds no {line!r} there:\n{output[-3000:]}"
        elif block.file is not None:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(compile(block.text, f"line {block.line}", "exec"), names)
            output = said.getvalue()
        elif block.tags[0] in ("slow", "engine"):
            code, output = run_shell(block)
            assert code == block.exit_code, f"line {block.line}: exit code {code}\n{output[-3000:]}"
        else:
            output = ""
            for line in commands(block.text):
                if block.tags[0] == "dry-run":
                    line = shlex.join(["draftsmith", *launched(shlex.split(line, comments=True)), "dry_run=true"])
                code, said_here = run_command(line)
                output += said_here
                assert code == block.exit_code, f"line {block.line}, {line}: exit code {code}\n{said_here[-3000:]}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A place that looks like the checkout's root; what a page writes stays in it."""
    for name in LINKED:
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


LONG = ("data.md", "adding-a-drafter.md")  # trainings and evaluations, half of the time of all pages


def tagged(tag: str) -> list[Path]:
    return [page for page in PAGES if any(b.tags[0] == tag for b in blocks(page.read_text(), tag))]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page.name in LONG else (), id=str(page.relative_to(ROOT)))
        for page in sorted({*tagged("run"), *tagged("dry-run")})
    ],
)
def test_blocks_run(page, folder):
    run_page(page.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("page", tagged("slow"), ids=lambda page: str(page.relative_to(ROOT)))
def test_slow_blocks_run(page, folder):
    run_page(page.read_text(), "slow")


@pytest.mark.slow
@pytest.mark.skipif(PYTHON not in os.environ, reason="no vLLM: scripts/test_engines makes its environment")
@pytest.mark.parametrize("page", tagged("engine"), ids=lambda page: str(page.relative_to(ROOT)))
def test_engine_blocks_run(page, folder):
    run_page(page.read_text(), "engine")


def test_pages_with_blocks_are_found():
    names = {page.name for page in tagged("run")}
    assert names >= {"getting-started.md", "writing-a-recipe.md", "adding-a-drafter.md", "adding-a-target.md"}
    assert "clusters.md" in {page.name for page in tagged("dry-run")}
    assert "getting-started.md" in {page.name for page in tagged("slow")}
    assert "lvlm.md" in {page.name for page in tagged("engine")}


# ---- that the blocks are really run


GOOD = """
```text run notes/a.txt
one two
```
```bash run
# a comment
cat notes/a.txt > b.txt; cat \\
    b.txt
```
```text output
...
one   two
```
```python run
x = 3
```
```python run
print(x + 1)
```
```text output
4
```
```bash
exit 1
```
```bash slow
exit 1
```
"""


@pytest.mark.parametrize(
    ("good", "bad", "says"),
    [
        ("one   two\n", "two one\n", "line 10: the output holds no 'two one'"),
        ("4\n```", "4\n3\n```", "line 20: the output holds no '3'"),
        ("cat notes/a.txt", "cat notes/c.txt", "exit code 1"),
        ("x + 1", "x + y", "name 'y' is not defined"),
        ("# a comment", "draftsmith recipe=demo/lvlm no_such_key=1 dry_run=true", "exit code 2"),
    ],
)
def test_a_page_that_does_not_do_what_it_says(good, bad, says, folder):
    run_page(GOOD)
    assert good in GOOD
    with pytest.raises((AssertionError, NameError), match=re.escape(says)):
        run_page(GOOD.replace(good, bad))
