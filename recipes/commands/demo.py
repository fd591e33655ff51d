"""`draftsmith demo`: a demo recipe on up to two ranks of this machine; what a real model needs is fetched first."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ...core.errors import UserError, did_you_mean
from ...core.files import FETCHED
from ...core.json_types import JsonObject, text_at, walk
from ...trainers.run.launcher import num_ranks
from ..config.files import recipe_names
from ..config.launch import ANNOUNCED, announcement, run_recipe, say
from ..config.load import load, read_words
from .command import Argument, Command

DEFAULT, MODULE = "lvlm", "draftsmith"
LAUNCHER = "draftsmith.trainers.run.launcher"
_LOW = {"target.dtype": "bfloat16", "engine.precision": "bf16"}


def arguments(words: Sequence[str]) -> list[str]:
    """`[NAME] [key=value ...]` as `recipe=demo/NAME key=value ...`.

    Raises:
        UserError: no demo has this name.
    """
    names = [name.removeprefix("demo/") for name in recipe_names() if name.startswith("demo/")]
    name, settings = DEFAULT, list(words)
    if settings and "=" not in settings[0]:
        name = settings.pop(0).removeprefix("demo/")
    if name not in names:
        raise UserError(f"no demo {name!r}; there are {', '.join(names)}", hint=did_you_mean(name, names))
    return [f"recipe=demo/{name}", *settings]


def environment() -> dict[str, str]:
    """What the ranks see: one thread each, since models this small gain nothing from more (and processors of one kind
    then give equal numbers); no network; modules of the working folder are not imported in place of installed ones.
    """
    fixed = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONSAFEPATH": "1",
             "HF_HUB_DISABLE_TELEMETRY": "1", ANNOUNCED: "1"}  # fmt: skip
    return {**os.environ, **fixed, "WANDB_MODE": os.environ.get("WANDB_MODE", "offline")}


def in_float32(tree: JsonObject, given: Sequence[str]) -> list[str]:
    """Words that hold a recipe's numbers in float32 where this machine has nothing that multiplies bfloat16. Empty: it
    has, or the user said a type.
    """
    said = {word.partition("=")[0] for word in given}
    low = [key for key, kind in _LOW.items() if text_at(tree, *key.split(".")) == kind]
    if not low or said & set(_LOW):
        return []
    import torch

    from ...models.stored import multiplies_bfloat16

    return [] if torch.cuda.is_available() or multiplies_bfloat16() else [f"{key}=auto" for key in low]


def _run(options: argparse.Namespace) -> int:
    given = arguments(options.words)
    words = read_words(given)
    if more := in_float32(words.tree, given):
        say(f"note: this processor has no instructions for bfloat16 and runs in float32: {' '.join(more)} added")
        given = [*given, *more]
        words = read_words(given)
    if words.options.dry_run:
        from unittest.mock import patch  # 60 modules, which no other command needs

        with patch.dict(os.environ, environment() | {"WORLD_SIZE": str(num_ranks())}):
            return run_recipe(given, options.typed)
    if (text := announcement(given)) is None:  # a setting is refused: here, and not by each rank of a launcher
        load(given)
    texts = [value for _, value in walk(words.tree) if isinstance(value, str)]
    for name, parent in FETCHED.items():
        folder = f"{parent}/{name}"
        both = ["--pictures", "all"] if name.startswith("emoji") and given[0].endswith("-full") else []
        # fetch itself tells a folder that was made of fewer pictures.
        is_here = Path(folder).exists() and not (both and name == "emoji-vlm")
        is_read = any(f"{value}/".startswith(f"{folder}/") for value in texts)
        fetch = [sys.executable, "-m", MODULE, "fetch", name, folder, *both]
        if is_read and not is_here and (code := subprocess.run(fetch).returncode):
            return code
    if text is not None:
        say(text)
    # In place of this process: signals and the exit code are the launcher's.
    os.execve(sys.executable, [sys.executable, "-m", LAUNCHER, MODULE, *given], environment())


COMMAND = Command(
    name="demo",
    summary="train small models and measure them on a CPU; most need minutes and no download",
    description="Run a demo recipe from data to a report, on two processes of this machine, without a GPU.\n"
    "Data are drawn, but for smollm2 and emoji-vlm, whose weights and pictures are fetched. Start it\n"
    "again to continue where it stopped. Words after the name are settings of the recipe.\n"
    "draftsmith recipes demo lists the demos.",
    examples=(
        ("draftsmith demo", "a draft VLM for a tiny LLaVA"),
        ("draftsmith demo compare", "twelve drafters of one target in one table"),
        ("draftsmith demo visual-ar seed=1 output=runs/seed1", "an image generator, with another seed"),
        ("draftsmith demo emoji-vlm", "drafters of a real picture model, which is fetched first"),
        ("draftsmith demo lvlm dry_run=true", "what it would do"),
    ),
    arguments=(
        Argument("words", "name of a demo (lvlm), then settings of its recipe; dry_run=true: only say what it would do",
                 {"nargs": "*", "metavar": "NAME|key=value"}),
    ),
    run=_run,
)  # fmt: skip
