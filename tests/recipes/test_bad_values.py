"""Wrong values at every key of the shipped recipes: each is refused in one message that names its key, or accepted.

The tables hold what once ended in a traceback, or passed the dry run and failed hours later. The walk after them puts
values of every wrong type into every key.
"""

import copy
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import prints
from draftsmith.core.errors import UserError
from draftsmith.recipes.commands.cli import main
from draftsmith.recipes.commands.recipes import resolved
from draftsmith.recipes.config.dry_run import dry_run
from draftsmith.recipes.config.launch import run_recipe
from draftsmith.recipes.config.load import checked, find_recipe, load, recipe_names
from draftsmith.recipes.config.messages import Written, blamed, placed
from draftsmith.recipes.config.plan import plan
from draftsmith.trainers.estimate.models import target_shape
from fails import fails_with

TRAIN, LM = "stages.pretrain", "drafter.language_model"
# Setting of demo/lvlm-from-nothing -> what its message says.
REFUSED = {
    f"{TRAIN}.optim.betas=[2,3]": "less than 1",
    f"{TRAIN}.optim.betas=[0.9]": "optim.betas",
    f"{TRAIN}.optim.lr=.inf": f"{TRAIN}.optim.lr: input should be a finite number",
    f"{TRAIN}.optim.lr=.nan": "finite number",
    f"{TRAIN}.optim.lr=1e26": "less than or equal to 100",
    f"{TRAIN}.optim.lr=true": "should be a number, and is True",
    f"{TRAIN}.optim.lr_by_part={{projector: -1}}": "greater than 0",
    f"{TRAIN}.about=''": "one line of printable text",
    f'{TRAIN}.about="two\\nlines"': "one line of printable text",
    f"{TRAIN}.about={'a' * 101}": "has 101 characters; there is room for 100",
    f"{TRAIN}.steps=true": f"{TRAIN}.steps: should be a number, and is True",
    f"{TRAIN}.steps=1e26": f"{TRAIN}.steps: ",
    f"{TRAIN}.steps=100000000000000000000000000": "beyond 1,000,000,000,000,000",
    f"{TRAIN}.steps=1.5": "fractional part",
    f"{TRAIN}.seed=4294967296": f"{TRAIN}.seed",
    f"{TRAIN}.num_workers=100000": f"{TRAIN}.num_workers",
    "engine.zero_stage=true": "engine.zero_stage",
    "seed=-1": "seed: input should be greater than or equal to 0",
    "output=": "output",
    # An inline config would not help here, whatever is wrong with it.
    "stages.evaluate.target={kind: llava, language_model: {}, vision_tower: {}}": "evaluate.target.path: is missing",
    "stages.evaluate.methods={a: {drafter: {kind: lvlm, path: x/y, vision_tower: target}}}": "a.drafter.vision_tower: ",
    "drafter.path=some/draft": "drafter.path: stands beside drafter.language_model and drafter.vision_tower",
    "target={kind: llava, path: some/target, vision_tower: null}": "nothing reads language_model beside path",
    "stages.evaluate.temperatures=[.nan]": "finite number",
    "stages.evaluate.temperatures=[1e9]": "less than or equal to 100",
    "stages.world.patch_size=1000": "patch_size 1000 is more than image_size, 48",
    "stages.world.image_size=32": "pictures have 32, and target.vision_tower reads 48",
    "stages.world.splits.train={caption: -1}": "greater than or equal to 0",
    "stages.world.splits.train={caption: true}": "should be a number",
    "target.vision_tower.patch_size=1000": "target.vision_tower.patch_size: 1000 is more than image_size, 48",
    "target.vision_tower.patch_size=null": "target.vision_tower.patch_size: should be a whole number",
    "target.vision_feature_layer=63": "vision_feature_layer is 63, and the tower has",
    "target.kind=[llava]": "target.kind: Input tag",
    "target.device_map=x": "target.device_map",
    "target.revision=../x": "target.revision",
    f"{LM}.hidden_size=63": f"{LM}.hidden_size: 63 is no multiple of num_attention_heads",
    f"{LM}.hidden_size=6": f"{LM}.hidden_size: a head of 3 cannot be rotated",
    f"{LM}.hidden_size=x": f"{LM}.hidden_size: should be a whole number",
    f"{LM}.hidden_size=0": f"{LM}.hidden_size: should be 1 to",
    f"{LM}.num_hidden_layers=1000000": f"{LM}.num_hidden_layers: should be 1 to 256",
    f"{LM}.intermediate_size=x": f"{LM}.intermediate_size: transformers refuses it",
    f"{LM}.model_type=lama": "transformers knows no model 'lama'",
    f"{LM}.model_type=[llama]": "transformers knows no model",
    f"{LM}.hidden_act=x": "transformers knows no activation 'x'",
    "stages.pretrain.kind=[train]": "stages.pretrain.kind",
    "stages.evaluate.target={kind: [llava], path: x}": "stages.evaluate.target.kind",
    "stages.evaluate.methods={a/b: {}}": "a name that files get has no /",
    "stages.evaluate.methods={..: {}}": "does not begin with a dot",
    "stages.evaluate.methods={'': {}}": "is not empty",
    "stages.world.splits={../x: {caption: 4}}": "a name that files get has no /",
    "stages.world.splits={manifest: {caption: 4}}": "the dataset has a file or folder of this name",
    "stages.world.splits={a: {caption: 4}, A: {caption: 4}}": "differ by their case alone",
    "stages.world.mixtures={/tmp/x: {train: all}}": "a name that files get has no /",
    "stages.evaluate.benchmarks={../x: {data: {path: a.json}}}": "benchmarks",
    "stages.evaluate.benchmarks={b: {data: {path: a.json}}, b: {data: {path: c.json}}}": "found duplicate key b",
    "stages.evaluate.benchmarks=[{name: b, data: {path: a.json}}, {name: b, data: {path: c.json}}]": "called 'b'",
    "stages.evaluate.benchmarks=[{name: b, kind: [files], data: {path: a.json}}]": "kind",
    f"{TRAIN}.data.path=trian": f"{TRAIN}.data takes 'trian' of stage world, which writes",
    f"{TRAIN}.data.path=[train, ../x]": f"{TRAIN}.data takes '../x' of stage world",
    "stages.finetune.validation.data.from=x": "stages.finetune.validation.data.from: is of stage x, and data of",
    "stages.evaluate.benchmarks.pictures.data.from=x": "stages.evaluate.benchmarks: come from 2 stages",
    f"{TRAIN}.data=3": f"{TRAIN}.data",
    f"{TRAIN}.objective=3": f"{TRAIN}.objective",
    f"{TRAIN}.data={{path: " + "y" * 300 + "}": "longer than a path can be",
}


def told(*arguments: str) -> UserError:
    return fails_with("", run_recipe, [*arguments, "dry_run=true"], "a test")


@pytest.mark.parametrize(("setting", "says"), REFUSED.items())
def test_a_value_that_cannot_be_meant_is_refused(setting, says):
    error = told("recipe=demo/lvlm-from-nothing", setting)
    assert says in error.problem and error.hint
    assert "command line: " in (error.where or ""), "whoever set it is named"


def test_a_mistyped_split_under_restart_moves_nothing(tmp_path):
    done = tmp_path / "run" / "pretrain" / "model.safetensors"
    done.parent.mkdir(parents=True)
    done.write_text("weights")
    words = ["recipe=demo/lvlm", f"output={tmp_path / 'run'}", f"{TRAIN}.data.path=trian", "restart=pretrain"]
    caught = fails_with(f"{TRAIN}.data takes 'trian' of stage world", run_recipe, words, "a test")
    assert "did you mean 'train'" in caught.hint and f"command line: {TRAIN}.data.path=trian" in caught.where
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [done]


@pytest.mark.parametrize(("name", "section", "problem"), [
    ("finetune", "path: some/draft", "drafters.finetune: stage finetune trains a drafter of this name"),
    ("mine", "path: some/draft, language_model: some/model",
     "drafters.mine.language_model: nothing reads it beside drafters.mine.path"),
])  # fmt: skip
def test_drafters_of_an_evaluation_have_one_source(name, section, problem):
    drafters = f"stages.evaluate.drafters={{{name}: {{kind: lvlm, {section}}}}}"
    error = told("recipe=demo/lvlm-from-nothing", drafters, f"stages.evaluate.methods={{a: {{drafter: {name}}}}}")
    assert problem in error.problem and error.hint and drafters in (error.where or "")


@pytest.mark.parametrize("recipe", ["llava15-68m", "llava-ov-160m"])
def test_a_path_beside_named_parts_is_refused(recipe):
    """Not only beside inline ones: what trains starts from the path, and the names were read by nothing."""
    error = told(f"recipe={recipe}", "drafter.path=some/draft")
    assert "drafter.path: stands beside drafter.language_model and drafter.vision_tower" in error.problem
    assert "drafter.language_model=null drafter.vision_tower=null, or drafter.path=null" in (error.hint or "")


def test_a_published_draft_of_a_folder_is_described_by_its_own_config(tmp_path, capsys):
    config = load(["recipe=demo/lvlm-from-nothing"]).recipe
    config.drafter.config_beside(target_shape(config)).save_pretrained(tmp_path)
    assembled = prints(capsys, ["recipe=demo/lvlm-from-nothing", "dry_run=true"])
    nulls = ["drafter.language_model=null", "drafter.vision_tower=null"]
    assert main(["recipe=demo/lvlm-from-nothing", f"drafter.path={tmp_path}", *nulls, "dry_run=true"]) == 0
    assert capsys.readouterr().out == assembled


def test_weights_of_a_path_and_from_scratch_may_stand_beside_each_other():
    """The first stage starts from the published draft, the second from the inline config."""
    settings = ["drafter.path=some/draft", "stages.finetune.from=scratch"]
    assert load(["recipe=demo/lvlm-from-nothing", *settings]).recipe.drafter.path == "some/draft"


# Text of a file that extends demo/lvlm-from-nothing -> what its message says.
FILES = {
    "stages: [a]": "stages: input should be a valid dictionary",
    "stages: 3": "stages: input should be a valid dictionary",
    "target: {kind: [llava]}": "target.kind",
    "stages: {3: {kind: publish}}": "has the key 3, which is no text",
    "stages: {../x: {kind: publish}}": "a name that files get has no /",
    "stages: {/tmp/x: {kind: publish}}": "a name that files get has no /",
    "stages: {.locks: {kind: publish}}": "does not begin with a dot",
    "stages: {recipe.yaml: {kind: publish}}": "a run writes a file or folder of this name",
    "stages: {world.before-1: {kind: publish}}": "a run writes a file or folder of this name",
    "stages: {'': {kind: publish}}": "is not empty",
    'stages: {"a\\u0007": {kind: publish}}': "a name that files get has no /",
    "stages: {a: {kind: publish, repo: alone}}": "stages.a.repo: 'alone' is no NAMESPACE/NAME of the Hub",
    "stages: {a: {kind: publish, repo: me/x/y}}": "is no NAMESPACE/NAME",
    "stages: {a: {kind: publish, repo: me/.x, upload: false}}": "is no NAMESPACE/NAME",
    "stages: {World: {kind: publish}}": "stage world has this name but for its case",
    "stages: {a: {kind: publish, repo: me/x}, b: {kind: publish, repo: Me/x}}": "stage a publishes to Me/x (main)",
    'seed: "a\\0b"': "seed: input should be a valid integer",
    "order: [1]": "no list of different stages",
    "order: [[1]]": "no list of different stages",
    "x: &a [1]\ny: *b": "line 3, column 4: found undefined alias",
    "seed: " + "1" * 5000: "not a readable recipe",
    "seed: 2024-99-99": "seed: input should be a valid integer",
    "x: " + "[" * 600 + "]" * 600: "nested too deep",
    "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    + "\n".join(
        f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]"
        for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    ): "YAML node expansion exceeds",
}


@pytest.mark.parametrize("text", FILES, ids=lambda text: text[:30])
def test_a_file_that_is_no_recipe_is_told_in_one_message(text, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: demo/lvlm-from-nothing\n{text}\n")
    error = told(f"recipe={path}")
    assert FILES[text] in error.problem
    assert str(path) in (error.where or "") and error.hint
    assert len(str(error)) < 1500


@pytest.mark.parametrize("value", ["[a, b]", "3", "{a: 1}", "''", ".", "../x", "true", "a" * 5000])
def test_what_cannot_be_extended(value, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: {value}\noutput: x\n")
    error = told(f"recipe={path}")
    assert error.problem.startswith("extends ") and f"{path}, key extends" in (error.where or "")


@pytest.mark.parametrize("content", [
    "root:x:0:0:s3cret:/root:/bin/bash\nme:x:1:1::/:/bin/sh\n", "s3cret: {a: 1}\nother: 2\n", "a: [s3cret\n",
    "a: s3cret\n s3cret", "s3cret s3cret: 1\ns3cret s3cret: 2\n", "a: *s3cret\n", "a: !s3cret 1\n", "- s3cret\n",
    "s3cret",
])  # fmt: skip
def test_the_content_of_other_files_is_not_printed(content, tmp_path, capsys):
    other = tmp_path / "passwd"
    other.write_text(content)
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: {other}\noutput: x\n")
    for recipe in (path, other):
        message = prints(capsys, [f"recipe={recipe}", "dry_run=true"], 2)
        assert str(other) in message and "s3cret" not in message and "Traceback" not in message


def test_numbers_as_text_are_read(monkeypatch, tmp_path):
    """An environment variable gives text."""
    monkeypatch.setenv("STEPS", "12")
    path = tmp_path / "mine.yaml"
    path.write_text(
        "extends: demo/lvlm-from-nothing\nstages: {pretrain: {log_every: '${oc.env:STEPS}', batch_size: 1e1}}\n"
    )
    stage = load([f"recipe={path}"]).recipe.stages["pretrain"]
    assert (stage.log_every, stage.batch_size) == (12, 10)


@pytest.mark.parametrize(("setting", "where"), [
    # No file has the section.
    ("traget.path=x", "command line: traget.path=x"),
    # Of the plan, of a model that is built, of a stage's description.
    ("stages.target.data.from=evaluate", "command line: stages.target.data.from=evaluate"),
    ("drafter.vision_tower.image_size=64", "command line: drafter.vision_tower.image_size=64"),
    ("stages.pretrain.data.max_length=1000000", "command line: stages.pretrain.data.max_length"),
    ("stages=[pretrian]", "command line: stages="),
    ("restart=pretrian", "command line: restart="),
])  # fmt: skip
def test_a_setting_of_the_command_line_is_blamed_on_it(setting, where, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: demo/lvlm-from-nothing\n")
    assert where in (told(f"recipe={path}", setting).where or "")


# ---- every key


BAD: dict[str, Any] = {
    "null": None, "true": True, "empty": "", "list": [], "mapping": {}, "x": "x", "below": -1, "zero": 0,
    "inf": math.inf, "nan": math.nan, "1e26": 1e26, "10**26": 10**26, "2**63": 2**63, "texts": ["x"],
    "sections": {"x": {"y": 1}}, "long": "y" * 5000, "surrogate": "\ud800", "null byte": "a\0b", "outside": "../x",
    "number as key": {1: 2}, "lists": [[1]], "odd": 63, "large": 10**9,
}  # fmt: skip
Place = tuple[Any, ...]


def places(tree: Any, place: Place = ()) -> Iterator[Place]:
    """Every key, and the first item of every list."""
    if place:
        yield place
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree[:1]) if isinstance(tree, list) else ()
    for key, value in inner:
        yield from places(value, (*place, key))


def with_value(tree: Any, place: Place, value: Any) -> Any:
    tree = section = copy.deepcopy(tree)
    for key in place[:-1]:
        section = section[key]
    section[place[-1]] = value
    return tree


def check(name: str, tree: Any, place: Place, label: str, *, described: bool) -> None:
    """That the value is refused with a message of one screen that names its key (or the one around), or accepted."""
    written = Written(find_recipe(name), [], with_value(tree, place, BAD[label]))
    start = time.monotonic()
    try:
        recipe = checked(written)
        if described:
            with blamed(written):
                dry_run(recipe, plan(recipe, written.path)).encode()
    except UserError as error:
        message = str(error)
        message.encode()
        assert len(message) < 3000, (place, label, len(message))
        assert any(str(key) in message for key in place), (place, label, message)
    assert time.monotonic() - start < 20, (place, label)


@pytest.mark.parametrize("name", ["demo/lvlm-ov", "demo/visual-ar", "demo/video"])
def test_a_wrong_value_at_any_key_is_a_mistake_and_no_crash(name):
    tree = json.loads(json.dumps(resolved(load([f"recipe={name}"]))))
    cases = [(place, label) for place in places(tree) for label in BAD]
    for place, label in random.Random(name).sample(cases, 100):
        check(name, tree, place, label, described=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", recipe_names())
def test_every_wrong_value_at_every_key(name):
    """A fifth of the cases of each recipe, described in full where they are accepted (hours for all of them)."""
    tree = json.loads(json.dumps(resolved(load([f"recipe={name}"]))))
    cases = [(place, label) for place in places(tree) for label in BAD]
    for place, label in random.Random(name).sample(cases, len(cases) // 20):
        check(name, tree, place, label, described=True)


@pytest.mark.parametrize(("key", "where", "says"), [
    ("stages.world.kind", None, "command line: stages.world.kind=x"),
    ("stages.world", None, "command line: stages.world.kind=x"),
    ("target.path", None, "a.yaml, key target.path"),
    ("target.path", "weights", "weights; a.yaml, key target.path"),
    ("suite.data", None, "a.yaml, key suite.data"),
    ("suite.data", "rows.json", "rows.json"),
    (None, "rows.json", "rows.json"),
    (None, None, "a.yaml"),
])  # fmt: skip
def test_the_key_of_an_error_says_who_set_it(key, where, says):
    written = Written(Path("a.yaml"), [("stages.world.kind", "x")], {"target": {"path": "p"}})
    assert placed(UserError("it is wrong", key=key, where=where), written).where == says


def test_a_key_that_begins_the_problem_is_not_said_twice():
    assert UserError("repo is no name", key="repo").found_at == ""
    assert UserError("stages.a.b: 3 is none", key="stages.a").found_at == ""
    assert UserError("repository/x holds files", key="repo").found_at == "key repo"
    assert UserError("no such set", key="suite.sets", where="rows.json").found_at == "rows.json, key suite.sets"
