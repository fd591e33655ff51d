"""What `draftsmith doctor` looks at: the environment and the machine, independent of any recipe."""

from __future__ import annotations

import os
import platform
import re
import shutil
import tomllib
import urllib.error
import urllib.request
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
from ...core.errors import UserError, first_line
from ...core.tracking import wandb_login
from .finding import Finding, fault, ok, tried, warning

ROOT = Path(__file__).resolve().parents[2]  # the checkout, or the installed package
GIB = 2**30


def look(output: Path, num_ranks: int | None, *, online: bool) -> Iterator[Finding]:
    """All of it.

    Args:
        output: folder that runs are written to.
        num_ranks: of a run on this node; None: one for each GPU, or one.
        online: also whether the Hub and wandb answer.
    """
    version = platform.python_version()
    if (3, 11) <= tuple(map(int, platform.python_version_tuple()[:2])) < (3, 13):
        yield ok("Python", f"{version}; draftsmith from {ROOT}")
    else:
        yield fault("Python", version, "draftsmith needs 3.11 or 3.12: make an environment with one of them")
    yield from packages({r.name: version_of(r.name) for r in requirements()})
    yield from devices()
    yield deepspeed()
    yield room("disk of runs", output, "choose another output=", wanted=20)
    yield room("disk of models", Path(constants.HF_HUB_CACHE), "set HF_HOME to a larger disk", wanted=20)
    if (shared := Path("/dev/shm")).is_dir():  # of loader workers
        yield room("shared memory", shared, "num_workers: 0, or a container with --shm-size", wanted=1)
    free = psutil.virtual_memory().available / GIB
    hint = "end other programs; smaller micro_batch_size; draftsmith check NAME says what a recipe needs"
    yield warning("memory", f"{free:.1f} GiB free", hint) if free < 4 else ok("memory", f"{free:.1f} GiB free")
    yield threads(num_ranks or torch.cuda.device_count() or 1)
    yield from logins()
    if online:
        yield from network()


def requirements() -> list[Requirement]:
    """What the project itself asks for, without extras."""
    pyproject = ROOT / "pyproject.toml"
    if pyproject.is_file():
        lines = tomllib.loads(pyproject.read_text())["project"]["dependencies"]
    else:
        lines = [line for line in metadata.requires("draftsmith") or () if "extra ==" not in line]
    return [Requirement(line) for line in lines]


def reinstall() -> str:
    """The command that installs what is missing: of a checkout, or of an installed wheel, which brings its pins."""
    if (ROOT / "pyproject.toml").is_file():
        return "pip install -c constraints.txt -e .  (or scripts/demo, which makes an environment)"
    return " ".join(["pip install -c", str(ROOT / "constraints.txt"), *(f"'{wanted}'" for wanted in requirements())])


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
    """Versions of what is imported directly, against what is required and what was tested together.

    Args:
        installed: name -> version; None: not installed.
    """
    wanted, tested, same = requirements(), pins(), []
    for requirement in wanted:
        name, version = requirement.name, installed.get(requirement.name)
        pin = tested.get(canonicalize_name(name))
        if version is None:
            yield fault(name, f"not installed; {requirement} is required", reinstall())
        elif not requirement.specifier.contains(version, prereleases=True):
            yield fault(name, f"{version}; {requirement} is required", f"pip install '{requirement}'")
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
        yield warning(f"GPU {index}", text, cure) if free < 0.5 * total else ok(f"GPU {index}", text)
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


def deepspeed() -> Finding:
    """DeepSpeed's version; fault where it cannot be imported."""
    from ...trainers.train.engine import import_deepspeed

    try:
        return ok("DeepSpeed", import_deepspeed().__version__)
    except Exception as error:  # any error of the import is a finding
        return fault("DeepSpeed", f"cannot be imported: {first_line(error)}", reinstall())


def room(subject: str, folder: Path, cure: str, *, wanted: float, least: float = 0) -> Finding:
    """Whether a folder, or the nearest one above it that is there, can be written, and the GiB that are free."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free / GIB
    text = f"{free:,.1f} GiB are free under {there.resolve()}"
    if not os.access(there, os.W_OK):
        return fault(subject, f"{there} cannot be written", f"fix its permissions, or {cure}")
    if free < least:
        return fault(subject, text, f"make room, or {cure}")
    return warning(subject, f"{text}, less than {wanted}", cure) if free < wanted else ok(subject, text)


def threads(num_ranks: int) -> Finding:
    """Ranks of this node times threads against its cores: two spinning pools on two cores run a hundred times slower
    (measured).
    """
    cores, value = num_cores(), os.environ.get("OMP_NUM_THREADS")
    best = max(1, cores // num_ranks)
    if value is None and num_ranks > cores:
        return fault("threads", f"{num_ranks} ranks on {cores} cores", f"start at most {cores} ranks on this node")
    if value is None:
        return ok("threads", f"{cores} cores, {num_ranks} rank(s): each will take {best} (OMP_NUM_THREADS is not set)")
    if not value.isdigit() or int(value) < 1:
        return fault("threads", f"OMP_NUM_THREADS={value} is no number of threads", f"export OMP_NUM_THREADS={best}")
    text = f"{num_ranks} rank(s) of {value} thread(s) on {cores} cores"
    if num_ranks * int(value) > cores:
        return fault("threads", text, f"export OMP_NUM_THREADS={best}, or start fewer ranks")
    return ok("threads", text)


def num_cores() -> int:
    """Cores that this process may use: affinity, and the quota of a container."""
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file() and (match := re.match(r"(\d+) (\d+)", quota.read_text(encoding="utf-8"))):
        return min(ranks.num_cores(), max(1, int(match[1]) // int(match[2])))
    return ranks.num_cores()


def logins() -> Iterator[Finding]:
    """Whether Hub and wandb know this user, without asking them."""
    if constants.HF_HUB_OFFLINE:
        yield ok("Hub login", "HF_HUB_OFFLINE is set: only what is in the cache")
    elif huggingface_hub.get_token():
        yield ok("Hub login", "a token is set")
    else:
        yield warning("Hub login", "no token: gated models cannot be read, and nothing can be published",
                      "hf auth login, or HF_TOKEN; public models need none")  # fmt: skip
    offline = "no key: runs that name a wandb project are kept offline (wandb login; wandb sync)"
    yield ok("wandb login", wandb_login() or offline)


def network(timeout_s: float = 10.0) -> Iterator[Finding]:
    """Whether the Hub and wandb answer. Any HTTP status is an answer."""

    def answers(address: str) -> str:
        if not address.startswith(("http://", "https://")):
            raise UserError(f"{address} is no http address")
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=timeout_s).close()
        except urllib.error.HTTPError:
            pass
        except (OSError, ValueError) as error:
            raise UserError(f"{address} does not answer: {first_line(error)}") from error
        return f"{address} answers"

    hub = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    hint = "proxy (HTTPS_PROXY), HF_ENDPOINT for a mirror, or HF_HUB_OFFLINE=1 with models fetched elsewhere"
    yield tried("HF_ENDPOINT", lambda: answers(hub), hint)
    wandb = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    yield tried("wandb", lambda: answers(wandb), "proxy (HTTPS_PROXY), or tracking.wandb.mode=offline")
