"""What `draftsmith check` says of stages that have begun and have not finished."""

import json

import pytest
from draftsmith.recipes.config.checks import stages_findings
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan
from draftsmith.trainers.run.matching import FINGERPRINTS, write_begun, write_done
from draftsmith.trainers.train.checkpoint import MANIFEST


@pytest.fixture
def begun(tmp_path):
    """Makes a run that has finished all stages up to one that it has begun; returns what the findings say of it."""

    def make(name: str):
        loaded = load(["recipe=demo/lvlm", f"output={tmp_path}"])
        planned = plan(loaded.recipe, loaded.path)
        for stage in planned:
            (tmp_path / stage.name).mkdir()
            write_begun(stage, tmp_path / stage.name)
            if stage.name == name:
                break
            write_done(stage, tmp_path / stage.name, FINGERPRINTS, 1.0)

        def told() -> list[tuple[str, str]]:
            found = stages_findings(loaded, planned, (name,), 8, "")
            return [(f.level, f.what) for f in found if f.subject == f"stages.{name}"]

        return tmp_path / name, told

    return make


def saved(folder, step: int, ranks: int = 1) -> None:
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    manifest = {"state": {"step": step, "fingerprint": "", "world_size": ranks}, "files": {}}
    (path / MANIFEST).write_text(json.dumps(manifest))


def test_a_training_that_stopped_says_where_it_continues(begun):
    """It said nothing: docs/reliability.md promises it."""
    folder, told = begun("language")
    assert told() == [], "nothing was written yet"
    (folder / "metrics.jsonl").write_text("{}")
    assert told() == [("ok", "begun before, without a checkpoint: begins at step 0")]
    checkpoints = folder / "checkpoints"
    saved(checkpoints, 990)
    saved(checkpoints, 1040)
    assert told() == [("ok", "continues from step 1040, with 1 rank as before")]
    saved(checkpoints, 1050, ranks=2)
    assert told() == [("ok", "continues from step 1050, with 2 ranks as before")]
    (checkpoints / "step-00001050" / "manifest.json").write_text("{")
    assert told() == [("ok", "continues from step 1040, with 1 rank as before")]


def test_a_training_of_which_no_checkpoint_can_be_read_is_a_fault(begun):
    """Its run says so as well."""
    folder, told = begun("language")
    saved(folder / "checkpoints", 990)
    (folder / "checkpoints" / "step-00000990" / "manifest.json").write_text("{")
    (folder / "metrics.jsonl").write_text("{}")
    assert told() == [("fault", "begun before, and no checkpoint of it can be read")]
