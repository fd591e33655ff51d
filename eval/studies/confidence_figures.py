"""SAGE's premises, drawn for whatever was measured: acceptance against confidence, and how entropy correlates in time.

The numbers are those of `watched.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..style import COLORS, GREY, one_panel, save, styled
from .confidence import Bin, Lag


@styled
def acceptance_by_confidence(path: Path, drafters: Mapping[str, Sequence[Bin]], *, title: str = "") -> None:
    """Share of places where the likeliest child stood, and (dashed) where any did, by the draft's confidence there."""
    assert len(drafters) <= len(COLORS), f"{len(drafters)} drafters, and {len(COLORS)} colours"
    figure, panel = one_panel((5.6, 3.6))
    most = max((b.places for bins in drafters.values() for b in bins), default=1)
    for color, (name, bins) in zip(COLORS, drafters.items(), strict=False):
        xs, sizes = [(b.low + b.high) / 2 for b in bins], [8 + 60 * b.places / most for b in bins]
        panel.plot(xs, [b.likeliest for b in bins], "-", color=color, label=name)
        panel.scatter(xs, [b.likeliest for b in bins], sizes, color=color)
        panel.plot(xs, [b.any for b in bins], "--", color=color, linewidth=1)
    panel.set(xlabel="confidence of the draft's distribution", ylabel="share accepted", xlim=(0, 1), ylim=(0, 1.02))
    panel.grid(alpha=0.25)
    panel.set_title(title or "accepted: likeliest child (line), any child (dashed); dots by number of places")
    panel.legend(loc="lower right")
    save(figure, path)


@styled
def entropy_autocorrelation(path: Path, drafters: Mapping[str, Sequence[Lag]], *, title: str = "") -> None:
    """Pearson's correlation of the draft's entropy between cycles (SAGE, figure 2)."""
    assert len(drafters) <= len(COLORS), f"{len(drafters)} drafters, and {len(COLORS)} colours"
    figure, panel = one_panel((5.6, 3.2))
    for color, (name, lags) in zip(COLORS, drafters.items(), strict=False):
        panel.plot([lag.lag for lag in lags], [lag.correlation for lag in lags], "o-", color=color, label=name)
    panel.axhline(0.0, color=GREY, linewidth=1)
    panel.set(xlabel="cycles between the two", ylabel="correlation of the entropy", title=title)
    panel.grid(alpha=0.25)
    panel.legend()
    save(figure, path)
