"""Names of repositories: engines guess a draft's method from its path, so a name can make them load it as another.

vLLM looks for substrings of the whole path in lower case, `eagle-` (EAGLE-1) before `eagle3`, then `dflash` and
`dspark`. Published heads are named `EAGLE-<target>`, `EAGLE3-<target>` or `<target>-Eagle3`.
"""

from __future__ import annotations

import re

from ...core.errors import UserError

# In the order in which they are looked for.
MATCHED = ("eagle-", "eagle3", "dflash", "dspark")
# Of heads of language models: what their paths must be taken for. All others must be taken for nothing.
_METHODS = {"eagle": "eagle-", "eagle3": "eagle3"}
_REPO = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def taken_for(repo: str) -> str | None:
    """The method's mark that an engine finds first in a path."""
    return next((mark for mark in MATCHED if mark in repo.lower()), None)


def suggested(method: str, target: str | None) -> str:
    """A name that is in use for such drafters, without its namespace."""
    model = (target or "my-target").rstrip("/").split("/")[-1].removesuffix("-hf")
    name = {"eagle": f"EAGLE-{model}", "eagle3": f"EAGLE3-{model}"}.get(method, f"{model}-{word(method)}-draft")
    return f"{model}-draft" if method not in _METHODS and method != word(method) and taken_for(name) else name


def word(method: str) -> str:
    """A kind as one word, for names and tags: of a class of another package its name (`Hydra` of HydraConfig)."""
    own = method.rpartition(":")[2].rpartition(".")[2]
    return own.removesuffix("Config").lower() or own.lower() if ":" in method else method


def is_repo(repo: str) -> bool:
    """Whether the Hub takes it for a repository: NAMESPACE/NAME, whose parts do not begin or end with . or -."""
    if not _REPO.fullmatch(repo) or "--" in repo or ".." in repo or repo.endswith(".git"):
        return False
    return all(len(part) <= 96 and part.strip(".-") == part for part in repo.split("/"))


def check_name(repo: str, method: str, target: str | None, *, is_language: bool) -> None:
    """Raises `UserError` for a path that the Hub does not take, or that engines take for another method's.

    Args:
        is_language: the target is a language model; no engine drafts for image generators by these names.
    """
    key, hint = "repo", f"a name in use is NAMESPACE/{suggested(method, target)}"
    if not is_repo(repo):
        raise UserError(f"repo: {repo!r} is no NAMESPACE/NAME of the Hub", key=key, hint=hint)
    named, wanted = taken_for(repo), _METHODS.get(method)
    if not is_language and named in (None, wanted):
        return
    if named != wanted:
        said = f"holds {named!r}" if named else f"does not hold {wanted!r}"
        as_what = f"take it for {named.rstrip('-').upper()}" if named else "do not know it for what it is"
        raise UserError(
            f"repo: {repo!r} {said}: engines that go by the path {as_what}, and this is {method}", key=key,
            hint=hint + (" (the namespace counts, too)" if named and named in repo.split("/")[0].lower() + "/" else ""),
        )  # fmt: skip
