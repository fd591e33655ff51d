"""The target's answers as a stage writes them: those of the decoding loop, whoever writes them and however often."""

import json
import shutil

import pytest
import torch
from distill_run import run
from draftsmith.core import ranks
from draftsmith.core.errors import UserError
from draftsmith.data.conversations import PromptFormat
from draftsmith.data.dataset import ConversationData, ConversationDataset
from draftsmith.data.processor_files import load_processor
from draftsmith.data.shards.shards import ShardReader
from draftsmith.data.sources import SHARDS, SKIPPED
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import RULES
from draftsmith.models.decoding.tree import no_tree
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.losses import log_probs
from draftsmith.models.targets.base import Taps
from draftsmith.models.targets.llava.section import LlavaTarget
from draftsmith.models.targets.load import load_lvlm
from draftsmith.trainers.run import precision
from draftsmith.trainers.run import run as runner
from draftsmith.trainers.serve import written_texts as texts
from draftsmith.trainers.stages import regenerate
from fails import fails_with
from stages_run import list_anew

COUNT = 27


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """World, target and a first set of answers."""
    output = tmp_path_factory.mktemp("answers") / "run"
    run(output, stages=["world", "seeing", "target", "answers"])
    return output


@pytest.fixture
def again(made, tmp_path):
    """A copy whose answers can be written anew."""
    output = tmp_path / "run"
    shutil.copytree(made, output)
    shutil.rmtree(output / "answers")
    return output


def answers(output) -> ShardReader:
    return ShardReader(output / "answers" / SHARDS)


def ids(output) -> list[list[int]]:
    return [tensors["ids"].tolist() for _, tensors, _ in answers(output)]


def files(output) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted((output / "answers" / SHARDS).iterdir())}


@pytest.fixture(scope="module")
def asked(made):
    """The requests of the stage, its processor and its target."""
    processor = load_processor(made / "world")
    form = PromptFormat(system="", image_rule="verbatim")
    path = made / "world" / "world" / "train.json"
    config = ConversationData(path=str(path), aspect="square", max_length=256)
    dataset = ConversationDataset(config, form, processor, files=[path], skipped_log=None, cache=made / "cache")
    model = load_lvlm(made / "target", revision=None, dtype=torch.float32, key="target")
    num_ids = len(processor.tokenizer)
    target = LlavaTarget(model, num_token_ids=num_ids, image_token_id=processor.image_token_id)
    return dataset, processor, target


def test_records_hold_all_that_an_answer_was_made_from(made, asked):
    dataset, processor, target = asked
    reader = answers(made)
    assert len(reader) == len(dataset) == COUNT and len(reader.shards) == 4
    greedy = Decoding(Chain(1), RULES["greedy"], Draw("top-k"), Warp(), 8, (processor.eos_id,))
    pictured = set()
    for number, (_, tensors, info) in enumerate(reader):
        request, _ = dataset.request(number)
        alone = generate(target, None, request, greedy)
        assert tensors["ids"].tolist() == alone.tokens and info["stop"] == alone.stop
        assert tensors["prompt"].tolist() == request.ids[request.modality == 0].tolist()
        assert info["name"] == dataset.sample_id(number) == request.name
        record = dataset.record(number)
        assert info["id"] == record["id"] and info["conversations"] == record["conversations"][:-1]
        assert info.get("image") == record.get("image")
        assert info["text"] == processor.tokenizer.decode(alone.tokens, skip_special_tokens=True)
        assert info["target"].startswith("inline@") and info["seed"] == number
        pictured.add(0 if request.pixels is None else len(request.pixels))
    assert pictured == {0, 1, 2}
    assert len({tuple(i) for i in ids(made)}) > 5, "a target that says the same to all tests nothing"


def test_the_way_of_writing_changes_no_answer(made, again):
    run(again, "stages.answers.batch_size=27", "stages.answers.samples_per_shard=100", stages=["answers"])
    assert ids(again) == ids(made) and len(answers(again).shards) == 1


def said_by_rank_0(work, *arguments):
    """To rank 1, which does none of this itself."""
    said = {
        runner.look_at_results: lambda *_: {}, runner._begin: lambda _, folder, say: runner.begun(folder).fingerprint,
        precision._recorded: precision._resolutions,
    }  # fmt: skip
    return said[work](*arguments) if work in said else None


def test_two_ranks_write_what_one_does(made, again, monkeypatch):
    """Each its own shards; the second here finds those of the first."""
    told = []
    (again / "answers").mkdir()
    shutil.copy(made / "answers" / "fingerprint.json", again / "answers")  # rank 0 has begun
    for rank in (1, 0):
        with monkeypatch.context() as patch:
            patch.setattr(ranks, "rank", lambda rank=rank: rank)
            patch.setattr(ranks, "world_size", lambda: 2)
            patch.setattr(ranks, "barrier", lambda: None)
            # What rank 0 says where it has nothing to say.
            patch.setattr(ranks, "broadcast", lambda value: {} if value is None else value)
            if rank == 1:
                patch.setattr(regenerate, "finish", None)
                patch.setattr(ranks, "on_main", said_by_rank_0)
            told += [line for line in run(again, stages=["answers"]) if line.startswith("shard")]
            if rank == 1:
                assert len(files(again)) == 2 + 1  # two shards and the identity
                (again / "answers" / "done.json").unlink(missing_ok=True)
    assert sorted(told) == [f"shard {n} of 4" for n in (1, 2, 3, 4)] and files(again) == files(made)


def test_a_killed_run_goes_on_behind_its_shards(made, again, monkeypatch):
    written = []
    whole = regenerate.write_shard

    def dies(folder, index, samples, counts):
        if index == 2:
            raise KeyboardInterrupt
        written.append(index)
        return whole(folder, index, samples, counts)

    with monkeypatch.context() as patch:
        patch.setattr(regenerate, "write_shard", dies)
        fails_with("", run, again, stages=["answers"], error=KeyboardInterrupt)
    assert written == [0, 1]
    told = run(again, stages=["answers"])
    assert [line for line in told if line.startswith("shard")] == ["shard 3 of 4", "shard 4 of 4"]
    assert files(again) == files(made)


def test_sampled_answers_are_drawn_by_seed(made, again, tmp_path):
    """The same again in other batches; others with another seed, and than the greedy ones."""
    drawn = []
    for number, settings in enumerate(([], ["stages.answers.batch_size=9"], ["stages.answers.top_k=2"])):
        output = tmp_path / str(number)
        shutil.copytree(again, output)
        run(output, "stages.answers.temperature=1.0", *settings, stages=["answers"])
        drawn.append(ids(output))
    assert drawn[0] == drawn[1]
    assert drawn[0] != ids(made) and drawn[2] != drawn[0]


def test_log_probabilities_are_kept_on_demand(made, again, asked):
    """Of every token that was emitted, at the place that it was drawn from, and the mass of all others."""
    dataset, _, target = asked
    run(again, "stages.answers.keep_logprobs=6", stages=["answers"])
    assert ids(again) == ids(made) and answers(again).identity["kept"] == 6
    assert "top_ids" not in answers(made)[0][1]
    for number in range(0, COUNT, 5):
        _, tensors, _ = answers(again)[number]
        request, _ = dataset.request(number)
        session, step = target.prefill(request, Taps(), capacity=20)
        for place, token in enumerate(tensors["ids"].tolist()):
            logs = log_probs(step.logits[-1])
            best = logs.topk(6)
            assert tensors["top_ids"][place].tolist() == best.indices.tolist()
            torch.testing.assert_close(tensors["top_log_probs"][place], best.values, atol=1e-4, rtol=1e-4)
            rest = torch.log1p(-best.values.double().exp().sum())
            torch.testing.assert_close(tensors["log_rest"][place].double(), rest, atol=1e-3, rtol=1e-3)
            step = target.verify(session, token, no_tree())
            target.commit(session, ())


def test_what_cannot_be_asked_is_left_out_and_counted(made, again):
    """A picture that is gone, and prompts without room for an answer."""
    synthetic = again / "world" / "world"
    records = json.loads((synthetic / "train.json").read_text())
    (synthetic / records[3]["image"]).unlink()
    list_anew(again / "world")
    fails_with("missing image", run, again, stages=["answers"])
    shutil.rmtree(again / "answers")
    run(again, "stages.answers.data.on_error=skip", "stages.answers.data.max_length=40", stages=["answers"])
    reader = answers(again)
    skipped = [n for n, (_, _, info) in enumerate(reader) if info["stop"] == SKIPPED]
    assert 3 in skipped and 1 < len(skipped) < COUNT and reader.refused == {SKIPPED: len(skipped)}
    listed = [json.loads(line) for line in (again / "answers" / "skipped.jsonl").read_text().splitlines()]
    assert sorted(entry["record"] for entry in listed) == skipped
    for number, (_, tensors, info) in enumerate(reader):
        if number not in skipped:
            image = 9 * len(info["image"]) if isinstance(info.get("image"), list) else 9 * ("image" in info)
            assert len(tensors["prompt"]) + image + len(tensors["ids"]) <= 40


def test_a_run_that_answers_nothing_is_no_result(again):
    """A mistyped folder of pictures, say, with on_error: skip."""
    settings = ["stages.answers.data.on_error=skip", "stages.answers.data.max_length=8"]
    with pytest.raises(UserError, match=r"every record was left out(.|\n)*skipped\.jsonl(.|\n)*restart=answers"):
        run(again, *settings, stages=["answers"])
    assert not (again / "answers" / "done.json").exists()


def test_an_answer_from_scores_that_are_not_finite_is_not_written(again, monkeypatch):
    """The weights are finite when they are loaded, and their scores overflow: the record is named."""
    open_target = texts.open_target

    def overflowing(*arguments, **keywords):
        target = open_target(*arguments, **keywords)
        head = target.decoder.model.lm_head  # its own weights from here on: the embedding may be the same
        head.weight = torch.nn.Parameter(head.weight.data.sign() * 3e38, requires_grad=False)
        return target

    monkeypatch.setattr(texts, "open_target", overflowing)
    caught = fails_with("the scores that a token is drawn from are not finite", run, again, stages=["answers"])
    assert str(caught.where).startswith("request ") and str(caught.where).endswith(", token 0")
    assert not list((again / "answers").rglob("shard-*"))
