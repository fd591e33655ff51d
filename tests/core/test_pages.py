"""Messages name pages of the documentation by where the reader finds them."""

import re
from pathlib import Path

import pytest
from draftsmith.core.errors import page

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("core", "data", "eval", "models", "recipes", "trainers")
SOURCES = {path: path.read_text() for top in TOPS for path in (ROOT / top).rglob("*.py")}
NAMED = {name for text in SOURCES.values() for name in re.findall(r"""\bpage\(["']([\w/.-]+)["']\)""", text)}


def test_a_page_is_named_from_where_the_command_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert page("exports.md") == "docs/exports.md"
    monkeypatch.chdir(tmp_path)
    assert page("exports.md") == str(ROOT / "docs" / "exports.md")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "exports.md").write_text("another project's")
    assert page("exports.md") == str(ROOT / "docs" / "exports.md")


@pytest.mark.parametrize("name", sorted(NAMED))
def test_every_page_that_a_message_names_exists(name):
    assert (ROOT / "docs" / name).is_file()


def test_no_message_names_what_a_wheel_does_not_carry():
    """Texts in code, without docstrings and comments: pages are named by `page`, and scripts are not in the wheel."""
    assert NAMED
    found = []
    for path, text in SOURCES.items():
        lines = re.sub(r'""".*?"""', "", text, flags=re.S).splitlines()
        code = [line.split("  #")[0] for line in lines if not line.lstrip().startswith("#")]
        found += [
            f"{path.relative_to(ROOT)}: {line.strip()}" for line in code if re.search(r"docs/[\w-]+|scripts/\w", line)
        ]
    in_a_checkout = "recipes/config/health.py"  # it says so there alone
    assert [one for one in found if not one.startswith(in_a_checkout)] == []
