"""Keep tokens and keys out of everything that is written: recipes, logs, trackers, error messages."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import warnings
from collections.abc import Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from .secret_rules import ENVIRONMENT, NAME, hits

HIDDEN = "<hidden>"
_SECRET_NAME = re.compile(NAME + "$", re.IGNORECASE)
# A secret's name inside a value: `{api_key: abc}`, and not `{max_new_tokens: 40}`.
_INNER_NAME = re.compile(rf"(?!tokens?\s*:\s*[\d.]+\s*[,}}]){NAME}['\"]?\s*:", re.IGNORECASE)
# Names that end like a secret and hold none.
_HARMLESS = {"image_token", "eos_token", "bos_token", "pad_token", "unk_token"}
_COUNTED = re.compile(r"\d\s+tokens?$", re.IGNORECASE)  # a method that is called `DFlash, 5 tokens`
_COMMIT_NAMES, _COMMIT = {"commit", "revision"}, re.compile(r"[0-9a-f]{40}")


def redact(text: str, values: Sequence[str] | None = None) -> str:
    """`text` without values of secret environment variables and without what looks like a secret. `values` are those of
    `secret_values`, where many texts share one look at the environment.
    """
    for value in secret_values() if values is None else values:
        text = text.replace(value, HIDDEN)
    pieces, at = [], 0
    for hit in sorted(hits(text), key=lambda hit: (hit.start, -hit.stop)):
        if hit.start >= at:
            pieces += [text[at : hit.start], HIDDEN]
        at = max(at, hit.stop)
    return "".join([*pieces, text[at:]])


def shortened(text: str, length: int) -> str:
    """The beginning of `text`, redacted before it is cut: half a key no longer looks like one."""
    return redact(text)[:length]


def secret_in(text: str) -> str | None:
    """The name of the rule by which `text` holds a secret, or None."""
    if any(value in text for value in secret_values()):
        return "value of a secret environment variable"
    return next((hit.rule for hit in hits(text)), None)


def secret_values() -> list[str]:
    """Values of environment variables that are named like secrets, without short ones, which would match everywhere;
    also as JSON, Python, URLs and HTML write them, and line by line.
    """
    values: set[str] = set()
    for name, value in os.environ.items():
        if len(value) >= 8 and ENVIRONMENT.match(name):
            values |= {value, json.dumps(value)[1:-1], repr(value)[1:-1], quote(value, safe=""), escape(value)}
            values |= {line for line in value.splitlines() if len(line) >= 16}
    return sorted(values, key=lambda value: (-len(value), value))  # one may begin like another


def redact_output() -> None:
    """From here on in this process, messages of libraries (`logging`, `warnings`) are redacted as ours are."""
    logging.setLogRecordFactory(_record)
    warnings.formatwarning = _warning


def _record(*arguments: Any, **names: Any) -> logging.LogRecord:
    record = logging.LogRecord(*arguments, **names)
    with contextlib.suppress(TypeError, ValueError):  # a library's own mistake in its arguments: logging reports it
        record.msg, record.args = redact(record.getMessage()), ()
    return record


_format_warning = warnings.formatwarning


def _warning(*arguments: Any, **names: Any) -> str:
    return redact(_format_warning(*arguments, **names))


def redact_argument(argument: str) -> str:
    """`key=value` of a command line; the whole value is hidden where it, or a key inside it, is a secret's."""
    key, sign, value = argument.partition("=")
    hides = _INNER_NAME.search(value) or _is_secret(key.split(".")[-1], value)
    return f"{redact(key)}={HIDDEN}" if sign and hides else f"{redact(key)}{sign}{_redact_named(key, value)}"


def redact_tree(value: Any, name: str = "") -> Any:
    """A nested structure with secret values hidden. Secrets are recognised by the name of their key or by their
    format.
    """
    return _redact_tree(value, name, secret_values())


def _redact_tree(value: Any, name: str, values: Sequence[str]) -> Any:
    if isinstance(value, dict):
        inherits = _is_secret(name, "")
        return {
            redact(k, values) if isinstance(k, str) else k: _redact_tree(v, name if inherits else str(k), values)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redact_tree(v, name, values) for v in value]
    if value is None or isinstance(value, bool):
        return value
    if _is_secret(name, str(value)):
        return HIDDEN
    return _redact_named(name, value, values) if isinstance(value, str) else value


def _is_secret(name: str, value: str) -> bool:
    """Whether a value under this name is hidden. A number is not: `max_new_tokens: 40`."""
    if name in _HARMLESS or _COUNTED.search(name) or not _SECRET_NAME.search(name):
        return False
    is_count = value.replace(".", "", 1).isdigit() and name.lower().endswith(("token", "tokens"))
    return not is_count


def _redact_named(name: str, value: str, values: Sequence[str] | None = None) -> str:
    if name.split(".")[-1] in _COMMIT_NAMES and _COMMIT.fullmatch(value):
        return value
    return redact(value, values)
