"""An engine in its own Python, beside this process: jobs go there as files, and files come back.

It outlives no job: one that dies or hangs is started again with the jobs that it has not done, and a job appears whole
or not at all, so that nothing is lost and nothing comes twice. It never outlives this process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file
from torch import Tensor

from ...core.errors import UserError
from ...core.files import unwritable
from ...core.json_types import JsonMapping
from ...core.locks import take_lock
from ...eval.engines.program import cure, ended, kill_program, last_lines, start_program
from ..run.stopping import Stop
from .engine_answers import Answer, Job, read_answers, read_states

if TYPE_CHECKING:
    from filelock import BaseFileLock

_WORKERS = Path(__file__).with_name("workers")
_LOOK_S = 0.005  # between two looks for an answer
_TRIES = 3  # starts in a row without a job done
_END_S = 20
_FOLDERS = ("jobs", "done")
_LOCK = "lock"
_OURS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class EngineProcess:
    """Open it as a context; it is started by `start`, or with the first job. Raises `UserError`: the folder cannot be
    written, or another run's engine works in it.

    Args:
        folder: of this process alone; emptied now, and removed at the end.
        settings: arguments of the engine.
        layers: whose hidden states are wanted; None: answers alone.
        timed: how each answer came about is wanted, too.
        python: the interpreter of its environment.
        key: of the section that names it, for errors.
        timeout_s: without a sign of it, after which it is taken for hung.
        say: prints a line for people.
    """

    def __init__(
        self,
        folder: Path,
        settings: JsonMapping,
        layers: Sequence[int] | None = None,
        *,
        timed: bool = False,
        python: str,
        stop: Stop,
        key: str = "engine",
        timeout_s: float = 3600.0,
        say: Callable[[str], None] = lambda text: None,
    ):
        self.folder, self.stop, self.python = folder, stop, python
        self.key, self.timeout_s, self.say = key, timeout_s, say
        self.log = folder / "log.txt"
        self.num_starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._next, self._fruitless = 0, 0
        try:
            self._lock = self._make_folder()
            given = {"settings": dict(settings), "layers": layers, "timed": timed}
            (folder / "engine.json").write_text(json.dumps(given))
        except OSError as error:
            raise self._unwritable(error) from error

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        if self._process is not None:
            if kind is None and self._process.poll() is None:
                (self.folder / "jobs" / "end").touch()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_S)
            kill_program(self._process)
        if kind is not None and issubclass(kind, UserError):  # its logs and answers explain an error of the engine's
            for name in ("jobs", "states"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
            for states in (self.folder / "done").glob("*.safetensors"):
                states.unlink()
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()

    def start(self) -> None:
        """Start the engine, and wait until it is loaded. Raises as `wait`."""
        if self._process is None:
            self._start()
        self._await(self.folder / "ready", "while an engine was loaded")

    def submit(self, requests: Sequence[JsonMapping], pictures: Mapping[str, Tensor]) -> str:
        """Hand over a job and return its name. Raises `UserError` where the folder cannot be written. `requests`: as
        `workers/draftsmith_jobs.py` says. `pictures`: [H,W,3] uint8 by the names that the requests use.
        """
        name, jobs = f"{self._next:09d}", self.folder / "jobs"
        self._next += 1
        try:
            if pictures:
                save_file(dict(pictures), jobs / f"{name}.safetensors")
            aside = jobs / f"{name}.partial"
            aside.write_text(json.dumps({"requests": list(requests)}))
            os.replace(aside, jobs / f"{name}.json")
        except Exception as error:  # safetensors has errors of its own
            raise self._unwritable(error) from error
        if self._process is None:
            self._start()
        return name

    def wait(self, name: str, job: Job, *, stops: bool = True) -> list[Answer]:
        """The answers of a job, in the order of its requests. Its files are gone then, but for files of states. Raises
        `UserError`: the engine died or hung three times without doing a job, or its answers are wrong. Raises
        `Stopped`: `stops`, and this rank was asked to stop meanwhile. `job`: what was asked, as its answers are
        compared with it. `stops`: False where the caller ends between two jobs: other ranks wait for the step in hand.
        """
        path = self.folder / "done" / f"{name}.json"
        self._await(path, "while an engine answered; what is finished is kept" if stops else None)
        self._fruitless = 0
        answers = read_answers(path, job)
        for file in (*(self.folder / "jobs" / f"{name}.{suffix}" for suffix in ("json", "safetensors")), path):
            file.unlink(missing_ok=True)
        return answers

    def states(self, name: str, job: Job, number: int) -> Tensor:
        """Hidden states [T,L,D] of a request of a job that was waited for; once, for their file is gone then."""
        assert job.states is not None
        path = self.folder / "done" / f"{name}-{number}.safetensors"
        states = read_states(path, job.requests[number], job.states)
        path.unlink()
        return states

    def _await(self, path: Path, place: str | None) -> None:
        """Wait for a file of the engine's; `place` is that of `Stop.check`, None where it is not looked at."""
        assert self._process is not None
        sign_s, touched, alive = time.monotonic(), None, self.folder / "alive"
        while not path.exists():
            if place is not None:
                self.stop.check(place)
            if self._process.poll() is not None and not path.exists():
                self._again(ended(self._process.returncode), self._process.returncode)
            # Touched in a job of many requests: what counts is that its time changes, and not which time another
            # machine's clock, or a file's owner, has written.
            if alive.exists() and (now := alive.stat().st_mtime_ns) != touched:
                sign_s, touched = time.monotonic(), now
            if time.monotonic() - max(sign_s, self._started_s) > self.timeout_s:
                self._again(f"gave no sign for {self.timeout_s:g} s", 0)
            time.sleep(_LOOK_S)

    def _again(self, what: str, code: int) -> None:
        assert self._process is not None
        kill_program(self._process)
        self._fruitless += 1
        if self._fruitless >= _TRIES:
            less = f"{self.key}.gpu_memory_utilization, max_num_seqs, or VLLM_CPU_KVCACHE_SPACE on a CPU"
            hint = cure(code, self.log, memory=less, disk=f"{self.key}.scratch") or "fix what it says"
            if "no sign" in what:
                hint = f"it hangs, or needs longer: {self.key}.timeout_s"
            raise UserError(f"the engine {what}, and {_TRIES} times in a row did no job; its last lines:\n"
                            f"{last_lines(self.log)}", key=self.key, where=str(self.log),
                            hint=f"{hint}; what the stage has finished is kept")  # fmt: skip
        copy = self.log.with_name(f"log-{self.num_starts}.txt")
        os.replace(self.log, copy)
        self.say(f"the engine {what} ({copy}): it is started again")
        self._start()

    def _start(self) -> None:
        self.num_starts += 1
        (self.folder / "ready").unlink(missing_ok=True)
        environment = {name: value for name, value in os.environ.items() if name not in _OURS}  # it is no rank of ours
        environment |= {"TOKENIZERS_PARALLELISM": "false"}
        self._process = start_program(self.python, _WORKERS / "vllm_worker.py", self.folder, self.log, environment)
        self._started_s = time.monotonic()

    def _make_folder(self) -> BaseFileLock:
        self.folder.mkdir(parents=True, exist_ok=True)
        place = self.folder / _LOCK
        if (lock := take_lock(place, timeout_s=0)) is None:
            holder = place.read_text()
            raise UserError(f"another run's engine works in this folder (process {holder})", where=str(self.folder),
                            hint=f"give each run a folder of its own: {self.key}.scratch")  # fmt: skip
        place.write_text(str(os.getpid()))
        for left in self.folder.iterdir():  # of an engine that was killed
            if left.is_dir():
                shutil.rmtree(left)
            elif not left.name.startswith(_LOCK):
                left.unlink()
        for name in _FOLDERS:
            (self.folder / name).mkdir()
        return lock

    def _unwritable(self, error: BaseException) -> UserError:
        problem = unwritable(self.folder, error)
        hint = f"{problem.hint}, or name a folder with more room there"
        return UserError(problem.problem, key=f"{self.key}.scratch", where=str(self.folder), hint=hint)
