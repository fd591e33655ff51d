"""mkdocs' hook (mkdocs.yml): generated pages, whole folders in the navigation, and GitHub's Markdown.

`scripts/reference.py` writes the reference. CONTRIBUTING.md and CHANGELOG.md are shown as pages of the site.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import reference
import site_markdown
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority, get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_LOG = get_plugin_logger("draftsmith")
ROOT = Path(__file__).resolve().parents[1]
_SEARCHED = tempfile.TemporaryDirectory()


@event_priority(100)  # before mkdocstrings reads its settings
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts a folder's pages in the place of `FOLDER/*`; mkdocstrings finds the package, whatever its folder's name."""
    config.nav = site_markdown.expanded(config.nav, Path(config.docs_dir))
    (Path(_SEARCHED.name) / "draftsmith").symlink_to(ROOT)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [_SEARCHED.name]
    return config


def on_post_build(config: MkDocsConfig) -> None:
    """Takes the link away; `mkdocs serve` builds again."""
    (Path(_SEARCHED.name) / "draftsmith").unlink()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that no file of docs/ holds."""
    for path, write in reference.generated().items():
        files.append(File.generated(config, path, content=write()))
    for name, path in site_markdown.OF_THE_ROOT.items():
        files.append(File.generated(config, path, content=site_markdown.of_the_root((ROOT / name).read_text())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to files of the root, as GitHub wants them, to their pages; GitHub's Markdown as mkdocs reads it."""
    if page.file.inclusion.is_not_in_nav():
        page.meta["search"] = {"exclude": True}
    return site_markdown.as_mkdocs_reads_it(site_markdown.to_the_root(markdown, page.file.src_uri))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Warns, which a strict build does not survive, of Markdown that stayed as it was written."""
    text = re.sub(r"<(code|pre)\b.*?</\1>", "", html, flags=re.S)
    for what, pattern in {"fence": "```", "list": r"(?m)^(?:<p>)?[^<\n]*\n- ", "table": r"\| --- \|"}.items():
        if match := re.search(pattern, text):
            _LOG.warning("%s: a %s is shown as text: %s", page.file.src_uri, what, text[match.start() :][:80])
    return html
