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

from .json_types import Json
from .markdown import plain

HIDDEN = "<hidden>"
_LEAST = 8  # letters of a value: shorter ones would match everywhere
# Names that hide their values: at the end of a key, or before a value inside a text.
_LONG_NAME = (
    r"(?:secret|passw(?:or)?d|passphrase|credential"
    r"|(?:api|access|private|secret|account|signing|encryption|auth|subscription)[_-]?key(?:[_-]?id)?)s?"
)
_NAME = (
    rf"(?:tokens?|{_LONG_NAME}|authorization|cookies?|bearer(?:[_-]?key)?"
    r"|(?:(?<=[_-])|\b)(?:pass|pwd|pat|auth|sig|signature))"
)
_SECRET_NAME = re.compile(_NAME + "$", re.IGNORECASE)
# The same of environment variables. A folder (PWD), a tokenizer and the place of a file are no secrets.
ENVIRONMENT = re.compile(
    rf"^(?!.*_(?:PATH|FILE|DIR|TYPE)$)(?:.*(?:TOKEN(?!IZ)|BEARER|WEBHOOK|{_LONG_NAME})|.*_(?:PASS|PWD|PAT|AUTH|SIG|KEY|DSN)$|PASS$)",
    re.IGNORECASE,
)
_SHAPES = (
    r"hf_(?:[A-Za-z]{30,}|(?=[A-Za-z]*\d)[A-Za-z0-9]{8,})",  # Hugging Face
    r"gh[a-z]_[A-Za-z0-9]{16,}|github_pat_\w{16,}",
    r"glpat-[\w-]{16,}",  # GitLab
    r"(?:AKIA|ASIA)[A-Z0-9]{12,}",  # AWS
    r"AIza[\w-]{20,}",  # Google
    r"xox[a-z]-[\w-]{8,}",  # Slack
    r"https://(?:hooks\.slack(?:-gov)?\.com|(?:\w+\.)?discord(?:app)?\.com/api/webhooks)/[\w/-]{8,}",  # webhooks
    r"nvapi-[\w-]{16,}",  # NVIDIA
    r"sk-[\w-]{16,}",  # OpenAI and others
    r"wandb_v\d+_\w{16,}",
    r"eyJ[\w-]{8,}\.eyJ[\w-]{4,}(?:\.[\w-]*)?",  # JSON web tokens
)
# Rule -> its pattern. The first group stays, and what follows it is hidden.
_RULES = {
    "format of a token": re.compile(rf"((?<![A-Za-z0-9]))(?:{'|'.join(_SHAPES)})[\w-]*"),
    "password of an address": re.compile(rf"(://)(?!{HIDDEN})[^/\s]+(?=@)"),
    # As YAML, JSON, Python, a shell, a header and a URL's parameters write it. A value has a digit, since prose has
    # colons too, and is neither a number (`max_new_tokens=40`, a mean of `visual_tokens` of 16 places) nor a call.
    "value of a secret's name": re.compile(
        rf"((?:(?<!\S)--[\w-]{{0,40}}{_NAME}[ =]|{_NAME}['\"]?\s*[=:]\s*(?:b?['\"])?|\b(?=(?:bearer|basic)\s+\S{{16}}))"
        r"(?:(?:bearer|basic|token)\s+)?)"
        rf"(?!{HIDDEN}|\$|-?\d+\.\d+(?:e[+-]?\d+)?(?![\w.]))(?=[a-z+/~_.-]|\S{{16}})(?=[^\s'\",;&()}}\]<>\[]*\d)[^\s'\",;&()}}\]<>\[]{{6,}}+(?!\()",
        re.IGNORECASE,
    ),
}
_VARIABLE = re.compile(r"\$\{oc\.env:\w+\}")  # which a secret's name does not hide: it is no default
# A secret's name inside a value: `{api_key: abc}`, and not `{max_new_tokens: 40}`.
_INNER_NAME = re.compile(rf"(?!tokens?\s*:\s*[\d.]+\s*[,}}]){_NAME}['\"]?\s*:", re.IGNORECASE)
# Names that end like a secret and hold none.
_HARMLESS = {"image_token", "eos_token", "bos_token", "pad_token", "unk_token"}
_IN_WORDS = re.compile(r"(\d|first|last)\s+tokens?$", re.IGNORECASE)  # a method that is called `DFlash, 5 tokens`


def redact(text: str, values: Sequence[str] | None = None) -> str:
    """`text` without values of secret environment variables and without what looks like a secret. `values` are those of
    `secret_values`, where many texts share one look at the environment.
    """
    for value in secret_values() if values is None else values:
        text = text.replace(value, HIDDEN)
    for rule in _RULES.values():
        text = rule.sub(rf"\1{HIDDEN}", text)
    return text


def redact_markdown(page: str) -> str:
    """A page of Markdown, redacted; what stands for a secret shows as it is, and not as a tag."""
    return re.sub(rf"(?<!\\){HIDDEN}", rf"\\{HIDDEN}", redact(page))


def shortened(text: str, length: int) -> str:
    """The beginning of `text`, redacted before it is cut: half a key no longer looks like one."""
    return redact(text)[:length]


def secret_in(text: str) -> str | None:
    """The name of the rule by which `text` holds a secret, or None."""
    if any(value in text for value in secret_values()):
        return "value of a secret environment variable"
    return next((name for name, rule in _RULES.items() if rule.search(text)), None)


def secret_values() -> list[str]:
    """Values of environment variables that are named like secrets, without short ones, which would match everywhere;
    also as JSON, Python, URLs and HTML write them, and line by line.
    """
    values: set[str] = set()
    for name, value in os.environ.items():
        if len(value) >= _LEAST and ENVIRONMENT.match(name):
            values |= {value, json.dumps(value)[1:-1], repr(value)[1:-1]}
            values |= {quote(value, safe=""), escape(value), plain(value)}
            values |= {line for line in value.splitlines() if len(line) >= 16}
    return sorted(values, key=lambda value: (-len(value), value))  # one may begin like another


def redact_output() -> None:
    """From here on in this process, messages of libraries (`logging`, `warnings`) are redacted as ours are."""
    format_warning = warnings.formatwarning

    def record(*arguments: Any, **names: Any) -> logging.LogRecord:
        made = logging.LogRecord(*arguments, **names)
        with contextlib.suppress(TypeError, ValueError):  # a library's own mistake in its arguments: logging reports it
            made.msg, made.args = redact(made.getMessage()), ()
        return made

    logging.setLogRecordFactory(record)
    warnings.formatwarning = lambda *arguments, **names: redact(format_warning(*arguments, **names))


def redact_argument(argument: str) -> str:
    """`key=value` of a command line; the whole value is hidden where it, or a key inside it, is a secret's."""
    key, sign, value = argument.partition("=")
    hides = _INNER_NAME.search(value) or _is_secret(key.split(".")[-1], value)
    return f"{redact(key)}={HIDDEN}" if sign and hides else f"{redact(key)}{sign}{redact(value)}"


def redact_tree(value: object, name: str = "", values: Sequence[str] | None = None) -> Json:
    """A nested structure without secrets, which are recognised by the name of their key or by their format. `values`
    as in `redact`.
    """
    values = secret_values() if values is None else values
    match value:
        case dict():
            inherits = _is_secret(name, "")
            return {
                redact(k, values) if isinstance(k, str) else k: redact_tree(v, name if inherits else str(k), values)
                for k, v in value.items()
            }
        case list() | tuple():
            return [redact_tree(v, name, values) for v in value]
        case None | bool():
            return value
        case str() if _VARIABLE.fullmatch(value):
            return value
    if _is_secret(name, str(value)):
        return HIDDEN
    return redact(value, values) if isinstance(value, str) else value


def _is_secret(name: str, value: str) -> bool:
    """Whether a value under this name is hidden. A number is not: `max_new_tokens: 40`."""
    if name in _HARMLESS or _IN_WORDS.search(name) or not _SECRET_NAME.search(name):
        return False
    is_count = value.replace(".", "", 1).isdigit() and name.lower().endswith(("token", "tokens"))
    return not is_count
