"""Ensembles' weights over time (TABED, figures 3 and 4): some requests decoded once more, after all that is timed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from ...core.batch import Request
from ...eval.measured_rows import Row
from ...eval.studies.ensemble_weights import (
    WeightsFigure,
    plot_weights,
    trace_weights,
    weights_over_time,
    weights_section,
)
from ...eval.tables import ReportSection
from .measuring import Measuring
from .requests import ConversationSet


def recorded_weights(measuring: Measuring, sets: Sequence[ConversationSet], rows: Sequence[Row]) -> list[ReportSection]:
    """A section with the figures, where `record_weights` asks for them; `rows` are not read."""
    count = measuring.stage.record_weights
    drawn = [figure for requests in sets for figure in _figures(measuring, requests, count)] if count else []
    return [weights_section(drawn)] if drawn else []


def _figures(measuring: Measuring, requests: ConversationSet, count: int) -> list[WeightsFigure]:
    """The first `count` requests of a set, decoded once more by each ensemble of modes, after all that is timed.

    Writes `weights/SET-DRAFTER-METHOD.json` and `.png` in the stage's folder.
    """
    folder = measuring.context.folder / "weights"
    folder.mkdir(parents=True, exist_ok=True)
    temperature = min(measuring.stage.temperatures)
    figures: list[WeightsFigure] = []
    for drafting, decoding in measuring.decodings(temperature, max(measuring.lengths)).items():
        if len(drafting.members) < 2:
            continue
        traces = {}
        numbers = range(min(count, len(requests)))
        for index in measuring.context.stop.watch(numbers, "while weights were recorded, after the report"):
            opened = requests.open(index, measuring.target)
            if opened is None or not isinstance(opened.request, Request):
                continue
            uniforms = measuring.uniforms(index)
            traces[opened.request.name] = trace_weights(
                measuring.target, drafting.drafter, opened.request, decoding, uniforms
            )
        if not traces:
            continue
        method = drafting.name.replace("*", "-adaptive")
        parts = requests.benchmark, requests.turn, requests.budget, drafting.drafter_name, method
        name = "-".join(part for part in parts if part).replace("/", "-")
        (folder / f"{name}.json").write_text(json.dumps({k: asdict(t) for k, t in traces.items()}))
        place = ", ".join(part for part in (requests.benchmark, requests.turn, requests.budget) if part)
        curves = {
            f"{place}, request {number}: {drafting.name}": weights_over_time(trace)
            for number, trace in enumerate(traces.values(), 1)
        }
        plot_weights(folder / f"{name}.png", curves)
        figures.append(WeightsFigure(f"weights/{name}.png", place, drafting.drafter_name, drafting.name, curves))
    return figures
