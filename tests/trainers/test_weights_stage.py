"""An evaluate stage with ensembles: spelt out and by name, what it keeps of their weights, and what it refuses."""

import json

import pytest
from fails import fails_with
from notebooks import run_notebook
from suite_run import loaded, run

BENCHMARK = "[{name: seen, data: {from: world, path: train, aspect: square, max_length: 256}}]"
CHEAP = ["stages.evaluate.methods=null", f"stages.evaluate.benchmarks={BENCHMARK}", "stages.evaluate.max_new_tokens=8"]
METHODS = {
    "M": {},
    "MT*": {"mode": "MT*"},
    "mine": {
        "mode": {"name": "mine", "members": ["T", "M", "P"],
                 "weights": {"kind": "inverse", "error": "tvd", "window": 4}}
    },
    "two-to-one": {
        "mode": {"name": "two-to-one", "members": ["M", "T"], "weights": {"kind": "fixed", "values": [2, 1]}}
    },
}  # fmt: skip


def test_weights_over_time_are_kept(tmp_path):
    run(tmp_path, *CHEAP, f"stages.evaluate.methods={json.dumps(METHODS)}", "stages.evaluate.record_weights=2")
    report = json.loads((tmp_path / "evaluate" / "report.json").read_text())
    cells = report["cells"]
    assert [cell["method"] for cell in cells] == [*METHODS]
    assert all(cell["identical"] == cell["requests"] for cell in cells)
    assert "Weights over time" in [section["title"] for section in report["sections"]]
    weights = tmp_path / "evaluate" / "weights"
    names = {path.stem for path in weights.iterdir()}
    assert names == {"seen-draft-MT-adaptive", "seen-draft-mine", "seen-draft-two-to-one"}
    traces = json.loads((weights / "seen-draft-two-to-one.json").read_text())
    assert len(traces) == 2
    for trace in traces.values():
        assert trace["members"] == ["M", "T"] and trace["steps"]
        assert all(first == pytest.approx(2 * second) for first, second in trace["cycles"])


@pytest.mark.slow
def test_the_notebook_draws_the_papers_figures(tmp_path, monkeypatch):
    methods = {"M": {}, "MT*": {"mode": "MT*"}, "MC": {"mode": {"name": "MC", "members": ["M", "C"]}}}
    more = [f"stages.evaluate.methods={json.dumps(methods)}", "stages.evaluate.captioner={kind: lvlm}"]
    run(tmp_path, *CHEAP, *more, "stages.evaluate.record_weights=1")
    names, shown = run_notebook(monkeypatch, "tabed", tmp_path, evaluation=tmp_path / "evaluate")
    assert len(shown) == 3, "weights of two ensembles, and times by stage"
    captions = names["times"]["captioning (s)"]["draft"]
    assert captions["MC"] > 0 and captions["M"] == captions["MT*"] == 0
    assert names["share"]({"pair": [0, 1], "cycles": [[0, 0, 1], [0.5, 0, 0.5]], "cycle_of_step": [0, 1]})[1] == 1


@pytest.mark.slow
def test_sampled_weights_are_those_of_the_answers_that_were_measured(tmp_path):
    """Of a seed that is not 0: the same uniforms, so the same cycles."""
    warm = ["seed=1", "stages.evaluate.temperatures=[1.0]", "stages.evaluate.methods={MT*: {mode: MT*}}"]
    run(tmp_path, *CHEAP, *warm, "stages.evaluate.record_weights=14")
    cells = json.loads((tmp_path / "evaluate" / "report.json").read_text())["cells"]
    (table,) = (cell for cell in cells if cell["method"] == "MT*")
    traces = json.loads((tmp_path / "evaluate" / "weights" / "seen-draft-MT-adaptive.json").read_text())
    assert len(traces) == table["requests"] == 14
    assert sum(len(trace["cycles"]) for trace in traces.values()) == table["accepted_by_depth"][0]["drafted"]


@pytest.mark.parametrize(("mode", "message"), [
    ("MTX", "no drafting mode"),
    ("MTCP", "needs a captioner"),
    ("{name: x, members: [M, T], weights: {kind: fixed, values: [1]}}", "one weight for each"),
    ("{name: x, members: [M, T], weights: {kind: grid, step: 0.1}}", "step"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_before_anything_runs(mode, message, tmp_path):
    fails_with(message, loaded, tmp_path, *CHEAP, f"stages.evaluate.methods={{x: {{mode: {mode}}}}}")
