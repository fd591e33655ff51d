"""The visual track from a synthetic dataset to a report, at its smallest: what each stage leaves, and that it comes
back.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from damage import DAMAGES, told
from draftsmith.core.errors import Refused, UserError
from draftsmith.core.tracking import Tracker
from draftsmith.data.captioned.prompts import PromptSource, read_prompts
from draftsmith.data.captioned.sources import TarSource, read
from draftsmith.data.shards.codes import CodeCollate, ShardData, ShardSamples
from draftsmith.data.shards.shards import ShardReader, claim
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Draw
from draftsmith.eval.policies.dynamic import Dynamic
from draftsmith.eval.rules import RULES
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.eagle import EagleConfig
from draftsmith.models.drafters.medusa import MedusaConfig
from draftsmith.models.shapes_reader import ShapesReader
from draftsmith.models.targets.anole.section import AnoleTargetConfig
from draftsmith.models.targets.llamagen.captions import TextFeatures
from draftsmith.models.targets.llamagen.files import load_llamagen, load_vq
from draftsmith.models.targets.llamagen.section import TEXT_ENCODER
from draftsmith.recipes.commands.cli import main
from draftsmith.recipes.config.load import load
from draftsmith.trainers.run.context import EngineConfig
from draftsmith.trainers.stages.train import TrainCodes
from draftsmith.trainers.train import on_codes as training_codes
from fails import fails_with
from safetensors.torch import load_file, save_file
from stages_run import list_anew
from states_run import parsed
from training import free_port
from visual_run import FEW, SHAPE, SIDE, STEPS, TREE, context, run
from visual_tiny import step_of

EAGLE = EagleConfig(kind="eagle")
DRAWS = {"every": 1, "prompts": {"path": "a.txt"}, "tree": TREE}
IMAGES = AnoleTargetConfig(kind="anole")
ROOT = Path(__file__).resolve().parents[2]
HEADS = ("head", "head_without_dropout")
STAGES = ("world", "pictures", "vq", "reader", "codes", "target", "features", *HEADS, "evaluate")


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """The whole recipe by the command line's own entry, in this process."""
    output = tmp_path_factory.mktemp("demo") / "run"
    assert main(["recipe=demo/visual-ar", f"output={output}", *FEW]) == 0
    return output


def branch(demo: Path, output: Path, without=(*HEADS, "evaluate")) -> Path:
    """A copy of the run in which some stages have not begun."""
    shutil.copytree(demo, output, ignore=lambda folder, names: set(without) if Path(folder) == demo else set())
    return output


def metrics(folder: Path) -> dict[str, dict[int, dict]]:
    """training, validation -> step -> line."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    result = {kind: {} for kind in ("training", "validation")}
    for line in lines:
        kind = result["training" if "samples_per_s" in line else "validation"]
        assert line["step"] not in kind, "a step stands twice"
        kind[line["step"]] = line
    return result


def untimed(found: dict) -> dict:
    timed = ("time", "samples_per_s", "tokens_per_s")
    return {
        kind: {
            step: {k: v for k, v in line.items() if k not in timed and not k.startswith("samples_")}
            for step, line in lines.items()
        }
        for kind, lines in found.items()
    }


def recipe(demo: Path):
    return load(["recipe=demo/visual-ar", f"output={demo}", *FEW]).recipe


@pytest.fixture(scope="module")
def generator(demo):
    made = {"target": demo / "target", "text": demo / "target", "vq": demo / "vq"}
    return recipe(demo).target.generator(made, device=torch.device("cpu"))


def saved_head(folder: Path, generator):
    return EAGLE.load(folder, generator.target)


# What the stages leave


def test_pictures_codes_and_features_lie_in_shards(demo, generator):
    pictures, codes, features = (ShardReader(demo / name / "shards") for name in ("pictures", "codes", "features"))
    for reader in (pictures, codes, features):
        assert (len(reader), len(reader.shards)) == (60, 3)
    assert [set(reader[0][1]) for reader in (pictures, codes, features)] == [
        {"pixels"}, {"codes"}, {"codes", "features"},
    ]  # fmt: skip
    vq = load_vq(demo / "vq")
    for number in (0, 31, 59):
        key, tensors, info = features[number]
        pixels = pictures[number][1]["pixels"]
        assert torch.equal(tensors["codes"].long(), vq.encode(pixels[None].float() / 127.5 - 1)[0])
        assert torch.equal(tensors["codes"], codes[number][1]["codes"])
        # What a head is trained on is what a prompt becomes when it is decoded.
        torch.testing.assert_close(tensors["features"], generator.condition(info["caption"], None))
        assert pictures[number][0] == key and pictures[number][2] == info


def test_a_saved_head_has_no_embedding_and_says_where_it_comes_from(demo, generator):
    for folder in (demo / "head", demo / "head" / "best-top3", demo / "head" / "best-tau"):
        names = set(load_file(folder / "model.safetensors"))
        assert names and not any("embed" in name for name in names)
        assert torch.equal(saved_head(folder, generator).embed_tokens.weight, generator.target.embedding)
    manifest = json.loads((demo / "head" / "draftsmith.json").read_text())
    assert (manifest["method"], manifest["selected"], manifest["seed"]) == ("eagle", "last", 0)
    assert manifest["training"]["stage"] == "head" and manifest["training"]["step"] == STEPS["head"]
    assert manifest["condition_dropout"] == 0.1 and "recipe=demo/visual-ar" in manifest["command"]


# Held-out scores and decoding while a head trains


def test_held_out_scores_are_those_of_the_saved_head(demo, generator):
    """Computed again from the files: the ten first held-out samples, every condition given, no noise."""
    folder = demo / "features" / "shards"
    held_out = ShardSamples(folder, ShardData(path=str(folder), held_out=0.25), held_out=True)
    assert 10 <= len(held_out) < 20
    module = EAGLE.training_objective(saved_head(demo / "head", generator), generator.target).eval()
    collate = CodeCollate(recipe(demo).target.sample_condition(), held_out[0], 0, 0.0, 15)
    with torch.no_grad():
        loss = step_of(module, generator.target, collate([held_out[n] for n in range(10)], epoch=0))
    last = metrics(demo / "head")["validation"][8]
    assert int(loss.num_tokens) == 150
    assert last["val_loss"] == pytest.approx(float(loss.loss_sum) / 150, rel=1e-5)
    for name in ("top1", "top3", "token_loss"):
        assert last[f"val_{name}"] == pytest.approx(float(loss.metrics[name]) / 150, rel=1e-5)


def test_tau_is_that_of_the_saved_head(demo, generator):
    prompts = read_prompts(PromptSource(path=str(demo / "world/world/test-00000.tar"), max_samples=2))
    proposal = EAGLE.drafter(saved_head(demo / "head", generator), generator.target)
    policy = Dynamic(**{name: value for name, value in TREE.items() if name != "kind"})
    emitted = cycles = 0
    for number, prompt in enumerate(prompts):
        decoding = Decoding(policy, RULES["greedy"], Draw("top-k"), Warp(0.0, 0, 1.0), 16, ())
        request = generator.request(prompt.caption, None, prompt.key)
        result = generate(generator.target, proposal, request, decoding, torch.Generator().manual_seed(number))
        emitted += sum(c.num_emitted for c in result.cycles)
        cycles += len(result.cycles)
    assert metrics(demo / "head")["validation"][8]["tau_T0"] == pytest.approx(emitted / cycles)


def best(found: dict, name: str) -> tuple[float, int]:
    """The highest score and the step that had it first."""
    scores = {}
    for step, line in found["validation"].items():
        if name == "top3":
            scores[step] = line["val_top3"]
        elif "tau_T0" in line:
            scores[step] = (line["tau_T0"] + line["tau_T1"]) / 2
    return max(scores.values()), max(scores, key=lambda step: (scores[step], -step))


def test_select_takes_the_best_and_not_the_last(demo, tmp_path):
    """A learning rate that makes the head worse after a few steps."""
    ruined = ["stages.head.optim.lr=0.3", "stages.head.validation.every=1", "stages.head.decoding.every=1",
              "stages.head.decoding.prompts.max_samples=1"]  # fmt: skip
    last = branch(demo, tmp_path / "last")
    run(last, *ruined, stages=["head"])
    actual = metrics(last / "head")
    for name in ("top3", "tau"):
        value, step = best(actual, name)
        assert step < 8, "the test needs a best that is not the last"
        output = branch(demo, tmp_path / name)
        told = run(output, *ruined, f"stages.head.select={name}", stages=["head"])
        assert untimed(metrics(output / "head")) == untimed(actual)
        assert f"head: weights of step {step}, best {name} {value:.4f}" in told
        manifest = json.loads((output / "head" / "draftsmith.json").read_text())
        assert (manifest["training"]["step"], manifest["selected"]) == (step, name)
        chosen = load_file(output / "head" / "model.safetensors")
        expected = load_file(output / "head" / f"best-{name}" / "model.safetensors")
        thrown_away = load_file(last / "head" / "model.safetensors")
        assert all(torch.equal(chosen[key], expected[key]) for key in chosen)
        assert any(not torch.equal(chosen[key], thrown_away[key]) for key in chosen)


def test_the_target_does_not_move(demo, tmp_path, monkeypatch):
    """Neither its weights in memory, guided loss or not, nor the files that it came from."""
    seen = []

    class Seen(training_codes.TrainedDrafter):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            self.first = {name: value.clone() for name, value in self.module.head.state_dict().items()}
            seen.append(self)

    monkeypatch.setattr(training_codes, "TrainedDrafter", Seen)
    output = branch(demo, tmp_path / "run")
    before = {path: path.read_bytes() for path in (output / "target").rglob("*") if path.is_file()}
    run(output, "stages.head.optim.weight_decay=0.1", stages=["head"])
    assert {path: path.read_bytes() for path in (output / "target").rglob("*") if path.is_file()} == before
    (heads,) = seen
    fresh = load_llamagen(output / "target")
    held = heads.target.model
    assert not held.training and not any(p.requires_grad or p.grad is not None for p in held.parameters())
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in held.state_dict().items())
    # The head did move, all but its rows of the target.
    still = {name for name, value in heads.module.head.state_dict().items() if torch.equal(value, heads.first[name])}
    assert still == {"embed_tokens.weight"}
    assert torch.equal(heads.module.head.embed_tokens.weight, fresh.tok_embeddings.weight)


# Stopped and killed


RESUMED = ["stages.head.checkpoints.every=3", "stages.head.validation.every=4"]


@pytest.fixture(scope="module")
def alone(demo, tmp_path_factory) -> Path:
    """A head that nobody disturbed; the first validation, at step 4, follows the first checkpoint."""
    output = branch(demo, tmp_path_factory.mktemp("alone") / "run")
    run(output, *RESUMED, stages=["head"])
    return output / "head"


class Died(Exception):
    pass


def die_at(monkeypatch, step: int, output: Path, *settings: str, stage: str = "head") -> None:
    """Run until the tracker has written that step's line: a head's of its validation, another stage's of training."""
    real = Tracker.log

    def log(self, values, at):
        real(self, values, at)
        if at == step and ("val_loss" in values) == (stage == "head"):
            raise Died

    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "log", log)
        with pytest.raises(Died):
            run(output, *settings, stages=[stage])


def same_head(actual: Path, expected: Path) -> None:
    assert untimed(metrics(actual)) == untimed(metrics(expected))
    for folder in ("", "best-top3", "best-tau"):
        assert (actual / folder / "model.safetensors").read_bytes() == (
            expected / folder / "model.safetensors"
        ).read_bytes(), folder
    for name in ("top3", "tau"):
        assert (actual / f"best-{name}/score.json").read_bytes() == (expected / f"best-{name}/score.json").read_bytes()


@pytest.mark.parametrize("step", [4, 8])
def test_a_head_that_died_comes_back_bit_equal(demo, alone, tmp_path, monkeypatch, step):
    """Right after a validation: what it kept as the best is there when the same step comes again. `test_resume.py` has
    every other step, and stops.
    """
    output = branch(demo, tmp_path / "run")
    die_at(monkeypatch, step, output, *RESUMED)
    assert not (output / "head" / "done.json").exists()
    assert any("resuming from" in line for line in run(output, *RESUMED, stages=["head"]))
    same_head(output / "head", alone)


def test_killed_while_the_best_weights_were_written(demo, alone, tmp_path, monkeypatch):
    """The weights of a best step lie there and their score does not yet."""
    output = branch(demo, tmp_path / "run")
    die_at(monkeypatch, 4, output, *RESUMED)
    for name in ("top3", "tau"):
        (output / "head" / f"best-{name}" / "score.json").unlink()
    (output / "head" / "best-tau" / "model.safetensors").write_bytes(b"half of it")
    run(output, *RESUMED, stages=["head"])
    same_head(output / "head", alone)


@pytest.mark.parametrize("name", ["vq", "reader", "target"])
def test_a_synthetic_dataset_model_that_died_comes_back_bit_equal(demo, tmp_path, monkeypatch, name):
    """With dead codes revived (in float32 where bf16 is asked for), dropout, and a last micro-batch that is empty."""
    revives = ["stages.vq.revive_every=2", "engine.precision=bf16"] if name == "vq" else []
    short = [f"stages.{name}.steps=10", f"stages.{name}.micro_batch_size=4", f"stages.{name}.checkpoints.every=3",
             f"stages.{name}.log_every=1", *revives]  # fmt: skip
    alone, output = (branch(demo, tmp_path / folder, without=STAGES[STAGES.index(name) :]) for folder in "ab")
    run(alone, *short, stages=[name])
    die_at(monkeypatch, 5, output, *short, stage=name)
    assert any("(step 3)" in line for line in run(output, *short, stages=[name]))
    assert untimed(metrics(output / name)) == untimed(metrics(alone / name))
    files = [path.relative_to(alone) for path in (alone / name).rglob("model.safetensors")]
    assert files and all((output / path).read_bytes() == (alone / path).read_bytes() for path in files)


# Going on from an earlier stage


@pytest.mark.parametrize(
    ("model", "data"), [("vq", "pictures"), ("reader", "pictures"), ("target", "codes"), ("drafter", "features")]
)
def test_a_second_stage_goes_on_from_the_first(demo, tmp_path, model, data):
    """With a learning rate of almost nothing the weights stay where the first stage left them."""
    first = "head" if model == "drafter" else model
    output = branch(demo, tmp_path / "run", without=())
    again = f"{{kind: train, model: {model}, data: {{from: {data}}}, steps: 1, batch_size: 8, optim: {{lr: 1.0e-12}}}}"
    # The latest of its kind is the default; of two heads the first is named.
    named = ["stages.again.from=head"] if model == "drafter" else []
    run(output, f"stages.again={again}", *named, stages=["again"])
    for path in sorted((output / first).rglob("model.safetensors")):
        if "best" in str(path) or "checkpoints" in str(path):
            continue
        before, after = load_file(path), load_file(output / "again" / path.relative_to(output / first))
        assert before.keys() == after.keys()
        for name, value in before.items():
            torch.testing.assert_close(after[name], value, rtol=0, atol=1e-6, msg=f"{path.name} {name}")
    run(output, f"stages.again={again}", "stages.again.from=scratch", stages=["again"], restart="again")
    before, after = (load_file(output / name / "model.safetensors") for name in (first, "again"))
    assert any((after[name] - value).abs().max() > 1e-3 for name, value in before.items())


def train_by_hand(demo, folder: Path, drafter, **changes) -> Path:
    """One step that hardly moves a head, under the demo's target."""
    made = {name: demo / name for name in ("target", "vq")} | {"text": demo / "target"}
    data = {"path": str(demo / "features" / "shards"), "held_out": 0.25}
    stage = settings(data=data, optim={"lr": 1e-12}, **changes)
    stage.run(context(folder, recipe(demo).target, made, name=folder.name, drafter=drafter))
    return folder / "model.safetensors"


@pytest.mark.parametrize("model", ["drafter", "target"])
def test_conditions_are_dropped_by_the_stages_own_seed(demo, tmp_path, model):
    made = {name: demo / name for name in ("target", "vq")} | {"text": demo / "target", "tokenizer": demo / "world"}
    data = {"path": str(demo / "features" / "shards"), "held_out": 0.25}
    asked = context(tmp_path, recipe(demo).target, made, drafter=EAGLE if model == "drafter" else None)
    training = training_codes.open_codes(settings(data=data, model=model), asked, seed=7)
    assert training.steps(0).collate.seed == 7


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_a_stage_starts_from_the_head_that_the_recipe_names(demo, tmp_path, method):
    if method == "eagle":
        fresh, named = EagleConfig(kind="eagle"), demo / "head"
    else:
        fresh, named = MedusaConfig(kind="medusa", num_heads=2), tmp_path / "named"
        train_by_hand(demo, named, fresh)
        weights = {name: value + 0.1 for name, value in load_file(named / "model.safetensors").items()}
        save_file(weights, named / "model.safetensors")
    config = fresh.model_copy(update={"path": str(named)})
    before = load_file(named / "model.safetensors")

    def moved(*arguments, **changes) -> float:
        after = load_file(train_by_hand(demo, *arguments, **changes))
        assert after.keys() == before.keys()
        return max(float((after[name] - value).abs().max()) for name, value in before.items())

    assert moved(tmp_path / "on", config) < 1e-6
    assert moved(tmp_path / "scratch", config, **{"from": "scratch"}) > 0.01
    assert moved(tmp_path / "fresh", fresh) > 0.01


def test_a_published_head_is_trained_on_with_its_own_embedding(demo, tmp_path, generator):
    """LANTERN's layout: one pickle of tensors with rows that are not the target's, and here without fc's bias."""
    published = {name: value for name, value in load_file(demo / "head" / "model.safetensors").items()}
    del published["fc.bias"]
    rows = torch.randn(generator.target.embedding.shape, generator=torch.Generator().manual_seed(0))
    (tmp_path / "published").mkdir()
    torch.save(published | {"embed_tokens.weight": rows}, tmp_path / "published" / "pytorch_model.bin")
    config = EagleConfig(kind="eagle", path=str(tmp_path / "published"))
    prompts = {"path": str(demo / "world/world/test-00000.tar"), "max_samples": 1}
    measured = {"validation": {"every": 1}, "decoding": {"every": 1, "prompts": prompts, "tree": TREE}}
    after = load_file(train_by_hand(demo, tmp_path / "on", config, select="top3", **measured))
    assert torch.equal(after.pop("embed_tokens.weight"), rows) and "fc.bias" not in after
    assert all((after[name] - value).abs().max() < 1e-6 for name, value in published.items())
    again = saved_head(tmp_path / "on", generator)
    assert torch.equal(again.embed_tokens.weight, rows) and not torch.equal(generator.target.embedding, rows)


def test_a_head_of_another_target_is_told_before_it_is_trained_on_or_drawn_with(demo, tmp_path):
    manifest = json.loads((demo / "head" / "draftsmith.json").read_text())
    shutil.copytree(demo / "head", tmp_path / "head", ignore=shutil.ignore_patterns("checkpoints", "best-*"))
    (tmp_path / "head" / "draftsmith.json").write_text(
        json.dumps(manifest | {"target": manifest["target"] | {"shape": {**SHAPE, "num_layers": 2}}})
    )
    with pytest.raises(UserError, match="num_layers is 2, expected 1"):
        train_by_hand(demo, tmp_path / "on", EagleConfig(kind="eagle", path=str(tmp_path / "head")))
    output = branch(demo, tmp_path / "run", without=("evaluate",))
    shutil.copy(tmp_path / "head" / "draftsmith.json", output / "head")
    list_anew(output / "head")
    fails_with("num_layers is 2, expected 1", run, output, stages=["evaluate"])


# What cannot be trained


def section(**changes) -> dict:
    values = {"kind": "train", "steps": 1, "batch_size": 4, "optim": {"lr": 0.1}}
    data = {"kind": "codes"} | changes.pop("data", {})
    return values | {"data": data} | changes


def settings(**changes) -> TrainCodes:
    return TrainCodes(**section(**changes))


# File of the run -> damages after which it is read all the same. All others are refused with the file's name.
FLIPPED = "one flipped bit"  # in weights: another number, which the run's own checksums find
READ = {
    "vq/config.json": set(),
    "vq/model.safetensors": {FLIPPED},
    "target/config.json": set(),
    "target/model.safetensors": {FLIPPED},
    "target/text_encoder/config.json": {FLIPPED},
    "target/text_encoder/model.safetensors": {FLIPPED},
    "target/text_encoder/tokenizer.json": {FLIPPED},
    "target/text_encoder/tokenizer_config.json": {FLIPPED},
    "reader/config.json": set(),
    "reader/model.safetensors": {FLIPPED},
    "codes/shards/manifest.json": set(),
    "codes/shards/shard-000000.safetensors": set(),
    "codes/shards/identity.json": set(),
    "world/world/train-00000.tar": {FLIPPED, "huge"},  # zeros after the end of a tar are padding
    "head/config.json": {"missing", "no fields"},
    "head/model.safetensors": {FLIPPED},
    "head/draftsmith.json": {"missing", "no fields", FLIPPED},  # of a record
}


@pytest.fixture(scope="module")
def damaged(demo, tmp_path_factory) -> Path:
    """A copy to break; each damage is fixed."""
    folder = tmp_path_factory.mktemp("damaged") / "run"
    without = {"pictures", "features", "evaluate", "steps", "samples"}
    return Path(shutil.copytree(demo, folder, ignore=lambda _, names: without & set(names)))


# transformers builds an encoder of its own defaults for each damage of these.
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in READ if "text_encoder" in name]


@pytest.mark.parametrize("name", [*(name for name in READ if "text_encoder" not in name), *SLOW])
def test_damaged_files_are_told_by_name(name, damaged):
    recipe = load(["recipe=demo/visual-ar", f"output={damaged}", *FEW]).recipe
    whole = recipe.target.load({"target": damaged / "target"}, device=torch.device("cpu"))
    shards = damaged / "codes" / "shards"
    identity = json.loads((shards / "identity.json").read_text())

    def codes():
        claim(shards, identity)
        reader = ShardReader(shards)
        return [reader[index] for index in range(len(reader))]

    readers = {
        "vq": lambda: load_vq(damaged / "vq"),
        "target": lambda: load_llamagen(damaged / "target"),
        "target/text_encoder": lambda: TextFeatures(damaged / "target" / TEXT_ENCODER),
        "reader": lambda: ShapesReader.load(damaged / "reader"),
        "codes/shards": codes,
        "world/world": lambda: list(read(TarSource(kind="webdataset", path=str(damaged / name)))),
        "head": lambda: recipe.drafter.load(damaged / "head", whole),
    }
    assert set(DAMAGES) - told(damaged / name, readers[name.rpartition("/")[0]]) <= READ[name], name


def test_data_that_a_model_cannot_be_trained_on_is_told(demo, tmp_path):
    shards = {name: str(demo / name / "shards") for name in ("pictures", "codes", "features")}
    target, head = recipe(demo).target, EagleConfig(kind="eagle")
    made = {name: demo / name for name in ("target", "vq")} | {"text": demo / "target", "tokenizer": demo / "world"}

    def train(model, data, given=target, **changes):
        stage = settings(model=model, data={"path": shards[data], **changes})
        stage.run(context(tmp_path / "out", given, made, drafter=head))

    fails_with("hold pixels and no codes", train, "target", "pictures")
    fails_with("hold codes and no pixels", train, "vq", "codes")
    fails_with("hold codes and no features", train, "drafter", "codes")
    # A target whose text encoder is a published one is trained on its features, and a class-conditional one on labels.
    published = target.model_copy(update={"text_encoder": "google/flan-t5-xl"})
    fails_with("hold codes and no features", train, "target", "codes", published)
    classes = target.model_copy(update={"condition": "class", "text_encoder": None})
    fails_with("without a label", train, "target", "codes", classes)
    with pytest.raises(UserError, match="images of 16 codes, the target's have 64"):
        train("target", "codes", target.model_copy(update={"image_size": 2 * SIDE}))
    fails_with("model: target for anole", train, "target", "codes", AnoleTargetConfig(kind="anole"))
    with pytest.raises(UserError, match="no manifest"):
        settings(model="vq", data={"path": str(tmp_path)}).run(context(tmp_path / "out", target, made))
    fails_with("names none", parsed, target, None, section(data={"path": shards["features"]}), error=Refused)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"select": "top3"}, "select: top3 needs validation"),
        ({"select": "tau"}, "select: tau needs decoding"),
        ({"validation": {"every": 2}}, "validation needs data.held_out"),
        ({"model": "vq", "data": {"held_out": 0.1}, "validation": {"every": 2}}, "for heads"),
        (
            {"data": {"held_out": 0.1}, "validation": {"every": 2},
             "decoding": {"every": 3, "prompts": {"path": "a.txt"}, "tree": TREE}},
            "multiple of validation.every",
        ),
        ({"epochs": 1}, "epochs or steps"),
        ({"micro_batch_size": 8}, "larger than batch_size"),
        ({"objective": {"token": 1.0}}, "objective: unknown key"),
        ({"held_out": 0.1}, "held_out: unknown key"),
        ({"decoding": {"every": 1, "tree": TREE}}, r"decoding\.prompts\n +Field required"),
        ({"decoding": DRAWS | {"max_new_tokens": 3}}, "max_new_tokens: unknown key"),
        ({"drafter": {"kind": "eagle", "vata": True}, "from": "scratch"}, "drafter.vata: nothing reads it"),
        ({"drafter": {"kind": "sparrow"}, "from": "scratch"}, "drafter.kind: sparrow is no drafter for targets that"),
        ({"drafter": {"kind": "llamagen", "path": "a", "size": "B"}, "from": "scratch"}, "kind llamagen, which is not"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(changes, words):
    fails_with(words, parsed, IMAGES, EAGLE, section(**changes), error=ValueError)


def test_dead_codes_are_revived_in_most_of_the_forwards_of_a_rank(tmp_path):
    """A step of 12 rows in micro-batches of 4 has three forwards: 60% of 50 steps are 90 of them, not 30."""
    stage = TrainCodes(
        kind="train", model="vq", data=ShardData(), steps=50, batch_size=12, micro_batch_size=4, revive_every=2,
        optim={"lr": 1e-3},
    )  # fmt: skip
    target = load(["recipe=demo/visual-ar", "output=out", *FEW]).recipe.target
    asked = context(tmp_path / "vq", target, {}, name="vq", engine=EngineConfig(precision="fp32"))
    module = training_codes._module(stage, asked, 0, 50)
    assert (module.revive_every, module.revive_until) == (2, 90)


# Two ranks


def launch(output: Path, *more: str) -> subprocess.CompletedProcess:
    launcher = ["-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", free_port()]
    command = [sys.executable, *launcher, "trains/train.py", "recipe=demo/visual-ar", f"output={output}", *FEW, *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
def test_two_ranks_write_the_same_shards_and_report(demo, tmp_path):
    output = branch(demo, tmp_path / "run", without=("pictures", "features", "head", "evaluate"))
    done = launch(output, "stages=[pictures,features,head,evaluate]")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for name in ("pictures", "features"):
        actual, expected = (
            {path.name: path.read_bytes() for path in (folder / name / "shards").iterdir()} for folder in (output, demo)
        )
        assert actual == expected
    # The same batches with the same noise: only sums round differently.
    actual, expected = (metrics(folder / "head") for folder in (output, demo))
    for step, line in expected["training"].items():
        assert actual["training"][step]["loss"] == pytest.approx(line["loss"], rel=1e-3)
    for step, line in expected["validation"].items():
        for name in ("val_loss", "val_top1", "val_top3"):
            assert actual["validation"][step][name] == pytest.approx(line[name], rel=1e-3, abs=0.01)
    # One rank alone comes to the same report with the same head.
    shared = cells(output)
    run(output, stages=["evaluate"], restart="evaluate")
    assert cells(output) == shared


def cells(output: Path) -> list[list]:
    built = json.loads((output / "evaluate" / "report.json").read_text())
    names = ("method", "temperature", "requests", "tau", "tau_interval", "kept_depth", "mean_nodes", "identical")
    return [[cell[name] for name in names] for cell in built["cells"]]
