"""The OneVision demo end to end with a few steps: mixtures, clips, long samples, four drafts side by side."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from draftsmith.eval.measured_rows import PLAIN, read_rows
from ranks_run import run_recipe

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("name", "caption", "colors", "attribute", "conversation", "place", "probe", "count", "difference", "edit",
         "story", "clip", "sums", "fact")  # fmt: skip
FEW = [
    f"stages.world.splits.words={{{', '.join(f'{kind}: 8' for kind in KINDS)}}}",
    "stages.world.splits.single={name: 1, colors: 1, caption: 8, attribute: 8, conversation: 8, place: 1, probe: 1, "
    "count: 1, sums: 2, fact: 1}",
    "stages.world.splits.pairs={difference: 4, edit: 4}",
    "stages.world.splits.stories={story: 6}",
    "stages.world.splits.clips={clip: 6}",
    "stages.world.splits.seen_single={attribute: 1, conversation: 0, place: 1}",
    "stages.world.splits.seen_pairs={difference: 1, edit: 1}",
    "stages.world.splits.seen_stories.story=2",
    "stages.world.splits.seen_clips.clip=2",
    "stages.world.splits.binding.attribute=2",
    "stages.evaluate.max_new_tokens=8",
    "stages.evaluate.warmup=0",
]  # fmt: skip
TRAINED = ("target", "language", "knowledge", "single_image", "onevision", "single_only", "few_single_image",
           "few_onevision", "few_single_only")  # fmt: skip
FEW += [f"stages.{name}.{key}" for name in TRAINED for key in ("steps=2", "batch_size=8")]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, str]:
    """The run's folder and what it said."""
    output = tmp_path_factory.mktemp("ov") / "run"
    return output, run_recipe(1, "recipe=demo/lvlm-ov", f"output={output}", *FEW, cwd=ROOT)


def of_stage(said: str, name: str) -> str:
    """What was said in a stage."""
    return said.split(f"stage {name}\n")[1].split("\nstage ")[0]


def config(run: Path, stage: str) -> dict:
    return json.loads((run / stage / "config.json").read_text())["text_config"]


def test_every_phase_leaves_a_draft_with_its_positions(run):
    folder, _ = run
    positions = {s: config(folder, s)["max_position_embeddings"] for s in TRAINED if s != "target"}
    many = {"single_image", "onevision", "single_only"}
    assert positions == {stage: 256 if stage in many else 64 for stage in positions}
    weights = {(folder / s / "model.safetensors").read_bytes() for s in ("onevision", "single_only")}
    assert len(weights) == 2


def test_mixtures_and_long_samples_are_told_before_training(run):
    folder, said = run
    assert "4 data files, 2 of them in part: 28 of 52 records" in of_stage(said, "onevision")
    assert "no sample is longer than max_length 256" in of_stage(said, "onevision")
    few = of_stage(said, "few_onevision")
    assert re.search(r"longer than max_length 64: 1\d of 28 \(the longest has at least \d+ ids\)", few)
    assert "their pictures are taken away" in few and "raise max_length" not in few
    listed = [json.loads(line) for line in (folder / "few_onevision" / "skipped.jsonl").read_text().splitlines()]
    dropped = {Path(entry["file"]).stem for entry in listed if "pictures are dropped" in entry["reason"]}
    assert dropped and dropped <= {"stories", "clips"}, "a conversation is too long without its picture, too"
    assert "they are left out" in of_stage(said, "few_single_only")


def test_the_report_tells_positions_and_training_apart(run):
    folder, said = run
    report = json.loads((folder / "evaluate" / "report.json").read_text())
    drafts = {"onevision", "single_only", "few_onevision", "few_single_only"}
    rows = [row for row in read_rows(folder / "evaluate" / "rows.jsonl") if row.method != PLAIN]
    result = Counter((row.benchmark, row.method, row.drafter) for row in rows)
    assert result == {(name, mode, draft): 2 for name in ("single", "pairs", "stories", "clips") for mode in "MT"
                     for draft in drafts}  # fmt: skip
    # Five pictures and what is decoded after them: more than 64 positions.
    beyond = {(row.benchmark, row.method, row.drafter) for row in rows if row.details["beyond_positions"]}
    assert beyond == {("stories", "M", draft) for draft in drafts if draft.startswith("few")}
    assert all(row.identical for row in rows)
    assert len({one["name"] for one in report["contrasts"]}) == 4
    text = (folder / "evaluate" / "report.md").read_text()
    assert all(draft in text for draft in drafts) and "more positions, trained on several pictures" in text
    warned = [line for line in said.splitlines() if line.startswith("warning: stories")]
    assert len(warned) == 2 and all("2 of 2" in line and "mode P" in line for line in warned)
    assert not any(line.startswith("warning: single") for line in said.splitlines())
