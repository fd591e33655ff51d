"""A checkpoint is whole or it is not used, and which one is used is said."""

import json

import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.trainers import checkpoint
from draftsmith.trainers.engine import Engine
from training import run


@pytest.fixture
def saved(tmp_path):
    """Checkpoints after 2, 4 and 6 of 7 steps."""
    run(tmp_path, steps=7, every=2, keep=3)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-00000002", "step-00000004", "step-00000006"]
    return tmp_path


def test_rotation(tmp_path):
    run(tmp_path, steps=7, every=1, keep=2)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-00000005", "step-00000006"]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def edit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [(truncate, "bytes, not"), (edit, "was changed after it was written"), (lambda p: p.unlink(), "is missing")],
    ids=["truncated", "edited", "missing"],
)
def test_a_harmed_checkpoint_is_refused_and_the_newest_good_one_named(saved, harm, reason):
    manifest = json.loads((saved / "step-00000006" / checkpoint.MANIFEST).read_text())
    for name in manifest["files"]:
        harm(saved / "step-00000006" / name)
        found = checkpoint.find(saved, fingerprint="f")
        assert found.step == 4
        assert "step-00000006" in found.notes[0] and reason in found.notes[0]
        break
    losses, _, told = run(saved, steps=7)
    assert sorted(losses) == [5, 6, 7]
    assert any("refused checkpoint step-00000006" in line for line in told)
    assert any("step-00000004" in line for line in told)


def test_without_a_manifest_it_is_no_checkpoint(saved):
    (saved / "step-00000006" / checkpoint.MANIFEST).unlink()
    (saved / "step-00000004" / checkpoint.MANIFEST).write_text("{")
    found = checkpoint.find(saved, fingerprint="f")
    assert found.step == 2 and len(found.notes) == 2


def test_all_bad_is_an_error_and_not_a_fresh_start(saved):
    for path in saved.iterdir():
        truncate(path / checkpoint.MANIFEST)
    with pytest.raises(UserError, match=r"no usable checkpoint.*step-00000006") as error:
        checkpoint.find(saved, fingerprint="f")
    assert "restart=" in error.value.cure


def test_nothing_is_unpickled_that_does_not_verify(saved, monkeypatch):
    """A harmed checkpoint is never handed to DeepSpeed, which unpickles."""
    for path in saved.iterdir():
        edit(next(path.rglob("*.pt")))
    monkeypatch.setattr(Engine, "load", lambda *_: pytest.fail("loaded a checkpoint that does not verify"))
    with pytest.raises(UserError):
        run(saved, steps=7)


def test_another_recipe_is_refused(saved):
    with pytest.raises(UserError, match="made by another recipe"):
        run(saved, steps=7, fingerprint="other")


def test_another_number_of_ranks_is_refused_with_the_reason(saved):
    path = saved / "step-00000006" / checkpoint.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["state"]["world_size"] = 2
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"made by 2 ranks, and this run has 1.*shared out by rank"):
        run(saved, steps=7)


def test_a_save_that_is_cut_off_leaves_the_old_one(saved, monkeypatch):
    full = Engine.save

    def cut_off(self, folder, state):
        full(self, folder, state)
        raise OSError("no space left")

    monkeypatch.setattr(Engine, "save", cut_off)
    with pytest.raises(OSError, match="no space"):
        run(saved, steps=12, every=4)
    monkeypatch.undo()
    assert (saved / ".step-00000008.partial").is_dir()
    assert checkpoint.find(saved, fingerprint="f").step == 6
    run(saved, steps=12, every=4)
    assert checkpoint.find(saved, fingerprint="f").step == 8
    assert not (saved / ".step-00000008.partial").exists()


def test_random_states_come_back_without_pickle(saved):
    state = torch.load(saved / "step-00000006" / "random-00000.pt", weights_only=True)
    assert {"torch", "python", "numpy"} <= state.keys()
