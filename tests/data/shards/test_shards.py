"""Shards are the same bytes whoever writes them, are whole or not there, and no edit of them goes unnoticed."""

import json
import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.data.shards import shards
from draftsmith.data.shards.shards import FORMAT, ShardReader, claim, finish, finished, shard_path, write_shard
from fails import fails_with, raising
from safetensors import SafetensorError
from small_records import flip, peak

IDENTITY = {"source": {"path": "x", "max_samples": 7}, "target": "tiny", "size": 256}


def sample(number: int) -> tuple[str, dict, dict]:
    """Ragged tensors of several types; one is a view, as rows of a batch are."""
    generator = torch.Generator().manual_seed(number)
    batch = torch.randn(4, 3 + number % 3, 8, generator=generator)
    tensors = {"codes": torch.arange(5 + number % 4).to(torch.uint16), "row": batch[number % 4], "turned": batch[0].T,
               "half": batch[1].to(torch.bfloat16)}  # fmt: skip
    return f"{number:09d}", tensors, {"caption": f"naïve picture {number}", "label": number, "nested": [1, {"a": None}]}


def write(folder: Path, index: int, numbers: range, counts: dict | None = None) -> shards.Shard:
    claim(folder, IDENTITY)
    return write_shard(folder, index, map(sample, numbers), counts or {})


def same(read: tuple, number: int) -> bool:
    key, tensors, info = sample(number)
    close = all(
        torch.equal(read[1][name], tensor) and read[1][name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    return read[0] == key and read[1].keys() == tensors.keys() and read[2] == info and close


@pytest.fixture
def folder(tmp_path) -> Path:
    """17 samples in four shards of 6, 4, 0 and 7."""
    for index, numbers in enumerate([range(6), range(6, 10), range(0), range(10, 17)]):
        write(tmp_path / "set", index, numbers, {"no caption": index, "image too small": 1})
    finish(tmp_path / "set", IDENTITY, num_shards=4)
    return tmp_path / "set"


def test_every_sample_comes_back_by_its_global_index(folder):
    reader = ShardReader(folder)
    assert len(reader) == 17
    assert all(same(reader[i], i) for i in np.random.default_rng(0).permutation(17).tolist())
    assert all(same(got, i) for i, got in enumerate(reader))
    for index in (17, -1):
        with pytest.raises(IndexError):
            reader[index]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert reader.identity == IDENTITY and reader.refused == {"no caption": 6, "image too small": 4}
    assert manifest["num_samples"] == 17 and manifest["bytes"] == sum(p.stat().st_size for p in folder.glob("shard-*"))
    assert [s["num_samples"] for s in manifest["shards"]] == [6, 4, 0, 7]
    assert not list(folder.glob("*.partial"))


def test_bytes_do_not_depend_on_when_and_by_whom(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 12345.0)
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(
            target=write, args=(tmp_path / "other", index, numbers, {"image too small": 1, "no caption": index})
        )
        for index, numbers in enumerate([range(6), range(6, 10), range(0), range(10, 17)])
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    finish(tmp_path / "other", IDENTITY, num_shards=4)
    names = sorted(p.name for p in folder.iterdir())
    assert names == sorted(p.name for p in (tmp_path / "other").iterdir())
    assert all((folder / name).read_bytes() == (tmp_path / "other" / name).read_bytes() for name in names)


def test_workers_and_pickles_read_the_same(folder):
    reader = ShardReader(folder)
    assert same(reader[3], 3), "opened before the fork"
    loader = torch.utils.data.DataLoader(reader, batch_size=5, num_workers=2, collate_fn=list)
    assert all(same(got, i) for i, got in enumerate(got for batch in loader for got in batch))
    assert same(pickle.loads(pickle.dumps(reader))[12], 12)


def test_a_stopped_writer_leaves_nothing_that_counts_and_goes_on(folder, tmp_path):
    torn = tmp_path / "torn"

    def stops():
        yield sample(0)
        raise KeyboardInterrupt

    claim(torn, IDENTITY)
    fails_with("", write_shard, torn, 0, stops(), {}, error=KeyboardInterrupt)
    assert not finished(torn, 0) and [path.name for path in torn.iterdir()] == ["identity.json"]
    again = write(torn, 0, range(6), {"no caption": 0, "image too small": 1})
    assert finished(torn, 0) and again.num_samples == 6
    assert shard_path(torn, 0).read_bytes() == shard_path(folder, 0).read_bytes()


def test_a_full_disk_is_told_by_the_shards_name_and_given_back(tmp_path, monkeypatch):
    """What safetensors says of a full disk; the writer before it has no place in memory of its own."""
    claim(tmp_path, IDENTITY)
    full = SafetensorError("I/O error: No space left on device (os error 28)")
    with monkeypatch.context() as patch:
        patch.setattr(shards.safetensors.torch, "save_file", raising(full))
        fails_with(r"No space left(.|\n)*shard-000001\.safetensors(.|\n)*make room", write, tmp_path, 1, range(3))
    assert not finished(tmp_path, 1) and not list(tmp_path.glob("*.partial"))


def test_a_sample_may_lack_tensors_that_others_have(tmp_path):
    """An answer to a record that was left out has ids alone."""
    claim(tmp_path, IDENTITY)
    rows = [{"ids": torch.arange(n), **({"kept": torch.ones(n, 2)} if n % 2 else {})} for n in range(5)]
    write_shard(tmp_path, 0, ((str(n), row, {"number": n}) for n, row in enumerate(rows)), {}, columns=["number"])
    finish(tmp_path, IDENTITY, num_shards=1)
    reader = ShardReader(tmp_path)
    assert [{name: t.tolist() for name, t in tensors.items()} for _, tensors, _ in reader] == [
        {name: t.tolist() for name, t in row.items()} for row in rows
    ]
    assert reader.column("number").tolist() == [0, 1, 2, 3, 4]
    assert [*reader.tensors(3, ["kept"])] == ["kept"] and not reader.tensors(2, ["kept"])


def test_counts_are_read_after_the_last_sample(tmp_path):
    counts = {}

    def counting():
        for n in range(3):
            counts["too small"] = n
            yield sample(n)

    claim(tmp_path, IDENTITY)
    assert write_shard(tmp_path, 0, counting(), counts).refused == {"too small": 2}


def test_no_manifest_while_a_shard_is_missing(tmp_path):
    write(tmp_path, 0, range(2))
    write(tmp_path, 2, range(2, 4))
    fails_with("1 of 3 shards are missing or cut, first shard-000001", finish, tmp_path, IDENTITY, num_shards=3)
    fails_with("no manifest", ShardReader, tmp_path)
    write(tmp_path, 1, range(2))
    finish(tmp_path, IDENTITY, num_shards=3)
    assert len(ShardReader(tmp_path)) == 6


def test_a_folder_belongs_to_one_identity(folder, tmp_path):
    claim(folder, json.loads(json.dumps(IDENTITY)))
    for other, field in [
        (IDENTITY | {"size": 512}, "size: 256, now 512"),
        (IDENTITY | {"source": {"path": "x", "max_samples": 8}}, r"source\.max_samples: 7, now 8"),
        (IDENTITY | {"new": 1}, "new: None, now 1"),
        ({k: v for k, v in IDENTITY.items() if k != "target"}, "target: 'tiny', now None"),
    ]:
        for refused in (claim, finish):
            more = {"num_shards": 4} if refused is finish else {}
            assert fails_with(field, refused, folder, other, **more).where == str(folder / "identity.json")
    (folder / "identity.json").write_text(json.dumps(IDENTITY | {"size": 512}))
    with pytest.raises(UserError, match="size: 256, now 512"):
        claim(folder, IDENTITY | {"size": 512})  # the manifest says otherwise
    (folder / "identity.json").unlink()
    fails_with(r"shards without identity(.|\n)*restart=", claim, folder, IDENTITY)


def test_missing_cut_and_edited_shards_are_told_by_name_with_the_command_that_makes_them_again(folder):
    path, hint = shard_path(folder, 1), f"restart={folder.parent.name} "
    whole = path.read_bytes()
    reader = ShardReader(folder)
    for place in range(0, len(whole), 97):  # in the header, the index, the samples
        flip(path, place)
        damaged = ShardReader(folder)
        told = fails_with(r"edited(.|\n)*shard-000001\.safetensors", list, map(damaged.__getitem__, range(12)))
        assert told.hint.startswith(hint)
        path.write_bytes(whole)
    place = whole.rindex(b"picture 9")  # in one sample's text
    flip(path, place)
    fresh = ShardReader(folder)
    with pytest.raises(UserError, match=r"info of sample 3 differs(.|\n)*shard-000001\.safetensors"):
        fresh[9]
    assert all(same(fresh[n], n) for n in (5, 6, 8, 10)), "other samples are as good as before"
    path.write_bytes(whole[:1000])
    assert not finished(folder, 1)
    fails_with(r"shard of 1000 bytes(.|\n)*shard-000001\.safetensors", ShardReader, folder)
    with pytest.raises(UserError, match=r"edited or damaged(.|\n)*shard-000001\.safetensors"):
        reader[9]
    path.unlink()
    assert fails_with(r"missing shard(.|\n)*shard-000001\.safetensors", ShardReader, folder).hint.startswith(hint)
    with pytest.raises(UserError, match=r"missing shard(.|\n)*shard-000001\.safetensors"):
        reader[6]
    for text, problem in [("{", "not valid JSON"), ("[]", "expected a valid dictionary"),
                          (json.dumps({"format": FORMAT}), "identity")]:  # fmt: skip
        (folder / "manifest.json").write_text(text)
        fails_with(rf"{problem}(.|\n)*manifest\.json", ShardReader, folder)


def test_shards_of_before_are_refused_with_the_command_that_makes_them_again(tmp_path):
    """As f7ebafb0 left them: tars, a json beside each, and a manifest of format 2."""
    folder = tmp_path / "codes" / "shards"
    folder.mkdir(parents=True)
    for name in ("shard-000000.tar", "shard-000000.json"):
        (folder / name).write_bytes(b"{}")
    (folder / "identity.json").write_text(json.dumps(IDENTITY))
    assert "restart=codes" in fails_with("shards of an earlier version", claim, folder, IDENTITY).hint
    manifest = {"format": 2, "identity": IDENTITY, "num_samples": 0, "bytes": 0, "refused": {}, "shards": []}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "restart=codes" in fails_with("shards of format 2", ShardReader, folder).hint


def test_a_reader_holds_an_index_and_no_samples(tmp_path):
    peaks = []
    for count in (4, 40):
        folder = tmp_path / str(count)
        claim(folder, IDENTITY)
        for index in range(count):
            tensors = {"states": torch.zeros(2000)}
            write_shard(folder, index, ((f"{index}-{n}", tensors, {}) for n in range(50)), {})
        finish(folder, IDENTITY, num_shards=count)
        peaks.append(peak(lambda folder=folder: sum(1 for _ in ShardReader(folder))))
    assert peaks[1] - peaks[0] < 36 * 12_000, peaks  # a shard costs its entry and an index; its samples are 400 kB
