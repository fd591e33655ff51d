"""A suite directory of the world for the sets of videos, pictures and texts: a kind of scenario stands in for each.

Clips of several lengths tell the same stories, so that what changes with a clip's length is its length alone. A tiny
target knows the world's words only: long answers are asked for in them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..benchmark_sets import BENCHMARK_SETS, LETTERS
from ..suite import INDEX

# Published set of pictures or texts -> the kind of scenario that stands in for it; sets of videos have clips.
STAND_INS = {
    "TextVQA": "word",
    "GQA": "attribute",
    "ChartQA": "count",
    "SEED-Bench": "place",
    "COCO": "caption",
    "MME": "probe",
    "ScienceQA": "colors",
    "MM-Vet": "edit",
    "AI2D": "difference",
    "GSM8K": "sums",
    "HumanEval": "fact",
}
PROMPTS = {"video": "What happens in the clip?", "image": "Describe the picture.", "explain": ""}
SPLIT = "clips"  # of all clips of all lengths: the split is part of what a story is drawn from
_OPTIONS = 4

# (folder, split, kind, index, frames of a clip) -> a record, whose pictures are written under folder/images/split.
WriteRecord = Callable[[Path, str, str, int, int], dict[str, Any]]


def length_set(num_frames: int) -> str:
    """The name of the set whose clips have so many frames."""
    return f"clips-{num_frames}"


def write_video_suite(
    folder: Path, count: int, lengths: Sequence[int], write_record: WriteRecord, *, seed: int
) -> None:
    """Write `suite.json`, a file for each set, and pictures and clips under `folder`.

    A set for each length holds the same `count` stories; of a published set of videos, record i has the length whose
    turn it is.

    Args:
        seed: of the wrong options among which a record's answer stands.
    """
    folder.mkdir(parents=True)
    index: dict[str, Any] = {"sets": {}, "prompts": PROMPTS}

    def write(name: str, kind: str, records: list[dict[str, Any]], **about: str) -> None:
        with_options = BENCHMARK_SETS[name].stock == "letter" if name in BENCHMARK_SETS else False
        if with_options:
            records = _with_options(records, f"{seed}/{name}")
        (folder / f"{name}.json").write_text(json.dumps(records, indent=0))
        index["sets"][name] = {"file": f"{name}.json", "label": kind, **about}

    for frames in lengths:
        name = length_set(frames)
        clips = [_moved(write_record(folder, SPLIT, "clip", i, frames), folder, name) for i in range(count)]
        write(name, f"{frames} frames", clips, group="video", describe="own", stock="own")
    for name, about in BENCHMARK_SETS.items():
        kind = "clip" if about.medium == "video" else STAND_INS[name]
        split = f"suite-{name}"
        (folder / "images" / split).mkdir(parents=True)
        write(name, kind, [write_record(folder, split, kind, i, lengths[i % len(lengths)]) for i in range(count)])
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def _moved(record: dict[str, Any], folder: Path, name: str) -> dict[str, Any]:
    """The record with its clip in a folder of the set's own: the lengths share names."""
    before = folder / record["video"]
    after = f"videos/{name}/{before.name}"
    (folder / after).parent.mkdir(parents=True, exist_ok=True)
    before.rename(folder / after)
    return record | {"id": f"{name}-{record['id']}", "video": after}


def _with_options(records: list[dict[str, Any]], seed: str) -> list[dict[str, Any]]:
    """Records with the answers of others as wrong options, as far as there are other answers."""
    answers = [record["conversations"][-1]["value"] for record in records]
    found = []
    for number, (record, answer) in enumerate(zip(records, answers, strict=True)):
        rng = random.Random(f"{seed}/{number}")
        others = sorted(set(answers) - {answer})
        options = [answer, *rng.sample(others, min(len(others), _OPTIONS - 1))]
        rng.shuffle(options)
        found.append(record | {"options": options, "letter": LETTERS[options.index(answer)]})
    return found
