"""Data order: LLaVA's grouping reproduced, and a pure function of seed and epoch."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.data.order import (
    BucketedOrder,
    RisingVisualOrder,
    arrange,
    epoch_order,
    num_full_megabatches,
    rows_of_rank,
)

CASES = json.loads((Path(__file__).parent / "vectors" / "lvlm" / "sampler.json").read_text())[
    "group_by_modality_length"
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: str(c["torch_seed"]))
def test_official_orders_are_reproduced(case):
    lengths = np.array(case["lengths"])
    torch.manual_seed(case["torch_seed"])
    images, texts = np.flatnonzero(lengths > 0), np.flatnonzero(lengths < 0)
    images = images[torch.randperm(len(images)).numpy()] if len(images) else images
    texts = texts[torch.randperm(len(texts)).numpy()] if len(texts) else texts
    full = num_full_megabatches(len(images), len(texts), case["megabatch"])
    order = torch.randperm(full).numpy() if not case["single_modality"] else np.empty(0)
    # The official code forgets the sign where one modality stands alone, so text-only data is dealt shortest first.
    used = lengths if case["single_modality"] else np.abs(lengths)
    result = arrange(used, images, texts, order, megabatch=case["megabatch"], num_bins=case["world_size"])
    assert result.tolist() == case["order"]


@pytest.mark.parametrize("grouped", [False, True])
def test_every_sample_once_and_epochs_differ(grouped):
    lengths = np.where(np.arange(103) % 3 == 0, -5, 1 + np.arange(103) % 17)
    first = epoch_order(lengths, seed=1, epoch=0, batch_size=8, grouped=grouped)
    assert sorted(first.tolist()) == list(range(103))
    assert first.tolist() == epoch_order(lengths, seed=1, epoch=0, batch_size=8, grouped=grouped).tolist()
    assert first.tolist() != epoch_order(lengths, seed=1, epoch=1, batch_size=8, grouped=grouped).tolist()
    if grouped:
        full = num_full_megabatches(int((lengths > 0).sum()), int((lengths < 0).sum()), 8)
        for batch in first[: full * 8].reshape(full, 8):
            assert len(set(lengths[batch] > 0)) == 1


LENGTHS = np.where(np.arange(103) % 3 == 0, -5, 1 + np.arange(103) % 17)
ORDERS = {
    "shuffled": lambda seed, epoch: epoch_order(LENGTHS, seed=seed, epoch=epoch, batch_size=8, grouped=False),
    "grouped": lambda seed, epoch: epoch_order(LENGTHS, seed=seed, epoch=epoch, batch_size=8, grouped=True),
    "bucketed": lambda seed, epoch: BucketedOrder(LENGTHS, seed, 8)(epoch),
    "apart": lambda seed, epoch: BucketedOrder(LENGTHS, seed, 8, apart=True)(epoch),
    "rising": lambda seed, epoch: RisingVisualOrder(LENGTHS, seed, 8, 0, 4)(epoch),
}


@pytest.mark.parametrize("name", ORDERS)
def test_seed_and_epoch_are_two_things(name):
    """Of their sum, the second epoch of one run would be the first of the run with the next seed."""
    drawn = {(seed, epoch): tuple(ORDERS[name](seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len({*drawn.values()}) == 9
    assert all(tuple(ORDERS[name](*key).tolist()) == order for key, order in drawn.items())


@pytest.mark.parametrize("case", [c for c in CASES if not c["single_modality"]], ids=lambda c: str(c["torch_seed"]))
def test_ranks_get_the_rows_of_the_official_deal(case):
    """Of the batches that production makes, which know no ranks: each rank computes the official rank's rows."""
    world, lengths = case["world_size"], np.abs(case["lengths"])
    full = num_full_megabatches(case["n_multimodal"], case["n_text"], case["megabatch"])
    for start in range(0, full * case["megabatch"], case["megabatch"]):
        official = case["order"][start : start + case["megabatch"]]
        # As `epoch_order` leaves it: longest first, in one bin.
        batch = np.array(sorted(official, key=lambda i: (-lengths[i], official.index(i))))
        shares = [rows_of_rank(batch, lengths, rank, world) for rank in range(world)]
        assert [sum(lengths[share].tolist()) for share in shares] == case["rank_length_sums"][
            start // case["megabatch"]
        ]


@pytest.mark.parametrize("grouped", [False, True])
def test_no_rank_is_always_the_heaviest(grouped):
    """Every world_size-th of rows that are sorted by length gave rank 0 the longest of each round."""
    lengths = np.random.default_rng(0).integers(5, 500, 4000)
    order = epoch_order(lengths, seed=0, epoch=0, batch_size=32, grouped=grouped)
    sums = np.zeros((125, 4))
    for number, batch in enumerate(order.reshape(125, 32)):
        shares = [rows_of_rank(batch, lengths, rank, 4) for rank in range(4)]
        assert sorted(np.concatenate(shares).tolist()) == sorted(batch.tolist()) and {len(s) for s in shares} == {8}
        sums[number] = [lengths[share].sum() for share in shares]
    assert (sums.max(1) / sums.mean(1)).mean() < 1.02
    assert len(set(sums.argmax(1).tolist())) == 4 and rows_of_rank(batch, lengths, 0, 1) is batch


def padded(batches: list[np.ndarray], lengths: np.ndarray, micro: int) -> float:
    """Share of real tokens in micro-batches."""
    parts = [
        np.abs(lengths[batch[start : start + micro]]) for batch in batches for start in range(0, len(batch), micro)
    ]
    return sum(part.sum() for part in parts) / sum(len(part) * part.max() for part in parts)


@pytest.mark.parametrize("window", [1, 5, 50])
def test_apart_each_batch_has_one_modality_and_what_is_left_comes_last(window):
    lengths = np.random.default_rng(0).integers(5, 900, 1003) * np.where(np.arange(1003) % 3, 1, -1)
    order = BucketedOrder(lengths, 0, 16, window, apart=True)(0)
    assert sorted(order.tolist()) == list(range(1003))
    full = sum(int(kind.sum()) // 16 for kind in (lengths > 0, lengths <= 0))
    batches = [order[start : start + 16] for start in range(0, 1003, 16)]
    assert all(len(set(lengths[batch] > 0)) == 1 for batch in batches[:full])
    kinds = [bool(lengths[batch[0]] > 0) for batch in batches[:full]]
    assert kinds != sorted(kinds) and kinds != sorted(kinds, reverse=True), "both kinds come all along"


def test_batches_by_length_hold_little_padding_on_every_rank():
    drawn = np.random.default_rng(0).lognormal(5.5, 1.0, 8000).astype(int).clip(2, 1024)
    lengths = drawn * np.where(np.arange(8000) % 6, 1, -1)
    shares = {}
    for name, order in {"grouped": epoch_order(lengths, seed=0, epoch=0, batch_size=64, grouped=True),
                        "by length": BucketedOrder(lengths, 0, 64, apart=True)(0)}.items():  # fmt: skip
        batches = [order[start : start + 64] for start in range(0, 8000, 64)]
        ranks = [[rows_of_rank(batch, lengths, rank, 4) for batch in batches] for rank in range(4)]
        shares[name] = min(padded(mine, lengths, 16) for mine in ranks)
    assert shares["grouped"] < 0.5 and shares["by length"] > 0.9
