"""What every rank does before step 0."""

from types import SimpleNamespace

import pytest
import torch
from draftsmith.core import ranks
from draftsmith.core.errors import UserError
from draftsmith.trainers.train.preflight import preflight


def module(patches: int, place="cpu"):
    calls = []

    def selected_features(pixels):
        calls.append(tuple(pixels.shape))
        assert pixels.device.type == place
        return torch.zeros(len(pixels), patches, 4)

    weights = [torch.zeros(1, device=place)]
    return SimpleNamespace(selected_features=selected_features, calls=calls, parameters=lambda: iter(weights))


def test_every_rank_runs_the_tower_once(monkeypatch, tmp_path):
    """Its first forward sets hooks, and ZeRO-3 wants them in the same order on all ranks."""
    monkeypatch.setattr(ranks, "is_main", lambda: False)
    processor = SimpleNamespace(image_size=24, num_image_tokens=9, reads_whole=False, reads_pictures=True)
    tower = module(9)
    preflight(None, tower, processor, folder=tmp_path, say=print)
    assert tower.calls == [(1, 3, 24, 24)]
    preflight(None, module(9, "meta"), processor, folder=tmp_path, say=print)  # a trained model lies on its GPU
    with pytest.raises(UserError, match="writes 9 tokens for a picture, the vision tower gives 4"):
        preflight(None, module(4), processor, folder=tmp_path, say=print)
