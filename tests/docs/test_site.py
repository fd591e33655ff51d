"""The site: every page is in its navigation, and the generated reference holds every key, recipe and command."""

import importlib
import pkgutil
import re
import sys
from pathlib import Path

import pytest
import yaml
from draftsmith.core.section import kinds, sections
from draftsmith.models.drafters import AnyDrafter
from draftsmith.recipes.commands.cli import COMMANDS
from draftsmith.recipes.config.files import recipe_names

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
METHODS = sorted(page for page in (DOCS / "methods").glob("*.md") if page.name != "README.md")
# Of the order, one pattern for all.
HEADINGS = ["What it does", "Equation", "Recipe", "Measured", "Departures"]


def script(name: str):
    """A module of scripts/, as the hook finds it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        module = importlib.import_module(name)
        sys.modules.pop(name)
        return module


@pytest.fixture(scope="module")
def reference():
    return script("reference")


def named(nav) -> list[str]:
    """The files of a navigation, and its FOLDER/*."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [name for part in parts for name in named(part)]


def navigation() -> tuple[list[str], set[str]]:
    """The pages of the navigation, `FOLDER/*` expanded, and the pages of docs/ that stand outside it."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    outside = {path for line in settings["not_in_nav"].split() for path in DOCS.rglob("*.md")
               if f"/{path.relative_to(DOCS)}".startswith(line)}  # fmt: skip
    return named(script("site_markdown").expanded(settings["nav"], DOCS)), {str(p.relative_to(DOCS)) for p in outside}


def test_every_page_is_in_the_navigation_once(reference):
    inside, outside = navigation()
    assert len(inside) == len(set(inside)) and not outside & set(inside)
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    made = {*reference.generated(), "project/contributing.md", "project/changelog.md"}
    assert set(inside) == pages - outside | made


def test_what_pages_import_and_document_is_there():
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    names = re.findall(r"^::: ([\w.]+)$", text, re.M)
    for module, imported in re.findall(r"^ *from (draftsmith[\w.]*) import ([\w, ]+)$", text, re.M):
        names += [f"{module}.{name}" for name in imported.split(", ")]
    assert len(names) > 40
    for name in names:
        assert pkgutil.resolve_name(name)


def test_the_site_can_be_read():
    """At most 50 pages, generated ones too, and 37,500 words in those of docs/; decisions and logs stay outside."""
    inside, outside = navigation()
    words = {page: len((DOCS / page).read_text().split()) for page in inside if (DOCS / page).exists()}
    assert len(inside) <= 50, len(inside)
    assert sum(words.values()) <= 37_500, sorted(words.items(), key=lambda item: -item[1])[:10]
    assert {"papers.md", "results/benchmarks.md", "decisions/README.md"} <= outside


def test_every_key_has_a_row_with_a_description(reference):
    """Found in the page itself: below the section's own heading, before the next one."""
    pages = reference.config_pages()
    below = {
        anchor: text
        for page in pages.values()
        for anchor, text in re.findall(r"^## [^\n]* \{#(\w+)\}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    }
    places = reference.reachable()
    assert (
        len(below) == len(places) > 80
        and {"sparrowconfig", "trainrecords", "trainstates", "traincodes", "method", "lanternconfig"} <= below.keys()
    )
    for section in places:
        rows = below[section.__name__.lower().lstrip("_")].splitlines()
        for name, field in section.model_fields.items():
            row = next((row for row in rows if row.startswith(f"| `{field.alias or name}` |")), None)
            assert row is not None, f"{section.__name__}.{name} has no row"
            assert not row.endswith("|  |"), f"{section.__name__}.{name}: give the key a comment in its class"


def test_every_recipe_and_command_is_shown(reference):
    recipes, commands = reference.recipes_page(), reference.commands_page()
    for name in recipe_names():
        assert f"| [`{name}`](#" in recipes
    for name, command in COMMANDS.items():
        assert f"## draftsmith {name}\n" in commands and command.summary in commands
    assert "Command: deepspeed trains/train.py recipe=eagle3-qwen2.5-vl-7b" in recipes
    assert "--prompts {all,text}" in commands


@pytest.mark.parametrize("page", METHODS, ids=lambda page: page.name)
def test_a_methods_page_has_the_pattern(page):
    text = page.read_text()
    assert re.findall(r"^## (.+)$", text, re.M) == HEADINGS
    assert re.search(r"^\*\*Papers?\.\*\* ", text, re.M)
    command = re.search(r"^```bash\ndraftsmith recipe=(\S+) dry_run=true", text, re.M)
    assert command is not None and command[1] in recipe_names()
    assert "Nothing was measured" in text


def test_every_drafter_has_a_page():
    pages = [page.read_text() for page in METHODS]
    for section in sections(AnyDrafter):
        for kind in kinds(section):
            assert any(re.search(rf"\bkind: {kind}\b", page) for page in pages), kind


# Messages that the page quotes -> one of the sources must hold their words.
def test_troubleshooting_quotes_messages_that_exist():
    text = (DOCS / "how-to" / "troubleshooting.md").read_text()
    quoted = [row.replace("`", "") for row in re.findall(r'^\| (".*?") \|', text, re.M)]
    assert len(quoted) > 20
    folders = ("core", "data", "models", "eval", "trainers", "recipes")
    sources = [path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    # Messages are written over several lines and with values in them.
    joined = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))
    for message in re.findall(r'"(.*?)"', "\n".join(quoted)):
        pieces = [piece.strip(" ,:") for piece in message.split("...")]
        for piece in filter(None, pieces):
            assert piece in joined, f"no message says {piece!r}"
