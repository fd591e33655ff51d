"""Write the world to disk as LLaVA JSON plus PNG, so that it enters training like any other data.

A record depends on (seed, split, kind, index) alone: changing how many there are changes none of them.
The folder is written aside and renamed, so an interrupted write is never taken for a whole one.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

from .scenarios import KINDS, TEXT_ONLY, Scenario
from .scene import draw


def write_world(folder: Path, *, seed: int, image_size: int, splits: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Write `<split>.json`, `images/<split>/*.png` and `manifest.json` under `folder`; return the manifest.

    Args:
        image_size: side of the square pictures in pixels.
        splits: split -> kind of scenario (a key of `KINDS`) -> number of records.
    """
    aside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    manifest: dict[str, Any] = {"seed": seed, "image_size": image_size, "splits": splits, "sha256": {}}
    for split, counts in splits.items():
        (aside / "images" / split).mkdir(parents=True)
        records = [
            _write_record(aside, split, kind, index, seed, image_size)
            for kind, number in counts.items()
            for index in range(number)
        ]
        text = json.dumps(records, indent=0)
        (aside / f"{split}.json").write_text(text)
        manifest["sha256"][f"{split}.json"] = hashlib.sha256(text.encode()).hexdigest()
    (aside / "manifest.json").write_text(json.dumps(manifest, indent=1))
    # A stage that was killed before it was marked as done finds its own world here, and writes it again.
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    return manifest


def sample(seed: int, split: str, kind: str, index: int) -> Scenario:
    """The scenario behind a record. Seeded by a string: Python hashes it the same on every machine."""
    return KINDS[kind](random.Random(f"{seed}/{split}/{kind}/{index}"))


def _write_record(folder: Path, split: str, kind: str, index: int, seed: int, image_size: int) -> dict[str, Any]:
    scenario = sample(seed, split, kind, index)
    images = []
    for number, scene in enumerate(scenario.scenes):
        name = f"images/{split}/{kind}-{index:06d}-{number}.png"
        draw(scene, image_size).save(folder / name)
        images.append(name)
    marks = "<image>\n" * len(images)
    turns = []
    for number, (question, answer) in enumerate(scenario.turns):
        turns.append({"from": "human", "value": (marks if number == 0 else "") + question})
        turns.append({"from": "gpt", "value": answer})
    record: dict[str, Any] = {"id": f"{split}-{kind}-{index:06d}"}
    if images:
        record["image"] = images[0] if len(images) == 1 else images
    return record | {
        "conversations": turns,
        "kind": kind,
        "picture_dependent": kind not in TEXT_ONLY,
        **scenario.extra,
    }
