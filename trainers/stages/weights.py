"""What an `evaluate` stage keeps of its ensembles' weights: the curves of a few requests, as data and as pictures."""

from __future__ import annotations

import json
from typing import Any

from ...data.dataset import ConversationDataset
from ...eval.weights_plot import as_data, plot_weights, trace_weights, weights_over_time
from ...models.drafters.ensemble import EnsembleProposal


def record_weights(measuring: Any, benchmark: str, dataset: ConversationDataset, count: int) -> dict[str, Any]:
    """The first `count` requests of a benchmark, decoded once more by each ensemble, after all that is timed.

    Writes `weights/BENCHMARK-DRAFT-MODE.json` and `.png` in the stage's folder; returns, for each of them, the share of
    drafted tokens that the target takes by the weights in use.
    """
    folder = measuring.context.folder / "weights"
    folder.mkdir(parents=True, exist_ok=True)
    shares: dict[str, Any] = {}
    for (draft, mode), drafter in measuring.drafters.items():
        if not isinstance(drafter, EnsembleProposal) or len(drafter.members) < 2:
            continue
        traces = {}
        for index in range(min(count, len(dataset))):
            asked, _ = measuring.request(dataset, index)
            uniforms = measuring.generator(index)
            traces[asked.name] = trace_weights(measuring.target, drafter, asked, measuring.decoding, uniforms)
        name = f"{benchmark}-{draft}-{mode.replace('*', '-adaptive')}"
        (folder / f"{name}.json").write_text(json.dumps({k: as_data(t) for k, t in traces.items()}))
        curves = {f"{k}, {mode}": weights_over_time(t) for k, t in traces.items()}
        plot_weights(folder / f"{name}.png", curves)
        shares[name] = {k: curve.inside for k, curve in curves.items()}
    return shares
