"""An engine in its own Python, beside this process: jobs go there as files, and files come back.

It outlives no job: one that dies is started again with the jobs that it has not done, and a job appears whole or not
at all, so that nothing is lost and nothing comes twice.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ...core.errors import UserError
from ...eval.engines.program import last_lines
from ..stopping import Stop

_WORKERS = Path(__file__).with_name("workers")
_LOOK_S = 0.005  # between two looks for an answer
_TRIES = 3  # starts in a row without a job done
_END_S = 20


class EngineProcess:
    """Open it as a context; it is started with the first job.

    Args:
        folder: of this process alone; emptied now, and removed at the end.
        kind: of the engine: which worker runs.
        settings: arguments of the engine.
        layers: whose hidden states are wanted; None: answers alone.
        python: the interpreter of its environment.
        devices: the GPUs that it sees, as CUDA_VISIBLE_DEVICES has them; None: those of this process.
    """

    def __init__(
        self,
        folder: Path,
        kind: str,
        settings: Mapping[str, Any],
        layers: Sequence[int] | None,
        *,
        python: str,
        stop: Stop,
        devices: str | None = None,
    ):
        self.folder, self.stop, self.python, self.devices = folder, stop, python, devices
        self.worker = _WORKERS / f"{kind}_worker.py"
        self.num_starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._next, self._fruitless = 0, 0
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("jobs", "done"):
            (folder / name).mkdir(parents=True)
        (folder / "engine.json").write_text(json.dumps({"settings": dict(settings), "layers": layers}))

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            (self.folder / "jobs" / "end").touch()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S if kind is None else 0)
        self._kill()
        if kind is None or not issubclass(kind, UserError):  # its log explains an error of the engine's
            shutil.rmtree(self.folder, ignore_errors=True)

    def submit(self, requests: Sequence[Mapping[str, Any]], pictures: Mapping[str, Tensor]) -> str:
        """Hand over a job and return its name.

        Args:
            requests: as `workers/draftsmith_jobs.py` says.
            pictures: [H,W,3] uint8 by the names that the requests use.
        """
        name, jobs = f"{self._next:09d}", self.folder / "jobs"
        self._next += 1
        if pictures:
            save_file(dict(pictures), jobs / f"{name}.safetensors")
        aside = jobs / f"{name}.partial"
        aside.write_text(json.dumps({"requests": list(requests)}))
        os.replace(aside, jobs / f"{name}.json")
        if self._process is None:
            self._start()
        return name

    def wait(self, name: str) -> list[dict[str, Any]]:
        """The answers of a job, in the order of its requests. Its files are gone then, but for files of states.

        Raises:
            UserError: the engine died three times without doing a job.
            Stopped: this rank was asked to stop meanwhile.
        """
        path = self.folder / "done" / f"{name}.json"
        while not path.exists():
            self.stop.check("while an engine answered; what is finished is kept")
            assert self._process is not None, "a job was handed over"
            if self._process.poll() is not None and not path.exists():
                self._again(self._process.returncode)
            time.sleep(_LOOK_S)
        self._fruitless = 0
        answers = json.loads(path.read_text())["answers"]
        for file in (path, *(self.folder / "jobs" / f"{name}.{suffix}" for suffix in ("json", "safetensors"))):
            file.unlink(missing_ok=True)
        return answers

    def _again(self, code: int) -> None:
        self._fruitless += 1
        if self._fruitless >= _TRIES:
            raise UserError(f"the engine ended {_TRIES} times with exit code {code}; its last lines:\n"
                            f"{last_lines(self.folder / 'log.txt')}", where=str(self.folder / "log.txt"),
                            hint="fix what it says; what the stage has finished is kept")  # fmt: skip
        self._kill()
        self._start()

    def _start(self) -> None:
        self.num_starts += 1
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)  # it is no rank of ours
        environment |= {} if self.devices is None else {"CUDA_VISIBLE_DEVICES": self.devices}
        with (self.folder / "log.txt").open("w") as log:
            # -I: nothing of ours, by PYTHONPATH or beside the worker, is found before the engine's own modules.
            self._process = subprocess.Popen(
                [self.python, "-I", "-u", str(self.worker), str(self.folder.resolve())],
                stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=self.folder, start_new_session=True,
            )  # fmt: skip

    def _kill(self) -> None:
        """End the engine with all its own processes."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
