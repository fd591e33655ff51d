"""An evaluation in a serving engine: what it is asked, its rows and report, and how it ends.

The engine is a script behind the same files (workers/timed_answers.py here); vLLM itself is in
`test_evaluation_vllm.py`.
"""

import json
import math
import shutil
from operator import attrgetter

import pytest
from draftsmith.core.errors import Refused, UserError
from draftsmith.core.results import write_sums
from draftsmith.eval.engines.served_results import disagreements
from draftsmith.eval.measured_rows import KEY, PLAIN, Row, read_rows
from draftsmith.models.drafters.eagle3 import Eagle3Config
from draftsmith.models.formats.export import export_drafter
from draftsmith.models.targets.llava.section import LlavaTargetConfig
from draftsmith.trainers.evaluate import engine_run
from draftsmith.trainers.evaluate.engine_measuring import cycles
from draftsmith.trainers.serve.engine_answers import Timing
from draftsmith.trainers.stages.evaluate import EvaluateStage
from engines_in_place import in_place
from fails import fails_with
from PIL import Image
from rows import a_row
from served_heads import save_drawn
from stages_run import load_spelled, run_loaded
from states_run import synthetic

pytestmark = pytest.mark.slow  # minutes of decoding; each part has quick tests of its own

TOKENS = 8
key = attrgetter(*KEY)  # of a row
LOOKUP = {"drafter": {"kind": "ngram", "max_match": 4}, "tree": {"kind": "chain", "gamma": 3}}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny LLaVA with data, and an EAGLE-1 head for it."""
    folder = tmp_path_factory.mktemp("world")
    made = synthetic(folder)
    save_drawn("eagle", folder / "target", folder / "head")
    return made


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    in_place(monkeypatch)


def stage(made, **settings):
    methods = {"lookup": LOOKUP, "EAGLE": {"drafter": "head", "tree": {"kind": "chain", "gamma": 2}}}
    return {
        "kind": "evaluate", "engine": {"kind": "vllm", "concurrency": [1, 4]}, "warmup": 0, "max_new_tokens": TOKENS,
        "benchmarks": {"mine": {"data": made.data | {"max_samples": 6}}}, "methods": methods,
        "drafters": {"head": {"kind": "eagle", "path": str(made.folder / "head"), "image": "placeholder"}},
    } | settings  # fmt: skip


def recipe(made, **stages):
    return {"target": {"kind": "llava", "path": str(made.folder / "target")}, "stages": stages}


def run(made, output, settings=None, **how):
    found = load_spelled(recipe(made, served=settings or stage(made)), "served", output)
    return run_loaded(found, output, **how)


def asked(folder, key):
    lines = (folder / "asked.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if key in line]


@pytest.fixture(scope="module")
def measured(made, tmp_path_factory):
    """A finished run."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        in_place(monkeypatch)
        output = tmp_path_factory.mktemp("run")
        run(made, output)
    return output


def test_each_method_has_an_engine_that_is_asked_at_each_number_at_once(measured):
    plain, lookup, eagle = (start["start"] for start in asked(measured, "start"))
    assert "speculative_config" not in plain and "per_request_spec_decode_metrics" not in plain
    assert lookup["speculative_config"] == {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1,
    }  # fmt: skip
    exported = measured / "served" / "exported" / "1-eagle"
    assert eagle["speculative_config"] == {"method": "eagle", "model": str(exported), "num_speculative_tokens": 2}
    assert json.loads((exported / "draftsmith.json").read_text())["export"]["prompts"] == "all"
    for settings in (plain, lookup, eagle):
        assert settings["max_num_seqs"] == 4 and settings["disable_log_stats"] is False
        assert settings["enable_prefix_caching"] is False and settings["limit_mm_per_prompt"] == {"image": 1}
        assert settings["max_model_len"] == plain["max_model_len"], "room for the longest chain, in all engines alike"
    jobs = asked(measured, "job")
    assert [job["together"] for job in jobs] == [1, 4] * 3 and {job["job"] for job in jobs} == {6}
    assert jobs[0]["pictures"] == [0, 1, 1, 0, 1, 1]
    assert len(set(jobs[0]["seeds"])) == 6 and all(job["seeds"] == jobs[0]["seeds"] for job in jobs)


def test_rows_are_an_engines_and_marked_so(measured):
    rows = read_rows(measured / "served" / "rows.jsonl")
    assert len(rows) == 3 * 2 * 6
    assert {(row.method, row.engine, row.concurrency) for row in rows} == {
        (method, "vllm", n) for method in (PLAIN, "lookup", "EAGLE") for n in (1, 4)
    }
    for row in rows:
        assert row.num_emitted == TOKENS - 1 and row.identical and row.plain_tokens == TOKENS
        assert row.prefill_s == row.plain_prefill_s == 0.02 and math.isnan(row.draft_s) and math.isnan(row.verify_s)
        assert row.plain_total_s == pytest.approx(0.02 + 0.01 * (TOKENS - 1) * row.concurrency)
        assert all(a <= d for a, d in zip(row.accepted, row.drafted, strict=True))
        assert row.cycle_s == pytest.approx((0.01 if row.method == PLAIN else 0.011) * row.concurrency)
    lookup = [row for row in rows if row.method == "lookup"]
    assert {drafted for row in lookup for drafted in row.planned} == {0, 3}, "passes without a draft count"
    line = json.loads((measured / "served" / "rows.jsonl").read_text().splitlines()[0])
    assert line["draft_s"] is None, "JSON has no NaN"


def test_the_report_has_its_lines_a_table_and_a_figure(measured):
    folder = measured / "served"
    report = json.loads((folder / "report.json").read_text())
    (section,) = [section for section in report["sections"] if section["name"] == "served"]
    cells = section["data"]["cells"]
    assert [(c["method"], c["concurrency"]) for c in cells] == [
        (method, n) for method in (PLAIN, "lookup", "EAGLE") for n in (1, 4)
    ]
    plain, lookup = cells[0], cells[2]
    assert plain["tau"] == 1 and plain["speedup"] == 1 and lookup["identical"] == 6
    assert plain["between_p50_s"] == pytest.approx(0.01) and plain["ttft_p95_s"] == pytest.approx(0.02)
    assert plain["tokens_per_s"] == pytest.approx(6 * TOKENS / (0.005 + 0.02 + 0.07))
    assert lookup["speedup"] == pytest.approx(lookup["tokens_per_s"] / plain["tokens_per_s"])
    assert len(lookup["accepted"]) == 3 and all(0 < share < 1 for share in lookup["accepted"])
    assert {(c["engine"], c["concurrency"]) for c in report["cells"]} == {("vllm", 1), ("vllm", 4)}
    assert all(c["T_q_ms"] is None and c["DSR"] > 0 for c in report["cells"])
    page = (folder / "report.md").read_text()
    assert "| mine | vllm | 4 | lookup |" in page and "served.png" in page and "by requests at once, on CPU" in page
    assert "nan" not in page and (folder / "served.png").stat().st_size > 10_000
    assert not (folder / "speedup.png").exists(), "nothing is expected of an engine"
    assert "identical to plain decoding, token by token, in all 24" in page


def test_turns_of_conversations_follow_plain_vllms_answers(made, tmp_path):
    (tmp_path / "set" / "images").mkdir(parents=True)
    rows = [{"id": f"m{n}", "image": f"m{n}.png", "turns": ["what is red ?", "and blue ?"][: n + 1],
             "category": "charts", "topic": "a"} for n in range(2)]  # fmt: skip
    for row in rows:
        Image.new("RGB", (24, 24), (200, 60, 90)).save(tmp_path / "set" / "images" / row["image"])
    (tmp_path / "set" / "mmspec.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"path": str(tmp_path / "set"), "aspect": "square", "max_length": 256}
    benchmarks = {"own": {"kind": "sets", "data": data, "sets": ["mmspec"]}}
    settings = stage(made, benchmarks=benchmarks, methods={"lookup": LOOKUP}) | {"drafters": {}}
    run(made, tmp_path, settings | {"warmup": 1})
    jobs = [(job["together"], job["job"]) for job in asked(tmp_path, "job")]
    assert jobs == [(1, 1), (1, 2), (4, 2), (4, 2), (1, 1), (4, 1)] * 2, "warm up once, all; turn by turn"
    (second,) = json.loads((tmp_path / "served/suite/MMSpec/T0-8/turn-2.json").read_text())
    assert len(second["conversations"]) >= 3 and second["conversations"][1]["value"], "the engine's own answer"
    report = json.loads((tmp_path / "served" / "report.json").read_text())
    (turns,) = (section for section in report["sections"] if section["name"] == "turns")
    assert all(line[-1] is not None for line in turns["tables"][0]["rows"]) and report["cells"][0]["requests"] == 3


def fault(folder, **what):
    """What goes wrong with the engines of a run (see workers/timed_answers.py)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fault.json").write_text(json.dumps(what))


def test_a_killed_run_asks_no_finished_cell_again(made, measured, tmp_path):
    fault(tmp_path, die=4, of="eagle", always=True)
    caught = fails_with(r"exit code 9, and 3 times(.|\n)*out of luck", run, made, tmp_path)
    assert "engine-0/log.txt" in caught.where and "stages.served.engine" in caught.key
    (tmp_path / "fault.json").unlink()
    (tmp_path / "asked.jsonl").unlink()
    run(made, tmp_path)
    assert len(asked(tmp_path, "start")) == 1 and [job["together"] for job in asked(tmp_path, "job")] == [4]
    again, before = (read_rows(folder / "served" / "rows.jsonl") for folder in (tmp_path, measured))
    assert len(again) == len(before) and {*map(key, again)} == {*map(key, before)}


def test_an_engine_that_dies_once_is_started_again(made, tmp_path):
    fault(tmp_path, die=4, of="ngram")
    told = run(made, tmp_path)
    assert any("it is started again" in line for line in told)
    assert len(asked(tmp_path, "start")) == 4 and len(asked(tmp_path, "job")) == 6


@pytest.mark.parametrize(
    "wrong",
    [{"accepted": [9]}, {"passes": [1]}, {"drafted": []}, {"decode_s": -1.0}, {"first_s": "1"}, {"began_s": 9e9}],
    ids=str,
)  # fmt: skip
def test_metrics_of_another_answer_are_refused(made, tmp_path, wrong):
    fault(tmp_path, wrong=wrong)
    fails_with(r"metrics of a request are missing, or are of another|answers are damaged", run, made, tmp_path)


def test_passes_are_told_apart_by_what_they_emitted():
    timing = {"began_s": 0.0, "ended_s": 1.0, "first_s": 0.1, "decode_s": 0.5}

    def of(passes, drafted, accepted, stop="length"):
        return cycles(Timing(passes=passes, drafted=drafted, accepted=accepted, **timing), stop)

    # Without a draft, whole, none accepted, and cut: no level behind the answer's last place counts.
    assert of([1, 1, 4, 2], [3, 3], [3, 3]) == [(0, 0, 1), (3, 3, 4), (3, 1, 2)]
    assert of([1, 3, 2], [4, 4], [2, 3], stop="eos") == [(4, 4, 3), (4, 2, 2)], "the end token was drafted"
    assert of([1, 3, 1], [4, 4], [2, 0], stop="eos") == [(4, 4, 3), (4, 4, 1)], "it was the bonus token"
    assert of([1], [], []) == []
    for passes, drafted, accepted in (([1, 2], [], []), ([1, 1], [3, 3], [0, 0]), ([1, 4, 1], [3], [1])):
        assert Timing(passes=passes, drafted=drafted, accepted=accepted, **timing).by_pass() is None


TARGET = LlavaTargetConfig(kind="llava", path="x")
SERVED = {"kind": "evaluate", "engine": {"kind": "vllm"}, "methods": {"m": {}},
          "benchmarks": {"mine": {"data": {"path": "x.json", "aspect": "square"}}}}  # fmt: skip
HEAD = Eagle3Config(kind="eagle3", visual_slots="read", image="placeholder")
REFUSED = {
    "a tree": ({"methods": {"m": {"drafter": {"kind": "ngram"}, "tree": "25-5-8"}}}, r"methods.m.tree.*chain"),
    "drawn drafts": ({"methods": {"m": {"draw": "sample"}}, "temperatures": [1.0]}, r"methods.m.draw.*likeliest"),
    "ViSkip": ({"methods": {"m": {"visual_skip": 0.5}}}, r"methods.m.visual_skip.*no such setting"),
    "a setting of decoding": ({"methods": {"m": {"vata": True}}}, r"methods.m.vata.*no such setting"),
    "a pruned copy": ({"methods": {"m": {"drafter": {"kind": "pruned"}}}}, r"no engine drafts with pruned"),
    "an ensemble": (
        {"methods": {"m": {"drafter": {"kind": "ensemble", "members": [{"kind": "ngram"}, {"kind": "suffix"}]}}}},
        r"methods.m.drafter.*no engine drafts with ensemble",
    ),
    "another argument": (
        {"engine": {"kind": "vllm", "options": {"disable_log_stats": True}}}, r"disable_log_stats.*follows",
    ),
    "tiles": ({"benchmarks": {"mine": {"data": {"path": "x.json", "aspect": "anyres"}}}}, "cuts a picture into tiles"),
    "TABED's suite": (
        {"benchmarks": {"s": {"kind": "tabed", "data": {"path": "x"}}}, "format": {"template": "v1"}},
        "benchmarks.s.*our own loop",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), REFUSED.values(), ids=REFUSED)
def test_what_the_engine_cannot_run_is_refused_before_the_run(changes, words):
    fails_with(words, EvaluateStage.model_validate(SERVED | changes).check, TARGET, HEAD, error=Refused)


OWN = {"repeats": 3, "graphs": False, "record_weights": 2, "probes": {"states": True}, "lengths": [4]}


@pytest.mark.parametrize(("changes", "words"), [
    *(({"engine": {"kind": "vllm"} | engine}, words) for engine, words in (
        ({"concurrency": [0]}, "greater than or equal to 1"), ({"concurrency": [2, 2]}, "names a number twice"),
        ({"concurrency": []}, "at least 1 item"), ({"max_num_seqs": 4}, "max_num_seqs: nothing reads it"),
        ({"kind": "sglang"}, "sglang"),
    )),
    *(({key: value}, f"{key}: nothing reads it: vllm decodes") for key, value in OWN.items()),
], ids=str)  # fmt: skip
def test_settings_that_say_nothing_or_are_of_our_own_loop_are_refused(changes, words):
    fails_with(words, EvaluateStage.model_validate, SERVED | changes, error=ValueError)


def test_what_is_missing_in_the_engines_python_is_said_before_anything_is_decoded(made, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_run, "version_of", lambda package, python: "" if package == "arctic_inference" else "1")
    methods = {"suffix": {"drafter": {"kind": "suffix"}}, "lookup": LOOKUP}
    settings = stage(made, methods=methods) | {"drafters": {}}
    fails_with(r"arctic-inference(.|\n)*leave out method suffix", run, made, tmp_path, settings)
    assert not list((tmp_path / "served").glob("rows/*"))


def test_a_cpus_engine_is_asked_above_temperature_0_with_its_repair_alone(made, tmp_path, monkeypatch):
    settings = stage(made, methods={"lookup": LOOKUP}) | {"drafters": {}, "temperatures": [0.0, 1.0]}
    monkeypatch.setattr(engine_run, "version_of", lambda package, python: "" if package == engine_run.MODULE else "1")
    fails_with(r"wrong temperatures on a CPU(.|\n)*draftsmith-vllm", run, made, tmp_path, settings)
    assert not list((tmp_path / "served").glob("rows/*"))


def test_medusa_drafts_all_its_heads_or_is_refused(made, tmp_path):
    save_drawn("medusa", made.folder / "target", tmp_path / "medusa")
    drafters = {"head": {"kind": "medusa", "path": str(tmp_path / "medusa")}}
    short, long = ({"M": {"drafter": "head", "tree": {"kind": "chain", "gamma": n}}} for n in (2, 5))
    with pytest.raises(UserError, match=r"drafts 3 tokens at once, and the method's chain has 2(.|\n)*gamma: 3"):
        run(made, tmp_path / "short", stage(made, drafters=drafters, methods=short))
    run(made, tmp_path / "long", stage(made, drafters=drafters, methods=long))
    _, medusa = (start["start"] for start in asked(tmp_path / "long", "start"))
    assert medusa["speculative_config"]["num_speculative_tokens"] == 3 and medusa["hf_overrides"]["vocab_size"] > 1


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_an_exported_folder_drafts_as_it_is(made, tmp_path, kind):
    save_drawn(kind, made.folder / "target", tmp_path / "head")
    export_drafter(tmp_path / "head", tmp_path / "out", "vllm", target=str(made.folder / "target"))
    methods = {"M": {"drafter": "head", "tree": {"kind": "chain", "gamma": 3}}}
    for name in ("head", "out"):
        drafters = {"head": {"kind": kind, "path": str(tmp_path / name)}}
        run(made, tmp_path / f"run-{name}", stage(made, drafters=drafters, methods=methods))
    (_, own), (_, ready) = (
        (start["start"] for start in asked(tmp_path / f"run-{name}", "start")) for name in ("head", "out")
    )
    assert ready["speculative_config"]["model"] == str(tmp_path / "out")
    assert not (tmp_path / "run-out" / "served" / "exported").exists()
    for start in (own, ready):  # the runs' own folders
        del start["model"], start["speculative_config"]["model"]
    assert own == ready, "chain, method and overrides of the target's config"


def test_a_published_folder_is_exported_and_a_damaged_one_refused(made, tmp_path):
    folder = shutil.copytree(made.folder / "head", tmp_path / "published")
    (folder / "README.md").write_text("# a head")
    write_sums(folder)
    settings = stage(made, drafters={"head": {"kind": "eagle", "path": str(folder)}})
    run(made, tmp_path / "run", settings)
    assert "1-eagle" in asked(tmp_path / "run", "start")[2]["start"]["speculative_config"]["model"]
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    fails_with(r"model.safetensors", run, made, tmp_path / "again", settings)


def test_an_export_for_texts_or_of_an_older_version_is_refused(made, tmp_path):
    export_drafter(made.folder / "head", tmp_path / "out", "vllm", target=str(made.folder / "target"), prompts="text")
    drafters = {"head": {"kind": "eagle", "path": str(tmp_path / "out"), "image": "placeholder"}}
    with pytest.raises(UserError, match=r"an export for prompts without pictures(.|\n)*exported here"):
        run(made, tmp_path / "run", stage(made, drafters=drafters))
    with pytest.raises(UserError, match="is an export already"):
        export_drafter(tmp_path / "out", tmp_path / "again", "vllm", target=str(made.folder / "target"))
    manifest = json.loads((tmp_path / "out" / "draftsmith.json").read_text())
    del manifest["export"]["served"]
    (tmp_path / "out" / "draftsmith.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"does not say how it is served(.|\n)*export it anew"):
        run(made, tmp_path / "old", stage(made, drafters=drafters))


def test_our_own_loops_rows_stand_beside_and_another_tau_is_named(made, tmp_path):
    """The script's tau is not that of our loop, which is said with both numbers."""
    ours = stage(made) | {"engine": {"kind": "transformers"}}
    served = stage(made) | {"engine": {"kind": "vllm", "concurrency": [2], "beside": "ours"}}
    found = load_spelled(recipe(made, ours=ours, served=served), "both", tmp_path)
    run_loaded(found, tmp_path)
    rows = read_rows(tmp_path / "served" / "rows.jsonl")
    assert {(row.engine, row.concurrency) for row in rows} == {("", 1), ("vllm", 2)}
    report = json.loads((tmp_path / "served" / "report.json").read_text())
    warned = [line for line in report["findings"] if "tau of lookup on mine, 2 at once, is" in line]
    assert len(warned) == 1 and "in our own loop" in warned[0] and "verify-engine" in warned[0]
    assert "| mine | our loop | 1 | EAGLE |" in (tmp_path / "served" / "report.md").read_text()
    assert "2% of it in" in report["about"]["our own loop"]
    other = served | {"benchmarks": {"other": served["benchmarks"]["mine"]}}
    with pytest.raises(UserError, match="stage ours measured none of these methods"):
        run_loaded(load_spelled(recipe(made, ours=ours, served=other), "other", tmp_path / "other"), tmp_path / "other")


def served_rows(accepted, **changes):
    details = {"began_s": 0.0, "ended_s": 1.0}
    return a_row(accepted=accepted, engine="vllm", drafter="d", details=details, **changes)


def test_taus_within_two_percent_agree():
    ours = [a_row(accepted=(1,) * 100, drafter="d")]
    near, far = ([served_rows((1,) * (100 - n) + (0,) * n, concurrency=8)] for n in (3, 5))
    assert disagreements(near, ours) == ([], "tau at temperature 0 within 2% of it in 1 of 1 cells, at most 1.5% apart")
    (line,), said = disagreements(far, ours)
    assert "tau of M on photos, 8 at once, is 1.95 in vllm and 2.00 in our own loop (-2.5%, 1 requests)" in line
    assert "0 of 1 cells" in said


def test_a_row_of_an_engine_is_read_back_and_one_of_our_loop_has_no_such_field():
    engine = served_rows((1, 0), concurrency=3, draft_s=math.nan)
    assert key(Row.from_json(engine.to_json())) == key(engine)
    ours = a_row().to_json()
    assert "engine" not in ours and Row.from_json(ours) == a_row()
