"""Texts in Markdown that show as they are: names come from recipes, logs and reports, which may be a stranger's.

The one place that escapes for Markdown, as `html.escape` does for HTML. What needs no escape has none, so that tables
stay readable as text: `max_new_tokens`, `MT*`, `[1.9, 2.1]`. After a slash there is none but for tags and links: a path
stays one word.

`filled` makes a page of a template (Jinja) that lies beside the code which fills it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What opens a tag, an entity, code, a link or a formula, strikes through, or is an escape itself (CommonMark 0.31, and
# GitHub's).
_INLINE = re.compile(
    r"\\(?=[!-/:-@\[-`{-~]|$)|`|<(?=[A-Za-z/!?])|&(?=#?\w+;)|\](?=[(\[:])|~(?=~)|(?<=~)~|\$(?=.*\$)|(?<=\$)\$"
    r"|(?P<run>\*+|_+)"
)
# What makes a block at a line's start: a heading, a quotation, a list, a rule, a fence.
_BLOCK = re.compile(r"[#>]|[-+*=](?:\s|$)|[-=_*\s]+$")
_NUMBERED = re.compile(r"\d{1,9}(?=[.)](?:\s|$))")
_MARKS = re.compile(r"(`[^`]+`|\*\*.+?\*\*(?!\*))")
_BREAKS = re.compile(r"\s*[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]\s*")


class Markup(str):
    """Markdown of our own, which stays as it is."""


def plain(text: str) -> Markup:
    """A text on one line, each letter as it is."""
    if isinstance(text, Markup):
        return text
    return Markup(_INLINE.sub(_escaped, _BREAKS.sub(" ", text)))


def _escaped(match: re.Match[str]) -> str:
    if match["run"] is None:
        return f"\\{match[0]}"
    before, after = match.string[: match.start()][-1:], match.string[match.end() :][:1]
    # What opens no emphasis can close none: a left-flanking run of the specification.
    opens = after.strip() and (after.isalnum() or not before.isalnum())
    if not opens or before == "/" or (match[0][0] == "_" and before.isalnum()):
        return match[0]
    return "".join(f"\\{mark}" for mark in match[0])


def sentence(text: str) -> Markup:
    """A sentence of a report, on one line: `code` and **bold** are its own marks, all else is as it is."""
    if isinstance(text, Markup):
        return text
    pieces = _MARKS.split(_BREAKS.sub(" ", text).strip())
    shown = "".join(_marked(piece) if number % 2 else plain(piece) for number, piece in enumerate(pieces))
    if (number := _NUMBERED.match(shown)) is not None:
        return Markup(f"{number[0]}\\{shown[number.end() :]}")
    return Markup("\\" + shown if _BLOCK.match(shown) else shown)


def _marked(piece: str) -> str:
    return code(piece[1:-1]) if piece.startswith("`") else f"**{plain(piece[2:-2])}**"


def code(text: str) -> Markup:
    """A span of code that holds any text: its fence is longer than what stands inside, and no space is lost."""
    text = _BREAKS.sub(" ", text)
    fence = "`" * (1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    space = " " if text.strip() and (text[0] in "` " or text[-1] in "` ") else ""
    return Markup(f"{fence}{space}{text}{space}{fence}")


def label(text: str) -> Markup:
    """What stands between the brackets of a link or a picture."""
    return Markup(re.sub(r"(?<!\\)((?:\\\\)*)([\[\]])", r"\1\\\2", plain(text)))


def cell(text: str) -> Markup:
    """What stands in a cell of a table: a pipe would end it, even inside code."""
    return Markup(re.sub(r"(?<!\\)((?:\\\\)*)\|", r"\1\\|", plain(text)))


def block(lines: str, language: str) -> Markup:
    """Lines of code between fences that no line of it closes."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", lines)), default=0))
    return Markup(f"{fence}{language}\n{lines}\n{fence}")


def filled(
    template: Path, *filters: Callable[..., Any], escape: Callable[[Any], str] | None = None, **values: object
) -> str:
    """The text of a template with these values.

    Args:
        filters: what a template may do with a value, by their names.
        escape: of what stands between braces, so that nothing is put in as it is by mistake; None: for HTML.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # nothing but a page needs it

    environment = Environment(
        loader=FileSystemLoader(template.parent),
        undefined=StrictUndefined,
        autoescape=escape is None,
        finalize=escape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {function.__name__: function for function in filters}
    return environment.get_template(template.name).render(values)
