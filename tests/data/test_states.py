"""Cached states come back as they were, in the same order whoever reads them, and never for another target."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.core.batch import Batch
from draftsmith.core.errors import UserError
from draftsmith.core.pictures import TEXT
from draftsmith.core.states import Taps
from draftsmith.data.loader import Loader
from draftsmith.data.order import BucketedOrder
from draftsmith.data.shards.codes import forward_seed
from draftsmith.data.shards.shards import ShardReader, shard_path
from draftsmith.data.states.identity import check_identity, target_identity
from draftsmith.data.states.reader import CachedCollate, CachedSamples, StatesReader
from draftsmith.data.states.records import Deal
from draftsmith.data.states.samples import draw_of, split
from fails import fails_with
from safetensors import safe_open
from states_fake import COUNT, DEAL, EAGLE3, SPARROW, D, identity, padded, row, write


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "states"
    write(folder)
    return folder


def same(actual: Batch, expected: Batch) -> bool:
    fields, states = ("ids", "attention_mask", "loss_mask", "modality", "positions"), actual.states
    return (
        all(torch.equal(getattr(actual, name), getattr(expected, name)) for name in fields)
        and actual.sample_ids == expected.sample_ids
        and torch.equal(states.feature, expected.states.feature)
        and torch.equal(states.positions, expected.positions)
        and states.layers.keys() == expected.states.layers.keys()
        and all(torch.equal(states.layers[layer], held) for layer, held in expected.states.layers.items())
    )


@pytest.mark.parametrize(
    "wanted", [SPARROW, EAGLE3, Taps(feature=True), Taps(feature=True, visual_layers=(0,)), Taps(everywhere=True)],
    ids=["sparrow", "eagle3", "hivis", "msd", "everywhere"],
)  # fmt: skip
def test_what_was_written_comes_back(tmp_path, wanted):
    wanted = Taps(feature=True, everywhere=True) if wanted.everywhere else wanted
    write(tmp_path / "c", wanted)
    reader = StatesReader([tmp_path / "c"])
    assert len(reader) == COUNT
    numbers = [4, 0, 22, 9]
    read = CachedCollate(reader, seed=1)(numbers, epoch=2)
    result = read.to("cpu")
    assert replace(read, packed=True).to("cpu").packed and not result.packed
    assert same(result, padded([row(n, wanted) for n in numbers]))
    assert len(set(result.seeds)) == 4 and result.states.feature.dtype == torch.bfloat16


def test_a_record_holds_states_at_the_places_that_are_read_and_nothing_else(cache):
    result = {info["number"]: tensors for _, tensors, info in map(ShardReader(cache).__getitem__, range(COUNT))}
    for number, tensors in result.items():
        made = row(number, SPARROW)
        assert tensors.keys() == {"ids", "modality", "loss_mask", "positions", "feature", "layer_002"}
        # A text slot reads the place before its token, a trained one is compared with its own place.
        text = [
            place for place in range(made.ids.shape[1])
            if made.loss_mask[0, place]
            or (place + 1 < made.ids.shape[1] and made.modality[0, place + 1] == TEXT)
        ]  # fmt: skip
        assert tensors["feature"].shape == (len(text), D)
        assert tensors["layer_002"].shape == (int((made.modality != TEXT).sum()), D)
    assert result[3]["layer_002"].shape == (0, D), "text alone has no visual states"


def test_columns_say_what_a_reader_needs_before_it_reads(cache, monkeypatch):
    monkeypatch.setattr(ShardReader, "tensors", None)
    reader = StatesReader([cache])
    assert reader.column("number").tolist() == list(range(COUNT))
    assert reader.column("length").tolist() == [5 + 3 * (n % 4) for n in range(COUNT)]
    assert reader.column("visual").tolist() == [int(n % 3 > 0) for n in range(COUNT)]
    assert (np.sign(CachedSamples.of(reader).lengths) == np.where(np.arange(COUNT) % 3, 1, -1)).all()
    assert reader.column("draw").tolist() == [draw_of(f"file[{n}]") for n in range(COUNT)]


def test_held_out_samples_follow_from_their_names_alone():
    draws = np.array([draw_of(f"file[{number}]") for number in range(4000)])
    train, held_out = split(draws, 0.05)
    assert 150 < len(held_out) < 250 and len(train) + len(held_out) == 4000
    _, other = split(draws[::-1], 0.05)
    assert sorted(3999 - other) == held_out.tolist()


def test_supervised_ids_are_read_and_checked_without_the_states(cache, tmp_path):
    """States of gigabytes are not read when a run starts: one that is damaged is told when its sample comes."""
    copy = Path(shutil.copytree(cache, tmp_path / "states"))
    reader, damaged = StatesReader([cache]), StatesReader([copy])
    for path in sorted(copy.glob("shard-*")):
        with safe_open(path, "pt") as file:
            feature, ids = (bytes(file.get_tensor(name).view(torch.uint8).numpy()) for name in ("feature", "ids"))
        data = path.read_bytes()
        path.write_bytes(data.replace(feature, bytes(len(feature))))
    for number in (0, 7):
        made = row(number, SPARROW)
        for one in (reader, damaged):
            assert torch.equal(one.supervised_ids(number), made.ids[made.loss_mask])
    path.write_bytes(data.replace(ids, bytes(len(ids))))
    number = DEAL[len(DEAL) - 1][0]
    assert fails_with(r"ids of sample 0 differs", damaged.supervised_ids, number).where == str(path)


def test_a_reader_of_several_caches_has_one_after_the_other(cache, tmp_path):
    write(tmp_path / "second", deal=Deal(4, 3), template="two", grouping={"samples_per_shard": 3})
    reader = StatesReader([cache, tmp_path / "second"])
    result = CachedCollate(reader, 0)([COUNT + 2, 5], epoch=0).to("cpu")
    assert len(reader) == COUNT + 4 and result.sample_ids == ("file[2]", "file[5]")
    write(tmp_path / "third", deal=Deal(4, 3), image_backend="torchvision")
    fails_with("image_backend is 'torchvision', and 'pil' in", StatesReader, [cache, tmp_path / "third"])


def test_a_filler_supervises_nothing(cache):
    filler = CachedCollate(StatesReader([cache]), 0)([], epoch=0)
    result = filler.to("cpu")
    assert filler.num_supervised == 0 == result.num_supervised
    assert (result.ids.tolist() == [[3, 3]] and result.states.feature.shape == (1, 2, D)
            and not result.states.layers[2].any())  # fmt: skip


# Order


def steps(reader: StatesReader, start: int = 0, **settings) -> list:
    samples = CachedSamples.of(reader)
    known = {"seed": 5, "batch_size": 4, "micro_batch_size": 2, "total_steps": 14, "start_step": start} | settings
    order = BucketedOrder(samples.lengths, known["seed"], known["batch_size"], window=3)
    return list(Loader(samples, collate=CachedCollate(reader, 5), order=order, **known))


def rows_of(found: list) -> list[list[str]]:
    return [[name for micro in step.micro for name in micro.sample_ids if name != "(filler)"] for step in found]


def test_every_epoch_has_each_sample_once_in_an_order_of_its_own(cache):
    rows = rows_of(steps(StatesReader([cache]), total_steps=12))
    names = sorted(f"file[{n}]" for n in range(COUNT))
    epochs = [[name for step in rows[start : start + 6] for name in step] for start in (0, 6)]
    assert [sorted(epoch) for epoch in epochs] == [names, names] and epochs[0] != epochs[1]


def test_seeds_of_forwards_are_those_of_the_same_samples_online_and_others_in_each_epoch(cache):
    """Noise of a head that learns from shards: the loader's epoch reaches the draws."""
    found = {(step.epoch, name): seed for step in steps(StatesReader([cache]), total_steps=12) for micro in step.micro
             for name, seed in zip(micro.sample_ids, micro.seeds, strict=True) if name != "(filler)"}  # fmt: skip
    assert {epoch for epoch, _ in found} == {0, 1} and len(found) == 2 * COUNT
    assert found == {(epoch, name): forward_seed(5, epoch, name) for epoch, name in found}
    assert len({*found.values()}) == 2 * COUNT


@pytest.mark.parametrize("start", [1, 6, 9])
def test_a_resumed_reader_goes_on_as_if_it_had_never_stopped(cache, start):
    whole, resumed = steps(StatesReader([cache])), steps(StatesReader([cache]), start)
    assert rows_of(resumed) == rows_of(whole)[start:]
    for one, other in zip(whole[start:], resumed, strict=True):
        assert [micro.seeds for micro in one.micro] == [micro.seeds for micro in other.micro]
        assert all(same(a.to("cpu"), b.to("cpu")) for a, b in zip(one.micro, other.micro, strict=True))


# Damage and strangers


def test_a_changed_byte_is_refused_with_the_files_name(cache, tmp_path):
    copy = shutil.copytree(cache, tmp_path / "c")
    path = shard_path(copy, 2)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    told = r"shard-000002\.safetensors"
    fails_with(told, lambda: [*map(StatesReader([copy]).__getitem__, DEAL[2].tolist())])
    shards = ShardReader(copy)
    fails_with(told, lambda: [shards[n] for n in range(len(shards))])
    fails_with(told, steps, StatesReader([copy]), num_workers=1)


CHANGES = {
    "target.path": ("target", {"path": "c/d"}),
    "target.revision": ("target", {"revision": "v2"}),
    "processor.tokenizer": ("processor", {"tokenizer": "u"}),
    "processor.images.size": ("processor", {"images": {"size": 48}}),
    "template": ("template", "another"),
    "pictures.aspect": ("pictures", {"aspect": "square"}),
    "transformers": ("transformers", "5.17.0"),
    "dtype": ("dtype", "fp8"),
    "image_backend": ("image_backend", "torchvision"),
}


@pytest.mark.parametrize("field", CHANGES)
def test_states_of_something_else_are_refused_by_the_fields_name(cache, field):
    name, change = CHANGES[field]
    expected = identity(SPARROW)
    del expected["samples"], expected["grouping"]
    StatesReader([cache], expected=expected)
    expected[name] = {**expected[name], **change} if isinstance(change, dict) else change
    assert str(cache) in str(fails_with(f"another {field}: ", StatesReader, [cache], expected=expected))
    StatesReader([cache], expected=expected, accept=[name])


def test_a_branch_that_has_moved_on_is_another_target(tmp_path, monkeypatch):
    """A recipe that names no revision takes the branch's present commit, which the folder of the snapshot says."""
    snapshots = tmp_path / "models--a--b" / "snapshots"
    for commit in ("c" * 40, "d" * 40):
        (snapshots / commit).mkdir(parents=True)
        (snapshots / commit / "config.json").write_text("{}")
    (tmp_path / "models--a--b" / "refs").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    result = []
    for commit in ("c" * 40, "d" * 40):
        (tmp_path / "models--a--b" / "refs" / "main").write_text(commit)
        result.append(target_identity("a/b", path="a/b", revision=None))
    assert [identity["commit"] for identity in result] == ["c" * 40, "d" * 40]
    assert target_identity("a/b", path="a/b", revision="c" * 40)["commit"] == "c" * 40
    assert target_identity("a/other", path="a/other", revision=None)["commit"] is None
    states = identity(SPARROW)["states"]
    with pytest.raises(UserError, match=r"another target\.commit: 'cccc"):
        check_identity({"states": states, "target": result[0]}, {"states": states, "target": result[1]}, tmp_path, ())


def test_weights_in_a_folder_are_told_by_its_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    identities = []
    for content in (b"a", b"b"):
        (tmp_path / "model.safetensors").write_bytes(content)
        identities.append(target_identity(tmp_path, path=None, revision=None)["weights"])
    assert identities[0] != identities[1]


def test_layers_that_are_not_there_are_refused_and_more_than_is_wanted_is_not(cache):
    held = identity(SPARROW)

    def check(wanted: Taps) -> None:
        check_identity(held, {"states": identity(wanted)["states"]}, cache, ())

    check(SPARROW)
    check(Taps(feature=True))  # HiViS reads a Sparrow cache
    for wanted, field in (
        (Taps(feature=True, visual_layers=(0,)), "visual_layers lacks layer 0"),
        (EAGLE3, "text_layers lacks layer 1"),
        (replace(SPARROW, everywhere=True), "everywhere is false"),
    ):
        fails_with(f"states.{field}", check, wanted)


def test_a_cache_that_is_not_finished_is_no_cache_and_takes_no_other_states(tmp_path):
    write(tmp_path / "c", shards=[0])
    fails_with("no manifest", StatesReader, [tmp_path / "c"])
    fails_with("another dtype: 'bf16', now 'fp8'", write, tmp_path / "c", shards=[1], dtype="fp8")
