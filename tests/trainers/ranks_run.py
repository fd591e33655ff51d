"""Ranks as processes of their own, forked from one that has imported everything.

Python, torch and DeepSpeed take longer to start than most tests run. One of each kind goes through the real launcher.
"""

import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from training import free_port

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["deepspeed", "draftsmith.recipes.schema", "draftsmith.trainers.run", "training"])
MAIN = "import sys; from draftsmith.recipes.cli import main; sys.exit(main(sys.argv[1:]))"


def run_ranks(world_size: int, script: str, *arguments: str, cwd: Path, timeout: float = 240, **environment: str):
    """Run `script` as each of `world_size` ranks. Returns [(exit code, what it printed)], by rank."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(world_size)}
    folder = Path(tempfile.mkdtemp())
    logs = [folder / f"rank-{rank}" for rank in range(world_size)]
    started = []
    for rank, log in enumerate(logs):
        own = os.environ | rendezvous | environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = FORKS.Process(target=_rank, args=(script, arguments, str(cwd), dict(own), str(log)))
        process.start()
        started.append(process)
    for process in started:
        process.join(timeout)
    for process in started:
        process.kill()
        process.join()
    result = [(process.exitcode, log.read_text()) for process, log in zip(started, logs, strict=True)]
    shutil.rmtree(folder)
    return result


def run_recipe(world_size: int, *arguments: str, cwd: Path, **environment: str) -> str:
    """`deepspeed --num_accelerators WORLD trains/train.py ARGUMENTS` without the launcher. Returns what rank 0 said."""
    result = run_ranks(world_size, MAIN, *arguments, cwd=cwd, **environment)
    assert [code for code, _ in result] == [0] * world_size, "\n".join(text[-3000:] for _, text in result)
    return result[0][1]


def _rank(script: str, arguments: tuple[str, ...], cwd: str, environment: dict[str, str], log: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(written, 1)
    os.dup2(written, 2)
    sys.argv = ["trains/train.py", *arguments]
    torch.set_num_threads(1)
    exec(compile(script, "rank", "exec"), {"__name__": "__main__"})
