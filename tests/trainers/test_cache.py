"""The `cache` stage: said before it is written, whole after any stop, and the states that the target computes."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from draftsmith.core.errors import Refused, UserError
from draftsmith.data.conversations import PromptFormat
from draftsmith.data.dataset import ConversationData
from draftsmith.data.loader import Loader
from draftsmith.data.order import BucketedOrder
from draftsmith.data.shards.shards import ShardReader, read_manifest
from draftsmith.data.states.reader import StatesReader
from draftsmith.models.drafters import Eagle3Config, HivisConfig, MsdConfig, SparrowConfig
from draftsmith.models.targets.llava.section import LlavaTargetConfig
from draftsmith.trainers.run.stage_records import check_fit
from draftsmith.trainers.serve import states_builder as build
from draftsmith.trainers.stages.cache import CacheStage
from draftsmith.trainers.train.on_states import open_states
from draftsmith.trainers.train.states_source import Cached, Online
from fails import fails_with
from safetensors.torch import load_file, save_file
from states_run import RECORDS, cached, context, stage


@pytest.fixture(scope="module")
def kept(made, tmp_path_factory):
    return cached(made, tmp_path_factory.mktemp("run") / "cache")


def _data(made):
    return ConversationData(**made.data), PromptFormat()


def test_the_manifest_says_what_the_states_are_bound_to_and_what_every_dtype_loses(kept):
    reader = ShardReader(kept.folder / "states")
    identity, loss = reader.identity, read_manifest(kept.folder / "states").measured["head distribution"]
    assert identity["states"] == {"feature": True, "text_layers": [], "visual_layers": [2], "everywhere": False}
    assert identity["dtype"] == "bf16" and identity["image_backend"] == "pil"
    assert identity["samples"]["computed_in"] == "float32" and len(identity["template"]) == 64
    assert identity["transformers"].startswith("5.") and identity["processor"]["tokenizer"]
    assert 0 < loss["bf16"]["kl"] < loss["int8"]["kl"] < 0.05 and 0 < loss["fp8"]["kl"] < 0.1
    assert all(0.8 < result["agreement"] <= 1 for result in loss.values())
    assert any("bf16: KL" in line for line in kept.say.lines)


def opened(made, folder, source, drafter=None, inputs=None):
    asked = context(made, folder, drafter, inputs)
    processor = asked.processor()
    target = build.open_target(asked, processor)
    return open_states(stage(made, source=source), asked, processor, target, 0), target


def steps_of(states, indices, epochs=1):
    order = BucketedOrder(states.lengths[indices], 7, 4, 2)

    def make(samples, collate, first, last):
        return Loader(
            samples, seed=7, batch_size=4, micro_batch_size=2, total_steps=last, collate=collate, start_step=first,
            order=order,
        )  # fmt: skip

    return list(states.steps(indices, make, 0, epochs * -(-len(indices) // 4), trains=True))


@pytest.mark.parametrize(
    "drafter",
    [SparrowConfig(kind="sparrow"), MsdConfig(kind="msd"), HivisConfig(kind="hivis"),
     Eagle3Config(kind="eagle3", taps=(1, 2, 3), visual_slots="middle")],
    ids=lambda config: config.kind
)  # fmt: skip
def test_states_that_are_read_are_those_that_are_computed(made, tmp_path, drafter):
    asked = cached(made, tmp_path / "cache", drafter)
    online, target = opened(made, tmp_path / "online", {"kind": "online"}, drafter)
    read, _ = opened(made, tmp_path / "read", {"kind": "cached"}, drafter, {"states": asked.folder})
    assert isinstance(online, Online) and isinstance(read, Cached)
    assert (online.draws == read.draws).all() and (online.lengths == read.lengths).all()
    indices = np.arange(RECORDS)
    for one, other in zip(steps_of(online, indices), steps_of(read, indices), strict=True):
        for first, second in zip(one.micro, other.micro, strict=True):
            assert first.num_supervised == second.num_supervised
            a, b = first.to("cpu"), second.to("cpu")
            ours, theirs = online(a), read(b)
            assert a.sample_ids == b.sample_ids and a.seeds == b.seeds
            for name in ("ids", "attention_mask", "loss_mask", "modality"):
                assert torch.equal(getattr(a, name), getattr(b, name)), name
            real = a.attention_mask
            assert torch.equal(ours.positions * real, theirs.positions * real)
            assert ours.feature.dtype == theirs.feature.dtype and ours.layers.keys() == theirs.layers.keys()
            pairs = [(ours.feature, theirs.feature), *((ours.layers[n], theirs.layers[n]) for n in ours.layers)]
            for one_, other_ in pairs:
                assert torch.allclose(one_, other_, rtol=0.01, atol=0.02)
                assert torch.equal(one_.any(-1), other_.any(-1)), "other places"
    if drafter.kind == "msd":
        # Layer 0 at visual tokens is the projected picture: other pixels, other states; text is not kept at all.
        assert drafter.taps_for(target.shape, training=True).visual_layers == (0,)


def test_text_embeddings_and_scores_are_never_kept(made, tmp_path):
    asked = cached(made, tmp_path / "cache", MsdConfig(kind="msd"))
    for _, tensors, info in map(ShardReader(asked.folder / "states").__getitem__, range(RECORDS)):
        assert tensors.keys() == {"ids", "modality", "loss_mask", "positions", "feature", "layer_000"}
        assert len(tensors["layer_000"]) == int((tensors["modality"] != 0).sum()) == 9 * info["visual"]


def test_a_disk_that_is_too_small_stops_the_stage_with_nothing_written(made, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**26 + 30_000))
    fails_with("and the disk has", cached, made, tmp_path / "cache")
    assert not (tmp_path / "cache" / "states").exists()


def test_a_cache_of_another_target_template_or_head_is_refused_by_the_field(made, kept, tmp_path):
    inputs = {"states": kept.folder}

    def read(drafter=None, form=None, made=made):
        asked = context(made, tmp_path / "read", drafter, inputs)
        processor = asked.processor()
        chosen = stage(made, source={"kind": "cached"}, **({"format": form} if form else {}))
        return open_states(chosen, asked, processor, build.open_target(asked, processor), 0)

    assert len(read().reader) == RECORDS
    assert len(read(HivisConfig(kind="hivis")).reader) == RECORDS, "it reads less than Sparrow"
    fails_with("visual_layers lacks layer 0", read, MsdConfig(kind="msd"))
    fails_with("another template", read, form={"system": "Answer in one word."})
    other = shutil.copytree(made.folder, tmp_path / "other")
    read(made=type(made)(folder=other, data=made.data))  # the same weights elsewhere
    path = other / "target" / "model.safetensors"
    weights = load_file(path)
    weights[sorted(weights)[0]] += 0.1
    save_file(weights, path, metadata={"format": "pt"})
    fails_with(r"another target\.weights", read, made=type(made)(folder=other, data=made.data))


def test_lengths_are_counted_without_reading_pixels(made, kept, tmp_path):
    asked = context(made, tmp_path / "count")
    samples = build.open_samples(*_data(made), None, asked, asked.processor())
    counts = build.count_samples(samples, asked)
    assert counts.length.tolist() == [len(samples[number].ids) for number in range(RECORDS)]
    assert counts.visual.tolist() == [sum(m != 0 for m in samples[number].modality) for number in range(RECORDS)]
    reader = StatesReader([kept.folder / "states"])
    assert reader.column("length").tolist() == counts.length.tolist()
    again = build.count_samples(build.open_samples(*_data(made), None, asked, asked.processor()), asked)
    assert (again.text == counts.text).all()


def test_what_the_target_cannot_read_is_refused_before_anything_is_kept(made, tmp_path):
    """Pictures that are cut for another model, and more places than it has positions."""
    with pytest.raises(
        UserError, match=r"max_length is 257 and the target has 256 positions(.|\n)*stages\.cache\.data"
    ):
        cached(SimpleNamespace(folder=made.folder, data=made.data | {"max_length": 257}), tmp_path / "cache")
    assert not (tmp_path / "cache" / "states").exists()
    asked = context(made, tmp_path / "read")
    target = build.open_target(asked, asked.processor())
    for anyres, aspect, shown in ((None, "pad", "tiles"), (False, "anyres", "single tiles")):
        tiled = replace(asked, target=LlavaTargetConfig(kind="llava_next", path="x", anyres=anyres))
        form, section = PromptFormat(), made.data | {"aspect": aspect}
        samples = build.open_samples(ConversationData(**section), form, None, asked, asked.processor())
        with pytest.raises(UserError, match=f"aspect is {aspect} and the target reads pictures in {shown}"):
            check_fit(tiled, samples.dataset, target.decoder, as_cut=True)
        check_fit(asked, samples.dataset, target.decoder, as_cut=True)
        if anyres is False:  # requests lose their further tiles
            check_fit(tiled, samples.dataset, target.decoder, as_cut=False)


@pytest.mark.parametrize(("others", "problem"), [
    ([{"kind": "pruned"}], r"drafters\.0\.kind: pruned reads no hidden states"),
    ([{"kind": "msd"}, {"kind": "eagle", "num_heads": 2}], r"drafters\.1\.num_heads: nothing reads it"),
])  # fmt: skip
def test_other_drafters_that_read_no_states_are_refused(made, others, problem):
    asked = CacheStage(kind="cache", data=made.data, drafters=others)
    target = LlavaTargetConfig(kind="llava", path="x")
    fails_with(problem, asked.check, target, SparrowConfig(kind="sparrow"), error=Refused)


def test_states_that_overflow_are_not_kept(made, tmp_path):
    """The weights are finite; what they compute is not. The sample is named, and nothing is written."""
    folder = tmp_path / "made"
    shutil.copytree(made.folder, folder)
    weights = load_file(folder / "target" / "model.safetensors")
    name = next(name for name in weights if name.endswith("norm.weight") and "layers" not in name)
    weights[name] = weights[name].sign() * 3e38
    save_file(weights, folder / "target" / "model.safetensors", metadata={"format": "pt"})
    spoilt = SimpleNamespace(folder=folder, data=made.data)
    caught = fails_with("the target's hidden states are not finite", cached, spoilt, tmp_path / "cache")
    assert str(caught.where).startswith("request ")
    assert not list((tmp_path / "cache").rglob("shard-*"))
