"""What environment variables give is used, and leaves the process as it was written; `${...}` is bounded."""

import json
import time

import pytest
import yaml
from draftsmith.core.errors import UserError
from draftsmith.core.secrets import as_written, redact_tree, variables_of
from draftsmith.recipes.commands.cli import main
from draftsmith.recipes.launch import _write_provenance, context_maker
from draftsmith.recipes.load import load
from draftsmith.recipes.origins import shown
from draftsmith.recipes.plan import plan
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


@pytest.mark.parametrize(("text", "value", "written"), [
    ("${oc.env:PROJECT}", VALUE, "${oc.env:PROJECT}"),
    ("a ${oc.env:PROJECT}/b", f"a {VALUE}/b", "a ${oc.env:PROJECT}/b"),
    ("${ oc.env : PROJECT }", VALUE, "${oc.env:PROJECT}"),
    ("${oc.env:NOT_SET,runs/x-1}", "runs/x-1", "${oc.env:NOT_SET,runs/x-1}"),
    ("${oc.env:NOT_SET,'a, b: c'}", "a, b: c", "${oc.env:NOT_SET,'a, b: c'}"),
    ("${oc.env:NOT_SET,'it\\'s {so}'}", "it's {so}", "${oc.env:NOT_SET,'it\\'s {so}'}"),
    ("${oc.env:NOT_SET,${oc.env:PROJECT}}", VALUE, "${oc.env:NOT_SET,${oc.env:PROJECT}}"),
    ("${oc.env:${oc.env:WHICH}}", VALUE, "${oc.env:${oc.env:WHICH}}"),
    ("${oc.env:${.entity}}", VALUE, "${oc.env:PROJECT}"),
    ("${.mode}", "offline", "offline"),
    ("\\${oc.env:PROJECT}", "${oc.env:PROJECT}", "\\${oc.env:PROJECT}"),
])  # fmt: skip
def test_the_run_has_the_value_and_the_written_recipe_the_text(recipe, tmp_path, text, value, written):
    wandb = {"project": text, "entity": "PROJECT", "mode": "offline", "tags": ["${..project}"]}
    found = load([recipe(yaml.safe_dump({"tracking": {"wandb": wandb}}))])
    assert found.recipe.tracking.wandb.project == found.recipe.tracking.wandb.tags[0] == value
    kept = redact_tree(found.tree)
    assert kept["tracking"]["wandb"]["project"] == kept["tracking"]["wandb"]["tags"][0] == written
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(kept))
    again = load([f"recipe={tmp_path / 'again.yaml'}"])
    assert again.recipe == found.recipe and redact_tree(again.tree) == kept, "it reads back as it was"


def test_everything_that_tells_of_a_recipe_has_the_text(recipe, tmp_path, capsys):
    settings = (
        f"output: {tmp_path}/run\nstages: {{pretrain: {{steps: '${{oc.env:STEPS}}', epochs: null, "
        "about: '${oc.env:PROJECT}'}}\ntracking: {wandb: {project: x, tags: ['${oc.env:PROJECT}']}}\n"
    )
    found = load([recipe(settings), "stages.finetune.about=for ${oc.env:PROJECT}"])
    assert found.recipe.stages["pretrain"].steps == 17 and found.recipe.stages["finetune"].about == f"for {VALUE}"
    planned = plan(found.recipe, found.path)
    _write_provenance(found, tmp_path / "run", "the command")
    written = [(tmp_path / "run" / name).read_text() for name in ("recipe.yaml", "run.yaml")]
    stored = [json.dumps(one.settings) for one in planned]
    context = context_maker(found, "x")(planned[0], tmp_path, {})
    for text in (*written, *stored, shown(found), json.dumps(redact_tree(context.recipe))):
        assert VALUE not in text and "'17'" not in text
    assert "${oc.env:STEPS}" in written[0] and "for ${oc.env:PROJECT}" in written[0]
    assert '"steps": "${oc.env:STEPS}"' in "".join(stored)
    assert "# command line" in next(line for line in shown(found).splitlines() if "for ${oc.env" in line)
    assert main(["show", str(found.path)]) == 0 and VALUE not in capsys.readouterr().out


def test_another_value_is_another_fingerprint(recipe, monkeypatch):
    argument = recipe("stages: {pretrain: {steps: '${oc.env:STEPS}', epochs: null}}\n")

    def fingerprints():
        found = load([argument])
        return {one.name: one.fingerprint for one in plan(found.recipe, found.path)}

    before = fingerprints()
    assert fingerprints() == before
    monkeypatch.setenv("STEPS", "18")
    assert {name for name, one in fingerprints().items() if one != before[name]} >= {"pretrain", "finetune"}


def test_errors_show_the_text(recipe):
    with pytest.raises(UserError) as caught:
        load([recipe("stages: {pretrain: {steps: '${oc.env:PROJECT}'}}\n")])
    assert VALUE not in str(caught.value) and "${oc.env:PROJECT}" in str(caught.value)
    with pytest.raises(UserError, match=r"variable 'NOT_SET' is not set") as caught:
        load([recipe("output: '${oc.env:NOT_SET}'\n")])
    assert "mine.yaml" in str(caught.value.where) and "export NOT_SET=" in caught.value.hint
    for around in ("${oc.decode:${oc.env:STEPS}}", "${oc.decode:${seed}}"):
        with pytest.raises(UserError, match="a resolver stands around") as caught:
            load([recipe(f"seed: '${{oc.env:STEPS}}'\noutput: '{around}'\n")])
        assert "mine.yaml" in str(caught.value.where) and "STEPS" not in caught.value.problem
    fails_with("command line: output=", load, [recipe(""), "output=${oc.env:NOT_SET}"])


def test_a_secret_name_hides_a_default_and_no_variable():
    found = redact_tree
    from draftsmith.core.secrets import AsWritten

    assert found({"api_key": AsWritten.of("v", "${oc.env:KEY1}")}) == {"api_key": "${oc.env:KEY1}"}
    assert found({"api_key": AsWritten.of("v", "${oc.env:KEY1,hunter2}")}) == {"api_key": "<hidden>"}


def test_texts_made_from_values(recipe):
    found = load([recipe("output: '${oc.env:PROJECT}/${oc.env:STEPS}'\n")])
    variables = variables_of(found.tree)
    assert variables == {VALUE: "${oc.env:PROJECT}"}, "short values would match everywhere"
    assert as_written({VALUE: [f"in {VALUE}/x", 17]}, variables) == {VALUE: ["in ${oc.env:PROJECT}/x", 17]}


PUBLISHED = ("SHA256SUMS", "draftsmith.json")


@pytest.mark.parametrize("beside", PUBLISHED)
@pytest.mark.parametrize(("text", "problem"), [
    ("${oc.decode:'7'}", "the resolver 'oc.decode'"),
    ("${oc.select:seed}", "the resolver 'oc.select'"),
    ("x ${oc.env:NOT_SET,${oc.decode:'7'}}", "the resolver 'oc.decode'"),
    ("${oc.env:HF_TOKEN}", "'HF_TOKEN', a variable that is named like a secret"),
    ("${oc.env:NOT_SET,${oc.env:AWS_SECRET_ACCESS_KEY}}", "named like a secret"),
])  # fmt: skip
def test_a_published_recipe_asks_for_plain_variables_alone(recipe, tmp_path, monkeypatch, beside, text, problem):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "S" * 34)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "S" * 34)
    argument = recipe(yaml.safe_dump({"output": f"runs/{text}"}))
    load([argument])
    (tmp_path / beside).write_text("")
    assert "copy" in fails_with(problem, load, [argument]).hint
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.yaml").write_text("extends: ../mine\n")
    fails_with(problem, load, [f"recipe={tmp_path / 'own' / 'mine.yaml'}"])
    recipe("output: '${oc.env:PROJECT}'\n")
    assert load([argument]).recipe.output == VALUE


def bomb(levels, name="x"):
    return (
        "".join(f"{name}{n}: '${{{name}{n + 1}}}${{{name}{n + 1}}}'\n" for n in range(levels)) + f"{name}{levels}: a\n"
    )


@pytest.mark.parametrize("text", [
    bomb(60),
    "".join(f"x{n}: ['${{x{n + 1}}}', '${{x{n + 1}}}']\n" for n in range(60)) + "x60: {a: 1}\n",
    "".join(f"x{n}: {{a: '${{..x{n + 1}}}', b: '${{x{n + 1}.a}}'}}\n" for n in range(60)) + "x60: {a: 1}\n",
    "".join(f"x{n}: '${{oc.select:x{n + 1}}}${{oc.select:x{n + 1}}}'\n" for n in range(60)) + "x60: a\n",
    f"x0: {'a' * 9000}\n" + "x1: '" + "${x0}" * 200 + "'\n",
    "x0: '${x1}'\nx1: '${x0}'\n",
    "stages: {a: {b: '${stages}'}}\n",
    "x0: a\nx1: '${${x0}}'\n",
    "x0: {y: 1}\nx1: '${x0.${x2}}'\nx2: y\n",
], ids=["texts", "sections", "relative", "select", "letters", "circle", "itself", "name", "part"])  # fmt: skip
def test_interpolation_is_bounded(recipe, text):
    begun = time.monotonic()
    caught = fails_with(r"become more than|interpolated", load, [recipe(text)])
    assert time.monotonic() - begun < 20 and "mine.yaml" in str(caught.where)
