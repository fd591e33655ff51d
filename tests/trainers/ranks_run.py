"""Ranks as processes of their own, forked from one that has imported everything.

Python, torch and DeepSpeed take longer to start than most tests run. One of each kind goes through the real launcher.
"""

import gc
import multiprocessing
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from training import free_port

FORKS = multiprocessing.get_context("forkserver")
# The optimizers of `muon_optimizer` are compiled by torch, whose compiler takes two seconds to import; every ZeRO stage
# looks whether the optimizer is one of them.
FORKS.set_forkserver_preload(
    ["no_garbage", "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "peft", "draftsmith.recipes.commands.cli",
     "draftsmith.recipes.config.launch", "draftsmith.recipes.config.schema", "draftsmith.trainers.run.run", "training"]
)  # fmt: skip
MAIN = "import sys; from draftsmith.recipes.commands.cli import main; sys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True)
class Rank:
    """A rank that was started, and the file of what it prints."""

    process: multiprocessing.process.BaseProcess
    log: Path


def start_ranks(world_size: int, script: str, *arguments: str, cwd: Path, **environment: str) -> list[Rank]:
    """Start `script` as each of `world_size` ranks."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(world_size)}
    folder = Path(tempfile.mkdtemp())
    started = []
    for rank in range(world_size):
        own = os.environ | rendezvous | environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        log = folder / f"rank-{rank}"
        process = FORKS.Process(target=_rank, args=(script, arguments, str(cwd), dict(own), str(log)))
        process.start()
        started.append(Rank(process, log))
    return started


def end_ranks(started: list[Rank], timeout: float = 240) -> list[tuple[int, str]]:
    """Wait for all ranks, then kill what is left. Returns [(exit code, what it printed)], by rank."""
    for rank in started:
        rank.process.join(timeout)
    for rank in started:
        rank.process.kill()
        rank.process.join()
    result = [(rank.process.exitcode, rank.log.read_text()) for rank in started]
    shutil.rmtree(started[0].log.parent)
    return result


def run_ranks(world_size: int, script: str, *arguments: str, cwd: Path, timeout: float = 240, **environment: str):
    """Run `script` as each of `world_size` ranks. Returns [(exit code, what it printed)], by rank."""
    return end_ranks(start_ranks(world_size, script, *arguments, cwd=cwd, **environment), timeout)


def run_recipe(world_size: int, *arguments: str, cwd: Path, **environment: str) -> str:
    """`deepspeed --num_accelerators WORLD trains/train.py ARGUMENTS` without the launcher. Returns what rank 0 said."""
    result = run_ranks(world_size, MAIN, *arguments, cwd=cwd, **environment)
    assert [code for code, _ in result] == [0] * world_size, "\n".join(text[-3000:] for _, text in result)
    return result[0][1]


def _rank(script: str, arguments: tuple[str, ...], cwd: str, environment: dict[str, str], log: str) -> None:
    gc.freeze()  # DeepSpeed collects garbage often, and what was imported is none
    gc.enable()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(written, 1)
    os.dup2(written, 2)
    sys.argv = ["trains/train.py", *arguments]
    torch.set_num_threads(1)
    exec(compile(script, "rank", "exec"), {"__name__": "__main__"})
