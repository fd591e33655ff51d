"""CUDA graphs of functions over buffers that stay in place: one launch for all of a pass.

A graph repeats the kernels that were launched while it was recorded, on the addresses that they had. So a captured
function reads and writes static buffers, asks for no value on the host, and draws no random numbers.
Source: "CUDA semantics", section "CUDA Graphs", of PyTorch's documentation.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import nn

WARM_UPS = 2  # libraries choose their kernels and make their workspaces before the capture


def why_nowhere(parameters: Iterable[nn.Parameter], device: torch.device) -> str | None:
    """Why no pass that reads these parameters of a target can be captured; None: its place allows it.

    Args:
        device: where inputs go.
    """
    held = list(parameters)
    devices = {parameter.device for parameter in held}
    if len(devices) > 1:
        return f"the target lies on {len(devices)} devices"
    if device.type != "cuda":
        return f"the target is on a {device.type.upper()}"
    if any(hasattr(parameter, "full_tensor") for parameter in held):
        return "several ranks hold the target together"
    return None


def capture_seconds(part: Any) -> float:
    """Seconds that captures took for a target, or for a drafter with all that it is an ensemble of."""
    graphs = getattr(part, "graphs", None)
    inside = sum(capture_seconds(member) for member in getattr(part, "members", ()))
    return inside if graphs is None else inside + graphs.seconds


class Graphs:
    """Graphs of one device, by key, in one memory pool.

    What a graph returns lies in the pool, and stays as it is until a graph of the pool is replayed: copy it at once.
    The pool is safe to share because of that: between replays nothing in it is needed.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds = 0.0  # that captures took
        self._pool: Any = None
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}

    def __len__(self) -> int:
        return len(self._captured)

    @property
    def captured(self) -> tuple[Hashable, ...]:
        """The keys of all graphs."""
        return tuple(self._captured)

    def clear(self) -> None:
        """Forget all graphs, before buffers that they read go."""
        self._captured.clear()
        self._pool = None

    def replay(self, key: Hashable, run: Callable[[], Any]) -> Any:
        """What `run` returns, in the graph's memory. It is captured where `key` has no graph; on a CPU it just runs."""
        if self.device.type == "cpu":
            return run()
        if key not in self._captured:
            start = time.perf_counter()
            self._captured[key] = self._capture(run)
            torch.cuda.synchronize(self.device)
            self.seconds += time.perf_counter() - start
        graph, outputs = self._captured[key]
        graph.replay()
        return outputs

    def _capture(self, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        # A capture records what runs on the current device.
        with torch.cuda.device(self.device), warnings.catch_warnings():
            warnings.filterwarnings("error", message="The CUDA Graph is empty")
            # On a stream of its own, as the capture is: no work of the default stream may mix with it.
            aside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(aside):
                for _ in range(WARM_UPS):
                    run()
            torch.cuda.current_stream(self.device).wait_stream(aside)
            torch.cuda.synchronize(self.device)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            # Other threads (NCCL's watchdog) may ask the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = run()
        return graph, outputs
