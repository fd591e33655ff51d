"""Figures of counts and shares: tokens of a cycle, ranks, accuracy and certainty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.ticker import PercentFormatter
from torch import Tensor

from ...style import COLORS, INK, WIDEST, Panel, one_panel, save, styled, wrapped

RANK_BINS = ((1, 1), (2, 2), (3, 3), (4, 5), (6, 10), (11, 20), (21, 50), (51, 100), (101, 300), (301, 1000))


@styled
def accepted_histogram(path: Path, shares: Mapping[str, Sequence[float]]) -> None:
    """Share of cycles by tokens emitted, bonus token included (ADT-Tree, figure 3a).

    Args:
        shares: name -> shares of lengths 1, 2, ...: methods at one temperature, or temperatures of one method.
    """
    longest = max(len(values) for values in shares.values())
    groups = {str(length): {n: v[length - 1] if length <= len(v) else 0.0 for n, v in shares.items()}
              for length in range(1, longest + 1)}  # fmt: skip
    means = {name: sum((i + 1) * share for i, share in enumerate(values)) for name, values in shares.items()}
    figure, panel = one_panel((min(max(4.6, 0.62 * longest + 1.6), WIDEST) if len(shares) <= 3 else WIDEST, 3.1))
    labels = wrapped([f"{name} (mean\u00a0{mean:.2f})" for name, mean in means.items()])
    _grouped(panel, groups, labels=dict(zip(means, labels, strict=True)))
    panel.set(xlabel="tokens that a cycle emitted (with the bonus)", ylabel="share of cycles")
    save(figure, path)


@styled
def rank_histogram(path: Path, ranks: Mapping[str, Tensor]) -> None:
    """Where the head ranks the right token (ADT-Tree, figure 3b).

    Args:
        ranks: name -> ranks from 1, any shape.
    """
    largest = max(int(values.max()) for values in ranks.values())
    bins = [edges for edges in RANK_BINS if edges[0] <= largest]
    last = RANK_BINS[-1][1]
    bins += [(last + 1, largest)] if largest > last else []
    groups: dict[str, dict[str, float]] = {}
    for low, high in bins:
        label = str(low) if low == high else f"{low}–{high}" if high <= last else f">{last}"
        groups[label] = {name: float(((r >= low) & (r <= high)).float().mean()) for name, r in ranks.items()}
    figure, panel = one_panel((min(max(4.6, 0.62 * len(bins) + 1.2), WIDEST), 3.1))
    _grouped(panel, groups)
    panel.set(xlabel="rank of the right token in the head's distribution", ylabel="share of cells")
    save(figure, path)


@styled
def share_bars(path: Path, groups: Mapping[str, Mapping[str, float]], label: str) -> None:
    """Shares in [0, 1] as groups of bars.

    Args:
        groups: "training pictures", a temperature -> {"top-1", "top-3"} -> share.
        label: what the shares are of.
    """
    figure, panel = one_panel((max(3.6, 1.35 * len(groups) + 1.4), 3.1))
    _grouped(panel, groups, written=True)
    panel.set(ylabel=label, ylim=(0, 1.1), yticks=[0, 0.25, 0.5, 0.75, 1])
    panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=3)
    save(figure, path)


def _grouped(
    panel: Panel,
    groups: Mapping[str, Mapping[str, float]],
    *,
    labels: Mapping[str, str] | None = None,
    written: bool = False,
) -> None:
    """Groups of bars along x, a colour for each name; `written` puts the share above its bar."""
    names = list(next(iter(groups.values())))
    assert len(names) <= len(COLORS), names
    width = 0.8 / len(names)
    for number, (color, name) in enumerate(zip(COLORS, names, strict=False)):
        places = [place - 0.4 + width * (number + 0.5) for place in range(len(groups))]
        values = [group[name] for group in groups.values()]
        panel.bar(places, values, 0.92 * width, color=color, label=(labels or {}).get(name, name))
        for place, value in zip(places, values, strict=True):
            if written:
                panel.text(place, value + 0.015, f"{value:.1%}", ha="center", va="bottom", fontsize=8, color=INK)
    panel.set_xticks(range(len(groups)), list(groups))
    panel.tick_params(axis="x", length=0)
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if len(names) > 3:
        panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    elif len(names) > 1 or labels:
        panel.legend()
