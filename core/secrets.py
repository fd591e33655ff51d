"""Keep tokens and keys out of everything that is written: recipes, logs, trackers, error messages."""

from __future__ import annotations

import os
import re
from typing import Any

HIDDEN = "<hidden>"
_NAME = r"(?:token|secret|password|passwd|api_?key|credential)s?"
_SECRET_NAME = re.compile(_NAME + "$", re.IGNORECASE)
_SECRET_ENV = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIALS?)", re.IGNORECASE)
# A secret's name inside a value: `{api_key: abc}`, and not `{max_new_tokens: 40}`.
_INNER_NAME = re.compile(rf"(?!tokens?\s*:\s*[\d.]+\s*[,}}]){_NAME}['\"]?\s*:", re.IGNORECASE)
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{8,}|gh[a-z]_[A-Za-z0-9]{16,}|wandb_v\d+_\w{16,}"
    r"|(?<!/commit/)[0-9a-f]{40}(?![A-Za-z0-9])|sk-[\w-]{16,})"
    r"|(?<=://)[^/\s]+(?=@)"  # user and password of an address
)
# Query parameters of a URL (signed storage URLs included) and values of headers: `?token=abc`, `Bearer abc`.
_ASKED = re.compile(
    r"([?&][\w.%-]*(?:token|secret|password|passwd|api_?key|credential|signature)=|\bbearer\s+(?=\S{16}))"
    r"[^&\s'\"#,;)}\]]{4,}",
    re.IGNORECASE,
)
# Names that end like a secret and hold none.
_HARMLESS = {"image_token", "eos_token", "bos_token", "pad_token", "unk_token"}
# A commit looks like an old wandb key: 40 hexadecimal digits. In an address it stands behind /commit/.
_COMMIT_NAMES, _COMMIT = {"commit", "revision"}, re.compile(r"[0-9a-f]{40}")


def redact(text: str) -> str:
    """`text` without values of secret environment variables and without strings shaped like keys."""
    for value in secret_values():
        text = text.replace(value, HIDDEN)
    return _ASKED.sub(rf"\1{HIDDEN}", _SHAPES.sub(HIDDEN, text))


def secret_values() -> list[str]:
    """Values of environment variables that are named like secrets, without short ones, which would match everywhere."""
    values = [value for name, value in os.environ.items() if _SECRET_ENV.search(name) and len(value) >= 8]
    return sorted(values, key=len, reverse=True)  # one may begin like another


def redact_argument(argument: str) -> str:
    """`key=value` of a command line; the whole value is hidden where it, or a key inside it, is a secret's."""
    key, sign, value = argument.partition("=")
    hides = _INNER_NAME.search(value) or _is_secret(key.split(".")[-1], value)
    return f"{redact(key)}={HIDDEN}" if sign and hides else f"{redact(key)}{sign}{_redact_named(key, value)}"


def redact_tree(value: Any, name: str = "") -> Any:
    """A nested structure with secret values hidden. Secrets are recognised by the name of their key or by their
    format.
    """
    if isinstance(value, dict):
        inherits = _is_secret(name, "")
        return {_redact_key(k): redact_tree(v, name if inherits else str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact_tree(v, name) for v in value]
    if value is None or isinstance(value, bool):
        return value
    if _is_secret(name, str(value)):
        return HIDDEN
    return _redact_named(name, value) if isinstance(value, str) else value


def _is_secret(name: str, value: str) -> bool:
    """Whether a value under this name is hidden. A number is not: `max_new_tokens: 40`."""
    if name in _HARMLESS or not _SECRET_NAME.search(name):
        return False
    is_count = value.replace(".", "", 1).isdigit() and name.lower().endswith(("token", "tokens"))
    return not is_count


def _redact_key(key: Any) -> Any:
    return redact(key) if isinstance(key, str) else key


def _redact_named(name: str, value: str) -> str:
    if name.split(".")[-1] in _COMMIT_NAMES and _COMMIT.fullmatch(value):
        return value
    return redact(value)
