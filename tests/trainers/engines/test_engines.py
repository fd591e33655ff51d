"""A target that another process runs: answers, states and losses are those of our own passes, whatever happens to it.

The engine is transformers' own model behind the files of `draftsmith_jobs.py` (workers/vllm_worker.py here); vLLM
itself is in `test_vllm.py`.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.core.pictures import PatchGrid, Picture, whole_picture
from draftsmith.core.refused import Refused
from draftsmith.data.patches import patches
from draftsmith.data.shards import ShardReader
from draftsmith.models.drafters.eagle3 import Eagle3Config
from draftsmith.models.targets.llava import LlavaTargetConfig
from draftsmith.trainers.engines import process, served
from draftsmith.trainers.engines.pictures import one_placeholder_each, shown
from draftsmith.trainers.stages.cache import CacheStage
from draftsmith.trainers.stages.regenerate import RegenerateStage
from draftsmith.trainers.training.states import looked_ahead
from PIL import Image
from states_run import RECORDS, cached, context, losses, stage, synthetic

WORKERS = Path(__file__).with_name("workers")
VLLM = {"kind": "vllm", "max_num_seqs": 4, "ahead": 3}
HEAD = Eagle3Config(kind="eagle3", taps=(1, 2, 3), visual_slots="read", image="placeholder", mtp_steps=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return synthetic(tmp_path_factory.mktemp("world"))


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """transformers in the engine's place, in this Python."""
    monkeypatch.setattr(process, "_WORKERS", WORKERS)
    monkeypatch.setattr(served, "find_python", lambda asked, engine: sys.executable)
    monkeypatch.setattr(served, "version_of", lambda package, python: "1.0")


def run(stage, asked):
    with asked.opened:
        stage.run(asked)
    return asked.folder


def answers(made, folder, **settings):
    settings = {"data": made.data, "max_new_tokens": 12, "samples_per_shard": 9, "batch_size": 4} | settings
    return run(RegenerateStage(kind="regenerate", **settings), context(made, folder))


def written(folder):
    reader = ShardReader(folder / "answers")
    return [(info, tensors["ids"].tolist()) for _, tensors, info in map(reader.__getitem__, range(len(reader)))]


def test_answers_are_those_of_our_own_passes(made, tmp_path):
    ours, theirs = answers(made, tmp_path / "ours"), answers(made, tmp_path / "theirs", engine=VLLM)
    assert written(ours) == written(theirs) and len(written(ours)) == RECORDS
    assert len({tuple(ids) for _, ids in written(ours)}) > 5, "answers that depend on nothing prove nothing"
    assert not list((theirs / "cache").glob("engine*")), "its files go with it"
    identities = [ShardReader(folder / "answers").identity for folder in (ours, theirs)]
    assert identities[1].pop("engine") == {"kind": "vllm", "quantization": None, "options": {}, "version": "1.0"}
    assert identities[0] == identities[1]


@pytest.fixture(scope="module")
def own_losses(made, tmp_path_factory):
    asked = context(made, tmp_path_factory.mktemp("own"), HEAD)
    stage(made, source={"kind": "online"}, epochs=2).run(asked)
    return losses(asked.folder)


def trained(made, folder, **engine):
    source = {"kind": "online", "engine": VLLM | engine}
    return run(stage(made, source=source, epochs=2, validation={"every": 4}), context(made, folder, HEAD))


def test_losses_are_those_of_our_own_passes(made, own_losses, tmp_path):
    theirs = losses(trained(made, tmp_path / "run"))
    assert theirs.keys() == own_losses.keys() and len(theirs) > 5
    assert [theirs[step] for step in theirs] == pytest.approx([own_losses[step] for step in theirs], rel=1e-4)


def test_states_are_kept_as_those_of_our_own_passes(made, own_losses, tmp_path):
    """Of the same samples in the same shards; what is read of them gives the losses of our own states."""
    states = {"shard_bytes": 20_000, "measured_samples": 4}
    folders = {}
    for name, more in {"ours": {}, "theirs": {"engine": VLLM}}.items():
        made_by = CacheStage(kind="cache", data=made.data, batch_size=3, states=states, **more)
        folders[name] = run(made_by, context(made, tmp_path / name, HEAD))
    ours, theirs = (ShardReader(folder / "states") for folder in folders.values())
    assert len(ours.shards) == len(theirs.shards) > 2 and "engine" not in ours.identity
    for index in range(RECORDS):
        (key, mine, info), (other, found, told) = ours[index], theirs[index]
        assert (key, info) == (other, told) and mine.keys() == found.keys()
        for name, tensor in mine.items():
            torch.testing.assert_close(found[name].float(), tensor.float(), rtol=0.02, atol=0.02)
    read = run(stage(made, source={"kind": "cached"}, epochs=2), context(made, tmp_path / "read", HEAD,
                                                                          {"states": folders["theirs"]}))  # fmt: skip
    assert list(losses(read).values()) == pytest.approx(list(own_losses.values()), rel=0.02)
    # Read as one, states of two engines are refused, unless somebody says that it does not matter.
    both = {"kind": "cached", "path": [str(folder / "states") for folder in folders.values()]}
    with pytest.raises(UserError, match=r"engine(.|\n)*source.accept: \[engine\]"):
        run(stage(made, source=both, steps=1), context(made, tmp_path / "both", HEAD))
    run(stage(made, source=both | {"accept": ["engine"]}, steps=1), context(made, tmp_path / "accepted", HEAD))


def test_an_engine_that_dies_is_started_again(made, own_losses, tmp_path, monkeypatch):
    """Nothing is lost, and nothing comes twice."""
    starts = []
    start = process.EngineProcess._start
    monkeypatch.setattr(process.EngineProcess, "_start", lambda self: starts.append(self) or start(self))
    (tmp_path / "run" / "cache").mkdir(parents=True)
    (tmp_path / "run" / "cache" / "fault.json").write_text('{"die": 3}')
    theirs = losses(trained(made, tmp_path / "run"))
    assert len(starts) == 2
    assert [theirs[step] for step in theirs] == pytest.approx([own_losses[step] for step in theirs], rel=1e-4)


def test_an_engine_that_always_dies_is_a_fault_with_its_own_words(made, tmp_path):
    (tmp_path / "run" / "cache").mkdir(parents=True)
    (tmp_path / "run" / "cache" / "fault.json").write_text('{"die": -1}')
    with pytest.raises(UserError, match=r"3 times with exit code 9(.|\n)*no memory for another block\n") as caught:
        answers(made, tmp_path / "run", engine=VLLM)
    assert "shutdown" not in str(caught.value) and (tmp_path / "run/cache/engine-0/log.txt").is_file()


@pytest.mark.parametrize("fault", ["longer", "write"])
def test_what_an_engine_gets_wrong_is_refused(made, tmp_path, fault):
    """Another number of picture tokens would be an answer to another prompt, without a sign of it."""
    image = json.loads((made.folder / "target/config.json").read_text())["image_token_index"]
    value, words = {
        "longer": (True, "prompt has 168 tokens, and ours 167"),
        "write": (image, f"wrote id {image}, which has no token"),
    }[fault]
    (tmp_path / "run" / "cache").mkdir(parents=True)
    (tmp_path / "run" / "cache" / "fault.json").write_text(json.dumps({fault: value}))
    with pytest.raises(UserError, match=words):
        answers(made, tmp_path / "run", engine=VLLM)


def test_a_folder_of_another_engine_is_refused(made, tmp_path, monkeypatch):
    answers(made, tmp_path / "run", engine=VLLM)
    monkeypatch.setattr(served, "version_of", lambda package, python: "1.1")
    with pytest.raises(UserError, match=r"another engine.version: '1.0', now '1.1'"):
        answers(made, tmp_path / "run", engine=VLLM)


def test_pictures_are_handed_over_as_they_were_read():
    """Byte for byte, also of a picture that was cut into merged patches."""

    class Processor:
        class image_processor:
            image_mean, image_std, resample = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28), Image.Resampling.BICUBIC

        patch_size = 4

    torch.manual_seed(0)
    bytes_ = torch.randint(0, 256, (16, 24, 3), dtype=torch.uint8)
    grid = PatchGrid(1, 4, 6)
    cut = patches([Image.fromarray(bytes_.numpy())], grid, Processor)
    (found,) = shown(cut, [whole_picture(grid)], Processor, "")
    assert torch.equal(found, bytes_)
    mean, std = (torch.tensor(v) for v in (Processor.image_processor.image_mean, Processor.image_processor.image_std))
    tile = ((bytes_ / 255 - mean) / std).permute(2, 0, 1)
    assert torch.equal(shown(tile[None], [Picture(4)], Processor, "")[0], bytes_)
    with pytest.raises(UserError, match="several"):
        shown(tile[None], [Picture(4, num_tiles=2)], Processor, "")
    with pytest.raises(UserError, match="clip"):
        shown(tile[None], [Picture(4, modality=2)], Processor, "")


def test_pictures_side_by_side_keep_a_placeholder_each():
    """An engine expands each of them; one for both would be one picture."""
    ids, kinds = torch.tensor([1, 9, 9, 9, 9, 9, 9, 9, 9, 5]), torch.tensor([0, 1, 1, 1, 1, 1, 1, 1, 1, 0])
    assert one_placeholder_each(ids, kinds, [Picture(2), Picture(2)]) == [1, 9, 9, 5]


def test_what_an_engine_cannot_do_is_refused(made):
    target = LlavaTargetConfig(kind="llava", path="x")
    answered = {"kind": "regenerate", "engine": VLLM}
    with pytest.raises(Refused, match="tiles by itself"):
        RegenerateStage(data=made.data | {"aspect": "anyres"}, **answered).check(target, None)
    with pytest.raises(Refused, match="log-probabilities"):
        RegenerateStage(data=made.data, keep_logprobs=4, **answered).check(target, None)
    engine = VLLM | {"options": {"max_model_len": 5}}
    with pytest.raises(Refused, match="follows from the recipe"):
        RegenerateStage(data=made.data, kind="regenerate", engine=engine).check(target, None)
    with pytest.raises(Refused, match="sglang hands out no hidden states of a llava"):
        CacheStage(kind="cache", data=made.data, engine={"kind": "sglang"}).check(target, HEAD)
    with pytest.raises(Refused, match="no hidden states of a llava_next"):
        CacheStage(kind="cache", data=made.data, engine=VLLM).check(
            LlavaTargetConfig(kind="llava_next", path="x"), HEAD
        )
    with pytest.raises(Refused, match="no hidden states of a llava_next"):
        stage(made, source={"kind": "online", "engine": VLLM}).check(
            LlavaTargetConfig(kind="llava_next", path="x"), HEAD
        )


def test_items_are_taken_ahead():
    taken = []
    items = looked_ahead((taken.append(n) or n for n in range(5)), 2)
    assert next(items) == 0 and taken == [0, 1, 2] and list(items) == [1, 2, 3, 4]


def test_no_engine_is_named_in_what_has_none(made, tmp_path):
    """Fingerprints and identities of before stay."""
    assert "engine" not in RegenerateStage(kind="regenerate", data=made.data).model_dump()
    assert "engine" not in ShardReader(cached(made, tmp_path / "run", HEAD).folder / "states").identity
