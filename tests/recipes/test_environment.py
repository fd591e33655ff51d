"""What environment variables give is used, and a run writes its recipe with `${...}` as it is; `${...}` is bounded."""

import json

import pytest
import yaml
from draftsmith.core.secrets import redact_tree
from draftsmith.recipes.commands.recipes import shown
from draftsmith.recipes.config.launch import _write_provenance, make_context
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan
from fails import fails_with

VALUE = "companyprojectname"
BASE = "extends: demo/lvlm-from-nothing\n"


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    monkeypatch.setenv("PROJECT", VALUE)
    monkeypatch.setenv("STEPS", "17")
    monkeypatch.setenv("WHICH", "PROJECT")
    monkeypatch.delenv("NOT_SET", raising=False)


@pytest.fixture
def recipe(tmp_path):
    def write(text, base=BASE):
        (tmp_path / "mine.yaml").write_text(base + text)
        return f"recipe={tmp_path / 'mine.yaml'}"

    return write


@pytest.mark.parametrize(("text", "value"), [
    ("${oc.env:PROJECT}", VALUE),
    ("a ${oc.env:PROJECT}/b", f"a {VALUE}/b"),
    ("${ oc.env : PROJECT }", VALUE),
    ("${oc.env:NOT_SET,'a, b: c'}", "a, b: c"),
    ("${oc.env:NOT_SET,${oc.env:PROJECT}}", VALUE),
    ("${.mode}", "offline"),
    ("${stages.pretrain.kind}", "train"),
    ("\\${oc.env:PROJECT}", "${oc.env:PROJECT}"),
])  # fmt: skip
def test_the_run_has_the_value_and_the_written_recipe_the_text(recipe, tmp_path, text, value):
    wandb = {"project": text, "entity": "PROJECT", "mode": "offline", "tags": ["${..project}"]}
    found = load([recipe(yaml.safe_dump({"tracking": {"wandb": wandb}}))])
    assert found.recipe.tracking.wandb.project == found.recipe.tracking.wandb.tags[0] == value
    written = redact_tree(found.tree)
    assert written["tracking"]["wandb"] == wandb
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(written))
    again = load([f"recipe={tmp_path / 'again.yaml'}"])
    assert again.recipe == found.recipe and redact_tree(again.tree) == written, "it reads back as it was"


def test_a_key_means_the_recipe_that_runs(recipe):
    """And not the file that it stands in: `${seed}` of a base is the seed of whoever extends it."""
    argument = recipe("seed: 5\noutput: 'runs/${seed}'\n")
    assert load([argument]).recipe.output == "runs/5" and load([argument, "seed=6"]).recipe.output == "runs/6"


def test_the_recipe_that_a_run_writes_and_tracks_has_the_text(recipe, tmp_path):
    settings = (
        f"output: {tmp_path}/run\nstages: {{pretrain: {{steps: '${{oc.env:STEPS}}', epochs: null, "
        "about: '${oc.env:PROJECT}'}}\ntracking: {wandb: {project: x, tags: ['${oc.env:PROJECT}']}}\n"
    )
    loaded = load([recipe(settings), "stages.finetune.about=for ${oc.env:PROJECT}"])
    assert loaded.recipe.stages["pretrain"].steps == 17 and loaded.recipe.stages["finetune"].about == f"for {VALUE}"
    planned = plan(loaded.recipe, loaded.path)
    _write_provenance(loaded, planned, tmp_path / "run", "the command")
    written = [(tmp_path / "run" / name).read_text() for name in ("recipe.yaml", "run.yaml")]
    context = make_context(loaded, "x", planned[0], tmp_path, {})
    for text in (*written, shown(loaded, defaults=False), json.dumps(redact_tree(context.recipe))):
        assert VALUE not in text and "'17'" not in text
    assert "${oc.env:STEPS}" in written[0] and "for ${oc.env:PROJECT}" in written[0]


def test_a_missing_variable_is_named_with_its_key_and_place(recipe):
    caught = fails_with(r"output: .*variable 'NOT_SET' not found", load, [recipe("output: '${oc.env:NOT_SET}'\n")])
    assert "mine.yaml" in str(caught.where) and "${oc.env:NOT_SET,DEFAULT}" in caught.hint
    fails_with("command line: output=", load, [recipe(""), "output=${oc.env:NOT_SET}"])


PUBLISHED = ("SHA256SUMS", "draftsmith.json")


@pytest.mark.parametrize("beside", PUBLISHED)
@pytest.mark.parametrize("text", [
    "${oc.decode:'7'}", "${oc.select:seed}", "x ${oc.env:NOT_SET,${oc.decode:'7'}}", "${${seed}}", "${oc.env:HF_TOKEN}",
    "${oc.env:NOT_SET,${oc.env:AWS_SECRET_ACCESS_KEY}}",
])  # fmt: skip
def test_a_published_recipe_asks_for_plain_variables_alone(recipe, tmp_path, monkeypatch, beside, text):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "S" * 34)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "S" * 34)
    argument = recipe(yaml.safe_dump({"output": f"runs/{text}"}))
    (tmp_path / beside).write_text("")
    problem = "variables without secrets and at most 20 keys"
    assert "copy" in fails_with(problem, load, [argument]).hint
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.yaml").write_text("extends: ../mine\n")
    fails_with(problem, load, [f"recipe={tmp_path / 'own' / 'mine.yaml'}"])
    recipe("output: '${oc.env:PROJECT}'\n")
    assert load([argument]).recipe.output == VALUE


@pytest.mark.parametrize("text", [
    "".join(f"x{n}: '${{x{n + 1}}}${{x{n + 1}}}'\n" for n in range(60)) + "x60: a\n",
    "".join(f"x{n}: ['${{x{n + 1}}}', '${{x{n + 1}}}']\n" for n in range(60)) + "x60: {a: 1}\n",
    f"x0: {'a' * 9000}\n" + "x1: '" + "${x0}" * 200 + "'\n",
], ids=["texts", "sections", "letters"])  # fmt: skip
def test_interpolation_of_a_published_recipe_is_bounded(recipe, tmp_path, text):
    (tmp_path / "SHA256SUMS").write_text("")
    assert "mine.yaml" in str(fails_with("at most 20 keys", load, [recipe(text)]).where)


@pytest.mark.parametrize("text", ["output: '${seed_}'\nseed_: '${output}'\n", "stages: {a: {b: '${stages}'}}\n"])
def test_a_circle_is_refused(recipe, text):
    assert "mine.yaml" in str(fails_with("", load, [recipe(text)]).where)
