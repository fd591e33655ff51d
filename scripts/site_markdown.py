"""The pages of docs/ are written for GitHub and for the site; what the two read differently is put right here.

Used by `scripts/site_hook.py`, and without mkdocs, so that the tests need none.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

# Files of the root that are pages of the site.
OF_THE_ROOT = {"CONTRIBUTING.md": "project/contributing.md", "CHANGELOG.md": "project/changelog.md"}


def expanded(nav: Any, docs: Path) -> Any:
    """`nav` with every page of a folder, but for its README.md, in the place of `FOLDER/*`."""
    if isinstance(nav, dict):
        return {title: expanded(inside, docs) for title, inside in nav.items()}
    if not isinstance(nav, list):
        return nav
    result = []
    for entry in nav:
        if isinstance(entry, str) and entry.endswith("/*"):
            pages = sorted((docs / entry.removesuffix("/*")).glob("*.md"))
            result += [str(page.relative_to(docs)) for page in pages if page.name != "README.md"]
        else:
            result.append(expanded(entry, docs))
    return result


def of_the_root(text: str) -> str:
    """A file of the root, with its links as they are in project/."""
    text = re.sub(r"\]\(docs/", "](../", text)
    for name, path in OF_THE_ROOT.items():
        text = text.replace(f"]({name}", f"]({Path(path).name}")
    return text


def to_the_root(markdown: str, page: str) -> str:
    """A page of docs/: links to files of the root lead to their pages; links to others outside docs/ become text."""
    up = "../" * page.count("/")
    for name, path in OF_THE_ROOT.items():
        markdown = markdown.replace(f"]({up}../{name}", f"]({up}{path}")
    return re.sub(rf"\[([^]]+)\]\({re.escape(up)}\.\./[^)]+\)", r"\1", markdown)


def as_mkdocs_reads_it(markdown: str) -> str:
    """Fences without the tags that `tests/docs` reads, a blank line before each list, and stars that mark defaults."""
    lines: list[str] = []
    fence = ""  # the marks that opened the block that a line stands in
    for line in markdown.splitlines():
        opened = re.match(r"( *)(```+)(\w*)(.*)", line)
        if opened and not fence:
            fence = opened[2]
            line = opened[1] + fence + opened[3] + _title(opened[3], opened[4].split())
        elif opened and opened[2] == fence and not opened[3]:
            fence = ""
        elif not fence:
            line = _default_stars(line) if line.startswith("|") else line
            last = lines[-1] if lines else ""  # of a paragraph: no blank line, and no part of a list
            if _ITEM.match(line) and last.strip() and not last.startswith(" ") and not _ITEM.match(last):
                lines.append("")
        lines.append(line)
    return "\n".join(lines) + "\n"


_ITEM = re.compile(r"(-|\d+\.) ")


def _title(language: str, tags: list[str]) -> str:
    """The name of the file that a block is saved as, above it."""
    saved = language not in ("bash", "python") and tags[:1] == ["run"]
    return f' title="{tags[1]}"' if saved and len(tags) > 1 else ""


def _default_stars(row: str) -> str:
    """`true*, false`: a star after a word is no emphasis, unless another one stands before the word."""
    protected = r"`[^`]*`|\*\*.+?\*\*|(?<![\w)\"])\*[^*|]+\*"
    return re.sub(rf"({protected})|(?<=[\w)\"])\*(?=[,;|) ]|$)", lambda match: match[1] or r"\*", row)
