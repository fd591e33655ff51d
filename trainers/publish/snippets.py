"""Code that a model card shows: each piece is run before the card is published, with local names in place of the Hub's.

A piece holds three literals that stand for something on the reader's side: the repository, the target, and a picture.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PICTURE, OWN_TARGET = "picture.png", "path/to/the/target"


@dataclass(frozen=True)
class Snippet:
    title: str
    code: str

    def shows(self, literal: str) -> bool:
        """Whether the code has this string, which stands for something of the reader's."""
        return json.dumps(literal) in self.code

    def with_names(self, names: Mapping[str, str]) -> str:
        """The code with some of its string literals replaced, the quotes around them included."""
        code = self.code
        for shown, meant in names.items():
            code = code.replace(json.dumps(shown), meant)
        return code


def loop_snippet(
    repo: str, target: str | None, text: str, *, pictures: int, label: int | None, modules: Sequence[str] = ()
) -> Snippet:
    """Our loop, three lines.

    Args:
        target: what the reader's target is called; None: the manifest names it.
        modules: of other packages, which the manifest names and a folder never imports by itself.
    """
    shown = "" if target is None else f", target={json.dumps(target)}"
    asked = "".join(f', "{PICTURE}"' for _ in range(pictures)) + ("" if label is None else f", label={label}")
    imports = "".join(f"import {module}  # code of its own package: install that first\n" for module in modules)
    code = (
        f"{imports}from draftsmith.eval.published import open_published\n"
        f"speculator = open_published({json.dumps(repo)}{shown})\n"
        f"print(speculator({json.dumps(text)}{asked}).output)"
    )
    return Snippet("Decode with the drafter (draftsmith)", code)


def transformers_snippet(repo: str, *, has_processor: bool) -> Snippet:
    """The drafter alone, as any other model. Families whose processors need torchvision get their tokenizer."""
    what = "AutoProcessor" if has_processor else "AutoTokenizer"
    code = (
        f"from transformers import AutoModelForImageTextToText, {what}\n"
        f"drafter = AutoModelForImageTextToText.from_pretrained({json.dumps(repo)})\n"
        f"processor = {what}.from_pretrained({json.dumps(repo)})"
    )
    return Snippet("Load the drafter alone (transformers)", code)
