"""The runner: stages that finished are passed over, and folders of other settings or versions are refused."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from draftsmith.core.errors import UserError
from draftsmith.core.results import BEGUN
from draftsmith.trainers.run.matching import ABSENT, FINGERPRINTS, HIDDEN, RULED, stage_state
from draftsmith.trainers.run.restart import pending_restart
from draftsmith.trainers.run.run import check_stages, run_stages
from draftsmith.trainers.run.stage import Planned, Stage
from fails import fails_with
from stages_run import contexts, list_anew


class Note(Stage):
    """A stage that writes one file."""

    text: str = "done"

    def run(self, context) -> None:
        (context.folder / "note.txt").write_text(self.text)


def planned(**changes) -> Planned:
    return Planned(**{"name": "note", "stage": Note(), "inputs": {}, "fingerprint": "f", "recipe": None, **changes})


def run(output: Path, *plan: Planned, restart: str | None = None, chosen: Sequence[str] | None = None) -> list[str]:
    said: list[str] = []
    context = contexts(said.append, resolved={f"stages.{stage.name}.captioner.dtype": "bfloat16" for stage in plan})
    run_stages(plan, context, output=output, chosen=chosen, restart=restart, say=said.append)
    return said


def test_a_finished_stage_is_passed_over(tmp_path):
    assert run(tmp_path, planned()) == ["stage note"]
    assert (tmp_path / "note" / "note.txt").read_text() == "done"
    assert run(tmp_path, planned()) == ["stage note: finished before, same inputs"]


def test_the_chosen_stages_run_and_no_others(tmp_path):
    first = planned(name="first")
    second = planned(name="second", inputs={"data": "first"}, earlier={"first": first})
    assert run(tmp_path, first, second, chosen=["first"]) == ["stage first"]
    assert not (tmp_path / "second").exists()
    assert run(tmp_path, first, second, chosen=["second"]) == ["stage second"]


def test_other_settings_are_refused_and_restarted_by_name(tmp_path):
    run(tmp_path, planned())
    changed = planned(stage=Note(text="again"), fingerprint="g")
    fails_with("with other settings", run, tmp_path, changed)
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
    fails_with("needs the data of stage first", run, tmp_path, waits)
    assert run(tmp_path, first, waits) == ["stage first", "stage second"]


SETTINGS = {"stages": {"first": {"optim": {"lr": 0.001}, "text": "a"}}, "seed": 0, "inputs": {}, "data": ["d"]}


def two_stages(**changes) -> list[Planned]:
    """A stage and one that reads what it made; `changes` are of the first one's settings."""
    settings = SETTINGS | changes
    # As a plan has it: the hash of the settings as they were written.
    ruled = {key: value for key, value in settings.items() if key not in RULED}
    settings = {HIDDEN: json.dumps(ruled, sort_keys=True)} | settings
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
        caught = fails_with("", refuse)
        assert "stage second takes the data of stage first, which was run with other settings" in caught.problem
        for change in ("stages.first.optim.lr was 0.001, is now 0.5", "stages.first.more was not set, is now [1]",
                       "seed was 0, is now 7"):  # fmt: skip
            assert change in caught.problem
        assert "text" not in caught.problem and "restart=first" in caught.hint
    assert not (tmp_path / "second").exists()


def test_data_that_is_not_here_matches_and_data_that_changed_does_not(tmp_path):
    """A run is evaluated on a machine without its training data."""
    run(tmp_path, two_stages()[0])
    run(tmp_path, two_stages(data=[ABSENT])[1])
    for data in (["e"], ["d", "e"], []):
        with pytest.raises(UserError, match=r"stage second was run .*: the files of stage first changed"):
            check_stages(two_stages(data=data), tmp_path, ["second"], None)


def test_results_of_a_maker_that_ran_anew_are_stale(tmp_path):
    """Stage first ran with other settings and was then put back in the plan: stage second had read neither result."""
    plan = two_stages()
    run(tmp_path, *plan)
    other = two_stages(seed=7)
    os.replace(tmp_path / "first", tmp_path / "first of before")
    run(tmp_path, other[0])
    # The stages as the recipe has them now, of which second read the first one of seed 0.
    own = SETTINGS | {"stages": {"second": {}}, "inputs": {"data": other[0].fingerprint}, "data": []}
    second = replace(plan[1], fingerprint="s", settings=own, earlier={"first": other[0]})
    for its in ([other[0], second], [other[0], replace(plan[1], earlier={"first": other[0]})]):
        with pytest.raises(UserError, match=r"stage second was run .*: stage first, which it builds on, has run anew"):
            check_stages(its, tmp_path, ["second"], None)
    run(tmp_path, other[0], second, restart="second")
    assert run(tmp_path, other[0], second)[-1] == "stage second: finished before, same inputs"
    # Back: what the first run made is there again, and is not what stage second read since.
    os.replace(tmp_path / "first", tmp_path / "first of seed 7")
    os.replace(tmp_path / "first of before", tmp_path / "first")
    with pytest.raises(UserError, match=r"stage second was run .* stage first, which it builds on, has run anew"):
        check_stages([plan[0], replace(second, earlier={"first": plan[0]})], tmp_path, ["second"], None)


def test_a_maker_that_ran_again_with_equal_settings_or_was_removed_makes_nothing_stale(tmp_path):
    plan = two_stages()
    run(tmp_path, *plan)
    os.replace(tmp_path / "first", tmp_path / "elsewhere")
    assert run(tmp_path, plan[1], chosen=["second"]) == ["stage second: finished before, same inputs"]
    assert run(tmp_path, *plan) == ["stage first", "stage second: finished before, same inputs"]


def test_a_stage_goes_on_under_the_fingerprint_that_it_began_with(tmp_path):
    """Data of stage first has been removed since: the plan of stage second has another fingerprint, and checkpoints
    and shards of before were refused.
    """
    used = []

    class Continued(Fragile):
        def run(self, context) -> None:
            used.append(context.fingerprint)
            super().run(context)

    first, second = two_stages()
    stage = Continued(path=str(tmp_path / "there"))
    fails_with("", run, tmp_path, first, replace(second, stage=stage), error=KeyboardInterrupt)
    (tmp_path / "there").touch()
    gone, again = two_stages(data=[ABSENT])
    run(tmp_path, gone, replace(again, stage=stage))
    assert used == [second.fingerprint] * 2 != [again.fingerprint] * 2
    assert json.loads((tmp_path / "second" / "done.json").read_text())["fingerprint"] == second.fingerprint
    assert run(tmp_path, first, replace(second, stage=stage))[-1] == "stage second: finished before, same inputs"


def test_of_long_values_the_parts_that_differ_are_shown(tmp_path):
    """Names that a list held out of training: 500 characters of it were the same."""
    words = [f"word{number}" for number in range(100)]
    run(tmp_path, two_stages(without=words)[0])
    plan = two_stages(without=[*words[:70], "added", *words[70:]])
    was, now = r'\.\.\. \S* "word69", "word70", .*', r'\.\.\. \S* "word69", "added", "word70", .*'
    fails_with(f"without was {was}, is now {now}", check_stages, plan, tmp_path, ["first"], None)


def test_values_that_are_hidden_in_the_settings_are_compared_too(tmp_path):
    """Two paths that look like keys are stored as the same text."""
    run(tmp_path, two_stages(**{HIDDEN: "a"})[0])
    for plan in (two_stages(**{HIDDEN: "b"}), two_stages(**{HIDDEN: "b"}, data=[ABSENT])):
        fails_with(r"stage first was run .*: a hidden value changed\n", check_stages, plan, tmp_path, ["first"], None)
    fails_with(r"seed was 0, is now 7\n", check_stages, two_stages(**{HIDDEN: "b"}, seed=7), tmp_path, ["first"], None)


def test_what_is_hidden_at_one_start_alone_changes_nothing(tmp_path):
    """The value of a secret variable, by which a text is hidden, may be that of a setting: texts are for messages."""
    shown = {"stages": {"first": {"prompt": "say hello"}}, HIDDEN: "a"}
    hidden = {"stages": {"first": {"prompt": "say <hidden>"}}, HIDDEN: "a"}
    run(tmp_path, two_stages(**shown)[0])
    check_stages(two_stages(**hidden), tmp_path, ["second"], None)
    caught = fails_with("", check_stages, two_stages(**hidden, data=["e"]), tmp_path, ["first"], None)
    assert "the files of stage first changed" in caught.problem and "prompt" not in caught.problem


def test_a_stage_that_made_nothing_begins_with_what_was_mended(tmp_path):
    """Its error named the cure, data or weights to fetch again, after which "data have changed" refused it."""

    class Fails(Stage):
        def run(self, context) -> None:
            (context.folder / "checkpoints").mkdir()
            (context.folder / ".lock").touch()
            raise UserError("record 3 has no picture")

    first = two_stages()[0]
    fails_with("record 3", run, tmp_path, replace(first, stage=Fails()))
    fixed = two_stages(data=["e"], outside={"target.path": "2"})
    assert run(tmp_path, *fixed) == ["stage first", "stage second"]
    assert json.loads((tmp_path / "first" / BEGUN).read_text())["settings"]["data"] == ["e"]
    assert run(tmp_path, *fixed)[0] == "stage first: finished before, same inputs"


@pytest.mark.parametrize("name", ["checkpoints/step-1/module.pt", "shards/a.tar", "done.json", "model.safetensors"])
def test_a_stage_that_made_something_is_not_begun_with_other_data(name, tmp_path):
    first = two_stages()[0]
    run(tmp_path, first)
    (tmp_path / "first" / "done.json").unlink()
    (tmp_path / "first" / "note.txt").unlink()
    (tmp_path / "first" / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "first" / name).touch()
    fails_with("the files of stage first changed", check_stages, two_stages(data=["e"]), tmp_path, ["first"], None)


def test_a_removed_maker_counts_as_equal_where_its_data_is_not_here(tmp_path):
    """A head is measured where neither the training data nor the cache of states that was made of it is."""
    first, second = two_stages()
    third = {"stages": {"third": {}}, "inputs": {"drafter": second.fingerprint}, "data": []}
    run(tmp_path, first, second)
    os.replace(tmp_path / "first", tmp_path / "elsewhere")
    gone = two_stages(data=[ABSENT])[1]
    last = planned(name="third", settings=third, inputs={"drafter": "second"}, earlier={"second": gone})
    assert run(tmp_path, last) == ["stage third"]
    for changes in ({"seed": 7}, {"data": ["e"]}):  # known, and not what was read
        with pytest.raises(UserError, match=r"stage second was run .*: stage first, which it builds on"):
            check_stages(two_stages(**changes), tmp_path, ["second"], None)


def test_weights_outside_the_run_that_changed_are_refused_by_name(tmp_path):
    """What was not here when the stage began, or is not here now, tells nothing."""
    target = {"target": {"path": "/models/llava"}}
    run(tmp_path, two_stages(**target, outside={"target.path": "1"})[0])
    for now in ("1", ABSENT):
        check_stages(two_stages(**target, outside={"target.path": now}), tmp_path, ["first"], None)
    with pytest.raises(UserError) as caught:
        check_stages(two_stages(**target, outside={"target.path": "2"}), tmp_path, ["second"], None)
    changed = "stage first, which was run with other settings, data or earlier stages: the weights or files at"
    assert changed in caught.value.problem
    assert caught.value.problem.endswith("target.path (/models/llava) have changed")


def test_the_hint_names_the_earliest_stage_that_must_run_again(tmp_path):
    """restart=second was the advice, and was then refused for stage first."""
    run(tmp_path, *two_stages())
    changed = two_stages(seed=7)
    with pytest.raises(UserError, match="restart=first runs it and what builds on it") as caught:
        check_stages(changed, tmp_path, ["second"], None)
    assert "restart=second" not in caught.value.hint
    check_stages(changed, tmp_path, None, "first")
    own = replace(two_stages()[1], settings=changed[1].settings | {"seed": 1, HIDDEN: "b"}, fingerprint="other")
    fails_with("restart=second runs it again", check_stages, [own], tmp_path, ["second"], None)


def test_a_restart_that_cannot_run_moves_nothing(tmp_path):
    """What is not restarted may be missing, or of other settings; what is restarted may not be among what runs."""
    first = planned()
    second = planned(name="second", inputs={"data": "note"}, earlier={"note": first})
    run(tmp_path, first, second)
    for chosen, plan, problem in [
        (("second",), (first, second), "restart=note sets aside stage note, whose data stage second takes"),
        (None, (first, planned(name="third", inputs={"data": "gone"})), "needs the data of stage gone"),
        (None, (first, planned(name="third", inputs={"drafter/gone": "gone"})), "needs the drafter of stage gone"),
        (None, (first, planned(name="second", fingerprint="g")), "with other settings"),
    ]:
        fails_with(problem, run_stages, plan, None, output=tmp_path, chosen=chosen, restart="note", say=pytest.fail)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["note", "second"]
    run(tmp_path, first, second, restart="note")
    assert (tmp_path / "note.before-1").is_dir() and (tmp_path / "second.before-1").is_dir()


# ---- restart= of a command that is started again

WORDS = ["recipe=r", "restart=note"]


class Fragile(Stage):
    """Fails until its file is there, as a stage that is killed and started again."""

    path: str = ""

    def run(self, context) -> None:
        (context.folder / "tried.txt").write_text("once")
        if not Path(self.path).is_file():
            raise KeyboardInterrupt


def start(output: Path, plan: list[Planned], words=WORDS, chosen=None) -> list[str]:
    """As the command line does it."""
    said: list[str] = []
    restart = pending_restart(plan, output, "note", words, said.append)
    check_stages(plan, output, chosen, restart)
    run_stages(plan, contexts(said.append), output=output, chosen=chosen, restart=restart, say=said.append, words=words)
    return said


def fragile(path: Path) -> list[Planned]:
    first = planned()
    second = Planned("second", Fragile(path=str(path)), {"data": "note"}, "s", None, earlier={"note": first})
    return [first, second]


def kept(output: Path) -> list[str]:
    return sorted(path.name for path in output.iterdir() if ".before-" in path.name)


def test_a_command_that_is_started_again_restarts_once(tmp_path):
    """A requeued job began from zero each time, and one old folder after the other was kept."""
    output, there = tmp_path / "run", tmp_path / "there"
    run(output, planned())
    plan = fragile(there)
    for attempt in range(3):
        fails_with("", start, output, plan, error=KeyboardInterrupt)
        assert kept(output) == ["note.before-1"], attempt
        (output / "note" / "note.txt").write_text("trained by this command")
        list_anew(output / "note")
    there.touch()
    said = start(output, plan)
    assert "restart=note: this command restarted note on 20" in said[0]
    assert "UTC and goes on with what it has begun; to begin anew delete" in said[0]
    assert "stage note: finished before, same inputs" in said
    assert (output / "note" / "note.txt").read_text() == "trained by this command"
    # All that it restarted has finished: nothing is left to do.
    said = start(output, plan)
    assert "UTC and goes on" in said[0] and str(output / ".restarts.json") in said[0]
    assert said[1:] == [f"stage {name}: finished before, same inputs" for name in ("note", "second")]
    assert kept(output) == ["note.before-1"]
    (output / ".restarts.json").unlink()
    start(output, plan)
    assert kept(output) == ["note.before-1", "note.before-2", "second.before-1"]
    assert (output / "note" / "note.txt").read_text() == "done"


def test_other_words_and_other_settings_restart_anew(tmp_path):
    output, plan = tmp_path / "run", fragile(tmp_path / "there")
    run(output, planned())
    other = planned(fingerprint="changed")
    changed = [other, replace(plan[1], fingerprint="t", earlier={"note": other})]
    for words, its in [(WORDS, plan), ([*WORDS, "seed=1"], plan), (WORDS, changed)]:
        fails_with("", start, output, its, words, error=KeyboardInterrupt)
    assert kept(output) == ["note.before-1", "note.before-2", "note.before-3", "second.before-1", "second.before-2"]


def test_words_whose_results_another_command_set_aside_restart_again(tmp_path):
    """They had nothing to go on with, and the folder of the other command was refused with the advice to restart."""
    plan, other = [planned()], [planned(stage=Note(text="other"), fingerprint="g")]
    run(tmp_path, *plan)
    start(tmp_path, plan)
    start(tmp_path, other, [*WORDS, "stages.note.text=other"])
    start(tmp_path, plan)
    assert kept(tmp_path) == ["note.before-1", "note.before-2", "note.before-3"]
    assert (tmp_path / "note" / "note.txt").read_text() == "done"


def test_a_restart_of_what_does_not_run_is_refused(tmp_path):
    """stages=[other] restart=note set stage note aside at every start, and never made it again."""
    plan = [planned(), planned(name="other", fingerprint="o")]
    run(tmp_path, *plan)
    with pytest.raises(UserError, match="restart=note sets aside stage note, and stages= does not run it"):
        start(tmp_path, plan, chosen=["other"])
    assert kept(tmp_path) == []


def test_a_disk_that_is_full_inside_a_stage_is_told_with_its_folder(tmp_path):
    class Writes(Stage):
        def run(self, context) -> None:
            raise RuntimeError("[enforce fail at inline_container.cc:668] . unexpected pos 787840 vs 787728")

    caught = fails_with(r"No space left on device; .* bytes are there", run, tmp_path, planned(stage=Writes()))
    assert caught.where == str(tmp_path / "note") and run(tmp_path, planned()) == ["stage note"]
