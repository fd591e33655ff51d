"""Ensembles' weights over time (TABED, figures 3 and 4): some requests decoded once more, after all that is timed.

docs/notebooks/tabed.ipynb draws the figures from the traces.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import torch

from ...core.batch import Request
from ...eval.loop import Decoding, generate
from ...eval.measured_rows import Row
from ...eval.tables import ReportSection
from ...models.drafters.ensemble import EnsembleProposal, WeightTrace
from ...models.targets.base import Target
from .measuring import Measuring
from .requests import ConversationSet


def recorded_weights(measuring: Measuring, sets: Sequence[ConversationSet], rows: Sequence[Row]) -> list[ReportSection]:
    """The first `record_weights` requests of each set, by each ensemble of modes; `rows` are not read.

    Writes `weights/SET-DRAFTER-METHOD.json` in the stage's folder, a trace for each request.
    """
    count, folder = measuring.stage.record_weights, measuring.context.folder / "weights"
    if not count:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    for requests in sets:
        place = [part for part in (requests.benchmark, requests.turn, requests.budget) if part]
        decodings = measuring.decodings(min(measuring.stage.temperatures), max(measuring.lengths))
        for drafting, decoding in decodings.items():
            if len(drafting.members) < 2:
                continue
            traces = {}
            numbers = range(min(count, len(requests)))
            for index in measuring.context.stop.watch(numbers, "while weights were recorded, after the report"):
                opened = requests.open(index, measuring.target)
                if opened is not None and isinstance(opened.request, Request):
                    traces[opened.request.name] = trace_weights(
                        measuring.target, drafting.drafter, opened.request, decoding, measuring.uniforms(index)
                    )
            if traces:
                name = "-".join([*place, drafting.drafter_name, drafting.name.replace("*", "-adaptive")])
                data = {request: asdict(trace) for request, trace in traces.items()}
                (folder / f"{name.replace('/', '-')}.json").write_text(json.dumps(data))
    return [ReportSection("Weights over time", (f"Traces of {count} requests of each set are in weights/.",))]


def trace_weights(
    target: Target,
    drafter: EnsembleProposal,
    request: Request,
    decoding: Decoding,
    generator: torch.Generator | None = None,
) -> WeightTrace:
    """Decode once more with the trace on: it waits for the device in each cycle, which no measurement should."""
    before, drafter.record = drafter.record, True
    try:
        generate(target, drafter, request, decoding, generator)
    finally:
        drafter.record = before
    assert drafter.trace is not None
    return drafter.trace
