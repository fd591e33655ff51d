"""Suite directories of the drawn scenes: for each published set, a kind of scenario like it.

They run the papers' tables without a network. A tiny target knows the scenes' words only, so second turns and long
answers are asked for in them. Clips of several lengths tell the same stories, so that their length alone differs.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from ...core.json_types import JsonObject
from ..suites.benchmark_sets import BENCHMARK_SETS, LETTERS
from ..suites.suite import INDEX

# Published set -> the kind of scenario that stands in for it.
SUBSTITUTES = {
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
# The nearest that the synthetic dataset has to "summarize the previous answer" is a listing.
TURNS = {
    "caption": "Describe the picture.",
    "summary": "Which color does each object have?",
    "story": "Tell the story of the five pictures.",
}

# Published set of pictures or texts -> the kind of scenario that stands in for it; sets of videos have clips.
VIDEO_STAND_INS = {
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
# Splits that suites' records are drawn by, and a dataset has none of: all clips of all lengths, and sets.
CLIPS, SETS = "clips", "suite-"
_OPTIONS = 4

# (folder, split, kind, index, frames of a clip) -> a record, whose pictures are written under folder/images/split.
WriteRecord = Callable[..., JsonObject]


def write_suite(folder: Path, count: int, write_record: WriteRecord, *, words: Callable[[str, int], str]) -> None:
    """Write `suite.json`, a file for each set and the pictures under `folder`.

    Args:
        count: records of each set.
        words: (split, index) -> the word that is drawn in a picture of kind `word`.
    """
    folder.mkdir(parents=True)
    index: JsonObject = {"sets": {}, "questions": {}, "turns": TURNS}
    for name, kind in (*SUBSTITUTES.items(), *QUESTIONS.items()):
        split = f"{SETS}{name}"
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


def num_suite_records(count: int) -> int:
    """Records that `write_suite` writes."""
    return count * (len(SUBSTITUTES) + len(QUESTIONS))


def num_video_suite_records(count: int, lengths: Sequence[int], kinds: Sequence[str]) -> int:
    """Records that `write_video_suite` writes."""
    return count * (len(kinds) * len(lengths) + len(BENCHMARK_SETS))


def length_set(num_frames: int, kind: str = "clip") -> str:
    """The name of the set whose clips have so many frames: `clips-4`; of the scenario `clip_late`, `late-4`."""
    return f"{kind.removeprefix('clip_') if kind != 'clip' else 'clips'}-{num_frames}"


def write_video_suite(
    folder: Path,
    count: int,
    lengths: Sequence[int],
    write_record: WriteRecord,
    *,
    seed: int,
    kinds: Sequence[str] = ("clip",),
) -> None:
    """Write `suite.json`, a file for each set, and pictures and clips under `folder`.

    A set for each length holds the same `count` stories; of a published set of videos, record i has the length whose
    turn it is.

    Args:
        seed: of the wrong options among which a record's answer stands.
        kinds: scenarios of clips; a set for each length of each of them.
    """
    folder.mkdir(parents=True)
    index: JsonObject = {"sets": {}, "prompts": PROMPTS}

    def write(name: str, kind: str, records: list[JsonObject], **about: str) -> None:
        with_options = BENCHMARK_SETS[name].stock == "letter" if name in BENCHMARK_SETS else False
        if with_options:
            records = _with_options(records, f"{seed}/{name}")
        (folder / f"{name}.json").write_text(json.dumps(records, indent=0))
        index["sets"][name] = {"file": f"{name}.json", "label": kind, **about}

    for kind, frames in itertools.product(kinds, lengths):
        name = length_set(frames, kind)
        clips = [_moved(write_record(folder, CLIPS, kind, i, frames), folder, name) for i in range(count)]
        write(name, f"{frames} frames", clips, group="video", describe="own", stock="own")
    for name, about in BENCHMARK_SETS.items():
        kind = "clip" if about.medium == "video" else VIDEO_STAND_INS[name]
        split = f"{SETS}{name}"
        (folder / "images" / split).mkdir(parents=True)
        write(name, kind, [write_record(folder, split, kind, i, lengths[i % len(lengths)]) for i in range(count)])
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def _moved(record: JsonObject, folder: Path, name: str) -> JsonObject:
    """The record with its clip in a folder of the set's own: the lengths share names."""
    before = folder / record["video"]
    after = f"videos/{name}/{before.name}"
    (folder / after).parent.mkdir(parents=True, exist_ok=True)
    before.rename(folder / after)
    return record | {"id": f"{name}-{record['id']}", "video": after}


def _with_options(records: list[JsonObject], seed: str) -> list[JsonObject]:
    """Records with the answers of others as wrong options, as far as there are other answers."""
    answers = [record["conversations"][-1]["value"] for record in records]
    with_options = []
    for number, (record, answer) in enumerate(zip(records, answers, strict=True)):
        rng = random.Random(f"{seed}/{number}")
        others = sorted(set(answers) - {answer})
        options = [answer, *rng.sample(others, min(len(others), _OPTIONS - 1))]
        rng.shuffle(options)
        with_options.append(record | {"options": options, "letter": LETTERS[options.index(answer)]})
    return with_options
