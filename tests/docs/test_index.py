"""The docs against the repository: links, names of files, tests, settings and recipes, and each item of the papers."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from draftsmith.core.section import Section
from draftsmith.recipes.config import schema
from draftsmith.recipes.config.files import recipe_names

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if page.parent.name != "decisions")
PAPERS = DOCS / "papers.md"
TRACKS = [DOCS / f"{name}.md" for name in ("lvlm", "visual-ar", "video")]
# Paper's heading -> what it numbers: equations, tables, figures. ADT-Tree counts tables in Roman numerals.
NUMBERED = {
    "TABED": (1, 14, 9),
    "LANTERN": (2, 11, 13),
    "ADT-Tree": (8, 5, 9),
    "Sparrow": (4, 8, 6),
    "SAGE": (39, 6, 4),
}
ROMAN = {"I": 1, "II": 2, "III": 3, "IV": 4, "V": 5}
TEST = re.compile(r"tests/[\w/]+\.py(?:::\w+)?")
FILE = re.compile(r"`((?:core|data|models|eval|trainers|recipes|scripts|tests|docs|trains)/[\w./-]*)(?:::\w+)?`")


def sections(page: str) -> dict[str, str]:
    """Heading of the second level -> what stands under it."""
    parts = re.split(r"^## (.+)$", page, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(text: str) -> list[list[str]]:
    """Cells of the table rows, without heads and rules."""
    result = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if cells and not set("".join(cells)) <= set("- "):
            result.append(cells)
    return result


def items(paper: str) -> dict[str, set[int]]:
    """equation, table, figure -> the numbers in the first column of a paper's table."""
    result: dict[str, set[int]] = {"equation": set(), "table": set(), "figure": set()}
    for cells in rows(sections(PAPERS.read_text())[paper]):
        for kind, number in re.findall(r"(equation|table|figure) (\w+)", cells[0]):
            result[kind].add(ROMAN.get(number) or int(number))
    return result


@cache
def functions(path: Path) -> frozenset[str]:
    return frozenset(n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef))


@pytest.mark.parametrize("paper", NUMBERED)
def test_every_item_of_a_paper_has_a_row(paper):
    counts = dict(zip(("equation", "table", "figure"), NUMBERED[paper], strict=True))
    assert items(paper) == {kind: set(range(1, count + 1)) for kind, count in counts.items()}


# What the last cell of a row begins with; drawings, texts and what was withdrawn have nothing to fail.
REPRODUCED = ("formula", "arithmetic", "settings", "G", "demo", "-", "went", "false as printed", "an interpretation")


def test_every_row_names_tests_that_are_there():
    """file::function, one or more; "as table 10" would hold nothing once that row changes."""
    named = 0
    for name, text in sections(PAPERS.read_text()).items():
        for cells in rows(text):
            if cells[0] == "item":
                continue
            assert len(cells) == 4 and cells[3].startswith(REPRODUCED), f"{name}: {cells}"
            tests = re.findall(r"`(tests/[^`]*)`", cells[2])
            assert tests or cells[3].startswith(("-", "went")), f"{name}, {cells[0]}: no test"
            for test in tests:
                path, _, function = test.partition("::")
                assert function in functions(ROOT / path), f"{name}, {cells[0]}: {test}"
                named += 1
    assert named > 100


@pytest.mark.parametrize("name", sorted(recipe_names()))
def test_every_recipe_is_in_the_paper_index(name):
    assert f"`{name}`" in PAPERS.read_text()


def test_no_page_names_a_recipe_that_is_none():
    known = set(recipe_names())
    stems = {name.split("-")[0].split("/")[0] for name in known} - {"demo", "eagle", "eagle3", "medusa", "chain"}
    for page in PAGES:
        for word in re.findall(r"`([\w.]+(?:[-/][\w.]+)+)`", page.read_text()):
            if word.startswith("demo/") or re.match(rf"({'|'.join(stems)})-", word):
                assert word in known, f"{page.name}: {word}"


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_tests_that_a_page_names_are_there(page):
    text = page.read_text()
    for name in FILE.findall(text):
        assert (ROOT / name).exists(), name
    for named in TEST.findall(text):
        path, _, function = named.partition("::")
        assert (ROOT / path).is_file(), named
        assert not function or function in functions(ROOT / path), named


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        place = (page.parent / target).resolve()
        # Pages of reference/ are made when the site is built, which checks links to them.
        if "://" not in target and place.parent != DOCS / "reference":
            assert place.exists(), target


def test_every_page_is_in_the_list_and_decisions_are_few():
    listed = re.findall(r"\]\((\S+\.md)\)", (DOCS / "README.md").read_text())
    assert {page.name for page in DOCS.glob("*.md")} - {"README.md"} <= set(listed)
    for folder in ("decisions", "methods"):
        inside = re.findall(r"\]\(([\w.-]+\.md)\)", (DOCS / folder / "README.md").read_text())
        assert {page.name for page in (DOCS / folder).glob("*.md")} - {"README.md"} <= set(inside), folder
    numbers = [path.name[:4] for path in (DOCS / "decisions").glob("[0-9]*.md")]
    assert len(set(numbers)) == len(numbers) <= 12, "what no longer holds is in git"


# ---- settings


@cache
def defaults() -> dict[str, frozenset[str]]:
    """Name or alias of every setting of every section -> its defaults there, as pages write them."""
    assert schema.Recipe
    result: dict[str, set[str]] = {}
    left = [Section]
    while left:
        here = left.pop()
        left += here.__subclasses__()
        for key, field in here.model_fields.items():
            for name in filter(None, (key, field.alias)):
                result.setdefault(name, set()).add(written(field.default))
    return {name: frozenset(values) for name, values in result.items()}


def written(value: object) -> str:
    value = getattr(value, "kind", value)  # a section goes by its kind
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, int | float) else str(value)


@pytest.mark.parametrize("page", TRACKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_that_a_track_names_exist(page):
    known = set(defaults())
    for cells in rows(page.read_text()):
        if len(cells) != 3 or not re.fullmatch(r"(`[^`]+`(, | \(.*?\))*)+( of .*)?( \(.*\))?", cells[0]):
            continue
        for key in re.findall(r"`([\w.]+)(?:: \w+)?`", cells[0]):
            if "/" not in key:
                unknown = [part for part in key.split(".") if part not in known | {"rule"}]
                assert not unknown, f"{page.name}: {key}"


def test_defaults_that_a_track_marks_are_the_codes():
    """`a*, b` after a setting, or a mark for each of several; a mark that is one kind's alone is left to readers."""
    compared = 0
    for page in TRACKS:
        for cells in rows(page.read_text()):
            keys = re.findall(r"`([\w.]+)`", cells[0]) if len(cells) == 3 else []
            marked = re.findall(r"(?:^|[,;] )([\w./-]+)\*", cells[1]) if keys else []
            if len(keys) != len(marked) or not cells[0].startswith("`"):
                continue
            for key, value in zip(keys, marked, strict=True):
                if key.endswith("kind"):  # tells sections apart, and has no default
                    continue
                value = value if not re.fullmatch(r"-?[\d.]+", value) else f"{float(value):g}"
                assert value in defaults()[key.split(".")[-1]], f"{page.name}: {key} is {value}"
                compared += 1
    assert compared > 15
