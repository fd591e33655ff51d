"""Checkpoints are whole or not there, damage is refused by name, and nothing is unpickled that does not verify."""

import json
import os
import pickle
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.trainers import checkpoint
from draftsmith.trainers.checkpoint import MANIFEST, CheckpointConfig
from draftsmith.trainers.engine import Engine, EngineConfig, init_distributed

from .training import FINGERPRINT, Run, same, scrambled, tiny

MODEL = "engine/mp_rank_00_model_states.pt"
RANDOM = "random-00000.pt"


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The smallest thing that the engine saves."""
    init_distributed()
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    return Engine(
        module, optimizer, lambda step: 1.0, EngineConfig(), micro_batch_size=1, accumulation=1, clip_norm=None
    )


def save(engine: Engine, folder: Path, step: int, keep: int = 100) -> Path:
    """Save, with weights that tell the step."""
    with torch.no_grad():
        engine.module.weight.fill_(step)
    return checkpoint.save(engine, folder, step=step, fingerprint=FINGERPRINT, keep=keep)


def found(folder: Path) -> checkpoint.Found:
    result = checkpoint.find(folder, fingerprint=FINGERPRINT)
    assert result is not None
    return result


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_save_and_load_bring_back_weights_and_every_random_state(engine, tmp_path):
    def draws() -> tuple:
        return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.normal(), np.random.rand()

    draws()  # a Gaussian draw leaves a second one in store: it must come back as well
    save(engine, tmp_path, 4)
    expected = draws()
    with torch.no_grad():
        engine.module.weight.zero_()
    assert draws() != expected
    checkpoint.load(engine, found(tmp_path))
    assert draws() == expected
    assert torch.equal(engine.module.weight, torch.full((2, 3), 4.0))


def test_nothing_saved_yet(tmp_path):
    assert checkpoint.find(tmp_path / "never", fingerprint=FINGERPRINT) is None
    (tmp_path / ".step-00000003.partial").mkdir()
    assert checkpoint.find(tmp_path, fingerprint=FINGERPRINT) is None


def test_frozen_weights_stay_out(tmp_path):
    run = Run(tiny(trainable=("projector",)), steps=1, checkpoints=CheckpointConfig(every=None))
    engine = run.prepare()
    path = checkpoint.save(engine, tmp_path, step=1, fingerprint=FINGERPRINT, keep=1)
    written = torch.load(path / MODEL, weights_only=False)["module"]  # written a moment ago by this test
    assert written and all("multi_modal_projector" in name for name in written)


def test_a_save_that_dies_in_the_engine_leaves_the_last_one(engine, tmp_path, monkeypatch):
    save(engine, tmp_path, 2)
    real = engine.save

    def dies(folder: Path, state: dict) -> None:
        real(folder, state)
        with open(folder / MODEL, "r+b") as file:
            file.truncate(100)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(engine, "save", dies)
        save(engine, tmp_path, 4)
    assert steps(tmp_path) == [2]
    left_over = tmp_path / ".step-00000004.partial"
    assert left_over.is_dir()
    assert found(tmp_path).step == 2 and found(tmp_path).notes == ()
    assert left_over.is_dir(), "looking for a checkpoint deletes nothing"
    # The same step again: nothing of the first try gets into it.
    (left_over / "stray.pt").write_bytes(b"of the first try")
    path = save(engine, tmp_path, 4)
    assert not left_over.exists() and not (path / "stray.pt").exists()
    assert found(tmp_path) == checkpoint.Found(path, 4, ())


def test_a_save_that_dies_at_any_write_leaves_one_that_verifies(engine, tmp_path, monkeypatch):
    """Die at the first, second, ... time that something is brought to disk, and at the renaming."""
    save(engine, tmp_path, 2)
    real_fsync, real_replace = os.fsync, os.replace

    class Died(BaseException):
        pass

    def die_at(count: int):
        left = [count]

        def step(real):
            def call(*arguments):
                left[0] -= 1
                if left[0] == 0:
                    raise Died
                return real(*arguments)

            return call

        return step

    outcomes = []
    for count in range(1, 50):
        with monkeypatch.context() as patch:
            dies = die_at(count)
            patch.setattr(os, "fsync", dies(real_fsync))
            patch.setattr(os, "replace", dies(real_replace))
            try:
                save(engine, tmp_path, 4)
            except Died:
                outcomes.append(found(tmp_path).step)
                assert found(tmp_path).notes == ()
                shutil.rmtree(tmp_path / "step-00000004", ignore_errors=True)
            else:
                break
    else:
        pytest.fail("never saved")
    # Two files, the manifest, the folder, the renaming; only then, with its parent still to be brought to disk, it counts.
    assert outcomes == [2] * 5 + [4]
    assert found(tmp_path).step == 4


def test_the_newest_are_kept(engine, tmp_path):
    for step in (2, 4, 6, 8):
        save(engine, tmp_path, step, keep=2)
    assert steps(tmp_path) == [6, 8]
    save(engine, tmp_path, 100_000, keep=1)
    assert steps(tmp_path) == [100_000]


def test_keeping_the_newest_does_not_delete_the_one_just_saved(engine, tmp_path):
    """Damaged ones of an earlier try are newer by name; they must not push out good ones."""
    for step in (4, 6, 8):
        save(engine, tmp_path, step)
    for step in (6, 8):
        (tmp_path / f"step-{step:08d}" / RANDOM).unlink()
    assert found(tmp_path).step == 4
    save(engine, tmp_path, 5, keep=2)
    assert found(tmp_path).step == 5
    save(engine, tmp_path, 6, keep=2)
    save(engine, tmp_path, 8, keep=2)
    assert steps(tmp_path) == [6, 8] and found(tmp_path).notes == ()


def truncated(path: Path) -> None:
    with open(path / MODEL, "r+b") as file:
        file.truncate(os.path.getsize(path / MODEL) - 1)


def edited(path: Path) -> None:
    data = bytearray((path / MODEL).read_bytes())
    data[len(data) // 2] ^= 1
    (path / MODEL).write_bytes(data)


def edit_manifest(path: Path, change) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    change(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))


DAMAGE = {
    "truncated file": (truncated, r"mp_rank_00_model_states\.pt has \d+ bytes, not \d+"),
    "edited byte": (edited, r"mp_rank_00_model_states\.pt was changed after it was written"),
    "missing file": (lambda path: (path / MODEL).unlink(), r"mp_rank_00_model_states\.pt is missing"),
    "missing random state": (lambda path: (path / RANDOM).unlink(), r"random-00000\.pt is missing"),
    "missing manifest": (lambda path: (path / MANIFEST).unlink(), r"manifest\.json is missing or not readable"),
    "cut manifest": (lambda path: os.truncate(path / MANIFEST, 60), r"manifest\.json is missing or not readable"),
    "binary manifest": (lambda path: (path / MANIFEST).write_bytes(b"\xff\x00"), r"manifest\.json is missing or not"),
    "empty manifest": (lambda path: (path / MANIFEST).write_text("{}"), r"manifest\.json is missing or not readable"),
    "a list for a manifest": (lambda path: (path / MANIFEST).write_text("[]"), r"manifest\.json is missing or not"),
    "edited hash": (
        lambda path: edit_manifest(path, lambda m: m["files"][RANDOM].update(sha256="0" * 64)),
        r"random-00000\.pt was changed",
    ),
    "edited step": (lambda path: edit_manifest(path, lambda m: m["state"].update(step=7)), r"manifest\.json says step 7"),
    "lost name in the manifest": (
        lambda path: edit_manifest(path, lambda m: m["files"].pop(RANDOM)),
        r"manifest\.json does not list random-00000\.pt",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_by_name_and_the_newest_good_one_used(engine, tmp_path, name):
    damage, message = DAMAGE[name]
    for step in (2, 4, 6):
        save(engine, tmp_path, step)
    damage(tmp_path / "step-00000006")
    good = found(tmp_path)
    assert good.step == 4 and good.path == tmp_path / "step-00000004"
    (note,) = good.notes
    assert note.startswith("step-00000006: ")
    import re

    assert re.search(message, note), note
    checkpoint.load(engine, good)
    assert torch.equal(engine.module.weight, torch.full((2, 3), 4.0))
    # All of them bad: never a silent start from nothing.
    for step in (2, 4):
        damage(tmp_path / f"step-{step:08d}")
    with pytest.raises(UserError) as error:
        checkpoint.find(tmp_path, fingerprint=FINGERPRINT)
    assert all(f"step-{step:08d}" in error.value.problem for step in (2, 4, 6))
    assert re.search(message, error.value.problem)
    assert error.value.where == str(tmp_path)
    assert "restart=STAGE" in error.value.cure


def test_training_says_what_it_refused_and_goes_on_from_the_good_one(tmp_path):
    settings = {"steps": 6, "checkpoints": CheckpointConfig(every=2, keep=5)}
    whole = Run(tiny(dropout=0.3), **settings).train(tmp_path)
    assert steps(tmp_path) == [2, 4]
    edited(tmp_path / "step-00000004")
    again = Run(scrambled(tiny(dropout=0.3)), **settings).train(tmp_path)
    assert again.said == [
        f"refused checkpoint step-00000004: {MODEL} was changed after it was written",
        f"resuming from {tmp_path / 'step-00000002'} (step 2)",
    ]
    assert again.losses == {step: loss for step, loss in whole.losses.items() if step > 2}
    assert same(again.weights(), whole.weights())
    assert found(tmp_path).step == 4, "the damaged one was written anew"


def test_another_recipe_is_refused(engine, tmp_path):
    path = save(engine, tmp_path, 2)
    with pytest.raises(UserError, match="another recipe or from other data") as error:
        checkpoint.find(tmp_path, fingerprint="0" * 64)
    assert error.value.where == str(path)
    assert "restart=STAGE" in error.value.cure


def test_another_number_of_ranks_is_refused_with_the_reason(engine, tmp_path):
    path = save(engine, tmp_path, 2)
    edit_manifest(path, lambda manifest: manifest["state"].update(world_size=4))
    with pytest.raises(UserError, match="made by 4 ranks, and this run has 1: optimizer states") as error:
        checkpoint.find(tmp_path, fingerprint=FINGERPRINT)
    assert "resume with 4 ranks" in error.value.cure


class Trap:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_nothing_is_unpickled_that_does_not_verify(tmp_path):
    settings = {"steps": 4, "zero_stage": 2, "checkpoints": CheckpointConfig(every=1, keep=5)}
    Run(tiny(), **settings).train(tmp_path / "c")
    sprung = tmp_path / "sprung"
    newest = tmp_path / "c" / "step-00000003"
    files = [path for path in newest.rglob("*.pt")]
    assert len(files) == 3  # weights, ZeRO's optimizer part, random state
    for file in files:
        torch.save(Trap(sprung), file)
        # The trap is a real one, in the format that DeepSpeed reads.
        torch.load(file, weights_only=False)
        sprung.rmdir()
    assert found(tmp_path / "c").step == 2
    again = Run(scrambled(tiny()), **settings).train(tmp_path / "c")
    assert again.rewound == [2]
    assert not sprung.exists()


def test_the_random_state_is_data_even_where_the_manifest_was_made_to_fit(engine, tmp_path):
    sprung, path = tmp_path / "sprung", save(engine, tmp_path / "c", 2)
    torch.save(Trap(sprung), path / RANDOM)
    entry = {"bytes": (path / RANDOM).stat().st_size, "sha256": checkpoint._sha256(path / RANDOM)}
    edit_manifest(path, lambda manifest: manifest["files"].update({RANDOM: entry}))
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.load(engine, found(tmp_path / "c"))
    assert not sprung.exists()
