"""Figures of the video track: tau against the number of visual tokens, and what becomes of those in target and draft.

They are Sparrow's figures 1, 2, 3, 5 and 6, for whatever was measured, in the style of the visual track's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cells import HeldVisual
from ..style import (
    BLUE,
    COLORS,
    GREY,
    INK,
    MARKERS,
    ORANGE,
    WIDEST,
    Panel,
    from_zero,
    lines,
    one_panel,
    panel_grid,
    save,
    stacked,
    styled,
)
from ..summary import Summary
from .visual_tokens import KINDS, THRESHOLD

# Whose attention chooses visual tokens -> its name in figures and the style of its lines.
CHOSEN_BY = {"last": ("chosen by the last instruction token", "-"), "text": ("chosen by all text", "--")}


@styled
def tau_by_visual_tokens(path: Path, methods: Mapping[str, Sequence[Summary]], *, title: str = "") -> None:
    """tau, and the time of a draft step, against visual tokens: a line for each method (Sparrow, figure 1a).

    Args:
        methods: `video.by_visual_tokens`.
    """
    figure, panels = panel_grid(1, 2, (WIDEST, 3.3))
    left, right = panels[0]
    tokens = {name: [c.visual_tokens for c in cells] for name, cells in methods.items()}
    for color, (name, cells) in zip(COLORS, methods.items(), strict=False):
        low, high = zip(*(c.tau_interval for c in cells), strict=True)
        left.fill_between(tokens[name], low, high, color=color, alpha=0.15, linewidth=0)
    lines(left, {name: (tokens[name], [c.tau for c in cells]) for name, cells in methods.items()})
    lines(right, {name: (tokens[name], [c.T_q_ms for c in cells]) for name, cells in methods.items()})
    left.set(ylabel="tau (tokens a target pass)", title="what a cycle emits")
    right.set(ylabel="one draft step (ms)", title="what drafting costs")
    longest = max(c.visual_tokens for cells in methods.values() for c in cells)
    for panel in (left, right):
        panel.set(xlabel="visual tokens", xlim=(0, 1.04 * longest))
        from_zero(panel)
        panel.grid(alpha=0.25)
    left.axhline(1.0, color=GREY, linestyle="--", linewidth=1)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncol=min(len(methods), 4))
    if title:
        figure.suptitle(title)
    save(figure, path)


@styled
def tau_by_visual_share(path: Path, sets: Mapping[str, Mapping[HeldVisual, Summary]], *, title: str = "") -> None:
    """tau by the share of the visual tokens that a head holds: a colour for each set, a line style for each way to
    choose them (Sparrow, figure 1b).

    Args:
        sets: name of a set -> what was held -> its summary.
    """
    figure, panel = one_panel((6.4, 3.6))
    handles: dict[str, Any] = {}
    for color, marker, (name, measured) in zip(COLORS, MARKERS, sets.items(), strict=False):
        for by, (label, style) in CHOSEN_BY.items():
            points = sorted(((100 * held.share, s) for held, s in measured.items() if held.by in (by, None)),
                            key=lambda point: point[0])  # fmt: skip
            if not any(held.by == by for held in measured):
                continue
            shares, summaries = zip(*points, strict=True)
            (line,) = panel.plot(shares, [s.tau for s in summaries], style, color=color, marker=marker,
                                 markeredgecolor="white")  # fmt: skip
            handles.setdefault(name, line)
            handles.setdefault(label, panel.plot([], [], style, color=INK)[0])
            low, high = zip(*(s.tau_interval for s in summaries), strict=True)
            panel.fill_between(shares, low, high, color=color, alpha=0.1, linewidth=0)
    panel.set(xlabel="visual tokens that the head holds (%)", ylabel="tau (tokens a target pass)", title=title)
    from_zero(panel)
    panel.grid(alpha=0.25)
    handles = {name: handles[name] for name in sorted(handles, key=lambda name: name not in sets)}
    figure.legend([*handles.values()], [*handles], loc="outside lower center", ncol=2, handlelength=3)
    save(figure, path)


@styled
def attention_bars(path: Path, shares: Mapping[str, Mapping[str, float]]) -> None:
    """Where a draft looks from the last instruction token, a bar for each length or drafter (Sparrow, figure 2)."""
    figure, panel = one_panel((6.4, 0.42 * len(shares) + 1.5))
    parts = {name: [of[kind] for kind in KINDS] for name, of in shares.items()}
    handles = stacked(panel, parts, COLORS, shown=".0%", least=0.06)
    panel.set(xlabel="share of the last instruction token's attention", xlim=(0, 1))
    figure.legend(handles, KINDS, loc="outside lower center", ncol=len(KINDS))
    save(figure, path)


@styled
def attention_map(path: Path, shares: Sequence[Sequence[float]], *, bridge: int | None = None) -> None:
    """How much of the last prompt token's attention visual tokens get, layer by layer and head (Sparrow, figure 3b).

    Args:
        shares: [L][H], as `target_visual_attention` has them.
    """
    figure, panel = one_panel((4.8, 0.14 * len(shares) + 1.6))
    # The strongest head of each layer on the left: heads have no order of their own.
    image = panel.imshow([sorted(heads, reverse=True) for heads in shares], aspect="auto", cmap="viridis", vmin=0)
    for axis in (panel.xaxis, panel.yaxis):
        axis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    if bridge is not None:
        panel.axhline(bridge - 0.5, color="white", linestyle="--", linewidth=1)
        panel.annotate("m*", (1, bridge - 0.5), xycoords=("axes fraction", "data"), xytext=(-3, 3), ha="right",
                       textcoords="offset points", fontsize=8, color="white")  # fmt: skip
    panel.set(xlabel="attention heads, the strongest first", ylabel="layer")
    figure.colorbar(image, ax=panel, label="attention to visual tokens")
    save(figure, path)


@styled
def importance_curve(path: Path, accuracy: Mapping[str, Mapping[int, float]], *, bridge: int | None = None) -> None:
    """Right answers where visual tokens are unseen from a layer on; dashed: seeing all (Sparrow, figures 3a and 5).

    Args:
        accuracy: set -> `importance`, the target's number of layers among its keys.
        bridge: the layer whose states the head reads at visual tokens (m*).
    """
    figure, panel = one_panel((6.4, 3.3))
    lines(panel, {name: (sorted(of), [of[layer] for layer in sorted(of)]) for name, of in accuracy.items()})
    for color, of in zip(COLORS, accuracy.values(), strict=False):
        panel.axhline(of[max(of)], color=color, linestyle="--", linewidth=1, alpha=0.7)
    _bridge(panel, bridge)
    panel.set(xlabel="visual tokens are unseen from this layer on", ylabel="right answers", ylim=(0, 1.04))
    panel.grid(alpha=0.25)
    panel.legend(loc="lower right")
    save(figure, path)


@styled
def retention_curve(path: Path, retention: Mapping[str, Sequence[float]], *, bridge: int | None = None) -> None:
    """Cosine of states with their embeddings, layer by layer (Sparrow, figure 6)."""
    figure, panel = one_panel((6.4, 3.3))
    colors = {"visual": ORANGE, "text": BLUE}
    for kind, values in retention.items():
        panel.plot(range(len(values)), values, "-o", color=colors[kind], label=f"{kind} tokens", markersize=4)
    panel.axhline(THRESHOLD, color=GREY, linestyle=":", linewidth=1)
    _bridge(panel, bridge)
    lowest = min(min(values) for values in retention.values())
    panel.set(xlabel="layer", ylabel="cosine with the embedding", ylim=(min(0.0, 1.1 * lowest), 1.04))
    panel.grid(alpha=0.25)
    panel.legend(loc="upper right")
    save(figure, path)


def _bridge(panel: Panel, layer: int | None) -> None:
    if layer is not None:
        panel.axvline(layer, color=INK, linestyle="--", linewidth=1)
        panel.annotate("m*", (layer, 1), xytext=(3, -2), xycoords=("data", "axes fraction"), textcoords="offset points",
                       va="top", fontsize=8, color=INK)  # fmt: skip
