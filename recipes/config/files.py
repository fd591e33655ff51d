"""Recipes as files: which there are, how one is read, and how it is laid over those that it extends.

No message prints what a file holds before the file is known to be a recipe, since `extends` can name any file.
"""

from __future__ import annotations

import copy
import functools
import os
import re
from pathlib import Path

import yaml

from ...core import interpolation
from ...core.errors import UserError, first_line, nearest, shown_value
from ...core.files import read_text
from ...core.json_types import Json, JsonObject, all_are, object_at
from ...core.results import SUMS
from ...core.secrets import redact_argument

FOLDER = Path(__file__).parents[1]
# Keys at the top of a file. `draftsmith --help` lists recipes without the schema, which brings torch.
KEYS = ("extends", "order", "target", "drafter", "stages", "engine", "hardware", "tracking", "seed", "output")
_WITH_FOLDER = ("demo", "drawings", "emoji_vlm", "smollm2")  # of the recipes' names
_MOST_BYTES = 1 << 20


def recipe_names() -> dict[str, Path]:
    """Recipes that ship with the project: name -> file. `demo/lvlm` keeps its folder, most go by their stem."""
    paths = {}
    for path in sorted(FOLDER.rglob("*.yaml"), key=lambda path: path.with_suffix("").parts):
        relative = path.relative_to(FOLDER).with_suffix("")
        paths[str(relative) if relative.parts[0] in _WITH_FOLDER else relative.name] = path
    return paths


def find_recipe(name: str) -> Path:
    """A shipped name, a name with its folder, or a path. Raises `UserError`."""
    shipped = recipe_names()
    for path in (shipped.get(name), FOLDER / f"{name}.yaml", Path(name)):
        if path is not None and os.path.isfile(path):
            return path
    shown = shown_value(name)
    if os.path.isdir(name):
        hint = f"of a run: recipe={shown}/recipe.yaml output={shown}"
        raise UserError(f"{shown} is a folder, and no recipe", hint=hint)
    meant = "".join(f"did you mean {close!r}? " for close in nearest(name[:100], shipped, 1))
    hint = f"{meant}draftsmith recipes lists ours; others are named by their path from the working folder"
    raise UserError(f"no recipe {shown!r}", hint=hint)


def is_published(path: Path) -> bool:
    """Whether what lies beside a recipe, or above it, shows that a folder was published: somebody else may have written
    it. Of a link both places count.
    """
    parents = dict.fromkeys((*path.absolute().parents, *path.resolve().parents))
    return any((parent / name).is_file() for parent in parents for name in (SUMS, "draftsmith.json"))


def sources(path: Path) -> list[tuple[Path, JsonObject]]:
    """The files that a recipe is made of, each as it is written: the one that extends nothing first, itself last."""
    layers: list[tuple[Path, JsonObject]] = []
    place: Path | None = path
    while place is not None:
        tree = _read(place)
        layers.insert(0, (place, tree))
        place = _extended(place, tree.pop("extends", None), [p for p, _ in layers])
    return layers


def with_bases(path: Path) -> JsonObject:
    """The recipe's tree over those of all recipes that it extends."""
    tree: JsonObject = {}
    for place, values in sources(path):
        tree = ordered(merge(tree, values, leaves_out=True), place)
    return tree


def _extended(path: Path, name: object, later: list[Path]) -> Path | None:
    """The file that the recipe at `path` extends, if any.

    Args:
        name: what stands under `extends`: a file beside the recipe (`.yaml` may be left out), or a shipped recipe.
        later: files that led here.
    """
    where = f"{path}, key extends"
    if name is None:
        return None
    if not isinstance(name, str) or not name:
        raise UserError(f"extends is {shown_value(name)!r}, and not one name", where=where, hint="name one recipe")
    name = str(interpolation.resolved({"extends": name})["extends"])
    beside = [path.parent / name, path.parent / f"{name}.yaml"]
    # A recipe may have the name of the shipped one that it extends.
    base = next((p for p in beside if os.path.isfile(p) and not p.samefile(path)), None)
    if base is None:
        try:
            base = find_recipe(name)
        except UserError as error:
            raise UserError(f"extends names {error.problem}", where=where, hint=error.hint) from error
    if any(base.samefile(p) for p in later):
        circle = " -> ".join(p.stem for p in [*reversed(later), base])
        raise UserError(f"recipes extend one another in a circle: {circle}", where=where, hint="break the circle")
    return base


def ordered(tree: JsonObject, path: Path) -> JsonObject:
    """The tree with its stages as its `order` lists them; the list itself is no part of the recipe."""
    tree = dict(tree)
    order, stages = tree.pop("order", None), object_at(tree, "stages")
    if order is None or stages is None:
        return tree
    if not all_are(order, str) or sorted(order) != sorted(map(str, stages)):
        raise UserError(f"order is {shown_value(order)}, and does not name each stage once",
                        where=f"{path}, key order", hint=f"the stages are [{', '.join(map(str, stages))}]")  # fmt: skip
    return tree | {"stages": {name: stages[name] for name in order}}


def _read(path: Path) -> JsonObject:
    hint = "name a recipe, such as recipes/demo/lvlm.yaml"
    text = read_text(path, hint=hint, max_bytes=_MOST_BYTES)
    try:
        tree = copy.deepcopy(_parsed(text))
    except (yaml.YAMLError, interpolation.Fault, ValueError, RecursionError) as error:
        raise UserError(f"not a readable recipe: {_fault(error)}", where=str(path), hint="fix the YAML") from None
    if not any(key in KEYS for key in object_at(tree) or {}):
        what = "a recipe is a mapping with some of the keys " + ", ".join(KEYS)
        raise UserError(f"not a recipe: {what}", where=str(path), hint=hint)
    if is_published(path):
        interpolation.check_foreign(tree, str(path))
    return tree


# A command reads a recipe and those that it extends several times, and parsing them is most of what loading one takes.
_parsed = functools.lru_cache(256)(interpolation.read)


def _fault(error: Exception) -> str:
    """The reader's message, of YAML with line and column but without the quoted text: the file may hold a secret, and
    cut in half that would not be recognised.
    """
    if not isinstance(error, yaml.MarkedYAMLError) or (mark := error.problem_mark) is None:
        return first_line(error)
    quoted = r"'[^']{4,}'|\"[^\"]{4,}\"|(?<=duplicate key )(?![\w.-]{1,40}$).*"
    return f"line {mark.line + 1}, column {mark.column + 1}: " + re.sub(quoted, "...", str(error.problem))


def merge(base: JsonObject, top: JsonObject, *, leaves_out: bool = False) -> JsonObject:
    """`top` over `base`; a section whose kind changes starts afresh, so that the old kind's keys go.

    Args:
        leaves_out: null takes a section or a list of the base away (a stage, a method, a contrast).
    """
    # `question_end` asks a published set's questions in a paper's way; nobody's own questions are asked so.
    names_others = any(key in top and top[key] != base.get(key) for key in ("path", "from"))
    merged = {key: value for key, value in base.items() if key != "question_end" or not names_others}
    for key, value in top.items():
        match merged.get(key), value:
            case dict(old), dict():
                changed = "kind" in value and "kind" in old and value["kind"] != old["kind"]
                merged[key] = value if changed else merge(old, value, leaves_out=leaves_out)
            case dict() | list(), None if leaves_out:
                del merged[key]
            case _:
                merged[key] = value
    return merged


def value_of(key: str, text: str) -> Json:
    """What `key=text` of the command line says, read as YAML. Raises `UserError` where it cannot be."""
    try:
        return interpolation.read_value(text)
    except (yaml.YAMLError, interpolation.Fault, ValueError, RecursionError) as error:
        where = "command line: " + redact_argument(f"{key}={text}")
        raise UserError(f"{key} cannot be read: {_fault(error)}", where=where, hint="quote it as YAML would") from error
