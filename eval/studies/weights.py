"""An ensemble's weights while it decodes, against all weights that would have been right (TABED, figures 3 and 4).

The shade at a step holds every weight between two members (M and T, where they are members) whose likeliest token the
target takes; a good rule stays inside it. Letters: S steps, G weights on the line between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...core.batch import Request
from ...models.drafters.ensemble import EnsembleProposal, WeightTrace
from ...models.targets.base import Target
from ..loop import Decoding, generate
from ..style import WIDEST, panel_grid, save, styled

SHADE, UNDRAFTED, LINE = "#cfe3cf", "#ececec", "#2a6fbb"


@dataclass(frozen=True)
class WeightsOverTime:
    """One request's curve."""

    names: tuple[str, str]  # the two members
    steps: np.ndarray  # [S] tokens of the output that were drafted for
    weight: np.ndarray  # [S] the first one's share of the two; not a number where both have none
    line: np.ndarray  # [G] shares that were tried
    accepted: np.ndarray  # [S,G] bool: whether the target takes the mixture's likeliest token

    @property
    def inside(self) -> float:
        """Share of steps whose token, by the nearest share on the line, the target takes."""
        known = ~np.isnan(self.weight)
        nearest = np.abs(self.line[None] - self.weight[known, None]).argmin(1)
        return float(self.accepted[known][np.arange(known.sum()), nearest].mean()) if known.any() else float("nan")


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


def as_data(trace: WeightTrace) -> dict[str, Any]:
    """The trace for a JSON file; `weights_over_time` takes it back."""
    return asdict(trace)


def weights_over_time(trace: WeightTrace | Mapping[str, Any]) -> WeightsOverTime:
    """The curve of a trace, or of its data."""
    kept = trace if isinstance(trace, WeightTrace) else WeightTrace(**trace)
    first, second = kept.pair
    weights = np.array([kept.cycles[c] for c in kept.cycle_of_step], dtype=float).reshape(-1, len(kept.members))
    total = weights[:, first] + weights[:, second]
    share = np.divide(weights[:, first], total, out=np.full(len(total), np.nan), where=total > 0)
    return WeightsOverTime(
        (kept.members[first], kept.members[second]),
        np.array(kept.steps, dtype=int),
        share,
        np.array(kept.line),
        np.array(kept.accepted, dtype=bool).reshape(-1, len(kept.line)),
    )


@styled
def plot_weights(path: Path, curves: Mapping[str, WeightsOverTime]) -> None:
    """One panel for each request. Steps that nothing was drafted for are grey and break no line."""
    assert curves, "nothing to draw"
    figure, panels = panel_grid(len(curves), 1, (WIDEST, 2.1 * len(curves) + 0.5))
    for panel, (title, curve) in zip(panels[:, 0], curves.items(), strict=True):
        half = (curve.line[1] - curve.line[0]) / 2
        for step in set(range(1, curve.steps.max(initial=0))) - set(curve.steps.tolist()):
            panel.axvspan(step - 0.5, step + 0.5, color=UNDRAFTED, linewidth=0)
        for step, taken in zip(curve.steps, curve.accepted, strict=True):
            for place in curve.line[taken]:
                low, high = max(0.0, place - half), min(1.0, place + half)
                panel.fill_between([step - 0.5, step + 0.5], low, high, color=SHADE, linewidth=0)
        for share in (0.0, 0.5, 1.0):
            panel.axhline(share, color="black", linewidth=0.6, linestyle=":")
        panel.plot(curve.steps, curve.weight, color=LINE, linewidth=1.6, drawstyle="steps-mid")
        first, second = curve.names
        panel.set(ylim=(-0.04, 1.04), yticks=(0, 0.5, 1), title=title, ylabel=f"weight of {first}")
        panel.set_yticklabels([f"0 ({second})", f"0.5 ({first}{second})", f"1 ({first})"])
    panels[-1, 0].set_xlabel("token of the output; green: weights whose token the target takes; grey: not drafted")
    save(figure, path)
