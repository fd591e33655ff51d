"""`draftsmith verify-engine`: whether vLLM drafts with an exported folder as our own loop does, chain by chain."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from ...core.errors import FAULTS, OK
from ...core.files import check_new
from ..config.launch import say
from .command import Argument, Command


def _run(options: argparse.Namespace) -> int:
    from ...eval.engines.engine_check import verify_engine
    from ...eval.engines.program import find_python

    python = find_python(options.python)
    with tempfile.TemporaryDirectory(prefix="verify-engine-") as folder:
        place = Path(folder)
        if options.keep is not None:
            check_new(Path(options.keep))
            place = Path(options.keep)
            place.mkdir(parents=True)
        verification = verify_engine(
            Path(options.folder), place, python=python, target=options.target, max_new_tokens=options.tokens,
            without_known_faults=options.without_known_faults, timeout_s=options.timeout,
        )  # fmt: skip
    say(verification.shown())
    return FAULTS if verification.faults else OK


COMMAND = Command(
    name="verify-engine",
    summary="serve an exported folder with vLLM, and compare every drafted chain with draftsmith's own",
    description="Serve a folder of `draftsmith export --to vllm` with the vLLM that is installed, and decode the same\n"
    "requests here: texts, one picture, two pictures, and pictures that are resized. The command compares plain\n"
    "answers, answers with the drafter, and every drafted chain, token by token, and names the likely cause of each\n"
    "difference. vLLM runs in its own Python: --python, or the environment variable DRAFTSMITH_VLLM_PYTHON. Exits\n"
    "with 3 if an answer differs, or more than 2% of the chains of a group.",
    examples=(
        ("draftsmith verify-engine out/EAGLE3-Qwen2.5-VL-7B", "vLLM in this environment"),
        (
            "draftsmith verify-engine out/head --target runs/x/target --python ~/vllm/bin/python",
            "in its own environment",
        ),
    ),
    arguments=(
        Argument("folder", "a folder of draftsmith export --to vllm"),
        Argument("--target", "Hub id or directory of the target (as the drafter's manifest names it)"),
        Argument("--python", "an interpreter with vLLM"),
        Argument("--tokens", "tokens of each answer", {"type": int, "default": 48, "metavar": "N"}),
        Argument(
            "--without-known-faults",
            "patch the engine's known faults in its process, to test the export by itself",
            {"action": "store_true"},
        ),
        Argument(
            "--timeout",
            "after which the engine is taken for hung",
            {"type": float, "default": 3600.0, "metavar": "SECONDS"},
        ),
        Argument("--keep", "keep requests, answers and logs in this new folder", {"metavar": "FOLDER"}),
    ),
    run=_run,
)
