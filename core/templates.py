"""Pages from templates (Jinja) that lie beside the code which fills them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


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
