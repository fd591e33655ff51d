"""A finished EAGLE-3 head and a publication that commit f7ebafb0 wrote are loaded, and decode as they did there.

`written_by_0_1_0/` has a LLaMA of 16 channels, the folder of the stage that trained a head on it (without its metrics),
and the publication of that head (without card and report, and without the report's lines in SHA256SUMS).
"""

import json
from pathlib import Path

import text_run
from draftsmith.core.results import check_sums
from draftsmith.eval.published import reproduce

OLD = Path(__file__).with_name("written_by_0_1_0")
DATA = {"path": str(OLD / "questions.jsonl"), "max_length": 64, "max_samples": 3}


def test_a_publication_decodes_its_stored_prompt():
    check_sums(OLD / "publication")
    expected = reproduce(OLD / "publication", target=OLD / "target")
    assert expected.tau == 2.75 and expected.accepted == [2, 2, 2, 1]


def test_a_finished_head_is_measured_by_its_path(tmp_path):
    """f7ebafb0 counted the same accepted tokens in the run that trained it."""
    evaluate = {
        "kind": "evaluate", "format": text_run.FORMAT, "max_new_tokens": 12, "warmup": 0,
        "benchmarks": {"held-out": {"data": DATA}},
        "methods": {"EAGLE-3": {"tree": {"kind": "chain", "gamma": 2}}},
    }  # fmt: skip
    recipe = {
        "target": {"kind": "causal_lm", "path": str(OLD / "target"), "dtype": "float32"},
        "drafter": {"kind": "eagle3", "path": str(OLD / "head"), "mtp_steps": 2},
        "stages": {"evaluate": evaluate},
    }
    text_run.run(recipe, tmp_path)
    rows = map(json.loads, (tmp_path / "evaluate" / "rows.jsonl").read_text().splitlines())
    accepted = [[0, 0, 0, 1, 0, 0, 1, 0, 0], [2, 2, 2, 1], [0, 0, 0, 0, 0, 2, 0, 0, 0]]
    assert [row["accepted"] for row in rows if row["method"] == "EAGLE-3"] == accepted
