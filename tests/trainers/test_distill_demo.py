"""The distillation demo from the synthetic dataset to the comparison of six drafts, at its smallest."""

import json

import pytest
from distill_run import run
from draftsmith.data.answers import SHARDS
from draftsmith.data.shards.shards import ShardReader

PAIRS = ("", "_1", "_2")


@pytest.mark.slow
def test_from_the_synthetic_dataset_to_the_interval(tmp_path):
    run(tmp_path / "run")
    folder = tmp_path / "run" / "compare"
    report = json.loads((folder / "report.json").read_text())
    names = [f"distill{n} - finetune{n}" for n in PAIRS]
    for benchmark in ("pictures", "text"):
        (cell,) = (c for c in report["cells"] if c["benchmark"] == benchmark)
        assert cell["method"] == "M"
        assert cell["identical"] == cell["answers"] == 6 * cell["requests"] == 6 * {"pictures": 3, "text": 2}[benchmark]
        result = report["comparison"][f"{benchmark}, mode M"]
        assert list(result["each"]) == names
        assert result["mean"] == pytest.approx(sum(result["each"].values()) / 3)
        assert f"| first trainings - second | {benchmark}, mode M |" in (folder / "report.md").read_text()
    manifests = [json.loads((tmp_path / "run" / f"{s}{n}" / "draftsmith.json").read_text())
                 for s in ("finetune", "distill") for n in PAIRS]  # fmt: skip
    assert [m["training"]["seed"] for m in manifests] == [0, 1, 2] * 2
    assert len({m["training"]["steps"] for m in manifests}) == 1
    weights = {(tmp_path / "run" / f"{s}{n}" / "model.safetensors").read_bytes()
               for s in ("pretrain", "distill", "finetune") for n in PAIRS}  # fmt: skip
    assert len(weights) == 9 and len(ShardReader(tmp_path / "run" / "answers" / SHARDS)) == 27
    assert all("finished before" in line for line in run(tmp_path / "run"))
