"""A checkpoint is whole or it is not used, and which one is used is said."""

import errno
import json
import os
import random
import re
import shutil

import numpy as np
import pytest
import torch
import xxhash
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from draftsmith.core import ranks
from draftsmith.core.files import full_disk_is_told
from draftsmith.trainers.run.context import EngineConfig
from draftsmith.trainers.train import checkpoint
from draftsmith.trainers.train.engine import Engine, init_distributed, load_data
from fails import fails_with
from small_records import flip
from training import engine_config, module, run


class Died(Exception):
    pass


def dies_at(last):
    """A run's `log` that ends it in this step."""

    def log(step):
        if step == last:
            raise Died

    return log


def small_engine(config=None, name="0"):
    module = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2)})
    init_distributed()
    return Engine(module, torch.optim.SGD(module.parameters(), lr=1.0), lambda step: 1.0, config or EngineConfig(),
                  micro_batch_size=1, accumulation=1, clip_norm=None)  # fmt: skip


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    run(folder, steps=7, every=2, keep=3)
    return folder


@pytest.fixture
def saved(stopped, tmp_path):
    """Checkpoints after 2, 4 and 6 of 7 steps."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-00000002", "step-00000004", "step-00000006"]
    return tmp_path


def test_rotation(tmp_path):
    run(tmp_path, steps=7, every=1, keep=2)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-00000005", "step-00000006"]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (truncate, "and was written with"),
        (flip, "was changed after it was written"),
        (lambda p: p.unlink(), "is missing"),
    ],
    ids=["truncated", "edited", "missing"],
)
def test_a_harmed_checkpoint_is_refused_and_the_newest_good_one_named(saved, harm, reason):
    manifest = json.loads((saved / "step-00000006" / checkpoint.MANIFEST).read_text())
    for name in manifest["files"]:
        harm(saved / "step-00000006" / name)
        result = checkpoint.find(saved, fingerprint="f")
        assert result.step == 4
        assert "step-00000006" in result.notes[0] and reason in result.notes[0]
        break
    losses, _, told = run(saved, steps=7)
    assert sorted(losses) == [5, 6, 7]
    assert any("refused checkpoint step-00000006" in line for line in told)
    assert any("step-00000004" in line for line in told)


def test_all_bad_is_an_error_and_not_a_fresh_start(saved):
    for path in saved.iterdir():
        truncate(path / checkpoint.MANIFEST)
    error = fails_with(r"no usable checkpoint.*step-00000006", checkpoint.find, saved, fingerprint="f")
    assert "restart=" in error.hint


def test_another_recipe_and_another_number_of_ranks_are_refused_with_the_reason(saved):
    caught = fails_with("made by another recipe", run, saved, steps=7, fingerprint="other")
    assert caught.where == str(saved / "step-00000006" / checkpoint.MANIFEST), "which says so"
    edit_manifest(saved / "step-00000006", lambda manifest: manifest["state"].update(world_size=2))
    fails_with(r"made by 2 ranks, and this run has 1.*shared out by rank", run, saved, steps=7)


def edit_manifest(path, change):
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    change(manifest)
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))


RANDOM = "random-00000.pt"


@pytest.mark.parametrize(("harm", "reason"), [
    (lambda path: (path / checkpoint.MANIFEST).unlink(), "manifest.json: file not found"),
    (lambda path: (path / checkpoint.MANIFEST).write_text("{}"), "manifest.json: state: Field required"),
    (lambda path: (path / checkpoint.MANIFEST).write_text(""), "manifest.json: the file is empty"),
    (lambda path: (path / checkpoint.MANIFEST).write_text("[]"), "manifest.json: expected a dictionary"),
    (lambda path: (path / checkpoint.MANIFEST).write_bytes(b"\xff"), "manifest.json: not UTF-8"),
    *(
        (lambda path, key=key: edit_manifest(path, lambda m: m["state"].pop(key)), f"manifest.json: state.{key}: F")
        for key in ("step", "fingerprint", "world_size")
    ),
    *(
        (lambda path, key=key: edit_manifest(path, lambda m: m["files"][RANDOM].pop(key)),
         f"manifest.json: files.{RANDOM}.{key}: Field required") for key in ("bytes", "xxh3")
    ),
    (lambda path: edit_manifest(path, lambda m: m.update(files=["a"])), "manifest.json: files: expected a valid"),
    (lambda path: edit_manifest(path, lambda m: m["files"].clear()), "manifest.json does not list"),
    (lambda path: (edit_manifest(path, lambda m: m["files"].pop(RANDOM)), (path / RANDOM).unlink()),
     f"manifest.json does not list {RANDOM}"),
    (lambda path: edit_manifest(path, lambda m: m["state"].update(step=7)), "manifest.json says step 7"),
    (lambda path: edit_manifest(path, lambda m: m["files"].pop(RANDOM)), f"manifest.json does not list {RANDOM}"),
    (lambda path: edit_manifest(path, lambda m: m["files"][RANDOM].update(xxh3="0")), f"{RANDOM} was changed")
])  # fmt: skip
def test_a_harmed_manifest_is_refused(saved, harm, reason):
    harm(saved / "step-00000006")
    result = checkpoint.find(saved, fingerprint="f")
    assert result.step == 4
    assert [note.startswith(f"step-00000006: {reason}") for note in result.notes] == [True]


def test_refused_checkpoints_do_not_push_out_the_one_just_saved(saved):
    """They are newer by name, and rotation goes by name."""
    for step in (4, 6):
        (saved / f"step-{step:08d}" / RANDOM).unlink()

    fails_with("", run, saved, steps=7, every=3, keep=1, log=dies_at(4), error=Died)
    result = checkpoint.find(saved, fingerprint="f")
    assert result.step == 3 and [note[:13] for note in result.notes] == ["step-00000006", "step-00000004"]
    losses, _, told = run(saved, steps=7, every=3, keep=1)
    assert sorted(losses) == [4, 5, 6, 7] and len(told) == 3
    assert [path.name for path in saved.iterdir()] == ["step-00000006"]
    assert checkpoint.find(saved, fingerprint="f").notes == ()


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_deepspeeds_own_barriers_wait_as_long_as_ours(zero, tmp_path, monkeypatch):
    """NCCL's would end a run whose disk takes ten minutes."""
    from deepspeed import comm

    built = small_engine(engine_config(zero))
    waited, impatient = [], []
    monkeypatch.setattr(comm, "barrier", lambda *_, **__: impatient.append(1))
    before, wait = comm.barrier, ranks.barrier
    monkeypatch.setattr(ranks, "barrier", lambda: waited.append(1) or wait())
    built.save(tmp_path, {"step": 1})
    assert len(waited) >= 2 and not impatient
    built.load(tmp_path)
    assert not impatient and comm.barrier is before


def test_a_save_that_dies_at_any_write_leaves_one_that_verifies(tmp_path, monkeypatch):
    """At the first, second, ... time that something is brought to disk, and at the renaming."""
    built = small_engine()
    checkpoint.save(built, tmp_path, step=2, fingerprint="f", keep=5)

    def die_at(count):
        calls = iter(range(1, 100))

        def wrap(real):
            def call(*arguments):
                if next(calls) == count:
                    raise Died
                return real(*arguments)

            return call

        return wrap

    survivors = []
    for count in range(1, 20):
        with monkeypatch.context() as patch:
            dies = die_at(count)
            patch.setattr(os, "fsync", dies(os.fsync))
            patch.setattr(os, "replace", dies(os.replace))
            try:
                checkpoint.save(built, tmp_path, step=4, fingerprint="f", keep=5)
                break
            except Died:
                saved = checkpoint.find(tmp_path, fingerprint="f")
                assert saved.notes == ()
                survivors.append(saved.step)
                shutil.rmtree(tmp_path / "step-00000004", ignore_errors=True)
    # The manifest, its renaming and its folder, and the checkpoint's renaming; then it counts, though its parent is not
    # brought to disk yet. Files below a megabyte are not flushed: one that a power cut took is told by its checksum.
    assert survivors == [2, 2, 2, 2, 4]
    assert not [*tmp_path.glob(".*")], "what a save before had left half-made"


class Trap:
    """Unpickling it makes a folder."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize(("zero", "count"), [(0, 2), (1, 3), (2, 3), (3, 3)])
def test_a_trap_in_a_checkpoint_is_not_sprung(tmp_path, zero, count):
    """Every file that is read back, replaced by one that acts when it is unpickled; the manifest was made to fit."""
    run(tmp_path / "c", steps=2, zero=zero, every=1, keep=3)
    sprung, saved = tmp_path / "sprung", tmp_path / "c" / "step-00000001"
    files = {file: file.read_bytes() for file in saved.rglob("*.pt")}
    assert len(files) == count  # weights, random states, and under ZeRO the optimizer's part
    for file, content in files.items():
        torch.save(Trap(sprung), file)
        torch.load(file, weights_only=False)
        sprung.rmdir()  # it would have worked
        fit_manifest(saved, file)
        error = fails_with("more than a checkpoint's data", run, tmp_path / "c", steps=2, zero=zero, every=1, keep=3)
        assert error.where == str(file) and not sprung.exists()
        assert "Trap" in error.problem or "mkdir" in error.problem, error.problem
        file.write_bytes(content)
        fit_manifest(saved, file)
    assert sorted(run(tmp_path / "c", steps=2, zero=zero, every=1, keep=3)[0]) == [2]


class Asks:
    """Pickled as Python before 3.11.4 pickles members of an enumeration."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_members_of_deepspeeds_stages_are_all_that_may_be_asked_for_by_name(tmp_path):
    torch.save({"zero_stage": Asks(ZeroStageEnum, "gradients")}, tmp_path / "good.pt")
    assert load_data(tmp_path / "good.pt") == {"zero_stage": ZeroStageEnum.gradients}
    for owner, name in (ZeroStageEnum, "mro"), (ZeroStageEnum, "__class__"), (LossScaler, "backward"), (int, "real"):
        torch.save(Asks(owner, name), tmp_path / "bad.pt")
        fails_with("more than a checkpoint's data", load_data, tmp_path / "bad.pt")


def test_what_deepspeed_keeps_beside_tensors_is_read(tmp_path):
    """Scales of fp16, which no CPU trains with, and where a parameter's part lies."""
    scale = DynamicLossScaler(2**16, 1000, 1.0, 2, False)
    scale.cur_scale = 2.0**11
    torch.save({"scale": scale, "static": LossScaler(4), "part": fragment_address(numel=3, start=5)}, tmp_path / "a.pt")
    state = load_data(tmp_path / "a.pt")
    assert vars(state["scale"]) == vars(scale) and state["static"].loss_scale == 4
    assert state["part"] == fragment_address(numel=3, start=5)


def fit_manifest(folder, file):
    entry = {"bytes": file.stat().st_size, "xxh3": xxhash.xxh3_64(file.read_bytes()).hexdigest()}
    edit_manifest(folder, lambda manifest: manifest["files"].update({str(file.relative_to(folder)): entry}))


def test_every_file_is_in_the_manifest_however_deep_and_none_may_join_it(saved):
    """DeepSpeed's files lie in a folder inside; one that nobody listed could be read in their place."""
    path = saved / "step-00000006"
    listed = json.loads((path / checkpoint.MANIFEST).read_text())["files"]
    held = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {checkpoint.MANIFEST}
    assert {*listed} == held and any("/" in name for name in held)
    nested = next(path / name for name in held if "/" in name)
    shutil.copy(nested, nested.with_name("another.pt"))
    assert checkpoint.find(saved, fingerprint="f").step == 4


def test_every_random_state_comes_back(saved):
    """torch, numpy and Python, with the second half of a Gaussian pair that each keeps in store."""

    def draws():
        return torch.rand(3).tolist(), torch.randn(3).tolist(), random.random(), random.gauss(0, 1), np.random.normal()

    draws()
    built = small_engine()
    checkpoint.save(built, saved / "own", step=1, fingerprint="f", keep=1)
    expected = draws()
    assert draws() != expected
    checkpoint.load(built, checkpoint.find(saved / "own", fingerprint="f"))
    assert draws() == expected


def test_frozen_weights_stay_out(tmp_path):
    with pytest.raises(Died):
        run(tmp_path, steps=3, every=1, model=module(parts=("projector",)), log=dies_at(2))
    written = torch.load(next(tmp_path.rglob("mp_rank_00_model_states.pt")), weights_only=False)["module"]
    assert written and all("multi_modal_projector" in name for name in written)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_weights_of_other_names_are_refused(zero, tmp_path):
    engine, others = (small_engine(EngineConfig(zero_stage=zero), named) for named in ("gate", "gate_proj"))
    engine.save(tmp_path, {})
    engine.load(tmp_path)
    said = "without ['gate_proj.bias', 'gate_proj.weight'], with ['gate.bias', 'gate.weight']"
    fails_with(re.escape(said), others.load, tmp_path)


@pytest.mark.parametrize("zero", [0, 2])
def test_a_disk_that_is_full_is_told_and_the_run_goes_on_when_there_is_room(zero, tmp_path, monkeypatch):
    """By torch's own writer, cut off at some byte: "unexpected pos 787840 vs 787728" was all that was said."""
    expected = run(tmp_path / "alone", steps=6, every=2, zero=zero)[1]
    folder, real = tmp_path / "c", checkpoint.torch.save
    room = {"bytes": 400_000}

    class Full:
        """A file on a disk that has so many bytes left."""

        def __init__(self, file):
            self.file = file

        def write(self, data):
            room["bytes"] -= len(data)
            if room["bytes"] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(data)

        def __getattr__(self, name):
            return getattr(self.file, name)

    def save(value, path, *rest, **named):
        with open(path, "wb") as file:
            real(value, Full(file), *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save)
        words = r"cannot be written: No space left on device; [\d,]+ bytes are there"
        full = fails_with(words, full_disk_is_told(tmp_path)(run), folder, steps=6, every=1, zero=zero)
    assert str(tmp_path) == full.where and "goes on from what is saved" in full.hint
    seen, weights, told = run(folder, steps=6, every=1, zero=zero)
    assert any("resuming from" in line for line in told) and 1 not in seen
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
