"""A fresh process that knows nothing of the run: it opens a published folder, runs the card's code, and decodes.

`python -m draftsmith.trainers.publish.fresh` reads one job as JSON from its input and exits with 0, or with 2 and
the reason. What it prints is redacted before anyone sees it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...core.errors import UserError
from ...core.json_types import JsonMapping
from ...core.secrets import redact
from ..run.stopping import Stop
from .snippets import Snippet

# What makes a process think that it is one of several.
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CROSS_RANK")

_LOOK_S = 0.2  # between two looks at whether to stop
_TRYING = "while the folder was tried in a fresh process"


def try_folder(
    folder: Path,
    target: object,
    snippets: Sequence[Snippet],
    names: Mapping[str, str],
    *,
    stop: Stop | None = None,
    hours: float = 2.0,
) -> None:
    """Run the code of the card and decode the stored prompt, in another process.

    Args:
        target: as `open_published` takes it.
        names: string literals of the snippets -> the expressions to run in their place.
        stop: whether the run was asked to stop, which ends the process; None: nobody asks.
        hours: after which the process is given up.

    Raises:
        Stopped: the run was asked to stop.
        UserError: it does not load, does not run, or says something else than when it was measured.
    """
    code = [[snippet.title, snippet.with_names(names)] for snippet in snippets]
    job = {"folder": str(folder), "target": _plain(target), "snippets": code}
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    command = [sys.executable, "-m", "draftsmith.trainers.publish.fresh"]
    stop = stop or Stop()
    stop.check(_TRYING)
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        try:
            said = _said(process, json.dumps(job), stop, folder, hours)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        stop.check(_TRYING)  # a launcher signals the child, too
        said = redact(said.strip()) or "no message"
        raise UserError(f"in a fresh process: {said[-3000:]}", where=str(folder),
                        hint="nothing was made public; fix what it names, and publish again")  # fmt: skip


def _said(process: subprocess.Popen[str], job: str, stop: Stop, folder: Path, hours: float) -> str:
    """What the process has written to standard error, once it has ended."""
    until, given = time.monotonic() + 3600 * hours, job or None
    while True:
        try:
            return process.communicate(given, timeout=_LOOK_S)[1]
        except subprocess.TimeoutExpired:
            given = None  # it has the job
        stop.check(_TRYING)
        if time.monotonic() > until:
            raise UserError(
                f"the published folder was still not tried after {hours:g} hours", where=str(folder),
                hint="look for what holds it up: the device may be full",
            )  # fmt: skip


def _plain(target: object) -> object:
    if isinstance(target, Mapping):
        return {thing: str(place) for thing, place in target.items()}
    return None if target is None else str(target)


def _try(job: JsonMapping) -> None:
    from ...eval.stored_prompt import reproduce

    for title, code in job["snippets"]:
        try:
            with contextlib.redirect_stdout(None):
                exec(compile(code, title, "exec"), {"__name__": "snippet"})
        except UserError:
            raise
        except Exception as error:  # any exception of the card's code is the card's fault
            last = traceback.format_exception_only(error)[-1].strip()
            raise UserError(f"the card's code fails: {last}", where=title) from error
    # The run that publishes has imported what its recipe names.
    reproduce(job["folder"], target=job["target"], allow_import=True)


def main() -> int:
    """Try the job on standard input. Returns 0, or 2 with the reason on standard error."""
    try:
        _try(json.loads(sys.stdin.read()))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
