"""The video track from a world to a report: what is written, kept, measured, and what heads hold while they draft."""

import json
from types import SimpleNamespace

import pytest
from draftsmith.core.errors import UserError
from draftsmith.data.videos import VideoSettings
from draftsmith.models.drafters.reading import HivisConfig, MsdConfig
from draftsmith.trainers.stages.kept import Kept
from draftsmith.trainers.stages.reading.methods import Method, with_reading
from draftsmith.trainers.stages.reading.requests import at_length
from reading_run import run

METHODS = ["Sparrow", "Sparrow without VATA", "MSD", "SpecVLM"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    output = tmp_path_factory.mktemp("reading")
    return output, run(output)


def rows_of(output, name):
    return Kept(output / "evaluate" / "rows" / name).values["0"]


def test_every_method_says_what_the_target_says(finished):
    output, told = finished
    report = json.loads((output / "evaluate" / "report.json").read_text())
    cells = report["cells"]
    assert {cell["method"] for cell in cells} == {*METHODS}
    # Two lengths of the clips, a set of pictures, one of texts; SpecVLM at temperature 0 alone.
    assert len(cells) == 4 * (2 * 4 - 1)
    greedy = [cell for cell in cells if not cell["temperature"]]
    assert all(cell["identical"] == cell["requests"] == 1 for cell in greedy)
    assert any(cell["num_accepted"] for cell in greedy) and any(cell["rejected_somewhere"] for cell in greedy)
    assert any("identical to plain decoding" in line for line in told)


def test_with_vata_a_head_holds_no_visual_slot_at_any_length(finished):
    output, _ = finished
    held = {}
    for length in ("8", "54"):
        for row in rows_of(output, f"clips-6-{length}-T0-6"):
            held[row["drafter"], length] = row.get("num_held", 0), row["visual_tokens"], row["prompt_tokens"]
    assert [held["MSD", length][1] for length in ("8", "54")] == [8, 24], "the clip has six frames, not thirteen"
    for length in ("8", "54"):
        visual = held["MSD", length][1]
        assert held["Sparrow without VATA", length][0] - held["Sparrow", length][0] == visual
    assert held["Sparrow", "8"][0] == held["Sparrow", "54"][0], "the question has the same words"


def test_tables_are_the_papers(finished):
    output, _ = finished
    report = json.loads((output / "evaluate" / "report.json").read_text())
    tables = {table["title"]: table for table in report["tables"]}
    assert {"Sets of videos", "By visual tokens", "Sets of pictures", "Sets of texts", "Ablation", "Sets",
            "Time by operation", "Breakdown: Sparrow"} <= set(tables)  # fmt: skip
    ablated = [line["labels"] for line in tables["Ablation"]["lines"] if line["section"] == "T = 0"]
    assert ablated == [["yes", "yes", "yes"], ["yes", "yes", "no"], ["no", "no", "no"]], "MTP, IVSB, VATA"
    assert tables["Sets"]["lines"][0]["labels"][0] == "plain decoding"
    page = (output / "evaluate" / "report.md").read_text()
    looks = (f"{name}.png" for name in ("confidence", "entropy", "attention", "retention", "importance"))
    for figure in [*report["figures"], *looks]:
        assert figure in page and (output / "evaluate" / figure).is_file()


def test_what_is_looked_into(finished):
    output, _ = finished
    looks = json.loads((output / "evaluate" / "looks.json").read_text())
    for name, shares in looks["attention_shares"].items():
        assert sum(shares.values()) == pytest.approx(1.0, abs=1e-4)
        assert (shares["visual"] == 0) == (name.startswith("Sparrow,")), name
    assert len(looks["attention_shares"]) == 6
    assert looks["retention"]["visual"][0] == pytest.approx(1.0)
    assert [*looks["importance"]["SEED-Bench"]] == ["0", "4"], "without visual tokens, and with all four layers' sight"
    for name in METHODS:
        assert sum(place["places"] for place in looks[name]["by_confidence"]) > 0
        assert looks[name]["plan"]["speedup"] > 0
    (row,) = (row for row in rows_of(output, "SEED-Bench-T0-6") if row["drafter"] == "SpecVLM")
    assert len(row["sage"]) == sum(drafted > 0 for drafted in row["drafted"]) and row["num_kept"] == 4


def test_a_killed_run_goes_on_behind_what_it_kept(finished):
    output, _ = finished
    rows = output / "evaluate" / "rows"
    kept = {path.name: path.read_text() for path in rows.iterdir()}
    (rows / "SEED-Bench-T1-6-0.jsonl").unlink()
    (output / "evaluate" / "done.json").unlink()
    told = run(output, stages=["evaluate"])
    assert "SEED-Bench: 1 requests decoded" in told
    after = {path.name: path.read_text() for path in rows.iterdir()}
    assert after.keys() == kept.keys()
    assert {name for name in kept if after[name] != kept[name]} <= {"SEED-Bench-T1-6-0.jsonl"}


def test_a_head_of_its_own_says_what_it_is(finished):
    output, _ = finished
    made = {stage: json.loads((output / stage / "draftsmith.json").read_text()) for stage in ("head", "msd")}
    assert [made[stage]["drafter"]["kind"] for stage in made] == ["sparrow", "msd"]
    held = json.loads((output / "states" / "states" / "manifest.json").read_text())
    assert "[0, 2]" in json.dumps(held), "states for both heads: projected pictures and the middle layer's"


def test_settings_of_decoding():
    msd = with_reading(MsdConfig(kind="msd"), {"vata": True, "positions": "compact"}, "here")
    assert msd.visual(training=False) == "none" and msd.visual(training=True) == "direct"
    with pytest.raises(UserError, match=r"vata: .* for a head of kind hivis") as error:
        with_reading(HivisConfig(kind="hivis"), {"vata": True}, "key stages.evaluate.methods.HiViS")
    assert "positions" in error.value.cure and "methods.HiViS" in str(error.value)
    with pytest.raises(ValueError, match="vata: of heads"):
        Method(drafter={"kind": "pruned"}, tree="static", vata=True)
    assert Method(tree="static").tree.build().max_nodes == 25 and Method(tree="chain").tree.gamma == 5


@pytest.mark.parametrize(
    ("length", "frames", "label"), [("25k", 128, "25k"), (128, 128, "25089"), ("0.5k", 3, "0.5k"), ("1", 1, "1")]
)
def test_lengths_of_llava_onevision(length, frames, label):
    """196 tokens a frame and one newline."""
    video, found = at_length(VideoSettings(), length, SimpleNamespace(reads_whole=False, patches=27))
    assert (video.num_frames, video.fps, video.min_frames, found) == (frames, None, min(2, frames), label)


@pytest.mark.parametrize(("length", "frames", "label"), [("17k", 132, "17k"), (128, 128, "16384"), ("0.5k", 4, "0.5k")])
def test_lengths_of_qwen(length, frames, label):
    """At most 256 tokens for two frames of 448 x 448."""
    processor = SimpleNamespace(reads_whole=True, image_size=28)
    video, found = at_length(VideoSettings(max_pixels=448**2), length, processor)
    assert (video.num_frames, found) == (frames, label)
