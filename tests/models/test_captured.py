"""What a captured function may read, as the recorder of `recorded_graphs.py` holds it."""

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
    assert len(graphs) == 2
    with pytest.raises(RuntimeError, match="value"):
        graphs("reads", lambda value: (value * float(value.sum()),), torch.ones(2))
    with pytest.raises(AssertionError, match="does not upload"):
        graphs("uploads", lambda value: (value + torch.tensor([1.0, 2.0]),), torch.ones(2))
