"""Packed steps: the samples of padded ones, in rows of like length, on any number of ranks."""

import numpy as np
import pytest
from draftsmith.core.errors import UserError
from draftsmith.data.collate import ConversationCollate, Sample
from draftsmith.data.loader import Loader
from draftsmith.data.order import BucketedOrder, check_lengths, packed_rows


class Words:
    """Samples of 5 to 60 tokens, named by their numbers."""

    def __init__(self, count: int = 45):
        self.lengths = np.random.default_rng(0).integers(5, 61, count) * np.where(np.arange(count) % 3, 1, -1)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        length = abs(int(self.lengths[index]))
        return Sample([4] * length, [True] * length, [0] * length, None, str(index))


def loader(**changes) -> Loader:
    settings = {"seed": 7, "batch_size": 16, "micro_batch_size": 1, "total_steps": 7, "max_tokens": 100}
    return Loader(Words(), **(settings | {"collate": ConversationCollate(3, 8)} | changes))


def names(step) -> list[list[str]]:
    return [[name for name in batch.sample_ids if name != "(filler)"] for batch in step.micro]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_rows_hold_every_sample_once_and_no_more_than_they_may(ranks):
    rng = np.random.default_rng(0)
    for count in (1, 3, 40):
        lengths = rng.integers(1, 101, count)
        rows = packed_rows(lengths, 100, ranks)
        assert {len(part) for part in rows} == {ranks}
        assert sorted(np.concatenate([row for part in rows for row in part]).tolist()) == list(range(count))
        assert max(int(lengths[row].sum()) for part in rows for row in part) <= 100
        assert len(rows) <= 2 * -(-int(lengths.sum()) // (100 * ranks))


def test_no_rank_waits_long():
    """Of what all ranks could compute while the slowest does: 128 samples in rows of 4,096 on 8 ranks."""
    rng, real, passed, sums = np.random.default_rng(0), 0, 0, np.zeros(8)
    for _ in range(50):
        lengths = 576 + rng.lognormal(5, 1, 128).astype(int).clip(2, 1472)
        for part in packed_rows(lengths, 4096, 8):
            loads = [int(lengths[row].sum()) for row in part]
            real, passed, sums = real + sum(loads), passed + 8 * max(loads), sums + loads
    assert real / passed > 0.97 and sums.max() / sums.mean() < 1.02


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_packed_step_has_the_samples_of_a_padded_one(ranks, window):
    order = None if window is None else BucketedOrder(Words().lengths, 7, 16, window)
    padded = [sorted(n for row in names(step) for n in row) for step in loader(order=order, max_tokens=None)]
    parts = [list(loader(order=order, rank=rank, world_size=ranks)) for rank in range(ranks)]
    numbers = []
    for expected, *steps in zip(padded, *parts, strict=True):
        assert sorted(name for step in steps for row in names(step) for name in row) == expected
        assert len({len(step.micro) for step in steps}) == 1
        assert all(batch.packed and batch.attention_mask.sum() <= 100 for step in steps for batch in step.micro)
        numbers.append(len(steps[0].micro))
    assert ranks > 1 or len(set(numbers)) > 1, "steps of several numbers of rows"
    assert parts[0][0].micro[0].num_supervised >= 1


@pytest.mark.parametrize("workers", [0, 2])
def test_packed_steps_come_back_in_the_middle_of_an_epoch(workers):
    whole = list(loader())
    again = list(loader(start_step=4, num_workers=workers))
    assert [(s.step, s.epoch, names(s)) for s in again] == [(s.step, s.epoch, names(s)) for s in whole[4:]]


def test_a_sample_that_fits_no_row_is_refused_by_name():
    check_lengths(np.array([-100, 7]), 100, "key")
    with pytest.raises(UserError, match="a sample has 101 tokens, and a row 100") as caught:
        check_lengths(np.array([-101, 7]), 100, "stages.x.packing.max_tokens")
    assert caught.value.key == "stages.x.packing.max_tokens"
