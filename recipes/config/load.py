"""Loads and checks a recipe: its files and `key=value` make a tree, and pydantic validates it, whose errors become one
message.

Everything a user can get wrong ends as a `UserError` that names the file, the key and the hint, before anything is
allocated or written.
"""

from __future__ import annotations

import atexit
import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationError

from ...core.errors import Refused, UserError, did_you_mean, nearest, shown_value
from ...core.fields import shorthand
from ...core.import_paths import ALLOW_IMPORT, NotImported
from ...core.interpolation import resolved
from ...core.json_types import JsonObject, object_at, parts, walk
from ...core.secrets import redact_argument, redact_tree
from ...core.section import Section
from .files import KEYS, find_recipe, is_published, merge, ordered, sources, value_of, with_bases

if TYPE_CHECKING:
    from .schema import Recipe

MOST = 10**15  # no setting counts further, and some of what reads it (NumPy, torch) counts in 64 bits
_SHOWN = 8  # problems that a message names


class Options(Section):
    """What to do with a recipe; not part of it."""

    stages: Annotated[tuple[str, ...], Field(min_length=1), shorthand(str, lambda text: text.split(","))] | None = None
    restart: str | None = None
    dry_run: bool = False
    # Whether DeepSpeed tells what it does.
    verbose: bool = False
    # Of modules that a published folder's recipe names.
    allow_import: bool = False


RUN_OPTIONS = ("recipe", *Options.model_fields)


@dataclass(frozen=True)
class Written:
    """A recipe as a command names it, before the schema looks at it: its file, (dotted key, text) of the command line,
    the tree of both with `${...}` and all, and the run's options.
    """

    path: Path
    settings: Sequence[tuple[str, str]]
    tree: JsonObject
    options: Options = field(default_factory=Options)
    name: str = ""

    def place(self, key: str) -> str:
        """Where the value of a key stands: on the command line, or in the file."""
        for setting, text in reversed(self.settings):
            if key and (f"{key}.".startswith(f"{setting}.") or setting.startswith(f"{key}.")):
                return "command line: " + redact_argument(f"{setting}={shown_value(text)}")
        return str(self.path)


@dataclass(frozen=True, kw_only=True)
class Loaded(Written):
    """A checked recipe."""

    recipe: Recipe


@contextmanager
def uncollected() -> Iterator[None]:
    """No search for garbage in here. torch and transformers make objects that all stay, and each search walks through
    them again: a fifth of a dry run's time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def leave_at_once() -> None:
    """At its exit Python searches for garbage once more, which takes as long as a third of the imports. A command that
    has only read has nothing there that must end well.
    """
    atexit.register(gc.freeze)


def read_words(arguments: Sequence[str]) -> Written:
    """`recipe=NAME key=value ...` without the schema, which brings torch. Raises `UserError`."""
    pairs = []
    for argument in arguments:
        key, sign, text = argument.partition("=")
        key = key.lstrip("-")
        if not sign or not all(key.split(".")):
            hint = "settings are key=value (dry_run=true) without blanks, or in quotes, after one recipe"
            raise UserError(f"{redact_argument(argument)!r} is not key=value", hint=hint)
        pairs.append((key, text))
    names = [value for key, value in pairs if key == "recipe"]
    if len(names) != 1:
        problem = f"{len(names)} recipes: {' and '.join(map(shown_value, names))}" if names else "give one recipe"
        raise UserError(problem, hint="recipe=NAME names one: draftsmith recipes lists them")
    path = find_recipe(names[0])
    tree = with_bases(path)
    options = _options([pair for pair in pairs if pair[0] in Options.model_fields], path, tree)
    settings = [pair for pair in pairs if pair[0] not in RUN_OPTIONS]
    return Written(path, settings, _with_settings(tree, settings), options, names[0])


@uncollected()
def load(arguments: list[str]) -> Loaded:
    """Read `recipe=NAME key=value ...`. The schema brings torch and transformers: a moment's wait."""
    written = read_words(arguments)
    published = any(is_published(place) for place, _ in sources(written.path))
    return Loaded(**vars(written), recipe=checked(written, imports=written.options.allow_import or not published))


def checked(written: Written, *, imports: bool = True) -> Recipe:
    """The recipe of a tree. Raises `UserError` for what it cannot say.

    Args:
        imports: modules of other packages that its kinds name are imported. A published recipe does so by leave alone.
    """
    from .schema import Recipe

    with blamed(written):
        tree = resolved(written.tree)
        for keys, value in walk(tree):  # those of inline configs are looked at nowhere else
            key = ".".join(keys) or "the recipe"
            for name in value if isinstance(value, dict) else ():
                if not isinstance(name, str):
                    raise UserError(
                        f"{key} has the key {shown_value(name)}, which is no text", key=key, hint="quote it"
                    )
            if isinstance(value, int) and abs(value) > MOST:
                raise UserError(f"{key} is a number beyond {MOST:,}", key=key, hint="write a smaller one")
        try:
            return Recipe.model_validate(tree, context=ALLOW_IMPORT if imports else None)
        except ValidationError as error:
            raise readable(error, tree, written) from error
        except NotImported as error:
            hint = "a published folder imports nothing by itself: if you trust that package, allow_import=true"
            raise UserError(error.problem, where=str(written.path), hint=hint) from error


def _options(settings: Sequence[tuple[str, str]], path: Path, tree: JsonObject) -> Options:
    """The options among a command's words; `tree` is that of the recipe's files."""
    values = {key: value_of(key, text) for key, text in settings}
    try:
        options = Options.model_validate(values)
    except ValidationError as error:
        raise readable(error, values, Written(path, settings, values)) from error
    known = list(object_at(tree, "stages") or {})
    for option, names in {"stages": options.stages or (), "restart": (options.restart,)}.items():
        for shown in [shown_value(name) for name in names if name not in (*known, None)]:
            problem = f"{option} names {shown!r}, which is no stage of this recipe"
            raise UserError(problem, where=f"command line: {option}={shown}", hint=did_you_mean(shown, known))
    return options


def _with_settings(tree: JsonObject, settings: Sequence[tuple[str, str]]) -> JsonObject:
    """The tree with `a.b=1` of the command line over it, one after another."""
    # Other files take `question_end` away (`merge`), wherever on the command line it stands.
    for key, text in sorted(settings, key=lambda setting: setting[0].endswith(".question_end")):
        first, *_ = places = key.split(".")
        if first not in KEYS:
            where = f"command line: {redact_argument(f'{key}={text}')}"
            raise UserError(f"unknown key {first}", where=where, hint=did_you_mean(first, [*KEYS, *RUN_OPTIONS]))
        value = value_of(key, text)
        for part in reversed(places):
            value = {part: value}
        tree = merge(tree, value)
    return ordered(tree, Path("command line"))


@contextmanager
def blamed(written: Written) -> Iterator[None]:
    """Errors that name a key of the recipe also say where it is written."""
    try:
        yield
    except UserError as error:
        raise placed(error, written) from error


def placed(error: UserError, written: Written) -> UserError:
    """The error of a section, which knows its key and not where that is written."""
    key = error.key if error.key is not None and error.key.split(".")[0] in KEYS else None
    if error.where is not None and key is None:
        return error  # of a file of data, or of weights
    place = written.place(key or "")
    # The command line shows the key, or the problem does.
    if error.key is not None and "command line: " not in place and not error.begins_with_key:
        place = f"{place}, key {error.key}"
    where = place if error.where in (None, str(written.path)) else f"{error.where}; {place}"
    return UserError(_cut(error.problem), where=where, hint=_cut(error.hint or "") or None)


def _cut(message: str) -> str:
    """Without the middle of words that are longer than any path."""
    return re.sub(r"\S{260,}", lambda word: shown_value(word[0]), message)


def readable(error: ValidationError, tree: JsonObject, written: Written) -> UserError:
    """Pydantic's report as one message."""
    errors = error.errors(include_url=False)
    # Of a key that takes a word or a section, what is wrong with a section says more than that it is no word.
    problems = [p for p in errors if not (p["type"].endswith("_type") and isinstance(p["input"], dict))] or errors
    told = [_said(problem, tree) for problem in problems[:_SHOWN]]
    keys: dict[str, list[str]] = {}  # of each text: one slip may stand at several
    for key, text, _ in told:
        keys.setdefault(text, []).append(key)
    lines = [f"{', '.join(those) or 'the recipe'}: {text}" for text, those in keys.items()]
    lines += [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    hints = dict.fromkeys(hint for *_, hint in told if hint)
    return UserError(
        _cut("; ".join(lines)),
        where="; ".join(dict.fromkeys(written.place(key) for key, *_ in told)),
        hint=_cut("; ".join(hints)) or "write another value; draftsmith show NAME prints every key of the recipe",
    )


def _said(problem: Any, tree: JsonObject) -> tuple[str, str, str | None]:
    """One problem: its key, what is wrong, and what to do."""
    kind, context = problem["type"], problem.get("ctx", {})
    key, message = _key(problem["loc"], tree, kind == "missing"), problem["msg"]
    match kind:
        case "value_error" if isinstance(refused := context["error"], Refused):
            return ".".join(part for part in (key, refused.key) if part), refused.problem, refused.hint
        case "value_error":
            message = str(context["error"])
        case "missing":
            return key, "is missing", None
        case "union_tag_invalid":
            kinds = re.findall(r"'([^']*)'", context["expected_tags"])
            return f"{key}.kind", message, did_you_mean(shown_value(context["tag"]), kinds)
        case "union_tag_not_found":
            *above, name = key.split(".")
            near = nearest(name, [other for other in object_at(tree, *above) or {} if other != name], 1)
            meant = "".join(f"did you mean {'.'.join([*above, other])}? " for other in near)
            return key, "its kind is missing", f"{meant}a new one says its kind"
    # Of a whole section the message says enough.
    value = redact_tree(problem["input"])
    shown = "" if object_at(value) is not None else f" (found {shown_value(repr(value))})"
    return key, f"{message[0].lower()}{message[1:]}{shown}", None


def _key(places: Sequence[int | str], tree: object, is_missing: bool) -> str:
    """The dotted key of pydantic's place, which also has the kinds of sections and the types of values."""
    keys = []
    for number, place in enumerate(places):
        inside = {str(name): value for name, value in parts(tree)}
        if str(place) in inside:
            tree = inside[str(place)]
            keys.append(shown_value(str(place)))
        elif is_missing and number == len(places) - 1:
            keys.append(str(place))
    return ".".join(keys)
