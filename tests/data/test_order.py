"""Data order: LLaVA's grouping reproduced, and a pure function of seed and epoch."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.data.order import arrange, epoch_order, num_full_megabatches

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
