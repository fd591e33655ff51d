"""Where weights go: nothing changes on a CPU, and several ranks never spread one model each."""

import pytest
import torch
from draftsmith.core import ranks
from draftsmith.core.errors import UserError
from draftsmith.core.placement import check_one_rank, fill, num_gpus, onto, spread, without_storage
from draftsmith.core.pretrained import read_safetensors
from safetensors.torch import save_file
from torch import nn


def test_weights_of_a_cpu_are_loaded_as_ever():
    assert onto(None) == onto(torch.device("cpu")) == {}
    assert onto(torch.device("cuda", 3)) == {"device_map": {"": torch.device("cuda", 3)}}


@pytest.mark.parametrize("device_map", ["auto", "balanced", "cuda:0"])
def test_several_ranks_do_not_spread_a_model_each(device_map, monkeypatch):
    check_one_rank(device_map, key="target")
    monkeypatch.setattr(ranks, "world_size", lambda: 8)
    with pytest.raises(UserError, match=f"target.device_map is {device_map}, and this run has 8 ranks") as error:
        spread(device_map, offload=None, key="target")
    assert "python trains/train.py" in error.value.hint and error.value.key == "target.device_map"
    check_one_rank(None, key="target")
    check_one_rank("cpu", key="target")


def test_gpus_of_a_stage_are_one_for_each_rank_or_all_that_a_spreading_rank_sees(monkeypatch):
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    own, spreading = ({"device_map": device_map} for device_map in (None, "auto"))
    assert num_gpus(own) == num_gpus(spreading) == 0, "on a CPU"
    monkeypatch.setattr(ranks, "device", lambda: torch.device("cuda", 0))
    assert num_gpus(own) == num_gpus(None) == num_gpus({"device_map": "cpu"}) == 2
    assert num_gpus(spreading) == 4


def test_a_module_that_is_filled_holds_the_files_weights(tmp_path):
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    save_file(own.state_dict(), tmp_path / "a.safetensors")
    state = read_safetensors(tmp_path / "a.safetensors")
    # The meta device stands for a GPU: what is built for it holds nothing, and buffers are real.
    with without_storage(torch.device("meta")):
        empty = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    assert all(p.is_meta for p in empty.parameters()) and not any(b.is_meta for b in empty.buffers())
    with without_storage(torch.device("cpu")):
        module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    fill(module, state, torch.device("cpu"))
    assert all(torch.equal(value, own.state_dict()[name]) for name, value in module.state_dict().items())
