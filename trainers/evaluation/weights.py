"""Weights of ensembles over time: the curves of a few requests of each set, as data and as pictures."""

from __future__ import annotations

import json
from typing import Any

from ...core.nouns import Request
from ...eval.studies.weights import as_data, plot_weights, trace_weights, weights_over_time
from .measuring import Measuring
from .requests import RequestSet


def record_weights(measuring: Measuring, requests: RequestSet, count: int) -> dict[str, Any]:
    """The first `count` requests of a set, decoded once more by each ensemble of modes, after all that is timed.

    Writes `weights/SET-DRAFTER-METHOD.json` and `.png` in the stage's folder; returns, for each of them, the share of
    drafted tokens that the target takes by the weights in use.
    """
    folder = measuring.context.folder / "weights"
    folder.mkdir(parents=True, exist_ok=True)
    temperature = min(measuring.stage.temperatures)
    shares: dict[str, Any] = {}
    for drafting, decoding in measuring.decodings(temperature, max(measuring.lengths)).items():
        if len(drafting.members) < 2:
            continue
        traces = {}
        for index in range(min(count, len(requests))):
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
        (folder / f"{name}.json").write_text(json.dumps({k: as_data(t) for k, t in traces.items()}))
        curves = {f"{k}, {drafting.name}": weights_over_time(t) for k, t in traces.items()}
        plot_weights(folder / f"{name}.png", curves)
        shares[name] = {k: curve.inside for k, curve in curves.items()}
    return shares
