"""An evaluation of an image generator, from a synthetic dataset to its report: what is drawn, kept, judged and
resumed.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.data.prompts import PromptSource
from draftsmith.models import generators
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.models.drafters.medusa import MedusaConfig
from draftsmith.models.generators import LlamaGenTargetConfig, build_transformer
from draftsmith.models.llamagen.files import save_model
from draftsmith.trainers.evaluation import measuring
from draftsmith.trainers.evaluation.resume_log import ResumeLog
from draftsmith.trainers.stages.evaluate import EvaluateStage
from PIL import Image
from visual_run import METHODS, SHAPE, SIDE, TREE, VQ, context, run

SAMPLED = {"sampled chain", "sampled chain, block rule"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    output = tmp_path_factory.mktemp("drawn") / "run"
    run(output)
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
    about = built["about"]
    assert about["seed"] == 0 and "CPU" in about["device"] and about["prompts"].startswith("3 of")


def test_exact_methods_draw_what_plain_decoding_draws_at_temperature_0(demo):
    rows = rows_of(demo, 0)
    for method in ("EAGLE-2", "ADT-Tree", "EAGLE-2, head without condition dropout"):
        assert all(row["identical"] and row["details"]["rule"] == "exact" for row in rows[method])
        assert [row["tokens"] for row in rows[method]] == [row["tokens"] for row in rows["plain decoding"]]
    assert all(row["details"]["rule"] == "lantern" for row in rows["LANTERN"])
    # Something was accepted and something was not: else all this would say little.
    accepted = [a for temperature in (0, 1) for row in rows_of(demo, temperature)["EAGLE-2"] for a in row["accepted"]]
    assert min(accepted) == 0 < max(accepted)


def test_the_report_shows_the_pictures(demo):
    _, text = report(demo)
    for temperature in (0, 1):
        image = Image.open(demo / "evaluate" / f"pictures-T{temperature}.png")
        # Three prompts in a row, plain decoding and the methods below each other.
        assert image.size == (3 * 98 - 2, len(rows_of(demo, temperature)) * 98 - 2)
        assert f"pictures-T{temperature}.png" in text
    assert all(f"| {method} | 3 |" in text for method in METHODS)


def test_adaptation_is_written_down_for_adaptive_trees_alone(demo):
    for method, rows in rows_of(demo, 0).items():
        adapts = method.startswith("ADT-Tree")
        assert all(bool(row["details"].get("adaptation")) == adapts for row in rows), method


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
    # A request at temperature 0 is decoded plainly and by five methods: those that were kept are not decoded again.
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
    loaded = generators.load_target(target, made, device=torch.device("cpu"))
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
def test_the_analysis_stands_in_the_report(demo, tmp_path):
    output = branch(demo, tmp_path / "run")
    analysis = "{k: [2, 4], head_data: {from: features, held_out: 0.25}}"
    run(output, f"stages.evaluate.probes={{analysis: {analysis}}}", stages=["evaluate"])
    built, text = report(output)
    figures = {path.name for path in (output / "evaluate" / "analysis").glob("*.png")}
    assert len(figures) > 5 and all(f"analysis/{name}" in text for name in figures)
    shown = [line.split("](")[1].split(")")[0] for line in text.splitlines() if line.startswith("![")]
    assert shown and all((output / "evaluate" / name).is_file() for name in shown)
    assert len(built["sections"]) == 2
