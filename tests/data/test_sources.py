"""Whose answers are learned: shares by draw, the target's ids as they were stored, the draft's to come."""

import json
import pickle
from collections import Counter

import pytest
import torch
from draftsmith.core.batch import TEXT, Batch
from draftsmith.core.errors import UserError
from draftsmith.core.states import TopLogProbs
from draftsmith.data.collate import ConversationCollate
from draftsmith.data.conversations import PromptFormat
from draftsmith.data.loader import Loader
from draftsmith.data.shards.shards import claim, finish, write_shard
from draftsmith.data.sources import (
    SKIPPED,
    Answer,
    AnswerCollate,
    AnsweredSamples,
    Answers,
    AnswersConfig,
    OpenBatch,
    kept_tensors,
    text_ids,
)
from draftsmith.models.drafters.distillation import with_rest
from draftsmith.models.losses import divergence_of_logs
from fails import fails_with
from pydantic import ValidationError
from small_records import record, talk
from torch.nn import functional as F

# Ids that no text is tokenized to: bytes that make no letter, a piece split in two.
ODD = [250, 251, 9, 9, 2]
KEPT = 3


def write(path, rows: list):
    path.write_text(json.dumps(rows))
    return path


def odd(number: int) -> list[int]:
    """Another length for each record."""
    return [10 + number, *ODD[number % 3 :]]


def kept_of(number: int) -> TopLogProbs:
    n = len(odd(number))
    ids = torch.arange(n * KEPT).view(n, KEPT) + 100 * number
    return TopLogProbs(ids, -torch.rand(n, KEPT), -torch.rand(n) - number)


@pytest.fixture
def data(folder, open_data):
    """Six records: four with a picture, one of two turns, one of text alone."""
    rows = [record(n) for n in range(5)]
    rows[3] = record(3, conversations=talk("<image>\nWhich?", "It is picture 3.") + talk("Sure?", "It is."))
    rows.append({"id": "t", "conversations": talk("What is one and one?", "Two.")})
    return open_data(write(folder / "data.json", rows), max_length=128, on_error="skip")


def write_answers(folder, dataset, *, kept: int = 0, skipped=(), prompts=None):
    place = folder / "answers"
    identity = {"kept": kept}
    claim(place, identity)
    samples = []
    for number in range(len(dataset)):
        request, _ = dataset.request(number)
        tensors = {"prompt": text_ids(request) if prompts is None else prompts, **kept_tensors(kept_of(number))}
        stop, ids = (SKIPPED, []) if number in skipped else ("eos", odd(number))
        samples.append(Answer(number, {"name": request.name}, ids, stop, 7, "target@1", tensors).sample())
    write_shard(place, 0, samples, {})
    finish(place, identity, num_shards=1)
    return Answers(place, dataset)


def answered(dataset, answers=None, seed: int = 0, **shares) -> AnsweredSamples:
    return AnsweredSamples(dataset, AnswersConfig(shares=shares), answers, seed=seed)


def test_the_target_s_ids_are_trained_on_as_they_are_stored(data, folder, processor):
    samples = answered(data, write_answers(folder, data), target=1.0)
    for index in range(len(data)):
        sample = samples.row(index, epoch=0).sample
        request, _ = data.request(index)
        n = len(request.ids)
        assert sample.ids == [*request.ids.tolist(), *odd(index)]
        assert sample.loss_mask == [False] * n + [True] * len(odd(index))
        assert sample.modality == [*request.modality.tolist(), *[TEXT] * len(odd(index))]
        assert sample.sample_id == data[index].sample_id == request.name
        own = data[index]
        assert (sample.pixels is None) == (own.pixels is None)
        assert own.pixels is None or torch.equal(sample.pixels, own.pixels)
        assert sample.pictures == own.pictures
        text = processor.tokenizer.decode(odd(index))
        again = processor.tokenizer(text, add_special_tokens=False).input_ids
        assert again != odd(index), "a test of tokenizing nothing again needs ids that it would change"


def test_the_data_s_own_answers_are_the_data_s_samples(data):
    samples = answered(data, data=1.0)
    for index in range(len(data)):
        result, own = samples.row(index, epoch=3).sample, data[index]
        assert (result.ids, result.loss_mask, result.sample_id) == (own.ids, own.loss_mask, own.sample_id)


def test_records_behind_those_that_the_target_was_asked_keep_their_own_answers(data, folder, open_data):
    """Kept scores of them are of a target that is sure: KL to them is cross-entropy."""
    first = open_data(folder / "data.json", max_length=128, max_samples=4)
    written = write_answers(folder, first, kept=KEPT)
    fails_with("4 answers for 6 records", Answers, written.folder, data, error=UserError)
    written = Answers(written.folder, data, others="own")
    samples = AnsweredSamples(data, AnswersConfig(others="own"), written, seed=0)
    assert [samples.row(n, 0).sample.ids == data[n].ids for n in range(6)] == [False] * 4 + [True] * 2
    batch = AnswerCollate(samples, 0, 32, KEPT)([3, 4], epoch=0)
    kept, labels = batch.states.top_log_probs, batch.ids[:, 1:][batch.loss_mask[:, 1:]]
    assert len(kept.ids) == len(labels) and torch.equal(kept.ids[: len(odd(3))], kept_of(3).ids)
    own = slice(len(odd(3)), None)
    assert torch.equal(kept.ids[own, 0], labels[own]) and all(len({*row}) == KEPT for row in kept.ids[own].tolist())
    scores = torch.randn(len(labels[own]), 400)
    log_p = torch.cat([kept.log_probs[own], kept.log_rest[own, None]], 1)
    log_q = with_rest(scores.log_softmax(-1), kept.ids[own])
    divergence = divergence_of_logs("kl", log_p, log_q, beta=0.5, eta=3.0)
    torch.testing.assert_close(divergence.sum(), F.cross_entropy(scores, labels[own], reduction="sum"))


def test_sources_are_drawn_by_seed_epoch_and_sample():
    config = AnswersConfig(shares={"data": 0.2, "target": 0.5, "draft": 0.3})
    names = [f"data.json[{n}]" for n in range(4000)]
    first = [config.source(0, 0, name) for name in names]
    counts = Counter(first)
    for source, share in config.shares.items():
        assert counts[source] / len(names) == pytest.approx(share, abs=4 * (share * (1 - share) / len(names)) ** 0.5)
    assert first == [config.source(0, 0, name) for name in names]
    for seed, epoch in ((1, 0), (0, 1)):
        other = [config.source(seed, epoch, name) for name in names]
        assert 0.5 < sum(a != b for a, b in zip(first, other, strict=True)) / len(names) < 0.75
    seeds_and_epochs = [(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(config.source(*one, name) for name in names[:99]) for one in seeds_and_epochs}) == 9
    for source in ("data", "target", "draft"):
        alone = AnswersConfig(shares={source: 1.0})
        assert {alone.source(0, 0, name) for name in names} == {source}


@pytest.mark.parametrize("shares", [{"target": 0.5}, {"target": 1.5, "data": -0.5}, {"people": 1.0}, {}])
def test_shares_that_are_none(shares):
    fails_with("", AnswersConfig, shares=shares, error=ValidationError)


def loader(samples, collate, *, rank: int = 0, world_size: int = 1, start_step: int = 0, num_workers: int = 0):
    return Loader(
        samples, seed=5, batch_size=4, micro_batch_size=2, total_steps=6, collate=collate, rank=rank,
        world_size=world_size, start_step=start_step, num_workers=num_workers,
    )  # fmt: skip


def rows_of(steps) -> dict[tuple[int, str], tuple[int, ...]]:
    """(step, sample) -> supervised ids."""
    result = {}
    for step in steps:
        for batch in step.micro:
            for row, name in enumerate(batch.sample_ids):
                result[step.step, name] = tuple(batch.ids[row][batch.loss_mask[row]].tolist())
    return {key: value for key, value in result.items() if key[1] != "(filler)"}


def test_each_epoch_draws_its_sources_anew(data, folder, processor):
    samples = answered(data, write_answers(folder, data), data=0.5, target=0.5)
    collate = AnswerCollate(samples, processor.pad_id, processor.image_size)
    steps = -(-len(samples) // 4)
    by_epoch = [{}, {}]
    for step in Loader(
        samples, seed=5, batch_size=4, micro_batch_size=2, total_steps=2 * steps, collate=collate
    ):  # fmt: skip
        by_epoch[step.epoch] |= {name: ids for (_, name), ids in rows_of([step]).items()}
    assert by_epoch[0].keys() == by_epoch[1].keys() and by_epoch[0] != by_epoch[1]
    for epoch, rows in enumerate(by_epoch):
        for name, ids in rows.items():
            drawn = samples.config.source(samples.seed, epoch, name)
            assert (ids == tuple(odd(int(name.split("[")[1][:-1])))) == (drawn == "target"), name


def test_ranks_workers_and_resumed_runs_see_the_same(data, folder, processor):
    samples = answered(data, write_answers(folder, data), data=0.5, target=0.5)
    collate = AnswerCollate(samples, processor.pad_id, processor.image_size)
    whole = rows_of(loader(samples, collate))
    kinds = {ids == tuple(odd(int(name.split("[")[1][:-1]))) for (_, name), ids in whole.items()}
    assert kinds == {True, False}, "both sources must come up"
    both = {k: v for r in (0, 1) for k, v in rows_of(loader(samples, collate, rank=r, world_size=2)).items()}
    assert both == whole and rows_of(loader(samples, collate, num_workers=2)) == whole
    later = rows_of(loader(samples, collate, start_step=3))
    assert later == {k: v for k, v in whole.items() if k[0] >= 3}


def test_kept_scores_stand_at_the_supervised_positions(data, folder, processor):
    """Row by row, and within a row in order, as the model takes its states; a row that was skipped has none."""
    torch.manual_seed(0)
    answers = write_answers(folder, data, kept=KEPT, skipped=(2,))
    samples = answered(data, answers, target=1.0)
    collate = AnswerCollate(samples, processor.pad_id, processor.image_size, num_kept=answers.num_kept)
    batch = collate([4, 2, 0], epoch=0)
    assert isinstance(batch, Batch) and batch.states is not None
    keep, kept = batch.loss_mask[:, 1:], batch.states.top_log_probs
    assert batch.ids[:, 1:][keep].tolist() == [*odd(4), *odd(0)]
    assert batch.num_supervised == len(kept.ids) == len(odd(4)) + len(odd(0))
    assert torch.equal(kept.ids, torch.cat([kept_of(4).ids, kept_of(0).ids]))
    assert (kept.log_rest[: len(odd(4))] < -3.9).all() and (kept.log_rest[len(odd(4)) :] > -1.1).all()
    nothing = collate([], epoch=0)
    assert nothing.num_supervised == 0 and nothing.states.top_log_probs.ids.shape == (0, KEPT)


def test_an_open_batch_is_filled_with_what_the_draft_writes(data, folder, processor):
    samples = answered(data, write_answers(folder, data), seed=0, target=0.5, draft=0.5)
    collate = AnswerCollate(samples, processor.pad_id, processor.image_size)
    names = [data.sample_id(n) for n in range(6)]
    epoch = next(e for e in range(20) if len({samples.config.source(0, e, n) for n in names[:4]}) == 2)
    batch = pickle.loads(pickle.dumps(collate(range(4), epoch=epoch)))  # as a worker hands it over
    assert isinstance(batch, OpenBatch) and batch.sample_ids == tuple(names[:4])
    drafts = [n for n in range(4) if samples.config.source(0, epoch, names[n]) == "draft"]
    assert [r.name for r in batch.requests] == [names[n] for n in drafts]
    assert batch.num_supervised == sum(len(odd(n)) for n in range(4) if n not in drafts)
    written = [[60 + n, 61, 62, 2][: 2 + n % 3] for n in drafts]
    filled = batch.filled(written)
    for row in range(4):
        wanted = written[drafts.index(row)] if row in drafts else odd(row)
        assert filled.ids[row][filled.loss_mask[row]].tolist() == wanted
        request, _ = data.request(row)
        assert filled.ids[row][: len(request.ids)].tolist() == request.ids.tolist()
    assert len(filled.pixels) == 4 and filled.sample_ids == tuple(names[:4])
    assert samples.limit(data.request(0)[0]) == 64
    short = replace_length(data, len(data.request(0)[0].ids) + 3)
    assert AnsweredSamples(short, samples.config, None, seed=0).limit(data.request(0)[0]) == 3


def replace_length(dataset, length: int):
    dataset.config = dataset.config.model_copy(update={"max_length": length})
    return dataset


def test_answers_to_something_else_are_refused(data, folder, open_data):
    answers = write_answers(folder, data)
    other = open_data(folder / "data.json", form=PromptFormat(system="Be brief."), max_length=128, on_error="skip")
    # Also where on_error is skip: that would leave out everything, quietly.
    fails_with("rendered otherwise", answered(other, Answers(answers.folder, other), target=1.0).row, 0, 0)
    fewer = open_data(folder / "data.json", max_samples=5)
    fails_with("6 answers for 5 records", Answers, answers.folder, fewer)
    renamed = open_data(write(folder / "renamed.json", [data.record(n) for n in range(6)]))
    with pytest.raises(UserError, match=r"answer 0 is to data.json\[0\], the data has renamed.json\[0\]"):
        answered(renamed, Answers(answers.folder, renamed), target=1.0).row(0, 0)


def test_what_cannot_be_used_keeps_its_place_or_stops(data, folder, processor, open_data):
    answers = write_answers(folder, data, skipped=(1,))
    (folder / "images" / "2.png").unlink()
    samples = answered(data, answers, target=1.0)
    result = [samples.row(n, 0).sample for n in range(6)]
    assert [any(s.loss_mask) for s in result] == [True, False, False, True, True, True]
    assert [s.sample_id for s in result] == [data.sample_id(n) for n in range(6)]
    strict = open_data(folder / "data.json", max_length=128)
    fails_with("missing image", answered(strict, Answers(answers.folder, strict), target=1.0).row, 2, 0)
    longest = len(strict.request(0)[0].ids) + len(odd(0))
    for length, stops in ((longest, False), (longest - 1, True)):
        cut = replace_length(open_data(folder / "data.json"), length)
        samples = answered(cut, Answers(answers.folder, cut), target=1.0)
        if stops:
            fails_with(f"{longest} ids, more than max_length", samples.row, 0, 0)
        else:
            assert any(samples.row(0, 0).sample.loss_mask)


def test_without_answers_the_loader_reads_as_ever(data, processor):
    """The data's own answers through this file are the batches of the plain collation."""
    samples = answered(data, data=1.0)
    ours = rows_of(loader(samples, AnswerCollate(samples, processor.pad_id, processor.image_size)))
    assert ours == rows_of(loader(data, ConversationCollate(processor.pad_id, processor.image_size)))
