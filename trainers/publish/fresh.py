"""The code that a model card shows, and the fresh process that runs it before the card is published.

The process knows nothing of the run: it opens the folder, runs the code of its card, and decodes the stored prompt.
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
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import UserError
from ...core.json_types import JsonMapping
from ...core.secrets import redact
from ..run.stopping import Stop

# Two of the literals in the code that stand for something of the reader's; the third is the repository.
PICTURE, OWN_TARGET = "picture.png", "path/to/the/target"
# What makes a process think that it is one of several.
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CROSS_RANK")
_LOOK_S, _MOST_HOURS = 0.2, 2.0  # between two looks at whether to stop; after which the process is given up
_TRYING = "while the folder was tried in a fresh process"


@dataclass(frozen=True)
class Snippet:
    title: str
    code: str

    def shows(self, literal: str) -> bool:
        """Whether the code has this string, which stands for something of the reader's."""
        return json.dumps(literal) in self.code


def loop_snippet(
    repo: str, target: str | None, text: str, *, pictures: int, label: int | None, modules: Sequence[str] = ()
) -> Snippet:
    """Our loop, three lines.

    Args:
        target: what the reader's target is called; None: the manifest names it.
        modules: of other packages, which the manifest names and a folder never imports by itself.
    """
    shown = "" if target is None else f", target={json.dumps(target)}"
    more = "".join(f', "{PICTURE}"' for _ in range(pictures)) + ("" if label is None else f", label={label}")
    imports = "".join(f"import {module}  # code of its own package: install that first\n" for module in modules)
    code = (
        f"{imports}from draftsmith.eval.published import open_published\n"
        f"speculator = open_published({json.dumps(repo)}{shown})\n"
        f"print(speculator({json.dumps(text)}{more}).output)"
    )
    return Snippet("Decode with the drafter (draftsmith)", code)


def transformers_snippet(repo: str, *, has_processor: bool) -> Snippet:
    """The drafter alone, as any other model. Families whose processors need torchvision get their tokenizer."""
    what = "AutoProcessor" if has_processor else "AutoTokenizer"
    code = (
        f"from transformers import AutoModelForImageTextToText, {what}\n"
        f"drafter = AutoModelForImageTextToText.from_pretrained({json.dumps(repo)})\n"
        f"processor = {what}.from_pretrained({json.dumps(repo)})"
    )
    return Snippet("Load the drafter alone (transformers)", code)


def try_folder(
    folder: Path,
    target: Mapping[str, Path] | None,
    snippets: Sequence[Snippet],
    names: Mapping[str, str],
    *,
    stop: Stop | None = None,
) -> None:
    """Run the code of the card and decode the stored prompt, in another process.

    Args:
        target: as `open_published` takes it.
        names: string literals of the snippets -> the expressions to run in their place.
        stop: whether the run was asked to stop, which ends the process; None: nobody asks.

    Raises:
        Stopped: the run was asked to stop.
        UserError: it does not load, does not run, or says something else than when it was measured.
    """
    code = []
    for snippet in snippets:
        local = snippet.code
        for shown, meant in names.items():
            local = local.replace(json.dumps(shown), meant)
        code.append([snippet.title, local])
    places = None if target is None else {thing: str(place) for thing, place in target.items()}
    job: str | None = json.dumps({"folder": str(folder), "target": places, "snippets": code})
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    command = [sys.executable, "-m", "draftsmith.trainers.publish.fresh"]
    stop, until, said = stop or Stop(), time.monotonic() + 3600 * _MOST_HOURS, None
    stop.check(_TRYING)
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        try:
            while said is None:
                try:
                    said = process.communicate(job, timeout=_LOOK_S)[1]
                except subprocess.TimeoutExpired:
                    job = None  # it has the job
                    stop.check(_TRYING)
                if time.monotonic() > until:
                    raise UserError(
                        f"the published folder was still not tried after {_MOST_HOURS:g} hours", where=str(folder),
                        hint="look for what holds it up: the device may be full",
                    )  # fmt: skip
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        stop.check(_TRYING)  # a launcher signals the child, too
        said = redact(said.strip()) or "no message"
        raise UserError(f"in a fresh process: {said[-3000:]}", where=str(folder),
                        hint="nothing was made public; fix what it names, and publish again")  # fmt: skip


def _try(job: JsonMapping) -> None:
    from ...eval.published import reproduce

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
