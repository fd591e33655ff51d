"""What `draftsmith doctor` looks at: the environment and the machine, independent of any recipe."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import huggingface_hub
import psutil
import torch
from huggingface_hub import constants
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from ...core import ranks
from ...core.errors import first_line
from ...core.tracking import wandb_login
from .finding import Finding, Level, fault, graded, ok, warning

ROOT = Path(__file__).resolve().parents[2]  # the checkout, or the installed package
GIB = 2**30


def look(output: Path, num_ranks: int | None) -> Iterator[Finding]:
    """All of it. `num_ranks`: of a run on this node; None: one for each GPU, or one."""
    hint = "draftsmith needs 3.11 or 3.12: make an environment with one of them"
    is_tested = (3, 11) <= sys.version_info[:2] < (3, 13)
    yield graded(is_tested, "Python", f"{platform.python_version()}; draftsmith from {ROOT}", hint, level="fault")
    yield from packages({r.name: version_of(r.name) for r in requirements()})
    yield from devices()
    try:
        from ...trainers.train.engine import import_deepspeed

        yield ok("DeepSpeed", import_deepspeed().__version__)
    except Exception as error:  # any error of the import is a finding
        yield fault("DeepSpeed", f"cannot be imported: {first_line(error)}", _installs("deepspeed"))
    yield room("disk of runs", output, "choose another output=", wanted=20)
    yield room("disk of models", Path(constants.HF_HUB_CACHE), "set HF_HOME to a larger disk", wanted=20)
    if (shared := Path("/dev/shm")).is_dir():  # of loader workers
        yield room("shared memory", shared, "num_workers: 0, or a container with --shm-size", wanted=1)
    free = psutil.virtual_memory().available / GIB
    hint = "end other programs; smaller micro_batch_size; draftsmith check NAME says what a recipe needs"
    yield graded(free >= 4, "memory", f"{free:.1f} GiB free", hint)
    yield threads(num_ranks or torch.cuda.device_count() or 1)
    yield from logins()


def requirements() -> list[Requirement]:
    """What the project itself asks for, without extras."""
    pyproject = ROOT / "pyproject.toml"
    if pyproject.is_file():
        lines = tomllib.loads(pyproject.read_text())["project"]["dependencies"]
    else:
        lines = [line for line in metadata.requires("draftsmith") or () if "extra ==" not in line]
    return [Requirement(line) for line in lines]


def _installs(requirement: object) -> str:
    return f"pip install -c {ROOT / 'constraints.txt'} '{requirement}'"


def pins() -> dict[str, str]:
    """name -> version of `constraints.txt`, which also lies in the wheel."""
    lines = (line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    return {canonicalize_name(name): version for name, sign, version in lines if sign}


def version_of(name: str) -> str | None:
    """The version of an installed package; None: it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def packages(installed: Mapping[str, str | None]) -> Iterator[Finding]:
    """Versions of what is imported directly, against what is required and what was tested together."""
    wanted, tested, same = requirements(), pins(), []
    for requirement in wanted:
        name, version = requirement.name, installed.get(requirement.name)
        pin = tested.get(canonicalize_name(name))
        if version is None:
            yield fault(name, f"not installed; {requirement} is required", _installs(requirement))
        elif not requirement.specifier.contains(version, prereleases=True):
            yield fault(name, f"{version}; {requirement} is required", _installs(requirement))
        elif pin is not None and Version(version).public != pin:
            yield warning(name, f"{version}; tested with {pin}", f"pip install {name}=={pin} where it misbehaves")
        else:
            same.append(f"{name} {version}")
    yield ok("packages", f"{len(same)} of {len(wanted)} as tested: {', '.join(same)}")


def devices() -> Iterator[Finding]:
    """A finding for each GPU, warning if under half of its memory is free; fault for GPUs that torch does not see."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        text = f"{torch.cuda.get_device_properties(index).name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
        cure = "end what uses it, or choose others: CUDA_VISIBLE_DEVICES"
        yield graded(free >= 0.5 * total, f"GPU {index}", text, cure)
    if count:
        return
    if not (Path("/proc/driver/nvidia/version").is_file() or shutil.which("nvidia-smi")):
        yield ok("GPU", f"none: runs on the CPU with torch {torch.__version__}")
    elif torch.version.cuda is None:
        hint = f"pip install torch=={pins()['torch']} from an index that has CUDA builds"
        yield fault("GPU", f"there is one, and torch {torch.__version__} is a CPU build", hint)
    else:
        hint = "nvidia-smi: is the driver as new as the CUDA of torch? is CUDA_VISIBLE_DEVICES empty?"
        yield fault("GPU", f"torch (CUDA {torch.version.cuda}) sees none", hint)


def room(subject: str, folder: Path, cure: str, *, wanted: float, level: Level = "warning") -> Finding:
    """Whether a folder, or the nearest one above it that is there, can be written, and the GiB that are free."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free / GIB
    text = f"{free:,.1f} GiB are free under {there.resolve()}"
    if not os.access(there, os.W_OK):
        return fault(subject, f"{there} cannot be written", f"fix its permissions, or {cure}")
    return graded(free >= wanted, subject, text, f"make room, or {cure}", level=level)


def threads(num_ranks: int) -> Finding:
    """Ranks of this node times threads against its cores: two spinning pools on two cores run a hundred times slower
    (measured).
    """
    cores = ranks.num_cores()
    best = max(1, cores // num_ranks)  # which each takes where the variable is not set
    value = os.environ.get("OMP_NUM_THREADS", str(best))
    text = f"{num_ranks} rank(s) of {value} thread(s) on {cores} cores"
    fits = value.isdigit() and 1 <= int(value) <= cores / num_ranks
    return graded(fits, "threads", text, f"export OMP_NUM_THREADS={best}, or start fewer ranks", level="fault")


def logins() -> Iterator[Finding]:
    """Whether Hub and wandb know this user, without asking them."""
    if constants.HF_HUB_OFFLINE:
        yield ok("Hub login", "HF_HUB_OFFLINE is set: only what is in the cache")
    else:
        cure = "gated models cannot be read, and nothing published: hf auth login, or HF_TOKEN; public models need none"
        has_token = huggingface_hub.get_token() is not None
        yield graded(has_token, "Hub login", "a token is set" if has_token else "no token is set", cure)
    offline = "no key: runs that name a wandb project are kept offline (wandb login; wandb sync)"
    yield ok("wandb login", wandb_login() or offline)
