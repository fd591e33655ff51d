"""Stage kind `encode`: what it writes is what its models say of each picture, and a killed run goes on where it was."""

import io
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.core import ranks
from draftsmith.core.errors import UserError
from draftsmith.core.results import CODES
from draftsmith.data.captioned.items import center_crop
from draftsmith.data.shards.shards import ShardReader, summary
from draftsmith.models.targets.llamagen.captions import TextFeatures
from draftsmith.models.targets.llamagen.files import load_vq
from draftsmith.models.targets.llamagen.section import TEXT_ENCODER
from draftsmith.trainers.stages import encode
from draftsmith.trainers.stages.encode import EncodeStage
from fails import fails_with
from PIL import Image
from visual_run import SHAPE, SIDE, VQ, context, noise, pictures, translators

ALL = ["pixels", "codes", "features"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return translators(tmp_path_factory.mktemp("translators"))


def stage(folder: Path, **settings) -> EncodeStage:
    values = {"kind": "encode", "source": {"kind": "folder", "folder": str(folder)}, "samples_per_shard": 4}
    return EncodeStage(**(values | settings))


def run(output: Path, made, chosen: EncodeStage, **changes) -> tuple[ShardReader, list[str]]:
    given = context(output, changes.pop("target", made.target), made.inputs, **changes)
    chosen.run(given)
    return ShardReader(output / CODES), given.say.lines


def everything(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / CODES).iterdir())}


# What is written


def test_samples_are_what_the_models_say(tmp_path, made):
    source = pictures(tmp_path / "in", 11, side=40)
    reader, told = run(tmp_path / "out", made, stage(source, write=ALL, batch_size=3))
    assert [len(reader), len(reader.shards)] == [11, 3] and reader.refused == {}
    assert told == [summary(tmp_path / "out" / CODES)] and told[0].startswith("11 samples in 3 shards, 0.")
    vq = load_vq(made.inputs["vq"])
    text = TextFeatures(made.inputs["text"] / TEXT_ENCODER, max_length=16, dtype=torch.float32)
    codes = set()
    for number in range(11):
        key, tensors, info = reader[number]
        caption = (source / f"{number:03d}.txt").read_text()
        assert (key, info) == (f"{number:09d}", {"name": f"{number:03d}", "caption": caption, "label": None})
        pixels = np.asarray(center_crop(Image.open(source / f"{number:03d}.png"), SIDE))
        assert torch.equal(tensors["pixels"], torch.from_numpy(pixels.copy()).permute(2, 0, 1))
        expected = vq.encode(torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1)[0]
        assert tensors["codes"].dtype == torch.int32 and torch.equal(tensors["codes"].long(), expected)
        features = text.encode([caption])[0]
        assert features.shape == (len(text.tokenizer(caption)["input_ids"][:16]), 16)
        assert tensors["features"].dtype == torch.float32
        torch.testing.assert_close(tensors["features"], features, rtol=1e-5, atol=1e-6)
        codes.add(tuple(expected.tolist()))
    assert len(codes) == 11, "pictures that all look alike would prove nothing"


def test_a_class_conditional_target_gets_labels_and_no_features(tmp_path, made):
    for label, name in enumerate(("ant", "bee")):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "a.png").write_bytes(noise(label))
    target = type(made.target)(kind="llamagen", shape=SHAPE, condition="class", image_size=SIDE, vq=VQ)
    chosen = stage(tmp_path, source={"kind": "classes", "folder": str(tmp_path / "in")})
    reader, _ = run(tmp_path / "out", made, chosen, target=target)
    assert [reader[n][2] for n in range(2)] == [{"name": "ant/a", "caption": "ant", "label": 0},
                                                {"name": "bee/a", "caption": "bee", "label": 1}]  # fmt: skip
    assert set(reader[0][1]) == {"codes"}
    # Folders of other names number their classes anew: shards of both would mix them.
    (tmp_path / "in" / "ant").rename(tmp_path / "in" / "cat")
    fails_with("made with another classes.bee: 1, now 0", run, tmp_path / "out", made, chosen, target=target)


def test_pictures_of_the_wrong_size_for_the_codes_stay_apart(tmp_path, made):
    """A picture is cut to the target's side whatever its own: codes of one target are all as many."""
    (tmp_path / "in").mkdir()
    for number, size in enumerate([(16, 16), (64, 16), (17, 90)]):
        data = io.BytesIO()
        Image.new("RGB", size, (10 * number, 0, 0)).save(data, "PNG")
        (tmp_path / "in" / f"{number}.png").write_bytes(data.getvalue())
        (tmp_path / "in" / f"{number}.txt").write_text("x")
    reader, _ = run(tmp_path / "out", made, stage(tmp_path / "in", write=["codes", "pixels"]))
    assert [tuple(reader[n][1]["pixels"].shape) for n in range(3)] == [(3, SIDE, SIDE)] * 3
    assert [len(reader[n][1]["codes"]) for n in range(3)] == [16] * 3


# What is refused


@pytest.fixture
def mixed(tmp_path) -> Path:
    """Ten items: five good ones, of which two come twice; the others broken, too small or without a caption."""
    folder = pictures(tmp_path / "in", 10)
    (folder / "001.png").write_bytes(noise(1)[:200])
    (folder / "002.png").write_bytes(noise(2, side=12))
    (folder / "003.txt").unlink()
    (folder / "004.txt").write_text(" \n")
    (folder / "007.png").write_bytes((folder / "005.png").read_bytes())
    (folder / "009.png").write_bytes((folder / "000.png").read_bytes())
    return folder


REFUSED = {"unreadable image": 1, "image too small": 1, "no caption": 1, "empty caption": 1, "duplicate": 2}


def test_what_cannot_be_used_is_counted_and_listed(tmp_path, made, mixed):
    reader, told = run(tmp_path / "out", made, stage(mixed, write=["codes"]))
    assert [reader[n][0] for n in range(len(reader))] == [f"{n:09d}" for n in (0, 5, 6, 8)]
    assert reader.refused == REFUSED
    assert [shard.refused for shard in reader.shards] == [
        {"image too small": 1, "no caption": 1, "unreadable image": 1},
        {"duplicate": 1, "empty caption": 1},
        {"duplicate": 1},
    ]
    assert all(f"{count} {reason}" in told[0] for reason, count in REFUSED.items())
    notes = [json.loads(line) for path in sorted((tmp_path / "out").glob("refused-*.jsonl"))
             for line in path.read_text().splitlines()]  # fmt: skip
    assert [(note["key"], note["reason"]) for note in notes] == [
        ("001", "unreadable image"), ("002", "image too small"), ("003", "no caption"), ("004", "empty caption"),
        ("007", "duplicate"), ("009", "duplicate"),
    ]  # fmt: skip
    assert notes[-1]["where"].endswith("009.png") and notes[-1]["detail"] == "the same bytes as item 0"
    assert all(str(mixed) in note["where"] and note["detail"] for note in notes)


def test_strict_stops_at_the_first_and_names_it(tmp_path, made, mixed):
    with pytest.raises(UserError, match="unreadable image") as told:
        run(tmp_path / "out", made, stage(mixed, write=["pixels"], on_error="strict"))
    assert str(mixed / "001.png") in str(told.value) and "on_error: skip" in str(told.value)
    fails_with(r"manifest\.json", ShardReader, tmp_path / "out" / CODES)


# Runs that are killed


class Killed(BaseException):
    """As SIGKILL: nothing in the stage expects it."""


@pytest.mark.parametrize(("shard", "place"), [(0, 0), (2, 0), (2, 1), (3, 3)])
def test_a_killed_run_goes_on_behind_its_finished_shards(tmp_path, made, mixed, monkeypatch, shard, place):
    """Ten items in shards of three; the run dies in shard `shard` after `place` samples."""
    chosen = stage(mixed, write=ALL, samples_per_shard=3, batch_size=2, deduplicate=place != 3)
    run(tmp_path / "alone", made, chosen)
    real, made_again = encode.write_shard, []

    def dying(folder, index, samples, counts):
        def cut():
            for number, sample in enumerate(samples):
                if (index, number) == (shard, place):
                    raise Killed
                yield sample
            raise Killed

        return real(folder, index, cut() if index == shard else samples, counts)

    with monkeypatch.context() as patch:
        patch.setattr(encode, "write_shard", dying)
        fails_with("", run, tmp_path / "out", made, chosen, error=Killed)
    finished = sorted((tmp_path / "out" / CODES).glob("shard-*"))
    assert len(finished) == shard
    before = {path: path.stat().st_mtime_ns for path in finished}

    monkeypatch.setattr(encode, "write_shard", lambda f, i, *rest: made_again.append(i) or real(f, i, *rest))
    run(tmp_path / "out", made, chosen)
    assert made_again == list(range(shard, 4))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert everything(tmp_path / "out") == everything(tmp_path / "alone")
    refused = sorted(path.name for path in (tmp_path / "alone").glob("refused-*"))
    assert refused and sorted(path.name for path in (tmp_path / "out").glob("refused-*")) == refused


@pytest.mark.parametrize(("changes", "named"), [
    ({"write": ["codes", "pixels"]}, r"settings\.write"),
    ({"samples_per_shard": 5}, r"settings\.samples_per_shard: 4, now 5"),
    ({"min_side": 3}, r"settings\.min_side"),
    ({"deduplicate": False}, r"settings\.deduplicate"),
    ({"source": {"kind": "folder", "folder": "SAME", "max_samples": 9}}, r"settings\.source\.max_samples"),
])  # fmt: skip
def test_changed_settings_are_refused_by_name(tmp_path, made, mixed, changes, named):
    run(tmp_path / "out", made, stage(mixed, write=["codes"]))
    before = everything(tmp_path / "out")
    if "source" in changes:
        changes = {"source": changes["source"] | {"folder": str(mixed)}}
    fails_with(named, run, tmp_path / "out", made, stage(mixed, **({"write": ["codes"]} | changes)))
    assert everything(tmp_path / "out") == before


def test_other_models_and_other_pictures_are_refused_by_name(tmp_path, made, mixed):
    chosen = stage(mixed, write=["codes"])
    run(tmp_path / "out", made, chosen)
    fails_with(r"another stage: 'f', now 'g'", run, tmp_path / "out", made, chosen, fingerprint="g")
    # A run that goes on after pictures were added would deal them to other shards than the first half did.
    (mixed / "010.png").write_bytes(noise(10))
    fails_with("another items: 10, now 11", run, tmp_path / "out", made, chosen)
    larger = made.target.model_copy(update={"image_size": 2 * SIDE})
    (mixed / "010.png").unlink()
    fails_with("another image_size: 16, now 32", run, tmp_path / "out", made, chosen, target=larger)


# Several ranks


def test_two_ranks_write_the_shards_of_one(tmp_path, made, mixed, monkeypatch):
    """Two threads stand for the ranks; each meets the other as often."""
    chosen = stage(mixed, write=ALL, samples_per_shard=2, batch_size=2)
    run(tmp_path / "alone", made, chosen)
    here, meeting, waits, wrote = threading.local(), threading.Barrier(2, timeout=60), Counter(), []
    real, encoder, loads = encode.write_shard, encode._Encoder, threading.Lock()

    def loaded(*arguments):
        with loads:  # transformers loads one model at a time
            return encoder(*arguments)

    def barrier():
        waits[here.rank] += 1
        meeting.wait()

    def work(rank):
        here.rank = rank
        given = context(tmp_path / "out", made.target, made.inputs)
        chosen.run(given)
        return len(given.say.lines)

    monkeypatch.setattr(encode, "_Encoder", loaded)
    monkeypatch.setattr(ranks, "rank", lambda: getattr(here, "rank", 0))
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    monkeypatch.setattr(ranks, "barrier", barrier)
    monkeypatch.setattr(ranks, "gather", lambda value: barrier() or [value])
    monkeypatch.setattr(
        encode, "write_shard", lambda f, index, *rest: wrote.append((here.rank, index)) or real(f, index, *rest)
    )
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [1, 0]
    assert sorted(wrote) == [(0, 0), (0, 2), (0, 4), (1, 1), (1, 3)]
    assert waits[0] == waits[1] == 3, "ranks that wait differently often hang"
    assert everything(tmp_path / "out") == everything(tmp_path / "alone")


# What it takes
