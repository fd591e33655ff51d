"""`${...}` of recipes: other keys of the recipe, and environment variables. The only door to OmegaConf.

A run uses the values; every file that it writes has the text that asks for them.
"""

from __future__ import annotations

import io
import re
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .errors import UserError
from .json_types import Json, JsonObject, text_at, walk
from .secrets import ENVIRONMENT

Fault = OmegaConfBaseException
MOST_KEYS = 20  # `${key}` of somebody else's recipe: each may double what the one before it gives
_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*(\w+)\s*(?:,[^${}]*)?\}")
_KEY = re.compile(r"\$\{\s*[\w.\[\]-]+\s*\}")


def read(text: str) -> Json:
    """A YAML file's tree with every `${...}` as it is written."""
    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)


def read_value(text: str) -> Json:
    """A value of the command line, as it is written."""
    tree: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    return tree["value"]


def resolved(tree: JsonObject) -> JsonObject:
    """The tree with what every `${...}` gives. Raises `Fault` or `UserError` where one gives nothing."""
    if not any("${" in (text_at(value) or "") for _, value in walk(tree)):
        return tree
    try:
        return OmegaConf.to_container(OmegaConf.create(tree), resolve=True)  # type: ignore[return-value]
    except Fault as error:
        problem = str(error).splitlines()[0].removeprefix("KeyError raised while resolving interpolation: ")
        missing = re.search(r"(?:variable|key) '([^']+)' not found", problem)
        name = missing[1] if missing else "NAME"
        hint = f"write ${{key}}, ${{oc.env:{name}}} or ${{oc.env:{name},DEFAULT}}"
        raise UserError(f"{error.full_key}: {problem}", key=error.full_key, hint=hint) from error


def check_foreign(tree: Json, where: str) -> None:
    """Raises `UserError` where somebody else's recipe asks for more than plain variables and a few keys."""
    texts = [text for _, value in walk(tree) if "${" in (text := text_at(value) or "")]
    is_more = any("${" in _KEY.sub("", _VARIABLE.sub("", text)) for text in texts)
    is_secret = any(ENVIRONMENT.match(name) for text in texts for name in _VARIABLE.findall(text))
    if is_more or is_secret or sum(len(_KEY.findall(text)) for text in texts) > MOST_KEYS:
        problem = f"a published recipe has more in ${{...}} than variables without secrets and at most {MOST_KEYS} keys"
        hint = "it may use ${oc.env:NAME} and ${key} alone; copy it to a folder of your own if you trust it"
        raise UserError(problem, where=where, hint=hint)
