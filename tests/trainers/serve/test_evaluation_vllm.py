"""An evaluation in a real vLLM (scripts/test_engines) beside our own loop's: equal answers, and one tau."""

import json
import random

import pytest
from draftsmith.eval.measured_rows import PLAIN, read_rows
from draftsmith.eval.summary import tau_of
from draftsmith.models.formats.export import export_drafter
from PIL import Image
from served_heads import save_draft, save_drawn
from served_pair import TEXTS, build, conversations
from stages_run import load_spelled, run_loaded
from vllm_server import IN_VLLM

pytestmark = IN_VLLM
REQUESTS, TOKENS = 9, 40


def records(folder):
    """Texts, and pictures that the processor need not resize."""
    rng, found = random.Random(0), []
    for number in range(REQUESTS):
        text, sees = TEXTS[number % len(TEXTS)], number % 3 > 0
        record = {"id": number, "conversations": [
            {"from": "human", "value": ("<image>\n" if sees else "") + text + " " + " ".join(text.split()[:number])},
            {"from": "gpt", "value": "the red circle"},
        ]}  # fmt: skip
        if sees:
            picture = Image.new("RGB", (32, 32), tuple(rng.randrange(256) for _ in range(3)))
            picture.paste(tuple(rng.randrange(256) for _ in range(3)), (4, 4, 20, 28))
            picture.save(folder / f"{number}.png")
            record["image"] = f"{number}.png"
        found.append(record)
    (folder / "data.json").write_text(json.dumps(found))


def test_both_loops_have_one_tau_and_one_answer(tmp_path):
    build(tmp_path)
    records(tmp_path)
    chain = {"kind": "chain", "gamma": 4}
    common = {
        "kind": "evaluate", "max_new_tokens": TOKENS, "stop_at_end": False,
        "format": {"template": "v1", "system": "", "image_rule": "verbatim"},
        "benchmarks": {"mine": {"data": {"path": str(tmp_path / "data.json"), "images": str(tmp_path),
                                         "aspect": "square", "max_length": 128}}},
        "drafters": {"head": {"kind": "eagle3", "path": str(tmp_path / "head")}},
        "methods": {"EAGLE-3": {"drafter": "head", "tree": chain},
                    "lookup": {"drafter": {"kind": "ngram"}, "tree": chain}},
    }  # fmt: skip
    engine = {"engine": {"kind": "vllm", "concurrency": [1, 3], "beside": "ours"}}
    recipe = {"target": {"kind": "llava", "path": str(tmp_path / "target"), "dtype": "float32"},
              "stages": {"ours": common, "served": common | engine}}  # fmt: skip
    output = tmp_path / "run"
    run_loaded(load_spelled(recipe, "both", output), output)

    rows = read_rows(output / "served" / "rows.jsonl")
    drafted = [row for row in rows if row.method != PLAIN]
    assert all(row.identical for row in rows) and len(rows) == 3 * 3 * REQUESTS
    assert all(row.num_emitted == TOKENS - 1 for row in rows)

    def tau(method, engine, together=1):
        return tau_of(r for r in drafted if (r.method, r.engine, r.concurrency) == (method, engine, together))

    ours = tau("EAGLE-3", "")
    assert ours > 1.2
    for together in (1, 3):
        assert tau("EAGLE-3", "vllm", together) == pytest.approx(ours, rel=0.02)
        assert tau("lookup", "vllm", together) > 1
    lookup = [row for row in drafted if row.method == "lookup" and row.engine]
    assert any(0 in row.planned for row in lookup), "passes without a draft are counted"
    assert all(row.prefill_s > 0 and row.total_s > row.prefill_s and row.cycle_s > 0 for row in drafted)

    # The tokens of both loops, which rows.jsonl leaves out.
    answers = {}
    for stage in ("ours", "served"):
        for path in (output / stage / "rows" / "mine").glob("*.jsonl"):
            for line in path.read_text().splitlines():
                for row in json.loads(line)[1]:
                    answers.setdefault(row["request"], set()).add(tuple(row["tokens"]))
    assert len(answers) == REQUESTS and all(len(tokens) == 1 for tokens in answers.values())
    report = json.loads((output / "served" / "report.json").read_text())
    assert "vLLM 0." in report["about"]["engine"] and (output / "served" / "served.png").is_file()
    assert not [line for line in report["findings"] if "tau of EAGLE-3" in line]


def test_each_kind_accepts_what_our_own_loop_does_turn_by_turn(tmp_path):
    """Drawn weights in vLLM's own classes and in our plugin's, of which one is an exported folder: every request of
    conversations of two turns has the same tokens in the same cycles.
    """
    build(tmp_path, steps=2, rows=4)
    target = tmp_path / "target"
    for kind in ("medusa", "msd", "middle", "dflash"):
        save_drawn(kind, target, tmp_path / kind)
    save_draft(target, tmp_path / "lvlm")
    export_drafter(tmp_path / "dflash", tmp_path / "out", "vllm", target=str(target))
    drafters = {kind: {"kind": kind, "path": str(tmp_path / kind)} for kind in ("medusa", "msd", "lvlm", "dflash")}
    drafters["middle"] = {"kind": "sparrow", "path": str(tmp_path / "middle")}
    common = {
        "kind": "evaluate", "max_new_tokens": 24, "stop_at_end": False,
        "format": {"template": "v1", "system": "", "image_rule": "verbatim"},
        "benchmarks": {"talks": {"kind": "sets", "sets": ["MMSpec"], "data": {
            "path": str(conversations(tmp_path / "set", 4)), "aspect": "square", "max_length": 256}}},
        "methods": {kind: {"drafter": kind, "tree": {"kind": "chain", "gamma": gamma}}
                    for kind, gamma in (("medusa", 3), ("msd", 3), ("middle", 3), ("lvlm", 3), ("dflash", 4))},
    }  # fmt: skip
    exported = drafters | {"dflash": {"kind": "dflash", "path": str(tmp_path / "out")}}
    engine = {"engine": {"kind": "vllm", "concurrency": [2], "beside": "ours"}, "drafters": exported}
    recipe = {"target": {"kind": "llava", "path": str(target), "dtype": "float32"},
              "stages": {"ours": common | {"drafters": drafters}, "served": common | engine}}  # fmt: skip
    output = tmp_path / "run"
    run_loaded(load_spelled(recipe, "both", output), output)

    rows = read_rows(output / "served" / "rows.jsonl")
    assert len(rows) == 2 * 6 * 6 and all(row.identical for row in rows)
    cycles = {"": {}, "vllm": {}}
    for row in rows:
        if row.method != PLAIN:
            cycles[row.engine][row.method, row.request] = (row.drafted, row.accepted)
    assert cycles[""] == cycles["vllm"] and len(cycles["vllm"]) == 5 * 6
    # Of drawn weights MSD's alone are right at times; what the others draft is compared by tests/eval/engines.
    assert sum(sum(accepted) for (method, _), (_, accepted) in cycles["vllm"].items() if method == "msd") > 0
    assert {row.details["turn"] for row in rows} == {1, 2}
    report = json.loads((output / "served" / "report.json").read_text())
    assert "5 of 5 cells, at most 0.0% apart" in report["about"]["our own loop"]
    (turns,) = (section for section in report["sections"] if section["name"] == "turns")
    assert turns["tables"]
