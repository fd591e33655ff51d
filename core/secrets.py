"""Keep tokens and keys out of everything that is written: recipes, logs, trackers, error messages."""

from __future__ import annotations

import os
import re
from typing import Any

HIDDEN = "<hidden>"
_SECRET_NAME = re.compile(r"(token|secret|password|passwd|api_?key|credential)s?$", re.IGNORECASE)
_SECRET_ENV = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIALS?)", re.IGNORECASE)
_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{8,}|\b(?:wandb_v1_)?[0-9a-f]{40}\b|\bsk-[A-Za-z0-9_-]{16,}|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
# Names that end like a secret and hold none.
_HARMLESS = {"image_token", "eos_token", "bos_token", "pad_token", "unk_token"}


def redact(text: str) -> str:
    """`text` without values of secret environment variables and without strings shaped like keys."""
    for name, value in os.environ.items():
        if _SECRET_ENV.search(name) and len(value) >= 8:
            text = text.replace(value, HIDDEN)
    return _SHAPES.sub(HIDDEN, text)


def redact_tree(value: Any, name: str = "") -> Any:
    """A nested structure with secret values hidden, by their key's name or their look."""
    if isinstance(value, dict):
        return {k: redact_tree(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact_tree(v, name) for v in value]
    if isinstance(value, str):
        if _SECRET_NAME.search(name) and name not in _HARMLESS:
            return HIDDEN
        return redact(value)
    return value
