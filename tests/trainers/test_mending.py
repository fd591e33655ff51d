"""Deleted and damaged shards of a finished stage: written again alone, with the bytes of before."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draftsmith.data.shards import shards
from draftsmith.data.shards.shards import ShardReader, claim, finish, finished, write_shard
from draftsmith.trainers.run import mending
from draftsmith.trainers.run.stage import Stage
from fails import fails_with
from test_run import planned, run

NUM_SHARDS, EACH = 4, 3
IDENTITY = {"of": "this test"}
written: list[int] = []


class Writes(Stage):
    """A stage of shards, as encode, regenerate and cache write them."""

    value: float = 1.0

    @property
    def shards(self) -> str:
        return "shards"

    def run(self, context) -> None:
        folder = context.folder / self.shards
        claim(folder, IDENTITY)
        for index in range(NUM_SHARDS):
            if not finished(folder, index):
                write_shard(folder, index, (self._sample(index * EACH + i) for i in range(EACH)), {})
                written.append(index)
        finish(folder, IDENTITY, num_shards=NUM_SHARDS)

    def _sample(self, number: int):
        return f"{number:09d}", {"codes": torch.full((50,), number * self.value)}, {"number": number}


class Reads(Stage):
    def run(self, context) -> None:
        values = [tensors["codes"].tolist() for _, tensors, _ in ShardReader(context.inputs["codes"] / "shards")]
        context.folder.joinpath("seen.txt").write_text(str(values))


WRITES = planned(name="codes", stage=Writes())
READS = planned(name="reader", stage=Reads(), inputs={"codes": "codes"}, earlier={"codes": WRITES})


@pytest.fixture
def output(tmp_path) -> Path:
    run(tmp_path, WRITES, READS)
    written.clear()
    return tmp_path


def everything(output: Path) -> dict[str, bytes]:
    """Of all that the first stage has left."""
    return {str(path): path.read_bytes() for path in sorted((output / "codes").rglob("*")) if path.is_file()}


def _flip(name: str, place: int = 700) -> Callable[[Path], object]:
    def flip(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[place] ^= 1
        (folder / name).write_bytes(data)

    return flip


def _delete(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def _cut(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:100])


def _copy(name: str, of: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / of).read_bytes())


TAR, JSON = "shard-000002.tar", "shard-000002.json"
# What happens to it -> shards that are written again.
SEEN = {"tar deleted": (_delete(TAR), [2]), "tar cut": (_cut(TAR), [2]), "json deleted": (_delete(JSON), [2]),
        "manifest deleted": (_delete("manifest.json"), []),
        "identity deleted": (_delete("identity.json"), [])}  # fmt: skip
ONLY_READ = {
    "tar flipped": (_flip(TAR), [2]),
    "end of the tar flipped": (_flip(TAR, -1), [2]),
    "another tar in its place": (_copy(TAR, "shard-000001.tar"), [2]),
    "json flipped": (_flip(JSON, 30), [2]),
    "json cut": (_cut(JSON), [2]),
    "manifest flipped": (_flip("manifest.json", 60), []),
    "manifest cut": (_cut("manifest.json"), []),
    "identity flipped": (_flip("identity.json", 10), []),
}


@pytest.mark.parametrize("what", SEEN)
def test_what_is_missing_is_written_again_though_nothing_reads_it(what, output):
    before, (damage, again) = everything(output), SEEN[what]
    damage(output / "codes" / "shards")
    said = run(output, WRITES, READS)
    assert written == again and everything(output) == before
    assert "it is written again" in " ".join(said) and said[-1] == "stage reader: finished before, same inputs"
    assert "stage codes: written again with the same bytes as before" in said
    assert run(output, WRITES, READS)[0] == "stage codes: finished before, same inputs"


@pytest.mark.parametrize("what", SEEN | ONLY_READ)
def test_what_a_stage_reads_is_mended_before_it_runs(what, output):
    before, (damage, again) = everything(output), (SEEN | ONLY_READ)[what]
    seen = (output / "reader" / "seen.txt").read_bytes()
    damage(output / "codes" / "shards")
    run(output, WRITES, READS, restart="reader")
    assert written == again and everything(output) == before
    assert (output / "reader" / "seen.txt").read_bytes() == seen


@pytest.mark.parametrize("what", ["tar deleted", "tar flipped", "manifest flipped"])
def test_without_its_stage_the_reader_is_refused_with_the_command_that_mends_it(what, output):
    damage, again = (SEEN | ONLY_READ)[what]
    damage(output / "codes" / "shards")
    words = r"stage reader takes the codes of stage codes, and (shard-000002\.tar|manifest)"
    e = fails_with(words, run, output, WRITES, READS, chosen=["reader"], restart="reader")
    assert e.hint.startswith('"stages=[codes,reader]" writes again') and not (output / "reader.before-1").exists()
    run(output, WRITES, READS, chosen=["codes", "reader"], restart="reader")
    assert written == again


def test_large_shards_are_not_read_beforehand_and_the_reader_s_cure_works(output, monkeypatch):
    """Hundreds of gigabytes: each sample's checksum is compared when it is read."""
    before = everything(output)
    monkeypatch.setattr(mending, "READ_BYTES", 0)
    _flip(TAR)(output / "codes" / "shards")
    e = fails_with("edited or damaged shard: sample 0 differs", run, output, WRITES, READS, restart="reader")
    assert e.hint.startswith("delete the file and run the stage again")
    Path(e.where).unlink()
    run(output, WRITES, READS)
    assert written == [2] and everything(output) == before


def test_shards_that_were_all_deleted_wait_for_somebody_to_read_them(output):
    """They may take hundreds of gigabytes, and have been trained on."""
    before = everything(output)
    for path in (output / "codes" / "shards").glob("*.tar"):
        path.unlink()
    assert run(output, WRITES, READS)[0] == "stage codes: finished before, same inputs"
    assert not written
    run(output, WRITES, READS, restart="reader")
    assert written == [0, 1, 2, 3] and everything(output) == before


def test_a_stop_amid_mending_loses_nothing(output, monkeypatch):
    before, write = everything(output), write_shard
    for name in ("shard-000001.tar", TAR):
        _delete(name)(output / "codes" / "shards")

    def stops(folder, index, *rest):
        if index == 2:
            raise KeyboardInterrupt
        return write(folder, index, *rest)

    monkeypatch.setitem(globals(), "write_shard", stops)
    fails_with("", run, output, WRITES, READS, error=KeyboardInterrupt)
    monkeypatch.undo()
    run(output, WRITES, READS)
    assert written == [1, 2] and everything(output) == before


def test_bytes_that_come_out_otherwise_are_said_and_listed(output):
    """On another device, say. What was trained on them is not what it would be now."""
    other = replace(WRITES, stage=Writes(value=2.0))
    _delete(TAR)(output / "codes" / "shards")
    done = (output / "codes" / "done.json").read_bytes()
    said = run(output, other, READS)
    assert any("warning: shard-000002.tar came out otherwise than before" in line for line in said)
    assert (output / "codes" / "done.json").read_bytes() != done
    run(output, other, READS, restart="reader")
    assert written == [2]


def test_shards_without_anything_that_tells_what_they_are_of_are_refused(output):
    for name in (shards.IDENTITY, shards.MANIFEST):
        _delete(name)(output / "codes" / "shards")
    fails_with(r"identity\.json and manifest\.json are both missing or damaged", run, output, WRITES, READS)
    run(output, WRITES, READS, restart="codes")
    assert written == [0, 1, 2, 3]
