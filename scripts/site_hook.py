"""mkdocs' hook (mkdocs.yml): generated pages, whole folders in the navigation, and links that leave docs/.

`scripts/reference.py` writes the reference. CONTRIBUTING.md and CHANGELOG.md are shown as pages of the site.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
_SEARCHED = tempfile.TemporaryDirectory()
# Files of the root that are pages of the site.
OF_THE_ROOT = {"CONTRIBUTING.md": "project/contributing.md", "CHANGELOG.md": "project/changelog.md"}


@event_priority(100)  # before mkdocstrings reads its settings
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts a folder's pages in the place of `FOLDER/*`; mkdocstrings finds the package, whatever its folder's name."""
    config.nav = expanded(config.nav, Path(config.docs_dir))
    (Path(_SEARCHED.name) / "draftsmith").symlink_to(ROOT)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [_SEARCHED.name]
    return config


def on_post_build(config: MkDocsConfig) -> None:
    """Takes the link away; `mkdocs serve` builds again."""
    (Path(_SEARCHED.name) / "draftsmith").unlink()


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


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that no file of docs/ holds."""
    for path, write in reference.generated().items():
        files.append(File.generated(config, path, content=write()))
    for name, path in OF_THE_ROOT.items():
        files.append(File.generated(config, path, content=of_the_root((ROOT / name).read_text())))
    return files


def of_the_root(text: str) -> str:
    """A file of the root, with its links as they are in project/."""
    text = re.sub(r"\]\(docs/", "](../", text)
    for name, path in OF_THE_ROOT.items():
        text = text.replace(f"]({name}", f"]({Path(path).name}")
    return text


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to files of the root, as GitHub wants them, to their pages."""
    for name, path in OF_THE_ROOT.items():
        up = "../" * page.file.src_uri.count("/")
        markdown = markdown.replace(f"]({up}../{name}", f"]({up}{path}")
    return markdown
