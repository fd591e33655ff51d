"""An evaluation of an image generator, from a synthetic dataset to its report: what is drawn, kept, judged and
resumed.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import visual_run
from draftsmith.core.errors import UserError
from draftsmith.data.captioned.prompts import PromptSource
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.models.drafters.medusa import MedusaConfig
from draftsmith.models.targets.llamagen.files import save_model
from draftsmith.models.targets.llamagen.section import LlamaGenTargetConfig, build_transformer
from draftsmith.trainers.evaluate import drawn as evaluation
from draftsmith.trainers.evaluate import measuring
from draftsmith.trainers.evaluate.resume_log import ResumeLog
from draftsmith.trainers.stages.evaluate import EvaluateStage
from notebooks import run_notebook
from safetensors.torch import load_file
from visual_run import CHAIN, METHODS, SHAPE, SIDE, TREE, VQ, context

pytestmark = pytest.mark.usefixtures("undrawn")
SAMPLED = {"sampled chain", "sampled chain, block rule"}
CONTRASTS = {
    "adaptive tree": ["ADT-Tree", "EAGLE-2"], "relaxed rule": ["LANTERN", "EAGLE-2"],
    "block rule": ["sampled chain, block rule", "sampled chain"],
    "condition dropout": ["EAGLE-2", "EAGLE-2, head without condition dropout"],
}  # fmt: skip


def run(output: Path, *settings: str, **chosen) -> list[str]:
    """With a seed whose head is wrong now and then, at both temperatures."""
    output.parent.mkdir(parents=True, exist_ok=True)
    recipe = output.parent / "visual-ar.yaml"
    recipe.write_text(visual_run.RECIPE)
    return visual_run.run(output, "seed=1", *settings, recipe=recipe, **chosen)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    output = tmp_path_factory.mktemp("drawn") / "run"
    run(output, f"stages.evaluate.contrasts={CONTRASTS}", "stages.evaluate.probes.law=true")
    return output


def branch(demo: Path, output: Path) -> Path:
    """A copy of the run whose evaluation has not begun."""
    return shutil.copytree(demo, output, ignore=lambda folder, names: {"evaluate"} if Path(folder) == demo else set())


def report(output: Path) -> tuple[dict, str]:
    folder = output / "evaluate"
    return json.loads((folder / "report.json").read_text()), (folder / "report.md").read_text()


def rows_of(output: Path, temperature: int) -> dict[str, list[dict]]:
    """Method -> rows in the order of the prompts."""
    log = ResumeLog(output / "evaluate" / "rows" / "captions" / f"T{temperature}-16")
    result: dict[str, list[dict]] = {}
    for index in sorted(log.values, key=int):
        for row in log.values[index]:
            result.setdefault(row["method"], []).append(row)
    return result


def test_every_method_is_measured_on_every_prompt(demo):
    built, _ = report(demo)
    for temperature in (0, 1):
        rows = rows_of(demo, temperature)
        assert set(rows) == {"plain decoding", *METHODS} | (SAMPLED if temperature else set())
        for method, mine in rows.items():
            assert [row["request"] for row in mine] == [f"test-{n:06d}" for n in range(3)]
            # The first of 16 tokens comes from the prefill; a cycle emits what it accepts, and one more.
            assert all(sum(row["emitted"]) == 15 and len(row["tokens"]) == row["plain_tokens"] == 16 for row in mine)
            assert all(sum(row["accepted"]) + len(row["emitted"]) == 15 for row in mine)
            assert all(len(row["nodes"]) == len(row["emitted"]) and max(row["nodes"]) <= 7 for row in mine)
            if method != "plain decoding":
                (cell,) = (
                    cell for cell in built["cells"] if (cell["temperature"], cell["method"]) == (temperature, method)
                )
                assert cell["tau"] == pytest.approx(45 / sum(len(row["emitted"]) for row in mine))
                assert cell["requests"] == 3 and cell["tau_interval"][0] <= cell["tau"] <= cell["tau_interval"][1]
        quality = built["quality"][str(temperature)]
        assert set(quality) == set(rows)
        assert all(q["as_captioned"]["n"] == 3 and 0 <= q["as_captioned"]["value"] <= 1 for q in quality.values())
    # Paired by prompt at each temperature that both methods were measured at.
    wanted = {(name, t) for name in ("adaptive tree", "relaxed rule", "condition dropout") for t in (0, 1)}
    contrasts = {(c["name"], c["place"]): c["result"] for c in built["contrasts"]}
    assert set(contrasts) == {(n, f"captions, T = {t}") for n, t in wanted} | {("block rule", "captions, T = 1")}
    taus = {(cell["temperature"], cell["method"]): cell["tau"] for cell in built["cells"]}
    adaptive = contrasts["adaptive tree", "captions, T = 1"]
    assert adaptive["difference"] == pytest.approx(taus[1, "ADT-Tree"] - taus[1, "EAGLE-2"])
    about = built["about"]
    assert about["seed"] == 1 and "CPU" in about["device"] and about["prompts"].startswith("3 of")


def test_the_law_of_the_drawn_codes_is_read_of_every_method_above_temperature_0(demo):
    built, text = report(demo)
    (law,) = (section["data"] for section in built["sections"] if section["name"] == "law")
    assert set(law) == {"1"} and set(law["1"]["chance"]) == set(rows_of(demo, 1))
    assert all(0 <= chance <= 1 for chance in law["1"]["chance"].values())
    assert len(law["1"]["entropy_by_place"]) == 16 and (demo / "evaluate" / "entropy.png").is_file()
    assert "## The law of the drawn codes" in text and "(entropy.png)" in text


def test_exact_methods_draw_what_plain_decoding_draws_at_temperature_0(demo):
    rows = rows_of(demo, 0)
    for method in ("EAGLE-2", "ADT-Tree", "EAGLE-2, head without condition dropout"):
        assert all(row["identical"] and row["details"]["rule"] == "exact" for row in rows[method])
        assert [row["tokens"] for row in rows[method]] == [row["tokens"] for row in rows["plain decoding"]]
    assert all(row["details"]["rule"] == "lantern" for row in rows["LANTERN"])
    # Something was accepted and something was not: else all this would say little.
    accepted = [a for temperature in (0, 1) for row in rows_of(demo, temperature)["EAGLE-2"] for a in row["accepted"]]
    assert min(accepted) == 0 < max(accepted)


def test_adaptation_is_written_down_for_adaptive_trees_alone(demo):
    for method, rows in rows_of(demo, 0).items():
        adapts = method.startswith("ADT-Tree")
        assert all(bool(row["details"].get("adaptation")) == adapts for row in rows), method


def test_random_neighbours_follow_the_seed_of_the_recipe(demo, tmp_path):
    """Of the control in which neighbours have nothing to do with one another; the seed stands in the table's name."""
    output = branch(demo, tmp_path / "run")
    few = ["stages.evaluate.methods.LANTERN.rule.metric=random", "stages.evaluate.temperatures=[1.0]"]
    run(output, *few, stages=["evaluate"])
    names = [path.name for path in (output / "evaluate" / "neighbours").glob("*-random*.safetensors")]
    assert names and all("-random1-" in name for name in names)


def test_a_trained_head_stands_before_jacobis_tail(demo, tmp_path):
    output = branch(demo, tmp_path / "run")
    tail = (
        "{drafter: {kind: head_tail, members: [head]}, tree: {kind: static, choices: [[0], [1], [0, 0]]}, draw: sample}"
    )
    run(output, f"stages.evaluate.methods.tail={tail}", "stages.evaluate.temperatures=[1.0]", stages=["evaluate"])
    rows = rows_of(output, 1)["tail"]
    assert len(rows) == 3 and all(sum(row["emitted"]) == 15 and max(row["nodes"]) == 3 for row in rows)
    assert any(sum(row["accepted"]) for row in rows)


def test_a_killed_evaluation_goes_on_behind_the_pictures_it_kept(demo, tmp_path, monkeypatch):
    """Killed while it draws: what was drawn is not drawn again, and rows and codes are those of a whole run."""
    output = branch(demo, tmp_path / "run")
    original, calls = measuring.generate, []

    class Killed(BaseException):
        pass

    def dying(*given, **named):
        calls.append(1)
        if len(calls) > 40:
            raise Killed
        return original(*given, **named)

    monkeypatch.setattr(measuring, "generate", dying)
    with pytest.raises(Killed):
        run(output, stages=["evaluate"])
    log = next((output / "evaluate" / "rows" / "captions").glob("*.jsonl"))
    lines = log.read_bytes()
    assert lines and not (output / "evaluate" / "report.json").exists()
    calls.clear()
    monkeypatch.setattr(measuring, "generate", lambda *given, **named: calls.append(1) or original(*given, **named))
    run(output, stages=["evaluate"])
    assert log.read_bytes().startswith(lines)
    untimed = ("method", "request", "tokens", "drafted", "nodes", "accepted", "emitted", "identical", "details")
    for temperature in (0, 1):
        result, whole = rows_of(output, temperature), rows_of(demo, temperature)
        assert result.keys() == whole.keys()
        for method, rows in whole.items():
            assert [[row[k] for k in untimed] for row in result[method]] == [[row[k] for k in untimed] for row in rows]
    assert report(output)[0]["quality"] == report(demo)[0]["quality"], (
        "judged on all pictures, those that were kept too"
    )
    # A request at temperature 0 is decoded plainly and by seven methods: those that were kept are not decoded again.
    kept = len(lines.splitlines())
    whole_run = 3 * (1 + len(METHODS)) + 3 * (1 + len(METHODS) + len(SAMPLED))
    warm_up = (1 + len(METHODS)) + (1 + len(METHODS) + len(SAMPLED))
    assert kept > 0 and len(calls) <= whole_run + warm_up - kept * (1 + len(METHODS))


def test_a_reader_of_another_dataset_is_told_before_anything_is_drawn(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "generate", lambda *given: pytest.fail("drawn"))
    (tmp_path / "prompts.txt").write_text("a red circle at the top left\na dog on a sofa\n")
    output = branch(demo, tmp_path / "run")
    prompts = f"{{from: null, path: {tmp_path / 'prompts.txt'}}}"
    with pytest.raises(UserError, match="'a dog on a sofa' names no figures"):
        run(output, f"stages.evaluate.benchmarks.captions.prompts={prompts}", stages=["evaluate"])


def test_medusa_and_its_classes(demo, tmp_path):
    """A class-conditional target: no captions, no text encoder, no reader."""
    target = LlamaGenTargetConfig(
        kind="llamagen", shape={**SHAPE, "num_classes": 3}, condition="class", image_size=SIDE, vq=VQ, cfg_scale=2.0
    )
    model = build_transformer(target, seed=0)
    torch.nn.init.normal_(model.output.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    save_model(model, tmp_path / "target")
    made = {"vq": demo / "vq", "target": tmp_path / "target"}
    config = MedusaConfig(kind="medusa", num_heads=3)
    loaded = target.load(made, device=torch.device("cpu"))
    torch.manual_seed(0)
    (tmp_path / "head").mkdir()
    identity = TargetIdentity(section=target.model_dump(mode="json"))
    config.save(config.build(loaded), tmp_path / "head", config.manifest(loaded, identity))

    def by_hand(name):
        return context(tmp_path / name, target, made | {"drafter": tmp_path / "head"}, name=name, drafter=config)

    prompts = {"classes": 3, "max_samples": 4}
    methods = {"Medusa": {"tree": TREE}, "sampled": {"tree": {"kind": "chain", "gamma": 3}, "draw": "sample"}}
    stage = EvaluateStage(
        kind="evaluate",
        benchmarks={"classes": {"prompts": prompts}},
        methods=methods,
        temperatures=[0.0, 1.0],
        repeats=2,
    )
    stage.run(by_hand("evaluate"))
    built, _ = report(tmp_path)
    cells = {(cell["method"], cell["temperature"]): cell for cell in built["cells"] if cell["method"] in methods}
    assert set(cells) == {("Medusa", 0.0), ("Medusa", 1.0), ("sampled", 1.0)}
    assert cells["Medusa", 0.0]["identical"] == 4 and built["about"]["prompts"] == "4 of 3 classes"
    log = ResumeLog(tmp_path / "evaluate" / "rows" / "classes" / "T0-16").values
    rows = [log[str(index)][1] for index in range(4)]
    assert [row["request"] for row in rows] == ["class-0-0", "class-1-1", "class-2-2", "class-0-3"]
    # The first and the last picture are of one class, and greedy decoding knows no other difference.
    assert rows[0]["accepted"] == rows[3]["accepted"]
    classes = stage.drawing.model_copy(update={"prompts": PromptSource(classes=4, max_samples=4)})
    beyond = stage.model_copy(update={"benchmarks": {"classes": classes}})
    with pytest.raises(UserError, match="label 3, and the target has classes 0 to 2"):
        beyond.run(by_hand("beyond"))


@pytest.mark.slow
def test_the_analysis_stands_in_the_report_and_the_notebooks_draw_it(demo, tmp_path, monkeypatch):
    output = branch(demo, tmp_path / "run")
    analysis = "{k: [2, 4], head_data: {from: features, held_out: 0.25}}"
    near = f"stages.evaluate.methods.near={{tree: {CHAIN}, rule: {{kind: replaced, k: 4}}}}"
    run(output, f"stages.evaluate.probes={{analysis: {analysis}}}", near, stages=["evaluate"])
    built, text = report(output)
    assert "First draft's chance under LANTERN" in text and "| training pictures |" in text
    for temperature in (0, 1):
        cells = load_file(output / "evaluate" / f"analysis-T{temperature}.safetensors")
        assert cells["top1"].shape == (3, 16) and cells["size"].shape == (2, 4, 15)
    quality = built["quality"]
    assert "near" not in quality["0"] and quality["1"]["near"].keys() == quality["1"]["LANTERN"].keys()
    for name, count in (("lantern", 6), ("adt_tree", 6)):
        names, shown = run_notebook(monkeypatch, name, tmp_path, evaluation=output / "evaluate")
        assert len(shown) >= count
        assert names["prediction"].index.tolist() == [
            "training pictures", "held-out pictures", "drawn, T = 0", "drawn, T = 1"
        ]  # fmt: skip
    assert names["depth_map"]([0, 3, 1, 0, 2, 3]).astype(int).ravel().tolist() == [
        0, 0, 1, 2, 3, 0, 1, 0, 0, 1, 2, 0, 1, 2, 3, 0
    ]  # fmt: skip
    assert len(built["sections"]) == 2


# ---- pictures for their quality alone

UNTIMED = "stages.evaluate.benchmarks.captions.untimed"


@pytest.fixture
def drawn(monkeypatch):
    """What the stage draws: pictures of each batch of plain decoding, and the methods' pictures one by one."""
    batches, methods = [], []
    plainly, drafted = evaluation.draw_pictures, evaluation.generate
    monkeypatch.setattr(
        evaluation, "draw_pictures", lambda t, asked, *a, **k: batches.append(len(asked)) or plainly(t, asked, *a, **k)
    )
    monkeypatch.setattr(evaluation, "generate", lambda *a: methods.append(1) or drafted(*a))
    monkeypatch.setattr(measuring, "generate", lambda *a: pytest.fail("timed"))
    return SimpleNamespace(batches=batches, methods=methods)


def test_untimed_pictures_are_those_of_a_timed_evaluation(demo, tmp_path, drawn):
    """The same scores to the last bit, of plain decoding and of every relaxed method; exact methods are not drawn."""
    output = branch(demo, tmp_path / "run")
    run(output, f"{UNTIMED}={{batch_size: 2}}", stages=["evaluate"])
    # Three prompts at two temperatures, at most two side by side; three relaxed methods.
    assert drawn.batches == [1, 2, 1, 2] and len(drawn.methods) == 2 * 3 * 3
    built, text = report(output)
    timed, _ = report(demo)
    kept = {"plain decoding", "LANTERN", "ADT-Tree + LANTERN", "LANTERN, chain"}
    for temperature in ("0", "1"):
        assert built["quality"][temperature].keys() == kept
        assert all(built["quality"][temperature][m] == timed["quality"][temperature][m] for m in kept)
    taus = {(c["temperature"], c["method"]): c["tau"] for c in timed["cells"]}
    (table,) = built["tables"]
    for temperature, method, n, tau, *_ in table["rows"]:
        assert n == 3 and tau == pytest.approx(taus.get((temperature, method), 1.0))
    assert built["cells"] == [] and not (output / "evaluate" / "rows.jsonl").exists()
    assert (
        "Not drawn, because exact methods have plain decoding's distribution: EAGLE-2, ADT-Tree, chain, sampled" in text
    )
    assert "| plain decoding | 3 |" in text and "pictures-T1.png" in text and "ms" not in table["columns"]


def test_exact_methods_are_drawn_where_they_are_asked_for(demo, tmp_path, drawn):
    output = branch(demo, tmp_path / "run")
    run(output, f"{UNTIMED}={{exact_methods: true}}", stages=["evaluate"])
    built, text = report(output)
    assert set(built["quality"]["0"]) == {"plain decoding", *METHODS}
    assert set(built["quality"]["1"]) == {"plain decoding", *METHODS, *SAMPLED}
    assert built["quality"]["0"]["EAGLE-2"] == built["quality"]["0"]["plain decoding"], "at temperature 0 the same"
    assert "Not drawn" not in text and drawn.batches == [3, 3]


def test_a_killed_table_of_quality_goes_on_behind_the_pictures_it_kept(demo, tmp_path, drawn, monkeypatch):
    output, original = branch(demo, tmp_path / "run"), evaluation.generate

    def dying(*given):
        if len(drawn.methods) == 4:
            raise KeyboardInterrupt
        return original(*given)

    monkeypatch.setattr(evaluation, "generate", dying)
    with pytest.raises(KeyboardInterrupt):
        run(output, f"{UNTIMED}={{}}", stages=["evaluate"])
    assert drawn.batches == [3] and len(drawn.methods) == 4
    monkeypatch.setattr(evaluation, "generate", original)
    run(output, f"{UNTIMED}={{}}", stages=["evaluate"])
    assert drawn.batches == [3, 3] and len(drawn.methods) == 2 * 3 * 3, "each of them once"
    assert report(output)[0]["quality"]["1"]["LANTERN"] == report(demo)[0]["quality"]["1"]["LANTERN"]
