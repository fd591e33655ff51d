"""Patterns of secrets: formats of tokens and keys, addresses with passwords, and values after a secret's name.

`secret_rules.toml` holds a kept list of providers' formats. The formats here are shorter, so that a key that lost its
end is found as well. Logs are read by these rules line by line, so each rule waits for a keyword.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources

# Names that hide their values: at the end of a key, or before a value inside a text.
_WORDS = ("secret", "passw(?:or)?d", "passphrase", "credential")
_KEYS = ("api", "access", "private", "secret", "account", "signing", "encryption", "auth", "subscription")
_TOKENS = ("access", "auth", "refresh", "session", "security", "bearer", "api", "hub", "private", "deploy")
_LONG_NAME = rf"(?:{'|'.join(_WORDS)}|(?:{'|'.join(_KEYS)})[_-]?key(?:[_-]?id)?)s?"
NAME = rf"(?:tokens?|{_LONG_NAME}|authorization|cookies?|(?:(?<=[_-])|\b)(?:pass|pwd|pat|auth|sig|signature))"
# The same of environment variables. A folder (PWD), a tokenizer and the place of a file are no secrets.
ENVIRONMENT = re.compile(
    rf"^(?!.*_(?:PATH|FILE|DIR|TYPE)$)(?:.*(?:TOKEN(?!IZ)|{_LONG_NAME})|.*_(?:PASS|PWD|PAT|AUTH|SIG|KEY|DSN)$|PASS$)",
    re.IGNORECASE,
)

_FORMATS: dict[str, tuple[tuple[str, ...], str]] = {  # name -> keywords in small letters, pattern
    "hugging face": (("hf_",), r"hf_(?:[A-Za-z]{30,}|(?=[A-Za-z]*\d)[A-Za-z0-9]{8,})"),
    "github": (("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"gh[a-z]_[A-Za-z0-9]{16,}"),
    "github, fine-grained": (("github_pat_",), r"github_pat_\w{16,}"),
    "gitlab": (("gl",), r"gl(?:pat|dt|rt|ptt|ft|soat|cbt|imt|agent|ffct|oas)-[\w-]{16,}"),
    "aws": (("akia", "asia", "abia", "acca"), r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}"),
    "google": (("aiza",), r"AIza[\w-]{20,}"),
    "slack": (("xox",), r"xox[a-z][.-][\w-]{8,}"),
    "nvidia": (("nvapi-",), r"nvapi-[\w-]{16,}"),
    "json web token": (("eyj",), r"eyJ[\w-]{8,}\.eyJ[\w-]{4,}(?:\.[\w-]*)?"),
    "openai and others": (("sk-",), r"sk-[\w-]{16,}"),
    "wandb": (("wandb_v",), r"wandb_v\d+_\w{16,}"),
}
# An old wandb key, or a commit: that stands in an address or a cache of a repository, or after its name.
_HEX = re.compile(r"[0-9a-f](?<![A-Za-z0-9].)[0-9a-f]{39}(?![A-Za-z0-9])")
_BEFORE_COMMIT = re.compile(
    r"(?:https?://[^\s/@]+/(?:(?:datasets|spaces)/)?[\w.-]+/[\w.-]+/(?:-/)?(?:commit|tree|blob|resolve|raw)/"
    r"|(?:models|datasets|spaces)--[\w.-]+/snapshots/|\b(?:commit|revision)(?:_hash)?['\"]?\s*[:=]?\s*['\"]?)$"
)
_ADDRESS = re.compile(
    r"://(?P<key>(?!<hidden>)[^/\s]+(?=@)"  # user and password
    r"|[^/\s:@'\"\[{<]+:(?!\d+/)[^\s@'\"<>]+(?=@)"  # a password with a slash, as AWS makes them
    r"|[^/\s:@'\"\[{<]+:(?=[^\s/]{3})(?!\d+(?![\w@]))[^\s/{<'\"]+)"  # the same without the end of the address
)
# Query parameters of a URL (signed storage URLs included) and values of headers, after `?token=` and `Bearer`.
_PARAMETER = re.compile(rf"[?&;](?i:[\w.%-]*{NAME}=)(?P<key>(?!<hidden>)[^&\s'\"#,;)}}\]]{{4,}})")
_HEADER = re.compile(
    r"\b(?:sig=(?=[\w%+/-]{16})|(?:bearer|basic)\s+(?=\S{16})|bearer\s+(?=\S{8})(?=\S*\d))"
    r"(?P<key>(?!<hidden>)[^&\s'\"#,;)}\]]{4,})",
    re.IGNORECASE,
)
# Headers by their names, whatever stands in them. A scheme may stay, a shell's variable is no value.
_NO_VALUE = r"(?!<hidden>|\$|null\b|none\b|true\b|false\b)"
_HEADERS = re.compile(
    r"authorization['\"]?\s*[:=]\s*b?['\"]?(?:(?:bearer|basic|token|key|api-?key)\s+(?P<a>VALUE)"
    r"|(?:digest|negotiate|ntlm|oauth|hawk|aws4-[\w-]+)\s+(?P<b>LINE)|(?P<c>(?=\S*\d|\S{16})VALUE))"
    r"|\b(?:x-[\w-]{0,40}(?:key|token|auth|secret|signature)|ocp-apim-subscription-key)['\"]?\s*:\s*b?['\"]?(?P<d>VALUE)"
    r"|\bcookie['\"]?\s*:\s*b?['\"]?(?=[^\s=]+=)(?P<e>LINE)"
    r"|proxy['\"]?\s*[:=]\s*b?['\"]?(?P<f>NO[^\s/:@'\"]+:(?!//)[^\s@'\"]+)(?=@)".replace("NO", _NO_VALUE)
    .replace("VALUE", _NO_VALUE + r"[^\s'\",;)}\]]{3,}")
    .replace("LINE", _NO_VALUE + r"[^\r\n]{4,}"),
    re.IGNORECASE,
)
# Options of commands: --token X, and a name with a password after -u (curl).
_OPTION = re.compile(
    rf"(?<!\S)(?:--(?!(?:eos|bos|pad|unk|image|mask|stop)\b)(?:[\w-]{1, 40}-)?(?:token|auth|{_LONG_NAME})[ =]['\"]?"
    rf"|(?:-u|--user|--proxy-user)[ =]['\"]?[^\s:'\"/]+:)(?P<key>(?!\d+\b|-|<){_NO_VALUE}[^\s'\"]{{4,}})",
    re.IGNORECASE,
)
# A secret's name and its value in a text: as YAML, JSON, Python and a shell write it. After a colon and a space a
# value has a digit, since prose has colons too; a token has one everywhere, since `eos_token` has none.
_STEMS = re.compile("|".join(("secret", "passw", "passphrase", "credential", "key", "token", "_pass", "_pwd", "_pat")))
_BEFORE_KEY, _BEFORE_TOKEN = ("|".join(f"(?<={word})|(?<={word}[_-])" for word in words) for words in (_KEYS, _TOKENS))
_NAMED = re.compile(
    rf"(?:(?:{'|'.join(_WORDS)}|(?:{_BEFORE_KEY})key(?:[_-]?id)?)s?['\"]?\s*"
    r"(?:=\s*|:(?=\S)|:\s*(?=b?['\"])|:\s+(?=\S*\d))"
    # A name in one word is no prose, and its value needs no digit.
    rf"|(?:{_BEFORE_KEY})key['\"]?:\s+(?=[\w+/-]{{12}})|(?:{_BEFORE_TOKEN})tokens?['\"]?\s*[=:]\s*(?=b?['\"]?[\w+/-]{{8}})"
    r"|(?<![\w-])token=(?=[\w-]{16}|(?=[\w-]*\d)(?=[\w-]*[a-z])[\w-]{8})"
    r"|(?-i:(?<=[A-Z0-9])_(?:PASS|PWD|PAT)|(?<=[A-Z0-9]_)KEY)['\"]?(?:[=:]|:\s+)(?=\S)"
    r"|tokens?['\"]?\s*[=:]\s*(?=b?['\"]?[\w~+/-]*\d)(?=b?['\"]?[\w~+/=-]{12}))"
    r"b?['\"]?(?P<key>(?!<hidden>|\$\{{oc\.env:\w+\}}|null\b|none\b|true\b|false\b)[^\s'\",;&)}\]<>]{4,})",
    re.IGNORECASE,
)
_WORD_END = re.compile(r"[\w-]*")


@dataclass(frozen=True)
class Hit:
    """Where a text holds a secret (`text[start:stop]`), and by which rule."""

    start: int
    stop: int
    rule: str


def hits(text: str) -> Iterator[Hit]:
    """Every place of `text` that looks like a secret. Places may overlap."""
    lower = text.lower()
    for keyword, rules in _by_keyword().items():
        if keyword in lower:
            for rule in rules:
                for match in _compiled(rule).finditer(text):
                    start, stop = match.span("key" if "key" in match.re.groupindex else 0)
                    yield Hit(start, _WORD_END.match(text, stop).end(), rule)  # type: ignore[union-attr]
    for match in _HEX.finditer(text):
        if not is_commit(text, match.start()):
            yield Hit(*match.span(), "format of an old wandb key")
    for match in _ADDRESS.finditer(text):
        yield Hit(*match.span("key"), "password of an address")
    for match in _PARAMETER.finditer(text):
        yield Hit(*match.span("key"), "parameter of an address")
    if "sig=" in lower or "bearer" in lower or "basic" in lower:
        for match in _HEADER.finditer(text):
            yield Hit(*match.span("key"), "header")
    if any(word in lower for word in ("authorization", "x-", "-key", "cookie", "proxy")):
        for match in _HEADERS.finditer(text):
            yield Hit(*match.span(str(match.lastgroup)), "header")
    if "-" in text:
        for match in _OPTION.finditer(text):
            yield Hit(*match.span("key"), "option of a command")
    yield from _named(text, lower)


def _named(text: str, lower: str) -> Iterator[Hit]:
    if len(lower) != len(text):  # few letters outside of ASCII change their number
        lower = "".join(letter.lower() if letter.isascii() else letter for letter in text)
    for stem in _STEMS.finditer(lower):
        match = _NAMED.match(text, stem.start())
        if match is not None and not (_HEX.fullmatch(match["key"]) and is_commit(text, match.start("key"))):
            yield Hit(*match.span("key"), "value of a secret's name")


def is_commit(text: str, start: int) -> bool:
    """Whether the 40 hexadecimal digits at `start` stand where a commit stands."""
    return _BEFORE_COMMIT.search(text[max(0, start - 200) : start]) is not None


@cache
def _providers() -> dict[str, dict[str, str | list[str]]]:
    return tomllib.loads(resources.files(__package__).joinpath("secret_rules.toml").read_text(encoding="utf-8"))


@cache
def _by_keyword() -> dict[str, list[str]]:
    """Keyword -> names of its rules: of a text without the keyword nothing else is searched."""
    keywords: dict[str, list[str]] = {}
    rules = [(name, words) for name, (words, _) in _FORMATS.items()]
    for name, words in [*rules, *((name, tuple(rule["keywords"])) for name, rule in _providers().items())]:
        for word in words:
            keywords.setdefault(word, []).append(name)
    return keywords


@cache
def _compiled(rule: str) -> re.Pattern[str]:
    if rule in _FORMATS:
        return re.compile(rf"(?<![A-Za-z0-9]){_FORMATS[rule][1]}")
    return re.compile(str(_providers()[rule]["pattern"]))
