"""Validation on several ranks: each rank scores rows of its own, and together they have scored every held-out sample.

Sums are reduced over ranks, so a rank that takes another one's rows changes a mean by as much as they differ, and
nothing else.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from draftsmith.core import ranks
from draftsmith.data.collate import ConversationCollate
from draftsmith.trainers.train import drafter
from draftsmith.trainers.train import on_codes as codes
from draftsmith.trainers.train import on_records as conversations
from draftsmith.trainers.train import on_states as heads_on_states
from draftsmith.trainers.train.validate import HeadValidation, RecordsValidation
from training import Samples

COUNT, SIZE = 11, 3
RECORDS = RecordsValidation(every=1, micro_batch_size=2, data={"path": "held_out.json"}, against_target=False)
SETTINGS = HeadValidation(every=1, micro_batch_size=2)
STAGE = SimpleNamespace(model="drafter", validation=SETTINGS, decoding=None, window=None, data=None, format=None)
DRAFTER = SimpleNamespace(
    stage=STAGE, context=SimpleNamespace(stop=None), _best=SimpleNamespace(keep=lambda *values: None)
)


@dataclass
class Codes:
    """In the collate's place of a head on codes."""

    dropout: float = 0.1

    def __call__(self, samples, *, epoch):
        return ConversationCollate(3, 16)(samples, epoch=epoch)


class States:
    lengths, held_out = Samples(COUNT).lengths, None

    def steps(self, rows, make_loader, first, last, *, trains):
        assert not trains
        return make_loader(Samples(len(rows)), ConversationCollate(3, 16), first, last)


def of_conversations(monkeypatch):
    monkeypatch.setattr(conversations.records, "open_records", lambda *asked, **more: Samples(COUNT))
    processor = SimpleNamespace(pad_id=3, image_size=16)
    context = SimpleNamespace(name="stage", stop=None)
    return conversations._validation(RECORDS, STAGE, context, processor, None)


def of_heads(monkeypatch):
    held_out = heads_on_states._held_out(STAGE, States(), np.arange(COUNT))
    return drafter.TrainedDrafter.validation(DRAFTER, held_out, None, 9)


def of_codes(monkeypatch):
    monkeypatch.setattr(codes, "shards_of", lambda *asked: None)
    monkeypatch.setattr(codes, "ShardSamples", lambda *asked, **more: Samples(COUNT))
    held_out = codes._held_out(STAGE, DRAFTER.context, Codes())
    return drafter.TrainedDrafter.validation(DRAFTER, lambda: held_out, None, 9)


@pytest.mark.parametrize("make", [of_conversations, of_heads, of_codes])
def test_ranks_share_the_held_out_samples(monkeypatch, make):
    seen = []

    def scores(engine, steps, *more):
        seen.append([name for step in steps for batch in step.micro for name in batch.sample_ids])
        return {}

    monkeypatch.setattr(conversations, "validate", scores)
    monkeypatch.setattr(drafter, "held_out_scores", scores)
    monkeypatch.setattr(ranks, "world_size", lambda: SIZE)
    for rank in range(SIZE):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        make(monkeypatch)(None, 1)
    everything = [name for names in seen for name in names]
    assert sorted(everything) == sorted(f"record-{n}" for n in range(COUNT))
    assert len(seen) == SIZE and all(seen), "no rank without a row"
