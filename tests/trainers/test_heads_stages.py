"""The video track from a synthetic dataset to a report: what is written, kept, measured, and what heads hold while they
draft.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from damage import DAMAGES, told
from draftsmith.core.errors import UserError
from draftsmith.data.families.processor import Processor
from draftsmith.data.families.table import PICTURE_FAMILIES
from draftsmith.data.pictures.videos import VideoSettings
from draftsmith.data.processor_files import load_processor
from draftsmith.data.shards.shards import ShardReader
from draftsmith.data.suites.suite import read_index
from draftsmith.eval.measured_rows import grouped, read_rows
from draftsmith.eval.run_reports import read_run
from draftsmith.eval.summary import summarize
from draftsmith.models.drafters import HivisConfig, MsdConfig
from draftsmith.models.targets.load import load_target
from draftsmith.trainers.evaluate.methods import Method, decoding_with
from draftsmith.trainers.evaluate.requests import at_length
from draftsmith.trainers.evaluate.resume_log import ResumeLog
from draftsmith.trainers.publish.card import read_evaluation
from fails import fails_with
from heads_run import loaded, run
from notebooks import run_notebook
from small_records import flip
from stages_run import list_anew

pytestmark = pytest.mark.usefixtures("undrawn")
METHODS = ["Sparrow", "Sparrow without VATA", "MSD", "SpecVLM"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    output = tmp_path_factory.mktemp("reading")
    return output, run(output)


@pytest.fixture(scope="module")
def report(finished):
    return json.loads((finished[0] / "evaluate" / "report.json").read_text())


def rows_of(output, benchmark, name):
    """Plain decoding's row, and one for each method."""
    return ResumeLog(output / "evaluate" / "rows" / benchmark / name).values["0"]


def test_every_method_says_what_the_target_says(finished, report):
    _, told = finished
    cells = [cell for cell in report["cells"] if cell["method"] != "plain decoding"]
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
        for row in rows_of(output, "clips-6", f"{length}-T0-6"):
            held[row["method"], length] = row["details"].get("num_held", 0), row["visual_tokens"], row["prompt_tokens"]
    assert [held["MSD", length][1] for length in ("8", "54")] == [8, 24], "the clip has six frames, not thirteen"
    for length in ("8", "54"):
        visual = held["MSD", length][1]
        assert held["Sparrow without VATA", length][0] - held["Sparrow", length][0] == visual
    assert held["Sparrow", "8"][0] == held["Sparrow", "54"][0], "the question has the same words"


def test_a_cell_by_hand_from_the_rows(finished, report):
    """tau with the bonus token, DSR and ESR, from one request's own counts and seconds."""
    output, _ = finished
    for method in METHODS:
        (row,) = (row for row in rows_of(output, "clips-6", "54-T0-6") if row["method"] == method)
        # Six tokens: the first from the prefill, five from the cycles.
        assert sum(row["emitted"]) == len(row["tokens"]) - 1 == row["plain_tokens"] - 1
        (cell,) = (c for c in report["cells"] if (c["method"], c["benchmark"], c["budget"], c["temperature"]) == (
            method, "clips-6", "54", 0.0))  # fmt: skip
        cycles = len(row["emitted"])
        assert cell["tau"] == pytest.approx(sum(row["emitted"]) / cycles)
        assert cell["num_accepted"] == pytest.approx(sum(row["accepted"]) / cycles)
        decoding = (row["plain_total_s"] - row["plain_prefill_s"]) / (row["total_s"] - row["prefill_s"])
        assert cell["DSR"] == pytest.approx(decoding)
        assert cell["ESR"] == pytest.approx(row["plain_total_s"] / row["total_s"])
        cycle_s = sum(row["drafted"]) / cycles * row["draft_s"] + row["verify_s"]
        expected = sum(row["emitted"]) / cycles * row["plain_cycle_s"] / cycle_s
        assert cell["expected_speedup"] == pytest.approx(expected), "by the levels that were drafted, SAGE's too"


def test_what_is_probed(finished):
    output, _ = finished
    probes = json.loads((output / "evaluate" / "probes.json").read_text())
    for name, shares in probes["attention_shares"].items():
        assert sum(shares.values()) == pytest.approx(1.0, abs=1e-4)
        assert (shares["visual"] == 0) == (name.startswith("Sparrow,")), name
    assert len(probes["attention_shares"]) == 6
    assert probes["retention"]["visual"][0] == pytest.approx(1.0)
    assert [len(heads) for heads in probes["visual_attention"]] == [4] * 4, "four layers of four heads"
    assert all(0 < share < 1 for heads in probes["visual_attention"] for share in heads)
    assert [*probes["importance"]["SEED-Bench"]] == ["0", "4"], "without visual tokens, and with all four layers' sight"
    (row,) = (row for row in rows_of(output, "SEED-Bench", "T0-6") if row["method"] == "SpecVLM")
    details = row["details"]
    assert len(details["sage"]) == sum(drafted > 0 for drafted in row["drafted"]) and details["num_kept"] == 4


@pytest.mark.slow
def test_the_notebooks_draw_the_papers_figures(finished, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(finished[0] / "evaluate", tmp_path / "evaluate"))
    head = {"drafter": "head"}
    methods = {"Sparrow": head | {"vata": True}, "Sparrow without VATA": head | {"visual_share": 0.5}, "MSD": {}}
    (tmp_path / "recipe.yaml").write_text(json.dumps({"stages": {"evaluate": {"methods": methods}}}))
    names, shown = run_notebook(monkeypatch, "sparrow", tmp_path, evaluation=folder)
    assert len(shown) == 6, "1a and 1b, 2, 3b, importance, retention"
    cells = json.loads((folder / "report.json").read_text())["cells"]
    taus = {(c["method"], c["budget"]): c["tau"] for c in cells if c["benchmark"] == "clips-6" and not c["temperature"]}
    assert names["by_tokens"].tau.to_dict() == pytest.approx(taus)
    held = names["shares"][names["shares"].budget == "8"]
    assert held.set_index("method").share.to_dict() == {"Sparrow": 0, "Sparrow without VATA": 50}
    names, shown = run_notebook(monkeypatch, "sage", tmp_path, evaluation=folder)
    assert len(shown) == 3 and [*names["correlations"]] == ["SpecVLM"]
    without_bonus = names["by_length"]["SpecVLM"].iloc[0]
    (rows,) = (some for (method,), some in grouped(read_rows(folder / "rows.jsonl"), "method").items()
               if method == "SpecVLM")  # fmt: skip
    assert without_bonus == pytest.approx(summarize(rows).num_accepted)


SMALL = [
    "stages.evaluate.benchmarks.sets.sets=[clips-6]", "stages.evaluate.benchmarks.sets.data.max_samples=2",
    "stages.evaluate.probes=null",
    "stages.evaluate.lengths=[2]", "stages.evaluate.temperatures=[0.0]",
]  # fmt: skip


def test_damaged_states_are_refused_with_the_command_that_computes_them_again(finished, tmp_path):
    output = shutil.copytree(finished[0], tmp_path / "run", ignore=shutil.ignore_patterns("evaluate"))
    path = max((output / "states" / "states").glob("shard-*"))
    whole = path.read_bytes()
    flip(path, len(whole) // 2)
    error = fails_with("edited or damaged shard", run, output, stages=["states", "head"], restart="head")
    assert error.where == str(path) and error.hint.startswith("restart=states ")
    path.write_bytes(whole[:-1])
    assert fails_with("the manifest has one of", run, output, stages=["head"]).where == str(path)


SKIP = "stages.evaluate.benchmarks.sets.data.on_error=skip"


def test_a_clip_that_cannot_be_read_is_left_out_where_the_data_says_so(finished, tmp_path):
    output = shutil.copytree(finished[0], tmp_path / "run")
    clip = sorted((output / "world" / "world" / "video_suite" / "videos" / "clips-6").iterdir())[0]
    clip.write_bytes(clip.read_bytes()[:200])
    list_anew(output / "world")
    assert str(clip) in str(fails_with(r"corrupt clip", run, output, *SMALL, stages=["evaluate"], restart="evaluate"))
    identical = [*SMALL, SKIP, "stages.evaluate.identical=true"]
    fails_with("identical: bits were compared", run, output, *identical, stages=["evaluate"], restart="evaluate")
    told = run(output, *SMALL, SKIP, stages=["evaluate"], restart="evaluate")
    assert any(line.startswith("clips-6 at 8: 1 requests decoded, 1 left out") for line in told)
    folder = output / "evaluate"
    assert len((folder / "skipped.jsonl").read_text().splitlines()) == 1
    report = json.loads((folder / "report.json").read_text())
    assert {cell["requests"] for cell in report["cells"]} == {1}
    assert report["about"]["left out"] == {"clips-6 at 8": "1 of 2 (skipped.jsonl)"}
    assert report["about"]["identical"] == "off"
    # Once it is fixed, a run that did not finish decodes it, and nothing else.
    shutil.copy(sorted(clip.parent.iterdir())[1], clip)
    list_anew(output / "world")
    (folder / "done.json").unlink()
    kept = (folder / "rows" / "clips-6" / "8-T0-6-0.jsonl").read_text()
    told = run(output, *SMALL, SKIP, stages=["evaluate"])
    assert "clips-6 at 8: 2 requests decoded" in told
    after = (folder / "rows" / "clips-6" / "8-T0-6-0.jsonl").read_text()
    assert after.startswith(kept) and len(after.splitlines()) == 2


def test_settings_that_changed_read_no_old_rows(finished, tmp_path):
    """The rows of other settings lie in another folder, or the run is refused."""
    output = shutil.copytree(finished[0], tmp_path / "run")
    (output / "evaluate" / "done.json").unlink()
    assert "restart=evaluate" in str(fails_with("other settings", run, output, *SMALL, stages=["evaluate"]))
    with pytest.raises(UserError, match=r"lengths name 8 visual tokens twice, the second time as '8'"):
        run(output, *SMALL, "stages.evaluate.lengths=[2, '8']", stages=["evaluate"], restart="evaluate")
    assert not (output / "evaluate" / "rows").exists() and (output / "evaluate.before-1" / "rows").is_dir()


def test_settings_of_decoding():
    msd = decoding_with(MsdConfig(kind="msd"), {"vata": True, "positions": "compact"}, "here")
    assert msd.visual(training=False) == "none" and msd.visual(training=True) == "direct"
    with pytest.raises(UserError, match=r"vata is no decoding setting .*kind hivis has positions") as error:
        decoding_with(HivisConfig(kind="hivis"), {"vata": True}, "key stages.evaluate.methods.HiViS")
    assert "methods.HiViS" in str(error.value)
    with pytest.raises(UserError, match="vata is no decoding setting"):
        Method(drafter={"kind": "pruned", "model": "target"}, tree="static", vata=True)
    assert Method(tree="static").tree.build().max_nodes == 25 and Method().tree.gamma == 5


def untokenized(family, patch_size, image_size) -> Processor:
    """A processor of which only sizes are asked."""
    ids = {"image_token_id": 0, "pad_id": 0, "bos_id": None, "eos_id": 0, "newline_id": 0}
    return Processor(
        None, None, patch_size=patch_size, image_size=image_size, picture_family=PICTURE_FAMILIES[family], **ids
    )


@pytest.mark.parametrize(
    ("length", "frames", "label"), [("25k", 128, "25k"), (128, 128, "25089"), ("0.5k", 3, "0.5k"), ("1", 1, "1")]
)
def test_lengths_of_llava_onevision(length, frames, label):
    """196 tokens a frame and one newline."""
    video, result = at_length(VideoSettings(), length, untokenized("llava_onevision", 14, 384), [])
    assert (video.num_frames, video.fps, video.min_frames, result) == (frames, None, min(2, frames), label)


@pytest.mark.parametrize(("length", "frames", "label"), [("17k", 132, "17k"), (128, 128, "16384"), ("0.5k", 4, "0.5k")])
def test_lengths_of_qwen(length, frames, label):
    """At most 256 tokens for two frames of 448 x 448."""
    processor = untokenized("qwen2_5_vl", 14, 28)
    video, result = at_length(
        VideoSettings(max_pixels=448**2), length, processor, [(1920, 1920), (448, 448), (600, 500)]
    )
    assert (video.num_frames, result) == (frames, label)


# File of the run -> damages after which it is read all the same: a bit that leaves another number, or what no field is
# needed of. Whatever is not listed is refused with the file's name.
READ = {
    "target/config.json": set(),
    "target/model.safetensors": {"one flipped bit"},  # the run's own checksums find it
    "target/generation_config.json": {"missing", "no fields", "one flipped bit"},
    "world/tokenizer.json": {"one flipped bit"},
    "world/tokenizer_config.json": {"one flipped bit"},
    "world/processor_config.json": {"one flipped bit"},
    "head/config.json": {"missing", "no fields"},
    "head/model.safetensors": {"one flipped bit"},
    "head/draftsmith.json": {"missing", "no fields", "one flipped bit"},
    "states/states/manifest.json": {"one flipped bit"},
    "states/states/shard-000000.safetensors": {"one flipped bit"},  # of a sample that is not read here
    "world/world/video_suite/suite.json": {"one flipped bit"},
    "evaluate/rows.jsonl": {"empty", "one flipped bit"},
    "evaluate/report.json": {"one flipped bit"},
    # Lines that cannot be read are passed over.
    "head/metrics.jsonl": set(DAMAGES),
    "evaluate/rows/GSM8K/T0-6-0.jsonl": set(DAMAGES),
}


def test_damaged_files_are_told_by_name(finished, tmp_path):
    output = Path(shutil.copytree(finished[0], tmp_path / "run"))
    recipe, processor = loaded(output).recipe, load_processor(output / "world")

    def target():
        return load_target(
            recipe.target, output / "target", num_token_ids=processor.num_token_ids,
            image_token_id=processor.image_token_id, device=torch.device("cpu"),
        )  # fmt: skip

    whole = target()
    readers = {
        "target": target,
        "world": lambda: load_processor(output / "world"),
        "head": lambda: recipe.drafter.load(output / "head", whole),
        "states/states": lambda: ShardReader(output / "states" / "states")[0],
        "world/world/video_suite": lambda: read_index(output / "world" / "world" / "video_suite"),
        "evaluate/rows.jsonl": lambda: read_rows(output / "evaluate" / "rows.jsonl"),
        "evaluate/report.json": lambda: read_evaluation(output / "evaluate", "head"),
        "head/metrics.jsonl": lambda: read_run(output, "run"),
        "evaluate/rows/GSM8K": lambda: ResumeLog(output / "evaluate" / "rows" / "GSM8K" / "T0-6"),
    }
    for name, expected in READ.items():
        load = readers.get(name) or readers[name.rpartition("/")[0]]
        assert set(DAMAGES) - told(output / name, load) <= expected, name
