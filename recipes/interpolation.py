"""`${...}` of recipes: other keys of the same file, and environment variables.

The only door to OmegaConf. What an environment variable gives carries the text that asked for it (`AsWritten`), so that
the run uses the value and every file that it writes has the text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..core.errors import UserError
from ..core.json_types import Json, JsonObject, parts, text_at, walk, with_each
from ..core.secrets import ENVIRONMENT, AsWritten

Fault = OmegaConfBaseException
# More is no recipe, as of YAML's anchors: `a: ${b}${b}`, `b: ${c}${c}` and so on double with every line.
MOST_FOLLOWED, MOST_LETTERS = 10_000, 1 << 20
_ENV = "oc.env"
_OPENING = re.compile(r"(?P<escapes>\\*)\$\{(?P<inner>[^{}$]*)(?P<nests>(?=\$\{))?")
_RESOLVER = re.compile(r"\s*([\w.]+)\s*:")
_KEY = re.compile(r"\s*(\.*[^\s:{}$'\",]*)\s*$")
_KEY_OF = re.compile(r"\s*oc\.(?:select|deprecated|dict\.\w+)\s*:\s*['\"]?(\.*[^\s:{}$'\",]+)")
# What stands for a variable while keys are followed: opening, name, default (after its mark), end. Private characters.
_OPEN, _DEFAULT, _NULL, _CLOSE = "\ue000", "\ue001", "\ue002", "\ue003"
_TOKEN = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")
_PLAIN = re.compile(r"[A-Za-z0-9_./+-]+|\$\{oc\.env:[\w.,/+-]+\}")


def loaded(path: Path, *, is_own: bool) -> JsonObject:
    """A file's tree with every `${...}` followed.

    Args:
        is_own: the user's file. A published one may be a stranger's: it may ask for environment variables that are not
            named like secrets, and for keys.

    Raises:
        UserError: it asks for more than a recipe does, or for what is not there.
    """
    raw = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    return _followed(raw, str(path), is_own)  # type: ignore[no-any-return]


def value_of(text: str, where: str) -> Json:
    """A value of the command line. It has no keys beside it."""
    raw = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    return _followed(raw, where, True)["value"]


def _followed(raw: object, where: str, is_own: bool) -> Json:
    if not any("${" in (text_at(value) or "") for _, value in walk(raw)):
        return raw
    _Cost(raw, where).of(())
    if not is_own:
        with_each(raw, str, lambda text: _refuse_others(text, where))
    OmegaConf.register_resolver(f"draftsmith.{_ENV}", _token, replace=True)
    tokens = OmegaConf.create(with_each(raw, str, _with_tokens))
    try:
        resolved = OmegaConf.to_container(tokens, resolve=True)
    except Fault as error:
        if _OPEN not in str(error):
            raise
        raise UserError("a resolver stands around an environment variable, and would change what it gives",
                        where=where, hint="write ${oc.env:NAME} alone: numbers are read so") from error  # fmt: skip
    return with_each(resolved, str, lambda text: _read(text, where, is_own))


def _asked(text: str) -> list[re.Match[str]]:
    """Each `${...}`: what stands inside, up to its end or to the next opening."""
    return [match for match in _OPENING.finditer(text) if len(match["escapes"]) % 2 == 0]


def _refuse_others(text: str, where: str) -> None:
    for asked in _asked(text):
        named = _RESOLVER.match(asked["inner"])
        if named is not None and named[1] != _ENV:
            raise UserError(f"a published recipe uses the resolver {named[1][:40]!r}", where=where,
                            hint="a recipe of somebody else may use ${oc.env:NAME} and ${key} alone; copy it to a "
                            "folder of your own if you trust it")  # fmt: skip


class _Cost:
    """How much following all of a tree's `${...}` takes: looked at before OmegaConf follows them without a bound."""

    def __init__(self, tree: object, where: str):
        self.tree, self.where = tree, where
        self._known: dict[tuple[str, ...], tuple[int, int]] = {}
        self._open: set[tuple[str, ...]] = set()

    def of(self, place: tuple[str, ...]) -> tuple[int, int]:
        """(interpolations followed, letters) of what stands at a place. Raises `UserError` where it is more than a
        recipe takes, or goes in a circle.
        """
        if place in self._known:
            return self._known[place]
        if place in self._open:
            raise UserError(f"{'.'.join(place)} is interpolated from itself", where=self.where, hint="break the circle")
        self._open.add(place)
        value = _at(self.tree, place)
        text = text_at(value) or ""
        inner = [self.of((*place, str(name))) for name, _ in parts(value)]
        letters = len(text) + len(inner)
        for asked in _asked(text):
            if asked["nests"] is not None and ":" not in asked["inner"]:
                raise UserError("the name inside a ${...} is interpolated itself", where=f"{self.where}, key "
                                f"{'.'.join(place)}", hint="write the name of the key out")  # fmt: skip
            target = self._target(asked["inner"], place)
            inner += [(1, 0)] + ([] if target is None else [self.of(target)])
        followed, letters = sum(part[0] for part in inner), letters + sum(part[1] for part in inner)
        if followed > MOST_FOLLOWED or letters > MOST_LETTERS:
            what = f"{MOST_FOLLOWED:,} interpolations" if followed > MOST_FOLLOWED else f"{MOST_LETTERS:,} letters"
            raise UserError(f"the recipe's ${{...}} become more than {what}", where=self.where,
                            hint="keys that name one another twice (a: ${b}${b}) do this")  # fmt: skip
        self._open.discard(place)
        self._known[place] = (followed, letters)
        return followed, letters

    def _target(self, inner: str, place: tuple[str, ...]) -> tuple[str, ...] | None:
        """Where the key of a `${key}` stands: the value that it ends at, or the interpolation that leads further."""
        match = _KEY_OF.match(inner) or _KEY.match(inner)
        if match is None:
            return None
        name = match[1]
        key = name.lstrip(".")
        steps = [step for step in re.split(r"[.\[\]]+", key) if step]
        up = len(name) - len(key)
        target: tuple[str, ...] = place[: len(place) - up] if up else ()
        for step in steps:
            inside = _at(self.tree, target)
            if text_at(inside) is not None:  # `${a.b}`, where a itself is one
                return target
            target = (*target, step)
            if _at(self.tree, target) is None:
                return None  # there is no such key: OmegaConf says so
        return target


def _at(tree: object, place: tuple[str, ...]) -> Json:
    for step in place:
        if isinstance(tree, dict):
            by_text = {str(key): value for key, value in tree.items()}
            tree = by_text.get(step)
        elif isinstance(tree, list) and step.isdecimal() and int(step) < len(tree):
            tree = tree[int(step)]
        else:
            return None
    return tree


def _with_tokens(text: str) -> str:
    """Replace the resolver of environment variables by ours, which only marks where a variable is asked for."""
    return re.sub(
        r"(\\*)\$\{\s*oc\.env\s*:",
        lambda match: match[0] if len(match[1]) % 2 else f"{match[1]}${{draftsmith.{_ENV}:",
        text,
    )


def _token(*arguments: object) -> str:
    name, *default = arguments
    marked = f"{_DEFAULT}{_NULL if default[0] is None else default[0]}" if default else ""
    return f"{_OPEN}{name}{marked}{_CLOSE}"


def _read(text: str, where: str, is_own: bool) -> Json:
    """The value of a text with tokens; it knows how it was written where that is not how it reads."""
    value, written = text, re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", text)
    is_null = False
    while (token := _TOKEN.search(value)) is not None:
        found = _variable(token[1], where, is_own)
        is_null = found is None and token.span() == (0, len(value))
        value = value[: token.start()] + str(found) + value[token.end() :]
    while _TOKEN.search(written) is not None:
        written = _TOKEN.sub(lambda match: _asking(match[1]), written)
    if is_null:
        return None
    return value if value == written else AsWritten.of(value, written)


def _variable(asked: str, where: str, is_own: bool) -> str | None:
    name, mark, default = asked.partition(_DEFAULT)
    if not is_own and ENVIRONMENT.match(name):
        raise UserError(f"a published recipe asks for {name[:80]!r}, a variable that is named like a secret",
                        where=where, hint="copy the recipe to a folder of your own if you trust it")  # fmt: skip
    value = os.environ.get(name)
    if value is not None:
        return value
    if not mark:
        raise UserError(f"the environment variable {name[:80]!r} is not set", where=where,
                        hint=f"export {name[:80]}=..., or give a default: ${{oc.env:{name[:80]},DEFAULT}}")  # fmt: skip
    return None if default == _NULL else default


def _asking(asked: str) -> str:
    """`${oc.env:NAME,DEFAULT}`."""
    name, mark, default = asked.partition(_DEFAULT)
    if not mark:
        return f"${{{_ENV}:{name}}}"
    if default == _NULL:
        return f"${{{_ENV}:{name},null}}"
    if not _PLAIN.fullmatch(default):
        default = "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), default) + "'"
    return f"${{{_ENV}:{name},{default}}}"
