"""Lists on a command line are quoted wherever a reader may copy them: zsh takes `stages=[a,b]` for a pattern."""

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# key=[...] that begins a word. A quote before it is the shell's own, or Python's around a whole argument.
BARE = re.compile(r"""(?:^|[\s`(\[])((?:--)?[a-z_][\w.]*=\[[^\]]*\])""", re.M)
COMMAND = re.compile(r"\b(draftsmith|deepspeed|torchrun|python|recipe=\S)|\bstages=\[")


def files(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split()]


def bare_in_text(text: str) -> list[str]:
    return [word for line in text.splitlines() if COMMAND.search(line) for word in BARE.findall(line)]


def bare_in_code(source: str) -> list[str]:
    """Of strings that say more than the one argument: help, messages, docstrings."""
    result = []
    for node in ast.walk(ast.parse(source)):
        text = None
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "NAME" for part in node.values)
        if text is not None and re.search(r"stages=\[[^\]]*\]", text) and not re.fullmatch(r"\S+", text):
            result += [word for word in BARE.findall(text) if "stages=" in word]
    return result


def test_pages_recipes_and_scripts_quote_lists():
    kept = [path for path in files("*.md", "*.yaml", "*.ipynb", "scripts/*") if path.suffix not in (".py", ".json")]
    assert len(kept) > 100
    found = {str(path.relative_to(ROOT)): words for path in kept if (words := bare_in_text(path.read_text()))}
    assert not found


def test_messages_and_help_quote_lists():
    sources = [path for path in files("*.py") if path.relative_to(ROOT).parts[0] != "tests"]
    found = {str(path.relative_to(ROOT)): words for path in sources if (words := bare_in_code(path.read_text()))}
    assert not found
