"""What a captured function may read, as the recorder of `recorded_graphs.py` holds it."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from draftsmith.models.decoding.captured import Graphs
from recorded_graphs import recorded  # noqa: F401  a fixture


def test_a_recording_keeps_what_the_host_knew_and_reads_tensors_anew(recorded):  # noqa: F811
    graphs, number, held = Graphs(torch.device("cpu")), [1.0], torch.ones(2)

    def run(value):
        return (value * number[0] + held,)

    first = graphs("key", run, torch.ones(2))[0].tolist()
    number[0] = 5.0
    held.fill_(3.0)
    assert first == [2.0, 2.0] and graphs("key", run, torch.ones(2))[0].tolist() == [4.0, 4.0]
    assert graphs("key", run, torch.ones(3, 2))[0].tolist() == [[8.0, 8.0]] * 3, "other shapes are captured anew"
    assert len(graphs.captured) == 2
    with pytest.raises(RuntimeError, match="value"):
        graphs("reads", lambda value: (value * float(value.sum()),), torch.ones(2))
    with pytest.raises(AssertionError, match="does not upload"):
        graphs("uploads", lambda value: (value + torch.tensor([1.0, 2.0]),), torch.ones(2))


def test_torch_s_own_function_takes_what_passes_give_it(monkeypatch):
    """In inference mode, with the parts that need a GPU left out: static inputs get the later ones' values."""
    nothing = contextlib.nullcontext
    for name in ("graph", "stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nothing())
    for name in ("synchronize", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda.graphs, "graph_pool_handle", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    replayed, seen = [], []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: replayed.append(1)))

    def run(value, more):
        seen.append(value)
        return value, value + more

    graphs = Graphs(torch.device("cuda"))
    with torch.inference_mode():
        rows = torch.ones(1, 2).expand(3, -1)
        first = graphs("key", run, rows, torch.ones(2))
        later = graphs("key", run, 2 * rows, torch.ones(2))
    assert len({id(value) for value in seen}) == 1 and len(replayed) == 2 and graphs.seconds > 0
    assert first[0].tolist() == [[1.0, 1.0]] * 3 and later[0].tolist() == [[2.0, 2.0]] * 3
    assert len(seen) > 1, "warm-ups, and the capture"
