"""Write the synthetic dataset to disk as LLaVA JSON plus PNG and mp4, so that it enters training like any other data.

A record depends on (seed, split, kind, index) alone: changing how many there are changes none of them.
The folder is written aside and renamed, so an interrupted write is never taken for a whole one.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from ...core.files import new_folder
from ...core.json_types import JsonObject
from ..pictures.videos import write_clip
from .captioned import HELD_OUT
from .scenarios import KINDS, OF_CLIPS, TEXT_ONLY, Scenario
from .scene import COLORS, SHAPES, Wordings, draw, drawn_by, usual
from .suites import write_suite, write_video_suite


def write_dataset(
    folder: Path,
    *,
    seed: int,
    image_size: int,
    splits: dict[str, dict[str, int]],
    mixtures: dict[str, dict[str, str]] | None = None,
    suite: int = 0,
    clip_frames: dict[str, int] | None = None,
    video_suite: int = 0,
    lengths: Sequence[int] = (4, 16, 64),
    clip_kinds: Sequence[str] = ("clip",),
    wordings: Wordings = "usual",
    unseen: int = 0,
    before_each: Callable[[], None] = lambda: None,
) -> JsonObject:
    """Write `<split>.json`, `images/<split>/*.png`, `videos/<split>/*.mp4`, `<mixture>.yaml` and `manifest.json`.

    Returns the manifest.

    Args:
        image_size: side of the square pictures in pixels (even, where clips are written).
        splits: split -> kind of scenario (a key of `KINDS`) -> number of records.
        mixtures: mixture -> split -> how much of it, as OneVision's files have it.
        suite: records of each set of the benchmark suite's substitute, under `suite/`; 0: none.
        clip_frames: split -> frames of its clips, where they are not four; at least two.
        video_suite: records of each set of videos, pictures and texts, under `video_suite/`; 0: none.
        lengths: frames of that suite's clips, in turn.
        clip_kinds: scenarios of that suite's clips (keys of `OF_CLIPS`), a set of each for each of `lengths`.
        wordings: "several" draws each answer's among right ones; the scenes and questions stay.
        unseen: pairs of a shape and a colour that the split `held_out` alone shows, one at least in each of its records
            with pictures; 0: every split shows all.
        before_each: called before each record; what it raises leaves nothing behind.
    """
    frames = clip_frames or {}
    manifest: JsonObject = {"seed": seed, "image_size": image_size, "splits": splits, "sha256": {}}
    manifest |= {"clip_frames": frames} if frames else {}
    manifest |= {} if wordings == "usual" else {"wordings": wordings}
    manifest |= {"unseen": unseen} if unseen else {}

    def record(at: Path, split: str, kind: str, index: int, num_frames: int | None = None) -> JsonObject:
        before_each()
        scenario = sample(seed, split, kind, index, num_frames=num_frames, wordings=wordings, unseen=unseen)
        return _write_record(at, split, kind, index, scenario, image_size)

    # A stage that was killed before it was marked as done finds its own pictures here, and writes them again.
    with new_folder(folder, replace=True) as aside:
        for split, counts in splits.items():
            (aside / "images" / split).mkdir(parents=True)
            numbers = [(kind, index) for kind, count in counts.items() for index in range(count)]
            text = json.dumps([record(aside, split, *number, frames.get(split)) for number in numbers], indent=0)
            (aside / f"{split}.json").write_text(text)
            manifest["sha256"][f"{split}.json"] = hashlib.sha256(text.encode()).hexdigest()
        for mixture, parts in (mixtures or {}).items():
            entries = [{"json_path": f"{split}.json", "sampling_strategy": share} for split, share in parts.items()]
            (aside / f"{mixture}.yaml").write_text(yaml.safe_dump({"datasets": entries}, sort_keys=False))
        if suite:
            write_suite(
                aside / "suite",
                suite,
                record,
                words=lambda split, index: str(sample(seed, split, "word", index).scenes[0].word),
            )
        if video_suite:
            write_video_suite(aside / "video_suite", video_suite, lengths, record, seed=seed, kinds=clip_kinds)
        (aside / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return manifest


def sample(
    seed: int,
    split: str,
    kind: str,
    index: int,
    *,
    num_frames: int | None = None,
    wordings: Wordings = "usual",
    unseen: int = 0,
) -> Scenario:
    """The scenario behind a record. Seeded by a string: Python hashes it the same on every machine.

    Args:
        num_frames: of a clip; None: the usual four.
        wordings: "usual": one for all answers of a kind; "several": drawn among right ones, of the same scenes.
        unseen: as of `write_dataset`. A scenario is drawn anew until it shows what its split may show.
    """
    record = f"{seed}/{split}/{kind}/{index}"
    pairs = unseen_pairs(seed, unseen)
    attempt = 0
    while True:
        scenario = _drawn(record if not attempt else f"{record}/again-{attempt}", kind, num_frames, wordings)
        shown = {(item.shape, item.color) for scene in (*scenario.scenes, *scenario.frames) for item in scene.objects}
        if not shown or bool(shown & pairs) == (unseen > 0 and split == HELD_OUT):
            return scenario
        attempt += 1


def unseen_pairs(seed: int, count: int) -> frozenset[tuple[str, str]]:
    """`count` pairs of a shape and a colour, at most 24: each shape and each colour comes in other pairs as well."""
    assert 0 <= count <= 24, count
    rng, size = random.Random(f"{seed}/unseen"), len(SHAPES)
    shapes, colors = rng.sample(SHAPES, size), rng.sample(sorted(COLORS), len(COLORS))
    return frozenset((shapes[i % size], colors[(i % size + i // size) % len(colors)]) for i in range(count))


def _drawn(record: str, kind: str, num_frames: int | None, wordings: Wordings) -> Scenario:
    rng, say = random.Random(record), usual if wordings == "usual" else drawn_by(random.Random(f"{record}/wording"))
    if kind in OF_CLIPS and num_frames is not None:
        return OF_CLIPS[kind](rng, say, num_frames)
    return KINDS[kind](rng, say)


def _write_record(folder: Path, split: str, kind: str, index: int, scenario: Scenario, image_size: int) -> JsonObject:
    images = []
    for number, scene in enumerate(scenario.scenes):
        name = f"images/{split}/{kind}-{index:06d}-{number}.png"
        draw(scene, image_size).save(folder / name)
        images.append(name)
    video = f"videos/{split}/{kind}-{index:06d}.mp4"
    if scenario.frames:
        (folder / video).parent.mkdir(parents=True, exist_ok=True)
        drawn = {scene: draw(scene, image_size) for scene in set(scenario.frames)}
        # One frame a second: readers that take one of each second take them all.
        write_clip(folder / video, [drawn[scene] for scene in scenario.frames], fps=1)
    # A clip's mark is <image>, too, in most of the published files.
    marks = "<image>\n" * (len(images) + bool(scenario.frames))
    turns = []
    for number, (question, answer) in enumerate(scenario.turns):
        turns.append({"from": "human", "value": (marks if number == 0 else "") + question})
        turns.append({"from": "gpt", "value": answer})
    record: JsonObject = {"id": f"{split}-{kind}-{index:06d}"}
    if images:
        record["image"] = images[0] if len(images) == 1 else images
    if scenario.frames:
        record["video"] = video
    return record | {
        "conversations": turns,
        "kind": kind,
        "picture_dependent": kind not in TEXT_ONLY,
        **scenario.extra,
    }
