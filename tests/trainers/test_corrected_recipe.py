"""A recipe that is corrected after a run has begun: what stays, and what may begin with the new settings."""

import pytest
from draftsmith.core.errors import UserError
from draftsmith.core.results import BEGUN, DONE
from draftsmith.trainers.serve import states_builder, written_texts
from fails import fails_with
from text_run import made, recipe, run

ANSWERED = ["answers", "states"]


class Lost(Exception):
    pass


def fails(*_, **__):
    raise Lost


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made(tmp_path_factory.mktemp("corrected"))


def test_answers_and_states_do_not_depend_on_how_the_drafter_is_trained(folder):
    output = folder / "kept"
    run(recipe(folder), output, stages=ANSWERED)
    for settings in (["drafter.mtp_steps=3", "drafter.draft_vocab_size=50"],
                     ["drafter=null", "drafter={kind: eagle3}"]):  # fmt: skip
        told = run(recipe(folder), output, *settings, stages=ANSWERED)
        assert told == [f"stage {name}: finished before, same inputs" for name in ANSWERED]
    with pytest.raises(UserError, match=r"stage states was run .*drafter\.taps was null, is now"):
        run(recipe(folder), output, "drafter.taps=[1,2,3]", stages=ANSWERED)
    other = run(recipe(folder), output, "drafter.taps=[1,2,3]", stages=["answers"])
    assert other == ["stage answers: finished before, same inputs"]


@pytest.mark.parametrize(("stage", "module", "name", "setting"), [
    ("answers", written_texts, "write_answers", "stages.answers.max_new_tokens=5"),
    ("states", states_builder.Builder, "write", "stages.states.answers.shares={target: 1.0}"),
    ("states", states_builder.Builder, "write", "stages.states.states={dtype: int8}"),
])  # fmt: skip
def test_what_wrote_nothing_begins_with_the_corrected_recipe(
    folder, tmp_path, monkeypatch, stage, module, name, setting
):
    output, source = tmp_path / "run", recipe(folder)
    before = ANSWERED[: ANSWERED.index(stage)]
    run(source, output, stages=before)
    with monkeypatch.context() as patched:
        patched.setattr(module, name, fails)
        fails_with("", run, source, output, stages=[stage], error=Lost)
    assert (output / stage / BEGUN).exists() and not (output / stage / DONE).exists()
    run(source, output, setting, stages=[stage])
    assert (output / stage / DONE).exists()
