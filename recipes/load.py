"""Loads and checks a recipe: OmegaConf merges YAML and `key=value` into a tree, and pydantic validates it.

The only door to OmegaConf. Everything a user can get wrong ends as a `UserError` that names the
file, the key and the hint, before anything is allocated or written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from ..core.errors import UserError, did_you_mean
from ..core.secrets import redact_argument
from .messages import Asked, readable

if TYPE_CHECKING:
    from .schema import Recipe

FOLDER = Path(__file__).parent
RUN_OPTIONS = ("recipe", "stages", "restart", "dry_run")


@dataclass(frozen=True)
class Options:
    """What to do with a recipe; not part of it."""

    stages: tuple[str, ...] | None = None
    restart: str | None = None
    dry_run: bool = False


@dataclass(frozen=True)
class Loaded:
    """A checked recipe, the tree it came from, its file, and the run's options."""

    recipe: Recipe
    tree: dict[str, Any]
    path: Path
    options: Options
    overrides: tuple[tuple[str, Any], ...] = ()  # of the command line: dotted key, value


def load(arguments: list[str]) -> Loaded:
    """Read `recipe=NAME key=value ...`."""
    # The schema brings torch and transformers: a moment's wait that --help does not need.
    from .schema import Recipe

    pairs = [_pair(argument) for argument in arguments]
    names = [value for key, value in pairs if key == "recipe"]
    if len(names) != 1:
        raise UserError("give one recipe", hint="recipe=NAME, one of: " + ", ".join(sorted(recipe_names())))
    path = find_recipe(names[0])
    tree = _with_bases(path)
    own_stages = dict(tree.get("stages") or {})
    options, overrides = _options(pairs, tree)
    for key, value in overrides:
        _override(tree, key, value)
    tree = _ordered(tree, Path("command line"))
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        fields = {name: field.annotation for name, field in Recipe.model_fields.items()}
        settings = [pair for pair in pairs if pair[0] not in RUN_OPTIONS]
        raise readable(error, Asked(path, settings, own_stages, fields, RUN_OPTIONS)) from error
    except UserError as error:  # of a section, which knows no file
        where = f"{path}, {error.where}" if error.where else str(path)
        raise UserError(error.problem, where=where, hint=error.hint) from error
    return Loaded(recipe, tree, path, options, tuple(overrides))


def recipe_names() -> dict[str, Path]:
    """Recipes that ship with the project: name -> file. `demo/lvlm` keeps its folder, others go by their stem."""
    paths = {}
    for path in sorted(FOLDER.rglob("*.yaml")):
        relative = path.relative_to(FOLDER).with_suffix("")
        paths[str(relative) if relative.parts[0] == "demo" else relative.name] = path
    return paths


def find_recipe(name: str) -> Path:
    """A shipped name, a name with its folder, or a path."""
    known = recipe_names()
    for path in (known.get(name), FOLDER / f"{name}.yaml", Path(name)):
        if path is not None and path.is_file():
            return path
    raise UserError(f"no recipe {name!r}", where=str(FOLDER), hint=did_you_mean(name, known))


def _pair(argument: str) -> tuple[str, str]:
    key, sign, value = argument.partition("=")
    if not sign or not key:
        raise UserError(f"{argument!r} is not key=value", hint=f"write {argument.lstrip('-')}=VALUE, without blanks")
    return key.lstrip("-"), value


def sources(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The files that a recipe is made of, each as it is written: the one that extends nothing first, itself last."""
    layers: list[tuple[Path, dict[str, Any]]] = []
    place: Path | None = path
    while place is not None:
        tree = _read(place)
        layers.insert(0, (place, tree))
        place = _extended(place, tree.pop("extends", None), [p for p, _ in layers])
    return layers


def _extended(path: Path, name: Any, seen: list[Path]) -> Path | None:
    """The file that the recipe at `path` extends, if any.

    Args:
        name: what stands under `extends`: a file beside the recipe (`.yaml` may be left out), or a shipped recipe.
        seen: files that led here.
    """
    where = f"{path}, key extends"
    if name is None:
        return None
    if not isinstance(name, str):
        raise UserError(f"extends is {name!r}, and not one name", where=where, hint="name one recipe")
    beside = [path.parent / name, path.parent / f"{name}.yaml"]
    # A recipe may have the name of the shipped one that it extends.
    base = next((p for p in beside if p.is_file() and not p.samefile(path)), None) or find_recipe(name)
    if any(base.samefile(p) for p in seen):
        circle = " -> ".join(p.stem for p in [*reversed(seen), base])
        raise UserError(f"recipes extend one another in a circle: {circle}", where=where, hint="break the circle")
    return base


def _with_bases(path: Path) -> dict[str, Any]:
    """The recipe's tree over those of all recipes that it extends."""
    (first, tree), *others = sources(path)
    tree = _ordered(tree, first)
    for place, own in others:
        tree = _ordered(_merge(tree, own, leaves_out=True), place)
    return tree


def _ordered(tree: dict[str, Any], path: Path) -> dict[str, Any]:
    """The tree with its stages as its `order` lists them; the list itself is no part of the recipe."""
    tree = dict(tree)
    order, stages = tree.pop("order", None), tree.get("stages")
    if order is None or not isinstance(stages, dict):
        return tree
    where = f"{path}, key order"
    if not isinstance(order, list) or len(set(map(str, order))) < len(order):
        raise UserError(f"order is {order!r}, and no list of different stages", where=where, hint="order: [a, b, c]")
    for name in order:
        if name not in stages:
            raise UserError(f"order names {name!r}, which is no stage", where=where, hint=did_you_mean(name, stages))
    missing = [name for name in stages if name not in order]
    if missing:
        raise UserError(f"order does not name {', '.join(missing)}", where=where, hint="name every stage once")
    return tree | {"stages": {name: stages[name] for name in order}}


def _read(path: Path) -> dict[str, Any]:
    try:
        yaml.load(path.read_text(), Loader=_StrictLoader)  # duplicate keys: OmegaConf would take the last
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"not a readable recipe: {_fault(error)}", where=str(path), hint="mend the YAML") from None
    if not isinstance(tree, dict):
        raise UserError("a recipe is a mapping", where=str(path), hint="see recipes/demo/lvlm.yaml")
    return tree  # type: ignore[return-value]


def _fault(error: Exception) -> str:
    """The YAML reader's message with line and column but without the quoted text, since a secret cut in half would not
    be recognised.
    """
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return str(error)


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice (two stages with one name)."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue  # `<<: *anchor`: keys beside it win, by YAML's own rule
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise UserError(
                    f"{key!r} stands twice",
                    where=f"{key_node.start_mark.name}, line {key_node.start_mark.line + 1}",
                    hint="give each stage (and key) a name of its own",
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _merge(base: dict[str, Any], top: dict[str, Any], *, leaves_out: bool = False) -> dict[str, Any]:
    """`top` over `base`; a section whose kind changes starts afresh, so that the old kind's keys go.

    Args:
        leaves_out: null takes a section of the base away (a stage, a method).
    """
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            changed = "kind" in value and "kind" in old and value["kind"] != old["kind"]
            merged[key] = value if changed else _merge(old, value, leaves_out=leaves_out)
        elif isinstance(old, dict) and value is None and leaves_out:
            del merged[key]
        else:
            merged[key] = value
    return merged


def _options(pairs: list[tuple[str, str]], tree: dict[str, Any]) -> tuple[Options, list[tuple[str, Any]]]:
    values: dict[str, Any] = {}
    overrides = []
    for key, text in pairs:
        value = _value(key, text)
        if key in RUN_OPTIONS:
            values[key] = value
        else:
            overrides.append((key, value))
    known = list((tree.get("stages") or {}).keys())
    stages = values.get("stages")
    if stages is not None:
        stages = tuple(str(s) for s in (stages if isinstance(stages, list) else [stages]))
        for stage in stages:
            _known_stage(stage, known, "stages")
    restart = values.get("restart")
    if restart is not None:
        _known_stage(str(restart), known, "restart")
    dry_run = values.get("dry_run", False)
    if not isinstance(dry_run, bool):
        raise UserError(f"dry_run={dry_run!r} is neither true nor false", hint="dry_run=true")
    return Options(stages, restart, dry_run), overrides


def _known_stage(stage: str, known: list[str], option: str) -> None:
    if stage not in known:
        raise UserError(f"{option} names {stage!r}, which is no stage of this recipe", hint=did_you_mean(stage, known))


def _value(key: str, text: str) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index,call-overload]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(
            f"cannot read the value of {redact_argument(f'{key}={text}')}", hint="quote it as YAML would want it"
        ) from error


def _override(tree: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    section: Any = tree
    for part in path:
        if not isinstance(section.get(part), dict):
            section[part] = {}
        section = section[part]
    if last == "kind" and section.get("kind") not in (None, value):
        section.clear()
    section[last] = _merge({last: section.get(last)}, {last: value})[last]
