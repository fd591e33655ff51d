"""Make `core/secret_rules.toml` of a gitleaks config: the rules that know a provider's tokens by their format.

    python scripts/secret_rules.py gitleaks.toml VERSION > core/secret_rules.toml

gitleaks writes its patterns for Go's RE2; they are rewritten for Python's `re` here, once. A message may hold a
key anywhere, and `redact` hides the whole word: so nothing is asked of what stands after a key, and an underscore may
stand before one. Thresholds of entropy are dropped, so a made-up key is hidden like a real one.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HEADER = """\
# Formats of providers' tokens and keys. Made by scripts/secret_rules.py; change that, not this file.
#
# Source: gitleaks {version}, config/gitleaks.toml, https://github.com/gitleaks/gitleaks
# MIT License, Copyright (c) 2019 Zachary Rice
#
# Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
# documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
# rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
# persons to whom the Software is furnished to do so, subject to the following conditions:
#
# The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
# Software.
#
# THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
# WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
# COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
# OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
#
# Left out: rules that know a value only by a provider's name before it ({named} of {total}), since they hit commits and
# hashes; rules of one file's syntax (Kubernetes, Terraform, NuGet, curl); and {generic}, which finds by entropy.
# A rule is looked for where one of its keywords occurs. The key is the group of that name, or the whole match.
"""
GENERIC = "generic-api-key"
OTHERS = {
    "curl-auth-header", "curl-auth-user", "hashicorp-tf-password", "kubernetes-secret-yaml", "nuget-config-password",
    "sidekiq-sensitive-url", "pkcs12-file", "sonar-api-token", "sumologic-access-id", "okta-access-token",
}  # fmt: skip
# Halves of a pattern that have no format of their own: 40 hexadecimal digits, and 24 letters after "s.".
NO_FORMAT = {"sourcegraph-access-token": "|[a-fA-F0-9]{40}", "vault-service-token": r"|s\.(?i:[a-z0-9]{24})"}
# Formats whose fixed letters `has_format` does not see.
FORMATS = {"atlassian-api-token", "azure-ad-client-secret", "vault-service-token"}
# A keyword that stands in the key itself, where the list has the provider's name.
KEYWORDS = {"airtable-personnal-access-token": ["pat"]}
# What gitleaks wants after a key.
_QUOTE_OR_END = r"""(?:[\x60'"\s;]|\\[nr]|$)"""
_ENDS = (
    _QUOTE_OR_END, _QUOTE_OR_END[:-1] + r"|\b)", r"(?:[^\w-]|\z)", r"(?:[^a-zA-Z0-9+/]|\z)",
    r"""(?:$|[\\'"\x60\s<),])""", r"\b",
)  # fmt: skip
_NAME_BEFORE = r"[\w.-]{0,50}?"
# What stands between a provider's name and the value.
_SIGN = r"""[\x60'"\s=]{0,5}"""


def main(arguments: list[str]) -> int:
    """Print the file. Returns 0."""
    source, version = arguments
    rules = tomllib.loads(Path(source).read_text())["rules"]
    rules_of_values = [rule for rule in rules if rule["id"] not in OTHERS | {GENERIC}]
    kept = [rule for rule in rules_of_values if rule["id"] in FORMATS or has_format(rule)]
    named = len(rules) - len(kept) - len(OTHERS) - 1
    print(HEADER.format(version=version, named=named, total=len(rules), generic=GENERIC))
    for rule in kept:
        keywords = KEYWORDS.get(rule["id"], rule["keywords"])
        print(f"[{rule['id']}]\nkeywords = {json.dumps(keywords)}\npattern = '''{python(rule)}'''\n")
    return 0


def has_format(rule: Mapping[str, Any]) -> bool:
    """Whether the value itself holds letters that stand in every such key."""
    value = rule["regex"].partition(_SIGN)[2] or rule["regex"]
    bare = re.sub(r"\[(?:\\.|[^\]])*\]|\{[\d,]+\}|\(\?[a-z:-]*|\\.", " ", value)
    return re.search(r"\w\w", bare) is not None


def python(rule: Mapping[str, Any]) -> str:
    """A rule's pattern for Python's `re`."""
    text = rule["regex"].replace(NO_FORMAT.get(rule["id"], "\0"), "").replace(_NAME_BEFORE, "")
    if rule["id"] == "atlassian-api-token":  # its older half has no format
        text = text.partition("|" + r"\b(ATATT3")[1].removeprefix("|") + text.partition(r"\b(ATATT3")[2]
    for end in _ENDS:
        text = text.removesuffix(end)
    text = text.replace(_SIGN + "(", _SIGN + "(?P<key>")
    text = re.sub(r"\?P<(?!key>)\w+>", "?:", text)
    text = text.replace("[[:alnum:]]", "[A-Za-z0-9]").replace(r"\z", r"\Z").replace(_QUOTE_OR_END + "|", "|")
    text = re.sub(r"^(\(\?i\))?\\b", r"\1(?<![A-Za-z0-9])", text)
    while (at := text.rfind("(?i)")) >= 0:  # RE2's flag holds to the end of the group that it stands in
        closes = _group_end(text, at + 4)
        text = f"{text[:at]}(?i:{text[at + 4 : closes]}){text[closes:]}"
    re.compile(text)
    return text


def _group_end(text: str, start: int) -> int:
    """Where the group that `start` stands in closes."""
    depth, at = 0, start
    while at < len(text):
        match text[at]:
            case "\\":
                at += 1
            case "[":
                at = re.compile(r"\[\]?(?:\\.|[^\]])*\]").match(text, at).end() - 1  # type: ignore[union-attr]
            case "(":
                depth += 1
            case ")" if depth == 0:
                return at
            case ")":
                depth -= 1
        at += 1
    return len(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
