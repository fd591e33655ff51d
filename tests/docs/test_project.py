"""Files for people who judge the project from outside: they agree with the code, and a forge can read them."""

import re
import tomllib
from pathlib import Path

import draftsmith
import pytest
import yaml
from draftsmith.recipes.config.health import pins

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == draftsmith.__version__ and citation["license"] == PROJECT["license"]
    assert {"cff-version", "title", "message", "authors"} <= set(citation)


def test_the_changelog_begins_with_this_version_and_the_tag_is_the_owners():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (.+)$", changelog, re.M)[0] == draftsmith.__version__
    assert len(changelog.splitlines()) <= 160  # for users; git has the history
    for text in (changelog, (ROOT / "docs" / "project.md").read_text()):
        assert f"tag `v{draftsmith.__version__}`" in text and "owner" in text


@pytest.mark.parametrize(("page", "words"), [("README.md", 900), ("CONTRIBUTING.md", 800)])
def test_pages_of_the_root_are_short(page, words):
    assert len((ROOT / page).read_text().split()) <= words


def test_the_page_of_versions_says_what_is_required_and_pinned():
    page = (ROOT / "docs" / "project.md").read_text()
    rows = {
        name: (supported, tested)
        for name, supported, tested in re.findall(r"^\| (\w+) \| (.+) \| (.+) \|$", page, re.M)
    }
    required = dict(re.match(r"([\w-]+)(.*)", line).groups() for line in PROJECT["dependencies"])
    for name in ("torch", "transformers", "deepspeed"):
        supported, tested = rows[name]
        assert tested == pins()[name]
        assert set(re.findall(r"[\d.]+", supported)) == set(re.findall(r"[\d.]+", required[name]))
    assert rows["Python"][0] == "3.11, 3.12" and PROJECT["requires-python"] == ">=3.11,<3.13"


def test_a_public_forge_runs_the_readmes_test_command_for_each_python():
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]["tests"]
    commands = "\n".join(step.get("run", "") for step in job["steps"])
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12"]
    for command in ("scripts/test", "ruff check .", "ruff format --check ."):
        assert command in commands
    own = (ROOT / ".ci" / "run").read_text()
    assert set(re.findall(r"-p (draftsmith\.\w+)", commands)) == set(re.findall(r"-p (draftsmith\.\w+)", own))
    assert "scripts/test" in (ROOT / "README.md").read_text()
