"""A target that another process runs: answers, states and losses are those of our own passes, whatever happens to it.

The engine is transformers' own model behind the files of `draftsmith_jobs.py` (workers/vllm_worker.py here); vLLM
itself is in `test_vllm.py`.
"""

import json
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from draftsmith.core.errors import Refused, UserError
from draftsmith.core.pictures import PatchGrid, Picture, one_placeholder_each, whole_picture
from draftsmith.data.families.processor import Processor, pil
from draftsmith.data.families.qwen import QWEN2_5_VL
from draftsmith.data.shards.shards import ShardReader
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters import DflashConfig, Eagle3Config, PeagleConfig
from draftsmith.models.targets.llava.section import LlavaTargetConfig
from draftsmith.models.targets.qwen.model import qwen_config
from draftsmith.recipes.config.launch import run_recipe
from draftsmith.trainers.run.stopping import Stopped
from draftsmith.trainers.serve import engine_process as process
from draftsmith.trainers.serve import engine_section, served
from draftsmith.trainers.serve.engine_section import VllmEngine
from draftsmith.trainers.serve.engines import EngineSection
from draftsmith.trainers.serve.served import shown
from draftsmith.trainers.stages.cache import CacheStage
from draftsmith.trainers.stages.regenerate import RegenerateStage
from engines_in_place import in_place
from fails import fails_with
from PIL import Image
from published_tiny import target_folder
from pydantic import TypeAdapter
from states_run import RECORDS, context, losses, stage
from tiny import request
from tiny_qwen import IDS, text_config, vision_config
from transformers import LlavaConfig

VLLM = {"kind": "vllm", "max_num_seqs": 4, "ahead": 3}
HEAD = Eagle3Config(kind="eagle3", taps=(1, 2, 3), visual_slots="read", image="placeholder", mtp_steps=1)


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    in_place(monkeypatch)


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


def fault(folder, **what):
    """What goes wrong with the engine of the stage in `folder` (see workers/vllm_worker.py)."""
    (folder / "cache").mkdir(parents=True)
    (folder / "cache" / "fault.json").write_text(json.dumps(what))
    return folder


def test_answers_are_those_of_our_own_passes(made, tmp_path, monkeypatch):
    ours, theirs = answers(made, tmp_path / "ours"), answers(made, tmp_path / "theirs", engine=VLLM)
    assert written(ours) == written(theirs) and len(written(ours)) == RECORDS
    assert len({tuple(ids) for _, ids in written(ours)}) > 5, "answers that depend on nothing prove nothing"
    assert not list((theirs / "cache").glob("engine*")), "its files go with it"
    identities = [ShardReader(folder / "answers").identity for folder in (ours, theirs)]
    assert identities[1].pop("engine") == {"kind": "vllm", "quantization": None, "options": {}, "version": "1.0"}
    assert identities[0] == identities[1]
    # What one engine began is not continued by another.
    monkeypatch.setattr(engine_section, "version_of", lambda package, python: "1.1")
    fails_with(r"another engine.version: '1.0', now '1.1'", answers, made, theirs, engine=VLLM)


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


@pytest.mark.slow
def test_an_engine_that_dies_is_started_again(made, own_losses, tmp_path, monkeypatch):
    """Nothing is lost, and nothing comes twice."""
    starts = []
    start = process.EngineProcess._start
    monkeypatch.setattr(process.EngineProcess, "_start", lambda self: starts.append(self) or start(self))
    theirs = losses(trained(made, fault(tmp_path / "run", die=3)))
    assert len(starts) == 2
    assert [theirs[step] for step in theirs] == pytest.approx([own_losses[step] for step in theirs], rel=1e-4)


def test_an_engine_that_always_dies_is_a_fault_with_its_own_words(made, tmp_path):
    with pytest.raises(UserError, match=r"exit code 9, and 3 times(.|\n)*no memory for another block\n") as caught:
        answers(made, fault(tmp_path / "run", die=-1), engine=VLLM)
    assert "shutdown" not in str(caught.value) and (tmp_path / "run/cache/engine-0/log.txt").is_file()
    assert "key stages.run.engine" in str(caught.value)


@pytest.mark.parametrize("of", [pytest.param("answers", marks=pytest.mark.slow), "states"])
def test_another_number_of_picture_tokens_is_refused_with_both(made, tmp_path, of):
    """It would be an answer to another prompt, without a sign of it."""
    folder = fault(tmp_path / "run", longer=True)
    with pytest.raises(UserError, match=r"prompt has (\d+) tokens, and ours (\d+)") as caught:
        answers(made, folder, engine=VLLM) if of == "answers" else trained(made, folder)
    theirs, ours = map(int, re.search(r"has (\d+) tokens, and ours (\d+)", str(caught.value)).groups())
    assert theirs == ours + 1


def test_every_request_has_its_own_seed_and_limit():
    """Drawn from one seed, prompts that are alike would all get one answer."""
    submitted = []
    engine = SimpleNamespace(submit=lambda asked, pictures: submitted.extend(asked))
    section = TypeAdapter(EngineSection).validate_python(VLLM)
    writes = served.ServedAnswers(
        engine, SimpleNamespace(eos_id=2, num_token_ids=64), partial(section.sampling, Warp(1.0)), ends=(2,), never=(5,)
    )
    writes.begin([request(seed, images=0) for seed in range(3)], limits=[7, 8, 9], seeds=[11, 12, 13])
    sampling = [one["sampling"] for one in submitted]
    assert [(one["seed"], one["max_tokens"]) for one in sampling] == [(11, 7), (12, 8), (13, 9)]
    assert [one["ids"] for one in submitted] == [request(seed, images=0).ids.tolist() for seed in range(3)]


def test_an_id_without_a_token_is_refused(made, tmp_path):
    image = json.loads((made.folder / "target/config.json").read_text())["image_token_index"]
    with pytest.raises(UserError, match=f"wrote id {image}, which has no token"):
        answers(made, fault(tmp_path / "run", write=image), engine=VLLM)


def test_a_stop_inside_a_step_saves_it(made, tmp_path, monkeypatch):
    """Of an engine that answers slowly: the step in hand is finished, whose other ranks wait for it, and saved."""
    asked, jobs = context(made, tmp_path / "run", HEAD), []
    waited = process.EngineProcess.wait

    def wait(self, name, job, **how):
        jobs.append(name)
        asked.stop.raised = len(jobs) >= 4  # micro-batches of two: inside the second step
        return waited(self, name, job, **how)

    monkeypatch.setattr(process.EngineProcess, "wait", wait)
    with pytest.raises(Stopped, match="after step 2"), asked.opened:
        stage(made, source={"kind": "online", "engine": VLLM}, epochs=2).run(asked)
    assert list(asked.folder.glob("checkpoints/*2*"))


OTHERS = {
    "dflash": DflashConfig(kind="dflash", block_size=3, num_layers=1, taps=(1, 3)),
    "peagle": PeagleConfig(kind="peagle", taps=(1, 2, 3), visual_slots="read", image="placeholder", parallel_tokens=2),
}


@pytest.mark.parametrize("kind", [pytest.param("dflash", marks=pytest.mark.slow), "peagle"])
def test_block_parallel_drafters_learn_from_its_states(made, tmp_path, kind):
    folders = []
    for name, source in {"ours": {}, "theirs": {"engine": VLLM}}.items():
        asked = context(made, tmp_path / name, OTHERS[kind])
        folders.append(run(stage(made, source={"kind": "online"} | source, steps=3), asked))
    ours, theirs = (list(losses(folder).values()) for folder in folders)
    assert len(ours) == 3 and theirs == pytest.approx(ours, rel=1e-4)


def test_pictures_are_handed_over_as_they_were_read():
    """Byte for byte, also of a picture that was cut into merged patches."""

    mean, std = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
    images = pil("Qwen2VL")(image_mean=mean, image_std=std, patch_size=4, merge_size=2)
    processor = Processor(None, images, 0, patch_size=4, image_size=8, pad_id=0, bos_id=None, eos_id=0, newline_id=0,
                          picture_family=QWEN2_5_VL)  # fmt: skip
    torch.manual_seed(0)
    bytes_ = torch.randint(0, 256, (16, 24, 3), dtype=torch.uint8)
    grid = PatchGrid(1, 4, 6)
    cut = QWEN2_5_VL.clip_pixels([Image.fromarray(bytes_.numpy())], whole_picture(grid), processor)
    (found,) = shown(cut, [whole_picture(grid)], processor, "")
    assert torch.equal(found, bytes_)
    tile = ((bytes_ / 255 - torch.tensor(mean)) / torch.tensor(std)).permute(2, 0, 1)
    assert torch.equal(shown(tile[None], [Picture(4)], processor, "")[0], bytes_)
    fails_with("several", shown, tile[None], [Picture(4, num_tiles=2)], processor, "")
    fails_with("clip", shown, tile[None], [Picture(4, modality=2)], processor, "")


def test_pictures_side_by_side_keep_a_placeholder_each():
    """An engine expands each of them; one for both would be one picture."""
    ids, kinds = [1, 9, 9, 9, 9, 9, 9, 9, 9, 5], [0, 1, 1, 1, 1, 1, 1, 1, 1, 0]
    assert one_placeholder_each(ids, kinds, [Picture(2), Picture(2)]) == [1, 9, 9, 5]


def test_what_an_engine_cannot_do_is_refused(made):
    llava, tiled = (LlavaTargetConfig(kind=kind, path="x") for kind in ("llava", "llava_next"))
    answers = {"kind": "regenerate", "data": made.data, "engine": VLLM}
    states = {"kind": "cache", "data": made.data}
    for words, chosen, target, head in (
        ("tiles by itself", RegenerateStage(**answers | {"data": made.data | {"aspect": "anyres"}}), llava, None),
        ("log-probabilities", RegenerateStage(**answers, keep_logprobs=4), llava, None),
        ("follows from the recipe",
         RegenerateStage(**answers | {"engine": VLLM | {"options": {"max_model_len": 5}}}), llava, None),
        ("no hidden states of a llava_next", CacheStage(**states, engine=VLLM), tiled, HEAD),
        ("no hidden states of a llava_next", stage(made, source={"kind": "online", "engine": VLLM}), tiled, HEAD),
    ):  # fmt: skip
        fails_with(words, chosen.check, target, head, error=Refused)


def test_a_target_whose_tower_no_engine_has_is_not_served_without_its_pictures(made, tmp_path):
    """Its language model alone would have answered the questions about pictures that it never saw."""
    source = target_folder(tmp_path / "target", "emoji", weights=True)
    one = SimpleNamespace(**vars(made) | {"target": LlavaTargetConfig(kind="llava", path=str(source))})
    asked = context(one, tmp_path / "run")
    words = r"no engine has the target's tower \(efficientnet_lite0\)(.|\n)*stages.run.engine(.|\n)*--target-to"
    with (
        pytest.raises(UserError, match=words),
        engine_section.engine_process(
            VllmEngine(kind="vllm"), asked, key="engine", layers=None, max_length=8, most_pictures=1
        ),
    ):
        pass


def test_layers_that_a_target_adds_pictures_to_are_refused():
    """Measured in vLLM 0.32, with a tiny Qwen3-VL that adds them to two layers: losses of taps 1, 3, 6 part by 3e-3."""
    config = qwen_config("qwen3_vl", text_config("qwen3_vl", 4, 32), vision_config("qwen3_vl", 32), IDS)
    with pytest.raises(UserError, match=r"reads layer 2(.|\n)*first 2(.|\n)*deepstack(.|\n)*drafter.taps above 2"):
        served.check_layers("vllm", (2, 3, 4), config)
    served.check_layers("vllm", (3, 4), config)
    served.check_layers("vllm", (1, 4), LlavaConfig())


def test_an_engine_is_told_every_end():
    sampling = VllmEngine(kind="vllm").sampling(Warp(), seed=0, limit=4, ends=(2, 7, 9), never={})
    assert sampling["stop_token_ids"] == [2, 7, 9] and sampling["ignore_eos"]


def test_a_node_has_one_engine(made, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_section.ranks, "any_rank", lambda value: True)
    section = VllmEngine(kind="vllm")
    with (
        pytest.raises(UserError, match="several ranks run on one node"),
        engine_section.engine_process(
            section, SimpleNamespace(name="answers"), key="engine", layers=None, max_length=8, most_pictures=0
        ),
    ):
        pass


def test_a_serving_engine_has_a_number_of_gpus_of_its_own():
    recipe = ["recipe=eagle3-llava15-7b", "dry_run=true", "stages=[answers]"]
    assert run_recipe([*recipe, "stages.answers.engine={kind: vllm, tensor_parallel_size: 2}"], "the command") == 0
