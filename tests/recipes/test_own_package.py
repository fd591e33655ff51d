"""A drafter, a tree, a rule and a target of a package outside of the checkout, named by their import paths."""

import importlib
import json
import shutil
import sys

import pytest
import yaml
from command_line import prints
from draftsmith.core.errors import UserError
from draftsmith.core.import_paths import NotImported, code_of
from draftsmith.core.results import DONE, SUMS, Mark, write_mark
from draftsmith.eval.published import read_published
from draftsmith.recipes.commands.recipes import shown
from draftsmith.recipes.config.launch import _write_provenance
from draftsmith.recipes.config.load import load
from fails import fails_with
from own_package import forget, write_package


@pytest.fixture(name="package")
def _package(tmp_path, monkeypatch):
    folder = write_package(tmp_path / "elsewhere" / "her_package")
    (folder / "broken.py").write_text("x = 1\nraise OSError('no licence')\n")
    (folder / "needy.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    yield folder
    forget("her_package")


def recipe(*settings):
    mine = "stages.eagle3.drafter={kind: her_package.recurrent:RecurrentConfig, levels: 2}"
    return load(["recipe=demo/compare", mine, *settings])


def test_a_recipe_takes_it_as_one_of_ours(package, capsys, tmp_path):
    loaded = recipe("stages.evaluate.methods.mine={drafter: eagle3, tree: 'her_package.others:Two', "
                    "rule: 'her_package.others:Same'}")  # fmt: skip
    stage, method = loaded.recipe.stages["eagle3"], loaded.recipe.stages["evaluate"].methods["mine"]
    assert stage.drafter.levels == 2 and stage.drafter.kind == "her_package.recurrent:RecurrentConfig"
    assert method.policy().num_levels == 2 and method.rule.is_exact
    assert "her_package.recurrent:RecurrentConfig" in shown(loaded, defaults=False)
    written = tmp_path / "shown.yaml"
    written.write_text(shown(loaded))
    again = load([f"recipe={written}"])
    assert again.recipe.model_dump() == loaded.recipe.model_dump()
    mine = "stages.eagle3.drafter={kind: her_package.recurrent:RecurrentConfig, levels: 2}"
    assert "her_package.recurrent:RecurrentConfig" in prints(capsys, ["recipe=demo/compare", mine, "dry_run=true"])


def test_a_target_section_too(package):
    text = load(["recipe=eagle-llava15-7b"]).tree["target"] | {"kind": "her_package.others:Mine"}
    target = load(["recipe=eagle-llava15-7b", f"target={json.dumps(text)}"]).recipe.target
    assert target.kind == "her_package.others:Mine"


REFUSED = {
    "her_package.recurent:RecurrentConfig": r"her_package.recurent'\n(?s:.*)did you mean 'recurrent'",
    "no_such_package:A": r"No module named 'no_such_package'\n(?s:.*)pip install -e FOLDER",
    "her_package.recurrent:RecurentConfig": "did you mean 'RecurrentConfig'",
    "her_package.recurrent.RecurrentConfig": "write her_package.recurrent:RecurrentConfig",
    "her_package.recurrent:Cell": "is no DrafterConfig",
    "her_package.others:Two": "is no DrafterConfig",
    "her_package.broken:A": r"importing her_package.broken fails: OSError: no licence\n(?s:.*)python -c",
    "her_package.needy:A": "importing her_package.needy fails: ModuleNotFoundError: No module named 'not_there_at_all'",
    "bcdfg": r"kind: Input tag 'bcdfg' found using 'kind' does not match any of the expected tags: 'lvlm', ",
    "her package:A": "write MODULE:CLASS",
    "draftsmith.models.drafters.eagle:EagleConfig": "has the kind 'eagle' of its own",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_imported_is_said(package, kind):
    fails_with(REFUSED[kind], load, ["recipe=demo/compare", f"stages.eagle3.drafter={{kind: '{kind}'}}"])


def test_a_package_that_is_missing_is_told_once():
    kinds = [f"stages.{stage}.drafter={{kind: 'no_such.heads:A'}}" for stage in ("eagle3", "draft")]
    with pytest.raises(UserError) as caught:
        load(["recipe=demo/compare", *kinds, "stages.evaluate.methods.mine={tree: 'no_such.others:B'}"])
    said = str(caught.value)
    assert said.count("importing no_such.heads fails") == 1, said
    for key in ("stages.eagle3.drafter.kind", "stages.draft.drafter.kind", "methods.mine.tree.kind"):
        assert key in caught.value.problem


def test_a_subclass_of_ours_that_keeps_its_word_is_told_what_to_write(package):
    fails_with("or `kind: str` in the class", load, ["recipe=llava15-68m", "target.kind=her_package.others:Words"])


def test_a_subclass_of_a_section_of_several_kinds_says_which(package):
    target = load(["recipe=llava15-68m", "target={kind: her_package.others:Mine, path: a/b}"]).recipe.target
    assert target.base_kind == "llava"
    words = "Unsaid does not say which of llava, llava_next, "
    fails_with(words, load, ["recipe=llava15-68m", "target={kind: her_package.others:Unsaid, path: a/b}"])


def test_its_class_takes_no_kind_of_another(package):
    mine = importlib.import_module("her_package.others").Two
    for kind in ("json:JSONDecoder", "her_package.others:Same", "chain", "not_there:Two"):
        fails_with("is not this class", mine, kind=kind, error=ValueError)
        fails_with("is not this class", mine.model_validate, {"kind": kind}, error=ValueError)
    sys.modules["her_package"].Two = mine
    for kind in ("her_package.others:Two", "her_package:Two"):
        assert mine(kind=kind).kind == kind


def test_its_settings_are_refused_as_ours_are(package):
    with pytest.raises(UserError, match=r"stages.eagle3.drafter.levls: unknown key(?s:.*)did you mean 'levels'"):
        recipe("stages.eagle3.drafter.levls=3")
    with pytest.raises(UserError, match=r"stages.eagle3.drafter.levels: input should be greater than or equal to 1"):
        recipe("stages.eagle3.drafter.levels=0")


def test_a_published_folder_imports_nothing_by_itself(package, tmp_path):
    loaded = recipe()
    forget("her_package")
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(yaml.safe_dump(loaded.tree))
    (folder / SUMS).write_text("")
    with pytest.raises(UserError, match=r"her_package.recurrent is not imported(?s:.*)allow_import=true"):
        load([f"recipe={folder / 'recipe.yaml'}"])
    extending = tmp_path / "mine.yaml"
    extending.write_text(f"extends: {folder / 'recipe.yaml'}\noutput: runs/x\n")
    fails_with("a published folder imports nothing by itself", load, [f"recipe={extending}"])
    (folder / "deep" / "er").mkdir(parents=True)
    shutil.copy(folder / "recipe.yaml", folder / "deep" / "er" / "r.yaml")
    (tmp_path / "link.yaml").symlink_to(folder / "deep" / "er" / "r.yaml")
    (tmp_path / "linked").symlink_to(folder / "deep")
    (tmp_path / "blob").write_text(yaml.safe_dump(loaded.tree))  # as the Hub's cache keeps it
    (folder / "deep" / "snap.yaml").symlink_to(tmp_path / "blob")
    for place in (folder / "deep/er/r.yaml", tmp_path / "link.yaml", tmp_path / "linked/er/r.yaml",
                  folder / "deep/snap.yaml"):  # fmt: skip
        fails_with("a published folder imports nothing by itself", load, [f"recipe={place}"])
    tree = {"kind": "her_package.others:Two"}
    whose = {"target": {"kind": "llava", "path": "me/target"}, "drafter": {"kind": "sparrow"}}
    section = whose | {"decoding": {"name": "a", "tree": tree}, "prompt": {"text": "a"}}
    (folder / "draftsmith.json").write_text(json.dumps({"published": section}))
    fails_with(r"her_package.others is not imported(?s:.*)draftsmith.json", read_published, folder, error=NotImported)
    assert "her_package" not in sys.modules
    assert read_published(folder, allow_import=True).decoding.tree.gamma == 2
    assert read_published(folder).decoding.tree.gamma == 2, "imported already"
    assert load([f"recipe={folder / 'recipe.yaml'}", "allow_import=true"]).options.allow_import


def test_an_edit_anywhere_in_the_package_is_another_code(package):
    kind = "her_package.recurrent:RecurrentConfig"
    recipe()
    before = code_of(kind)
    (package / "parts").mkdir()
    (package / "parts" / "layers.py").write_text("x = 1\n")
    added = code_of(kind)
    (package / "parts" / "layers.py").write_text("x = 2\n")
    assert len({one["sha256"] for one in (before, added, code_of(kind))}) == 3
    (package / "__pycache__").mkdir(exist_ok=True)
    (package / "__pycache__" / "recurrent.py").write_text("")
    (package / "notes.txt").write_text("no code")
    (package / "parts" / "layers.py").write_text("x = 1\n")
    assert code_of(kind) == added


def test_a_module_outside_of_a_package_is_one_file(tmp_path, monkeypatch):
    (tmp_path / "her_module.py").write_text("x = 1\n")
    (tmp_path / "another.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("her_module")
    before = code_of("her_module:A")
    (tmp_path / "another.py").write_text("y = 1\n")
    assert code_of("her_module:A") == before
    # Runs that began with it go on: sha256 of the lines "place\0sha256 of the file".
    assert before["sha256"] == "9b5aa36a67985cc265e9cd631b0066b781f2fe9205495f952a4fc8b8e46edfb1"
    (tmp_path / "her_module.py").write_text("x = 2\n")
    assert code_of("her_module:A") != before
    forget("her_module")


def test_a_run_that_goes_on_with_other_code_says_what_that_means(package, tmp_path, capsys):
    loaded, output = recipe(), tmp_path / "run"

    def started():
        _write_provenance(loaded, [], output, "command")
        return capsys.readouterr().out

    assert "warning" not in started() + started()
    mark = Mark("f")
    for stage in ("target", "eagle3"):
        (output / stage).mkdir()
    write_mark(output / "target" / DONE, mark)
    (package / "others.py").write_text("x = 1\n")
    said = started()
    assert "the code of her_package.recurrent:RecurrentConfig has changed since this run was started last" in said
    assert "not run again; begun with the old code and going on with the new: eagle3" in said, said
    assert "restart=STAGE makes a stage anew" in said
    (package / "others.py").write_text("x = 2\n")
    write_mark(output / "eagle3" / DONE, mark)
    said = started()
    assert "finished stages are not run again: restart=STAGE" in said and "going on" not in said
