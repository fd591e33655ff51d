"""The site's generated pages, as Markdown: keys of a recipe, recipes that ship, commands with their help.

They are made from the schema, the headers of the YAML files and the parsers themselves, so they cannot go stale.
`scripts/site_hook.py` hands them to mkdocs. Descriptions of keys are the comments beside them in their class.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import re
import textwrap
import types
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from unittest.mock import patch

from draftsmith.core.section import Section, kinds, sections
from draftsmith.recipes.commands.cli import COMMANDS, usage
from draftsmith.recipes.config.files import recipe_names
from draftsmith.recipes.config.schema import Recipe
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

# Page -> its title, and the modules whose sections stand there. The longest that fits is taken.
PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "targets": ("Targets", ("models.targets",)),
    "drafters": ("Drafters", ("models.drafters",)),
    "evaluation": ("Evaluation", ("eval", "trainers.evaluate", "trainers.stages.evaluate")),
    "data": ("Data", ("data",)),
    "stages": (
        "Stages",
        ("trainers.stages", "trainers.train", "trainers.serve", "models.drafters.distillation", "models.training"),
    ),
    "run": ("The whole run", ("",)),
}
TRACKS = {
    "demo": "Demos, on a CPU",
    "smollm2": "A small real model",
    "drawings": "A small generator of real pictures",
    "emoji_vlm": "A small real picture model",
    "lvlm": "Draft LVLMs",
    "video": "Heads for language models",
    "visual_ar": "Image generators",
}
_BOUNDS = {
    "ge": "at least",
    "gt": "above",
    "le": "at most",
    "lt": "below",
    "min_length": "length at least",
    "max_length": "length at most",
}


# ---- keys


def reachable() -> dict[type[Section], list[str]]:
    """Every section that a recipe can hold -> the keys that lead to it, in the order in which they are met."""
    places: dict[type[Section], list[str]] = {Recipe: [""]}
    waiting: list[type[Section]] = [Recipe]
    while waiting:
        section = waiting.pop(0)
        for name, field in section.model_fields.items():
            whole = field.annotation
            choices = get_args(whole) if get_origin(whole) in (Union, types.UnionType) else (whole,)
            many = ".NAME" if any(get_origin(choice) is dict for choice in choices) else ""
            for inner in sections(field.annotation):
                if inner not in places:
                    places[inner] = []
                    waiting.append(inner)
                above = places[section][0] if places[section] else section.__name__
                place = f"{above}.{field.alias or name}".removeprefix(".") + many
                if place not in places[inner] and len(places[inner]) < 4 and len(place) < 80:
                    places[inner].append(place)
    return places


def page_of(section: type[Section]) -> str:
    """The page that a section stands on."""
    module = section.__module__.removeprefix("draftsmith.")
    starts = ((s, page) for page, (_, starts) in PAGES.items() for s in starts)
    return max((len(s), page) for s, page in starts if s == "" or f"{module}.".startswith(f"{s}."))[1]


def config_pages() -> dict[str, str]:
    """Page -> Markdown with a table for each of its sections."""
    places = reachable()
    parts: dict[str, list[str]] = {page: [f"# {title}\n", _INTRODUCTION] for page, (title, _) in PAGES.items()}
    for section in sorted(places, key=lambda s: places[s][0] if places[s] else ""):
        page = page_of(section)
        parts[page].append(_section(section, places[section], page))
    return {page: "\n".join(text) for page, text in parts.items()}


_INTRODUCTION = (
    "This page is generated from the schema. Each heading is the place of a section in a recipe, and its table\n"
    "lists the section's keys; NAME is a name of your own. *Required* means that there is no default.\n"
    "`draftsmith show RECIPE` prints any recipe with all of its values.\n"
)


def _section(section: type[Section], places: list[str], page: str) -> str:
    way = f", on {section.way}" if hasattr(section, "way") else ""
    kind = f", kind: {', '.join(kinds(section))}" if kinds(section) else ""
    title = "A recipe" if section is Recipe else f"{places[0]}{kind}{way}"
    lines = [f"## {title} {{#{section.__name__.lower().lstrip('_')}}}\n"]
    if text := inspect.cleandoc(section.__dict__.get("__doc__") or ""):
        lines.append(_text(text.split("\n\n")[0]) + "\n")
    if len(places) > 1:
        lines.append(f"Also at {', '.join(f'`{place}`' for place in places[1:])}.\n")
    if not section.model_fields:
        return "\n".join([*lines, "No keys.\n"])
    lines += ["| key | type | default | what it is |", "| --- | --- | --- | --- |"]
    for name, field in section.model_fields.items():
        types = _named(field.annotation, page) + _bounds(field.metadata)
        cells = (f"`{field.alias or name}`", types, _default(field), _text(comment(section, name)))
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def _named(annotation: Any, page: str) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _named(inner[0], page) + _bounds(inner[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_named(part, page) for part in inner))
    if origin is Literal:
        return ", ".join(f"`{_written(value)}`" for value in inner)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        there, anchor = page_of(annotation), annotation.__name__.lower().lstrip("_")
        label = (kinds(annotation) or (annotation.__name__.removesuffix("Config"),))[0]
        return f"[{label}]({'' if there == page else f'{there}.md'}#{anchor})"
    if origin is dict:
        return f"mapping of {_named(inner[0], page)} to {_named(inner[1], page)}"
    if origin in (list, tuple, set, frozenset):
        return f"list of {' or '.join(dict.fromkeys(_named(i, page) for i in inner if i is not Ellipsis))}"
    plain = {
        str: "text",
        int: "whole number",
        float: "number",
        bool: "true, false",
        type(None): "null",
        Any: "any value",
    }
    return plain.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _bounds(metadata: Any) -> str:
    constraints = [one for item in metadata for one in (item.metadata if isinstance(item, FieldInfo) else [item])]
    values = [(words, getattr(one, name, None)) for one in constraints for name, words in _BOUNDS.items()]
    said = [(words, f"{v:,}" if isinstance(v, int) else f"{v:g}") for words, v in values if isinstance(v, int | float)]
    return "".join(f", {words} {number}" for words, number in said)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if field.is_required() or value is PydanticUndefined:
        return "required"
    if isinstance(value, Section):
        kind = dict(value).get("kind")
        return f"kind {kind}" if kind else "its own defaults"
    return f"`{_written(value)}`"


def _written(value: Any) -> str:
    """Return a value as YAML writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Section):
        return str({name: part for name, part in value if name in value.model_fields_set} or type(value).__name__)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_written(part)}' for key, part in value.items())}}}"
    return f"{value:g}" if isinstance(value, float) else str(value) if value != "" else '""'


def _text(text: str) -> str:
    """Prose of a docstring or comment: marks that Markdown would read are taken as they stand, outside of code."""
    pieces = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(p if p.startswith("`") else re.sub(r"([*_\[\]{}])", r"\\\1", p.replace("<", "&lt;")) for p in pieces)


# Keys that mean the same in every section, where the class says nothing of its own.
USUAL = {
    "kind": "Which kind of section this is.",
    "path": "Hub id or directory.",
    "revision": "A commit, tag or branch of the Hub; null: the newest.",
    "dtype": "Precision of the weights.",
    "format": "How conversations become text.",
    "top_k": "Only this number of the likeliest tokens can be drawn; 0: all.",
    "top_p": "Only the likeliest tokens that make up this probability can be drawn; 1: all.",
    "tree": "The shape of what is drafted in one cycle.",
    "max_new_tokens": "Tokens of an answer.",
    "max_samples": "The largest number of samples, in the order of the file; null: all.",
    "gradient_checkpointing": "Compute activations again in the backward pass: memory for speed.",
}


def comment(section: type[Section], name: str) -> str:
    """What a key's class says of it: the comment above or beside it, else that of the class that it inherits from.

    A key without any takes what is usual for its name, the docstring of the section that it holds, or the comment of
    the key on the line before, which then speaks of both.
    """
    owners = [owner for owner in section.__mro__ if issubclass(owner, Section)]
    text = next((said for owner in owners if (said := _comments(owner).get(name, ("", ""))[0])), "")
    if text or name in USUAL:
        return text or USUAL[name]
    held = [text for inner in sections(section.model_fields[name].annotation) if (text := _sentence(inner))]
    if len(held) == 1:
        return held[0]
    return next((said for owner in owners if (said := _comments(owner).get(name, ("", ""))[1])), "")


def _sentence(section: type[Section]) -> str:
    """The first sentence of a section's docstring."""
    text = " ".join((section.__dict__.get("__doc__") or "").split())
    return re.split(r"(?<=[a-z)])\. ", text)[0]


@cache
def _comments(section: type[Section]) -> dict[str, tuple[str, str]]:
    """Key -> its comment, and that of the key on the line before."""
    lines = textwrap.dedent(inspect.getsource(section)).splitlines()
    body = ast.parse("\n".join(lines)).body[0]
    assert isinstance(body, ast.ClassDef)
    result: dict[str, tuple[str, str]] = {}
    last, before = 0, ""
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above = itertools.takewhile(lambda line: line.lstrip().startswith("#"), reversed(lines[: node.lineno - 1]))
            beside = lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset or 0 :]
            comments = [*reversed([*above]), *re.findall(r"^\s*#(?! (?:fmt|type|noqa)\b).*", beside)]
            text = " ".join(line.strip().lstrip("# ") for line in comments)
            before = before if node.lineno == last + 1 else ""
            result[node.target.id] = text, before
            last, before = node.end_lineno or node.lineno, text or before
    return result


# ---- recipes and commands


def recipes_page() -> str:
    """The recipes of each track in a table, and below it their headers."""
    tables, headers = [], []
    for folder, title in TRACKS.items():
        named = {name: path for name, path in recipe_names().items() if path.parent.name == folder}
        tables += [f"## {title}\n", "| recipe | what |", "| --- | --- |"]
        headers += [f"## {title}: headers\n"]
        for name, path in named.items():
            comments = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
            header = [line.removeprefix("#").removeprefix(" ") for line in comments]
            tables.append(f"| [`{name}`](#{_anchor(name)}) | {_text(header[0])} |")
            headers += [f"### {name} {{#{_anchor(name)}}}\n", "```text", *header, "```\n"]
        tables.append("")
    start = "This page is generated from the recipes' files. `draftsmith show NAME` prints one with every value.\n"
    return "\n".join(["# Recipes\n", start, *tables, *headers])


def _anchor(name: str) -> str:
    return "recipe-" + re.sub(r"\W", "-", name)


def commands_page() -> str:
    """Every command's help, as the terminal shows it at 100 columns."""
    parts = ["# Commands and their help\n", "This page is generated from the commands' own help.\n"]
    parts += ["```text", usage().split("\nrecipes:")[0].rstrip(), "```\n"]
    with patch.dict(os.environ, COLUMNS="100"):
        for name, command in COMMANDS.items():
            parts += [f"## draftsmith {name}\n", "```text", command.help().rstrip(), "```\n"]
    return "\n".join(parts)


def generated() -> dict[str, Callable[[], str]]:
    """Path in the site -> what writes the page."""
    keys = cache(config_pages)
    pages = {f"reference/{page}.md": lambda page=page: keys()[page] for page in PAGES}
    return {**pages, "reference/recipes.md": recipes_page, "reference/commands.md": commands_page}
