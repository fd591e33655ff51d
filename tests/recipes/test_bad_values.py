"""Wrong values at every key of the shipped recipes: each is refused in one message that names its key, or accepted.

The table holds what a recipe's own checks refuse: what once ended in a traceback, or passed the dry run and failed
hours later. The walk after it puts values of every wrong type into every key.
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
from draftsmith.recipes.config.files import find_recipe, recipe_names
from draftsmith.recipes.config.launch import run_recipe
from draftsmith.recipes.config.load import Written, blamed, checked, load, placed
from draftsmith.recipes.config.plan import plan
from draftsmith.trainers.estimate.models import target_shape
from fails import fails_with

TRAIN, LM = "stages.pretrain", "drafter.language_model"
METHOD, LANTERN = "stages.evaluate.methods.EAGLE-2", "stages.evaluate.methods.LANTERN.rule"
CHAIN = (f"{METHOD}.tree.kind=chain", f"{METHOD}.tree.gamma=3")
SPARROW, PROMPTS = "stages.evaluate.methods.Sparrow", "stages.evaluate.benchmarks.captions.prompts"
UNTIMED = "stages.evaluate.benchmarks.captions.untimed={}"
DATA = "stages.finetune.data.path"
STAGE = "stages.evaluate"

# Recipe -> rows of words that the message holds, the key or the cure, and the settings that it is about.
REFUSED = {
    "demo/lvlm-from-nothing": [
        ("optim.lr: input should be a finite number", f"{TRAIN}.optim.lr=.inf"),
        ("should be a number, and is True", f"{TRAIN}.optim.lr=true"),
        ("one line of printable text", f'{TRAIN}.about="two\\nlines"'),
        ("of at most 100 characters", f"{TRAIN}.about={'a' * 101}"),
        ("beyond 1,000,000,000,000,000", f"{TRAIN}.steps=100000000000000000000000000"),
        ("fractional part", f"{TRAIN}.steps=1.5"),
        (f"{TRAIN}.seed", f"{TRAIN}.seed=4294967296"),
        (f"{TRAIN}.data", f"{TRAIN}.data=3"),
        ("takes 'trian' of stage world, which writes", f"{TRAIN}.data.path=trian"),
        (f"{TRAIN}.data takes '../x' of stage world", f"{TRAIN}.data.path=[train, ../x]"),
        ("longer than a path can be", f"{TRAIN}.data={{path: {'y' * 300}}}"),
        ("data.from: is of stage x, and data of", "stages.finetune.validation.data.from=x"),
        ("stages.evaluate.benchmarks: come from 2 stages", "stages.evaluate.benchmarks.pictures.data.from=x"),
        ("which runs later", "stages.target.data.from=evaluate"),
        ("makes none", "stages.language.data.from=target"),
        # An inline config would not help here, whatever is wrong with it.
        ("evaluate.target.path: is missing",
         f"{STAGE}.target={{kind: llava, language_model: {{model_type: llama}}, "
         "vision_tower: {model_type: clip_vision_model}}"),
        ("a.drafter.vision_tower: ",
         f"{STAGE}.methods={{a: {{drafter: {{kind: lvlm, path: x/y, vision_tower: target}}}}}}"),
        ("stands beside drafter.language_model and drafter.vision_tower", "drafter.path=some/draft"),
        ("nothing reads language_model beside path", "target={kind: llava, path: some/target, vision_tower: null}"),
        ("drafters.finetune: stage finetune trains a drafter of this name",
         f"{STAGE}.drafters={{finetune: {{kind: lvlm, path: some/draft}}}}",
         f"{STAGE}.methods={{a: {{drafter: finetune}}}}"),
        ("nothing reads it beside drafters.mine.path",
         f"{STAGE}.drafters={{mine: {{kind: lvlm, path: some/draft, language_model: x/y}}}}",
         f"{STAGE}.methods={{a: {{drafter: mine}}}}"),
        ("vata is no decoding setting of this drafter (kind lvlm",
         f"{STAGE}.methods={{a: {{drafter: finetune, vata: true}}}}"),
        ("stages.evaluate.temperatures", f"{STAGE}.temperatures=[0.0,0.0]"),
        ("patch_size 1000 is more than image_size, 48", "stages.world.patch_size=1000"),
        ("pictures have 32, and target.vision_tower reads 48", "stages.world.image_size=32"),
        ("target.vision_tower.patch_size: 1000 is more than image_size, 48", "target.vision_tower.patch_size=1000"),
        ("target.vision_tower.patch_size: should be a whole number", "target.vision_tower.patch_size=null"),
        ("vision_feature_layer is 63, and the tower has", "target.vision_feature_layer=63"),
        ("target.kind: Input tag", "target.kind=[llava]"),
        ("target.revision", "target.revision=../x"),
        ("'hidden_size'", "target.vision_tower.hidden_sizes=64"),
        ("image_size", "drafter.vision_tower.image_size=64"),
        ("max_length", "stages.pretrain.data.max_length=1000000"),
        (f"{LM}.hidden_size: 63 is no multiple of num_attention_heads", f"{LM}.hidden_size=63"),
        (f"{LM}.hidden_size: a head of 3 cannot be rotated", f"{LM}.hidden_size=6"),
        (f"{LM}.hidden_size: should be 1 to", f"{LM}.hidden_size=0"),
        (f"{LM}.num_hidden_layers: should be 1 to 256", f"{LM}.num_hidden_layers=1000000"),
        (f"{LM}: transformers refuses it: Validation error for field 'intermediate_size'", f"{LM}.intermediate_size=x"),
        ("transformers knows no model 'lama'", f"{LM}.model_type=lama"),
        ("transformers knows no activation 'x'", f"{LM}.hidden_act=x"),
        ("a name that files get has 1 to 100 bytes, no /", f"{STAGE}.methods={{a/b: {{}}}}"),
        ("no dot at its beginning", f"{STAGE}.methods={{..: {{}}}}"),
        ("a name that files get has 1 to", f"{STAGE}.methods={{'': {{}}}}"),
        ("a name that files get has 1 to 100 bytes, no /", "stages.world.splits={../x: {caption: 4}}"),
        ("the dataset has a file or folder of this name", "stages.world.splits={manifest: {caption: 4}}"),
        ("differ by their case alone", "stages.world.splits={a: {caption: 4}, A: {caption: 4}}"),
        ("a name that files get has 1 to 100 bytes, no /", "stages.world.mixtures={/tmp/x: {train: all}}"),
        ("benchmarks", f"{STAGE}.benchmarks={{../x: {{data: {{path: a.json}}}}}}"),
        ("found duplicate key b",
         f"{STAGE}.benchmarks={{b: {{data: {{path: a.json}}}}, b: {{data: {{path: c.json}}}}}}"),
        ("called 'b'",
         f"{STAGE}.benchmarks=[{{name: b, data: {{path: a.json}}}}, {{name: b, data: {{path: c.json}}}}]"),
        ("did you mean 'caption'", "stages.world.splits.train.captoin=1"),
        ("did you mean 'steps'", "stages.target.max_steps=1"),
        ("'warmup_ratio'", "stages.target.optim.ratio_warmup=0"),
        ("did you mean stages.finetune?", "stages.finetoone.steps=2"),
        ("512 positions", f"{STAGE}.max_new_tokens=[40, 5000]"),
        ("64 positions",
         "stages.target.positions=64", "stages.target.data.max_length=64", f"{STAGE}.max_new_tokens=64"),
    ],
    "llava15-68m": [
        ("did you mean 'lr'", f"{TRAIN}.optim.lrr=1"),
        ("did you mean 'target'", "traget=1"),
        (f"{TRAIN}.batch_size", f"{TRAIN}.batch_size=many"),
        ("kinds here are generate", f"{TRAIN}.kind=encode"),
        ("did you mean 'train'", f"{TRAIN}.kind=trian"),
        ("stages.new: its kind is missing", "stages.new={data: {path: mine.json}}"),
        ("does not name language_model", f"{TRAIN}.lora={{rank: 4}}"),
        ("did you mean 'temperatures'", f"{STAGE}.temperature=1.0"),
        ("fits none of the temperatures", f"{STAGE}.methods.M.draw=sample"),
        ("stands beside drafter.language_model and drafter.vision_tower", "drafter.path=some/draft"),
        (f"{DATA}.pth: unknown key", f"{DATA}={{kind: datasets, pth: x}}"),
        (f"{DATA}: its kind is missing", f"{DATA}={{path: x}}"),
        ("did you mean 'image'", f"{DATA}={{kind: datasets, path: x, columns: {{imge: a}}}}"),
        (f"{DATA}.1.pth: unknown key", f"{DATA}=[a.json, {{kind: webdataset, path: a.tar, pth: 3}}]"),
    ],
    "demo/lvlm": [
        ("`from` is for splits", f"{DATA}={{kind: webdataset, path: a.tar}}"),
        ("drafter.language_model.num_hidden_layer", f"{LM}.num_hidden_layer=4"),
    ],
    "demo/lvlm-distilled": [("512 positions", "stages.answers.max_new_tokens=512")],
    "demo/suite": [("quality.max_new_tokens", "stages.suite.benchmarks.suite.quality.max_new_tokens=100000")],
    "demo/lvlm-ov": [
        ("did you mean 'stories'", "stages.world.mixtures.onevision.storys=all"),
        ("first:500", "stages.world.mixtures.onevision.pairs=half"),
        ("few_onevison", f"{STAGE}.contrasts={{a: [onevision, few_onevison]}}"),
        ("drop_images", "stages.knowledge.data.over_length=drop"),
    ],
    "demo/visual-ar": [
        # Combinations that would not be exact
        ("not lossless with draw: sample", f"{METHOD}.draw=sample"),
        ("tree 'adt' prunes", f"{METHOD}.tree.kind=adt", f"{METHOD}.tree.preset=anole", f"{METHOD}.draw=sample"),
        ("tree 'sage' prunes", f"{METHOD}.tree={{kind: sage, growth: online}}", f"{METHOD}.draw=sample"),
        ("rule: block with tree 'dynamic'", f"{METHOD}.rule={{kind: block}}"),
        ("use tree: chain with draw: sample", *CHAIN, f"{METHOD}.rule={{kind: block}}"),
        ("methods.EAGLE-2 fits none of the temperatures",
         *CHAIN, f"{METHOD}.draw=sample", f"{STAGE}.temperatures=[0.0]"),
        ("fits none of the temperatures", f"{METHOD}.temperatures=[0.7]"),
        # Bounds of LANTERN
        ("takes delta and the multiplicative one lambda", f"{LANTERN}.lambda=2.0"),
        ("takes delta", f"{LANTERN}.delta=null"),
        ("each only its own", f"{LANTERN}.delta=null", f"{LANTERN}.lambda=2.0"),
        ("each only its own", f"{LANTERN}.bound=multiplicative"),
        ("use divergence: tvd", f"{LANTERN}={{bound: multiplicative, delta: null, lambda: 5, divergence: jsd}}"),
        ("rule.k: lantern: k is 65, in a codebook of", f"{LANTERN}.k=65"),
        # Targets
        ("Lumina-mGPT is not supported", "target.kind=lumina-mgpt"),
        ("did you mean 'llamagen'", "target.kind=llamagan"),
        ("give size", "target.size=XL"),
        ("condition: text needs text_encoder", "target.text_encoder=null"),
        ("text_layer is of a text encoder that comes from outside", "target.text_layer=0"),
        ("condition is class", "target.condition=class"),
        ("must divide", "target.vq.groups=5"),
        ("multiple of 4", "target.shape.num_heads=3"),
        ("use 1 (or 0) for no guidance", "target.cfg_scale=0.5"),
        ("target.text_encoder.d_models", "target.text_encoder.d_models=32"),
        # Drafters and stages
        ("for target llamagen", "drafter.kind=sparrow"),
        ("did you mean 'total'", f"{METHOD}.tree.totl=3"),
        ("did you mean 'tree'", f"{METHOD}.tre=3"),
        ("did you mean 'path'", "stages.codes.source.pth=x"),
        ("classes needs max_samples", f"{PROMPTS}={{from: null, path: null, classes: 10, max_samples: null}}"),
        ("give path", f"{PROMPTS}.classes=10"),
        ("a prompt without a caption", f"{PROMPTS}={{classes: 3, max_samples: 2, path: null, from: null}}"),
        ("from or path", "stages.head.data.path=x"),
        ("validation needs data.held_out", "stages.head.data.held_out=0"),
        ("decoding and select are for heads", "stages.vq.select=tau"),
        ("makes none", "stages.head.data.from=world"),
        ("no earlier stage makes one that fits", "stages.target.from=vq"),
        ("needs a text", "stages.pictures.write=[pixels, features]"),
        ("needs a vq", "stages.pictures.write=[codes]"),
        ("use adt-llamagen", f"{STAGE}.preset=adt"),
        ("did you mean 'head'", f"{METHOD}.drafter=haed"),
        ("max_new_tokens", f"{STAGE}.max_new_tokens=4"),
        # Pictures for their quality alone
        ("give quality or reader", UNTIMED, f"{STAGE}.benchmarks.captions.reader=false"),
        ("the benchmark is untimed", UNTIMED, f"{STAGE}.repeats=2"),
        ("the benchmark is untimed", UNTIMED, f"{STAGE}.clock=thread"),
    ],
    "eagle-llamagen-c2i-xl": [
        ("label 1999, and the target has classes 0 to 999",
         f"{STAGE}.benchmarks.classes.prompts={{classes: 2000, max_samples: 2000}}"),
        ("label 1000, and", "stages.head.decoding.prompts={classes: 1001, max_samples: 1001}"),
    ],
    "sparrow-qwen2.5-vl-7b": [
        ("did you mean 'sparrow'", "drafter.kind=sparow"),
        ("no kind of drafter for target qwen2_5_vl", "drafter.kind=lvlm"),
        ("did you mean 'vata'", "drafter.vatta=true"),
        ("which no qwen2_5_vl reads", "stages.text.kind=encode"),
        ("'captioner' is no model", "stages.text.model=captioner"),
        ("did you mean 'epochs'", "stages.text.epoch=3"),
        ("did you mean 'feature'", "stages.text.objective.featur=3"),
        ("did you mean 'trainable'", "stages.text.model=target", "stages.text.trainabel=[projector]"),
        ("starts from: scratch", "stages.text.drafter={kind: msd}"),
        ("did you mean 'pictures'", f"{SPARROW}.drafter=picturs"),
        ("makes none", f"{SPARROW}.drafter=answers"),
        ("names no tree", f"{SPARROW}.tree=30-4"),
        ("follows the rows of an image", f"{SPARROW}.tree={{kind: adt, preset: anole}}"),
        ("not lossless with draw: sample", f"{SPARROW}.draw=sample"),
        ("methods.Sparrow.drafter.vatta: unknown key", f"{SPARROW}.drafter={{kind: msd, vatta: 1}}"),
        ("no number of visual tokens", f"{STAGE}.lengths=[many]"),
        ("is no number of frames", f"{STAGE}.lengths=[0]"),
        ("lengths name 16 twice", f"{STAGE}.lengths=[16,16]"),
        ("did you mean 'MVBench'", f"{STAGE}.lengths={{MVBenh: [17k]}}"),
        ("lengths.MVBench name 13k twice", f"{STAGE}.lengths={{MVBench: [13k, 13k]}}"),
        ("is no published set", f"{STAGE}.benchmarks.sets.sets=[VideoMM]"),
        ("two benchmarks are called ScienceQA", "stages.images.benchmarks.sets.sets=[SQA,ScienceQA]"),
        ("not among the evaluation's sets", f"{STAGE}.probes={{importance: {{sets: [VideoMMEE]}}}}"),
        ("convention: stock", f"{STAGE}.probes={{importance: {{sets: [MVBench]}}}}"),
        ("stages.evaluate.benchmarks", f"{STAGE}.benchmarks=null"),
        ("temperature 1 is used by no method", "stages.images.methods.Sparrow.temperatures=[0.0]",
         "stages.images.methods.Sparrow without VATA.temperatures=[0.0]"),
        ("128,000 positions", f"{STAGE}.max_new_tokens=128000"),
    ],
    "sparrow-ablation-qwen2.5-vl-7b": [
        ("importance.max_new_tokens", "stages.layers.probes.importance.max_new_tokens=128000"),
    ],
    "eagle3-qwen2.5-vl-7b": [
        ("text.decoding.max_new_tokens",
         "stages.text.validation={every: 100}", "stages.text.decoding={every: 100, tree: "
         "{kind: chain, gamma: 3}, data: {path: a.json}, max_new_tokens: 128000}"),
    ],
    "specvlm-qwen2.5-vl-72b-7b": [
        ("drafter.model.kind: Input tag 'qwen'", "drafter.model.kind=qwen"),
        ("drafter.model: input should be 'target'", "drafter.model=tarhet"),
    ],
}  # fmt: skip


def told(*arguments: str) -> UserError:
    return fails_with("", run_recipe, [*arguments, "dry_run=true"], "a test")


@pytest.mark.parametrize(
    ("recipe", "words", "settings"),
    [(recipe, words, settings) for recipe, rows in REFUSED.items() for words, *settings in rows],
)
def test_a_value_that_cannot_be_meant_is_refused(recipe, words, settings, tmp_path, monkeypatch):
    """By its key, with a cure and where it was set, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    error = told(f"recipe={recipe}", *settings)
    assert words in str(error) and error.hint and error.where
    assert list(tmp_path.iterdir()) == []


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
    "stages: {3: {kind: publish}}": "has the key 3, which is no text",
    "stages: {../x: {kind: publish}}": "a name that files get has 1 to 100 bytes, no /",
    "stages: {.locks: {kind: publish}}": "no dot at its beginning",
    "stages: {recipe.yaml: {kind: publish}}": "a run writes a file or folder of this name",
    "stages: {world.before-1: {kind: publish}}": "a run writes a file or folder of this name",
    "stages: {a: {kind: publish}, a: {kind: publish}}": "found duplicate key a",
    "stages: {a: {kind: publish, repo: me/x/y}}": "is no NAMESPACE/NAME",
    "stages: {a: {kind: publish, repo: me/x, visibility: public, pull_request: true}}": "main branch",
    "stages: {a: {kind: publish, repo: me/x, revision: a, pull_request: true}}": "against main",
    "stages: {World: {kind: publish}}": "stage world has this name but for its case",
    "stages: {a: {kind: publish, repo: me/x}, b: {kind: publish, repo: Me/x}}": "stage a publishes to Me/x (main)",
    "order: [1]": "does not name each stage once",
    "x: &a [1]\ny: *b": "line 3, column 4: found undefined alias",
    "seed: " + "1" * 5000: "not a readable recipe",
    "x: " + "[" * 600 + "]" * 600: "not a readable recipe",
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


@pytest.mark.parametrize("value", ["[a, b]", "3", "''", "../x", "a" * 5000])
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
