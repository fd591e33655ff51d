"""Captured passes without a GPU: torch.fx records each of them once, and later calls run the recording.

It repeats operations on the tensors that they had, as a CUDA graph does: whatever else the captured function read, a
number on the host, another request's tensor, stays as it was at the capture. Reading a value on the host raises.
"""

import pytest
from draftsmith.models.decoding.captured import Graphs
from torch.fx.experimental.proxy_tensor import make_fx


def _record(self, run, inputs):
    recording = make_fx(lambda *values: run(*values))(*(value.clone() for value in inputs))
    made_on_the_host = [node for node in recording.graph.nodes if "lift_fresh" in str(node.target)]
    assert not made_on_the_host, "a capture does not upload"
    return recording


@pytest.fixture
def recorded(monkeypatch):
    """Within the test, passes are captured, and repeated as they were recorded."""
    monkeypatch.setattr(Graphs, "_capture", _record)
