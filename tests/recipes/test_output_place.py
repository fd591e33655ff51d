"""Where a run cannot write, and what stands in its place, is told in one message and nothing is begun."""

import errno
import os
from types import SimpleNamespace

import pytest
from draftsmith.core.errors import UserError
from draftsmith.recipes.config.launch import run_recipe
from draftsmith.trainers.evaluate.benchmarks import TabedBenchmark
from draftsmith.trainers.evaluate.text import refuse_twice
from draftsmith.trainers.run.guard import RunLock
from fails import fails_with


def lock(output):
    return RunLock(output, say=print, patience_s=0.1)


def test_an_output_that_is_a_file_or_under_one(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for output in (file, file / "run", file / "a" / "b"):
        caught = fails_with("cannot be written: (File exists|Not a directory)", lock, output)
        assert str(output) in caught.where and "give a folder that is yours" in caught.hint
    assert file.read_text() == "mine"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_an_output_that_cannot_be_written(number, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number), str(tmp_path / "run"))

    monkeypatch.setattr("draftsmith.trainers.run.guard.Path.mkdir", refuse)
    caught = fails_with("cannot be written", lock, tmp_path / "run")
    cure = "make room" if number == errno.ENOSPC else "a folder that is yours"
    assert os.strerror(number) in caught.problem and cure in (caught.hint or "")


def test_locks_that_no_run_made(tmp_path):
    folder = tmp_path / "run" / ".locks"
    folder.mkdir(parents=True)
    (folder / "rank-x").write_text("stray")
    (folder / "rank-").write_text("")
    lock(tmp_path / "run").release()
    (folder / "rank-00007").mkdir()
    fails_with(r"a folder stands in the place of a file [\s\S]*rank-00007", lock, tmp_path / "run")
    other = tmp_path / "other"
    other.mkdir()
    (other / ".locks").write_text("")
    fails_with(r"cannot be written: File exists[\s\S]*\.locks", lock, other)


def test_a_file_in_a_stage_s_place(tmp_path):
    (tmp_path / "world").write_text("mine")
    with pytest.raises(UserError, match="is a file, and stage world wants its folder there"):
        run_recipe(["recipe=demo/lvlm", f"output={tmp_path}"], "a test")
    assert (tmp_path / "world").read_text() == "mine" and not (tmp_path / "recipe.yaml").exists()


def test_two_suites_with_sets_of_one_name():
    """Both would be decoded, and one reported. What a directory holds is known once it is opened."""

    def suite(*names):
        return SimpleNamespace(about=SimpleNamespace(sets=dict.fromkeys(names)), group=lambda name: "ood")

    section = TabedBenchmark(kind="tabed", data={"path": "somewhere"})
    refuse_twice("evaluate", {"a"}, [(section, suite("b")), (section, suite("c"))])
    for names, suites in (({"b"}, [suite("b")]), (set(), [suite("b", "c"), suite("c")])):
        with pytest.raises(UserError, match="two benchmarks have sets called") as caught:
            refuse_twice("evaluate", names, [(section, held) for held in suites])
        assert caught.value.key == "stages.evaluate.benchmarks"
