"""The runner: stages that finished are passed over, and folders of other settings or versions are refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from draftsmith.core.errors import UserError
from draftsmith.core.tracking import TrackingConfig
from draftsmith.trainers.run import ABSENT, FINGERPRINTS, check_stages, run_stages, stage_state
from draftsmith.trainers.stages.base import Planned, Stage


class Note(Stage):
    """A stage that writes one file."""

    text: str = "done"

    def run(self, context) -> None:
        (context.folder / "note.txt").write_text(self.text)


def planned(**changes) -> Planned:
    return Planned(**{"name": "note", "stage": Note(), "inputs": {}, "fingerprint": "f", **changes})


def run(output: Path, *plan: Planned, restart: str | None = None) -> list[str]:
    said: list[str] = []

    def context(stage, folder, inputs):
        return SimpleNamespace(folder=folder, tracking=TrackingConfig(), trackers=[], say=said.append)

    run_stages(plan, context, output=output, chosen=None, restart=restart, say=said.append)
    return said


def test_a_finished_stage_is_passed_over(tmp_path):
    assert run(tmp_path, planned()) == ["stage note"]
    assert (tmp_path / "note" / "note.txt").read_text() == "done"
    assert run(tmp_path, planned()) == ["stage note: finished before, same inputs"]


def test_other_settings_are_refused_and_restarted_by_name(tmp_path):
    run(tmp_path, planned())
    changed = planned(stage=Note(text="again"), fingerprint="g")
    with pytest.raises(UserError, match="with other settings"):
        run(tmp_path, changed)
    run(tmp_path, changed, restart="note")
    assert (tmp_path / "note" / "note.txt").read_text() == "again"
    assert (tmp_path / "note.before-1" / "note.txt").read_text() == "done"


@pytest.mark.parametrize("version", [None, FINGERPRINTS + 1])
def test_a_folder_of_another_version_is_refused_by_name(version, tmp_path):
    """Fingerprints of the first version had no number."""
    run(tmp_path, planned())
    for name in ("done.json", "fingerprint.json"):
        path = tmp_path / "note" / name
        result = json.loads(path.read_text()) | {"fingerprint": "of before"}
        assert result.pop("version") == FINGERPRINTS
        path.write_text(json.dumps(result if version is None else result | {"version": version}))
    state = stage_state(planned(), tmp_path)
    assert isinstance(state, UserError)
    assert f"by another version of draftsmith (fingerprints {version or 1}, here {FINGERPRINTS})" in state.problem
    assert "restart=note" in state.hint and "note" in state.where


def test_a_stage_without_its_inputs_says_which(tmp_path):
    first = planned(name="first")
    waits = planned(name="second", inputs={"data": "first"}, earlier={"first": first})
    with pytest.raises(UserError, match="needs the data of stage first"):
        run(tmp_path, waits)
    assert run(tmp_path, first, waits) == ["stage first", "stage second"]


SETTINGS = {"stages": {"first": {"optim": {"lr": 0.001}, "text": "a"}}, "seed": 0, "inputs": {}, "data": ["d"]}


def two_stages(**changes) -> list[Planned]:
    """A stage and one that reads what it made; `changes` are of the first one's settings."""
    settings = SETTINGS | changes
    first = planned(name="first", fingerprint=json.dumps(settings), settings=settings)
    own = {"stages": {"second": {}}, "seed": 0, "inputs": {"data": first.fingerprint}, "data": []}
    second = planned(
        name="second", fingerprint=json.dumps(own), settings=own, inputs={"data": "first"}, earlier={"first": first}
    )
    return [first, second]


def test_an_input_of_other_settings_is_refused_with_what_changed(tmp_path):
    """stages=[second] took what stage first had made with other settings, and wrote the new ones into the recipe."""
    first, _ = two_stages()
    run(tmp_path, first)
    _, second = two_stages(stages={"first": {"optim": {"lr": 0.5}, "text": "a", "more": [1]}}, seed=7)
    for refuse in (lambda: run(tmp_path, second), lambda: check_stages([first, second], tmp_path, ["second"], None)):
        with pytest.raises(UserError) as caught:
            refuse()
        assert "stage second takes the data of stage first, which was run with other settings" in caught.value.problem
        for change in (
            "stages.first.optim.lr was 0.001, is now 0.5",
            "stages.first.more was not set, is now [1]",
            "seed was 0, is now 7",
        ):
            assert change in caught.value.problem
        assert "text" not in caught.value.problem and "restart=first" in caught.value.hint
    assert not (tmp_path / "second").exists()


def test_data_that_is_not_here_matches_and_data_that_changed_does_not(tmp_path):
    """A run is evaluated on a machine without its training data."""
    run(tmp_path, two_stages()[0])
    run(tmp_path, two_stages(data=[ABSENT])[1])
    with pytest.raises(UserError, match=r"stage second was run .*: the files of stage first changed"):
        check_stages(two_stages(data=["e"]), tmp_path, ["second"], None)


def test_a_restart_that_nothing_would_make_again_is_refused(tmp_path):
    plan = two_stages()
    run(tmp_path, *plan)
    with pytest.raises(UserError, match="restart=first sets aside stage first, whose data stage second takes"):
        check_stages(plan, tmp_path, ["second"], "first")
    changed = two_stages(seed=7)
    with pytest.raises(UserError, match=r"stage first was run .* seed was 0, is now 7"):
        check_stages(changed, tmp_path, None, None)
    check_stages(changed, tmp_path, None, "first")


def test_a_restart_that_cannot_run_moves_nothing(tmp_path):
    """What is not restarted may be missing, or of other settings; what is restarted may not be among what runs."""
    first = planned()
    second = planned(name="second", inputs={"data": "note"}, earlier={"note": first})
    run(tmp_path, first, second)
    for chosen, plan, problem in [
        (("second",), (first, second), "restart=note sets aside stage note, whose data stage second takes"),
        (None, (first, planned(name="third", inputs={"data": "gone"})), "needs the data of stage gone"),
        (None, (first, planned(name="second", fingerprint="g")), "with other settings"),
    ]:
        with pytest.raises(UserError, match=problem):
            run_stages(plan, None, output=tmp_path, chosen=chosen, restart="note", say=pytest.fail)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["note", "second"]
    run(tmp_path, first, second, restart="note")
    assert (tmp_path / "note.before-1").is_dir() and (tmp_path / "second.before-1").is_dir()
