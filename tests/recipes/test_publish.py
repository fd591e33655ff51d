"""Publishing a finished run: whether a publication that is there was made with the same settings, and how it stops."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from command_line import prints
from draftsmith.core.errors import STOPPED
from draftsmith.recipes.commands.cli import main
from draftsmith.recipes.commands.stages import _is_other
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan
from draftsmith.trainers.run.matching import BEGUN, FINGERPRINTS, write_begun, write_done
from draftsmith.trainers.stages.publish import PublishStage
from fails import fails_with


def test_another_publication_is_known_by_its_record(tmp_path):
    assert not _is_other(tmp_path, "a")
    (tmp_path / BEGUN).write_text(json.dumps({"fingerprint": "a", "version": 3}))
    assert not _is_other(tmp_path, "a") and _is_other(tmp_path, "b")


@pytest.mark.parametrize("data", [b"", b'{"finger', b"\xff", b"[]", b"{}"])
def test_a_cut_record_is_named(tmp_path, data):
    (tmp_path / BEGUN).write_bytes(data)
    assert str(tmp_path / BEGUN) in str(fails_with("", _is_other, tmp_path, "a"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run whose stages say that they have finished, and hold nothing."""
    output = tmp_path_factory.mktemp("run")
    loaded = load(["recipe=demo/lvlm", f"output={output}", "stages.publish={kind: publish}"])
    (output / "recipe.yaml").write_text(yaml.safe_dump(loaded.tree, sort_keys=False))
    for stage in plan(loaded.recipe, loaded.path)[:-1]:
        (output / stage.name).mkdir()
        write_begun(stage, output / stage.name)
        write_done(stage, output / stage.name, FINGERPRINTS, 1.0)
    return output


@pytest.mark.parametrize("words", ["publish {run}", "recipe={run}/recipe.yaml output={run} stages=[publish]"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_command_says_so_and_exits_with_143(number, words, finished, tmp_path, monkeypatch, capfd):
    """`draftsmith publish RUN` ended with a traceback and 1: a stop was caught for whole recipes alone."""

    def upload(self, context) -> None:
        os.kill(os.getpid(), number)
        context.stop.check("in the upload")

    monkeypatch.setattr(PublishStage, "run", upload)
    run = shutil.copytree(finished, tmp_path / "run")
    assert main(words.format(run=run).split()) == STOPPED
    printed = capfd.readouterr()
    assert "stopped in the upload: the same command continues from there" in printed.out
    assert "Traceback" not in printed.err


def test_dry_run_of_a_runs_folder_describes_it_and_writes_nothing(finished, tmp_path, capsys):
    """It built the folder and set the old one aside: the stage had a key of this name."""
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "publish").mkdir()
    (run / "publish" / BEGUN).write_text(json.dumps({"fingerprint": "another", "version": 3}))
    before = sorted(run.rglob("*"))
    said = prints(capsys, ["publish", str(run), "dry_run=true", "repo=me/tiny"])
    assert "dry run: nothing is written" in said and "stage publish (publish)" in said and "stage pretrain" in said
    assert "one commit to main of me/tiny" in said and "kept in" not in said
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize("words", [(), ("restart=publish",)])
def test_without_a_login_an_earlier_publication_stays(words, finished, tmp_path, monkeypatch, capfd):
    """It was set aside first: the folder then held a fingerprint alone."""
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "publish").mkdir()
    (run / "publish" / BEGUN).write_text(json.dumps({"fingerprint": "another", "version": 3}))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert main(["publish", str(run), "repo=me/tiny", *words]) == 2
    said = capfd.readouterr()
    assert "not logged in to the Hub" in said.err and "kept in" not in said.out
    assert [path.name for path in run.glob("publish*")] == ["publish"]
    assert json.loads((run / "publish" / BEGUN).read_text())["fingerprint"] == "another"


@pytest.mark.parametrize("option", ["restart=pretrain", "stages=[pretrain]"])
def test_publishing_a_folder_runs_no_other_stage(option, finished, capsys):
    """Both words were taken and said nothing."""
    assert "its own stage alone" in prints(capsys, ["publish", str(finished), option], 2)
