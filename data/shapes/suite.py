"""A suite directory of the world: for each published set of the benchmark suite a kind of scenario like it.

It runs the whole table without a network. A tiny target knows the world's words only, so second turns ask in them, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..suite import INDEX

# Published set -> the kind of scenario that stands in for it.
STAND_INS = {
    "LLaVA-W": "conversation",
    "DocVQA": "word",
    "POPE": "probe",
    "MMVet": "count",
    "IEdit": "edit",
    "MB": "edit",
    "Spot": "difference",
    "PSV": "story",
    "VIST": "story",
    "OCRBench": "word",
    "TextCaps": "caption",
}
QUESTIONS = {"NQ": "fact", "GSM8K": "sums"}
# The nearest that the world has to "summarize the previous answer" is a listing.
TURNS = {
    "caption": "Describe the picture.",
    "summary": "Which color does each object have?",
    "story": "Tell the story of the five pictures.",
}

# (folder, split, kind, index) -> a record, whose pictures are written under folder/images/split.
WriteRecord = Callable[[Path, str, str, int], dict[str, Any]]


def write_suite(folder: Path, count: int, write_record: WriteRecord, *, words: Callable[[str, int], str]) -> None:
    """Write `suite.json`, a file for each set and the pictures under `folder`.

    Args:
        count: records of each set.
        words: (split, index) -> the word that is drawn in a picture of kind `word`.
    """
    folder.mkdir(parents=True)
    index: dict[str, Any] = {"sets": {}, "questions": {}, "turns": TURNS}
    for name, kind in (*STAND_INS.items(), *QUESTIONS.items()):
        split = f"suite-{name}"
        (folder / "images" / split).mkdir(parents=True)
        records = [write_record(folder, split, kind, number) for number in range(count)]
        if name == "OCRBench":
            records = [record | {"references": [words(split, number)]} for number, record in enumerate(records)]
        (folder / f"{name}.json").write_text(json.dumps(records, indent=0))
        if name in QUESTIONS:
            index["questions"][name] = f"{name}.json"
        else:
            index["sets"][name] = {"file": f"{name}.json", "label": kind}
    (folder / INDEX).write_text(json.dumps(index, indent=1))
