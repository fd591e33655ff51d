"""Broken shards go whole, and what binds them together comes back: the stage that runs again then writes them alone."""

from pathlib import Path

import pytest
import torch
from draftsmith.data.shards import shard_faults
from draftsmith.data.shards.shards import claim, finish, finished, write_shard
from fails import fails_with
from small_records import flip

IDENTITY = {"of": "this test"}
TAR, JSON = "shard-000001.tar", "shard-000001.json"


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three shards of two samples."""
    claim(tmp_path, IDENTITY)
    for index in range(3):
        samples = ((f"{2 * index + i:09d}", {"codes": torch.full((50,), i)}, {}) for i in range(2))
        write_shard(tmp_path, index, samples, {})
    finish(tmp_path, IDENTITY, num_shards=3)
    return tmp_path


@pytest.mark.parametrize("name", [TAR, JSON])
def test_a_broken_half_goes_with_the_other_one(folder, name):
    """What is left of a shard says nothing of what was lost: both are written again."""
    names = {path.name for path in folder.iterdir()}
    flip(folder / name, 700 if name == TAR else 30)
    faults = shard_faults.broken(folder, read_bytes=1 << 30)
    assert [fault.name for fault in faults] == [name]
    shard_faults.drop(folder, faults)
    assert {path.name for path in folder.iterdir()} == names - {TAR, JSON}
    assert [finished(folder, index) for index in range(3)] == [True, False, True]


def test_small_shards_are_read_and_large_ones_looked_at(folder):
    total = sum((folder / f"shard-{index:06d}.tar").stat().st_size for index in range(3))
    assert shard_faults.broken(folder, read_bytes=total) == shard_faults.broken(folder, read_bytes=0) == []
    flip(folder / TAR, 700)
    assert [fault.name for fault in shard_faults.broken(folder, read_bytes=total)] == [TAR]
    assert shard_faults.broken(folder, read_bytes=total - 1) == [] == shard_faults.lost(folder)


def test_the_identity_comes_back_from_the_manifest(folder):
    content = (folder / "identity.json").read_bytes()
    (folder / "identity.json").unlink()
    faults = shard_faults.lost(folder)
    assert [fault.name for fault in faults] == ["identity.json"]
    shard_faults.drop(folder, faults)
    assert (folder / "identity.json").read_bytes() == content and shard_faults.lost(folder) == []
    for name in ("identity.json", "manifest.json"):
        (folder / name).unlink()
    fails_with("are both missing or damaged", shard_faults.drop, folder, shard_faults.lost(folder))
