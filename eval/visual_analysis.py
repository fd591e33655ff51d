"""The section of a visual report that explains its numbers: every figure of `visual_plots`, and what they show.

What a figure holds is `analysis`'s to say; here it is decided which are drawn, and under which name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from . import visual_plots as plots
from .analysis import (
    AnalysisConfig,
    Reading,
    accepted_histogram,
    cell_map,
    compare,
    depth_map,
    length_map,
    mean_map,
)
from .lantern import LanternConfig
from .measure import Row
from .quality import LOWER_IS_BETTER
from .tables import markdown_table

FOLDER = "analysis"


def write_section(
    folder: Path,
    config: AnalysisConfig,
    readings: Mapping[float, Reading],
    results: Mapping[float, Mapping[str, Sequence[Row]]],
    tables: Mapping[float, Mapping[str, Mapping[str, Any]]],
    pictures: Mapping[float, Mapping[str, Tensor]],
    captions: Sequence[str],
    *,
    plain: str,
    rules: Mapping[str, LanternConfig],
    quality: Mapping[float, Mapping[str, Mapping[str, Any]]],
    encoded: Mapping[str, Reading],
) -> list[str]:
    """Figures into `folder`/analysis; returns the section's lines.

    Args:
        readings, results, tables, pictures, quality: by temperature; then by method, `plain` among the pictures.
        pictures: uint8 [B,3,S,S] of the first requests, in the order of the rows.
        rules: of methods that relax acceptance and differ in nothing else; all others are references.
        encoded: "training pictures", "held-out pictures" -> what was read from the head's own data.
    """
    place = folder / FOLDER
    lines = ["## Why, and where", "", *_numbers(config, readings), ""]
    lines += _overall(place, readings, encoded)
    for temperature, reading in readings.items():
        methods = results[temperature]
        lines += [f"### Temperature {temperature:g}", ""]
        lines += _drawing(place, f"T{temperature:g}", methods, tables[temperature], pictures[temperature])
        shown = pictures[temperature][plain]
        lines += _reading(place, f"T{temperature:g}", config, reading, shown, captions)
        lines += _trade_offs(
            place, f"T{temperature:g}", tables[temperature], quality.get(temperature, {}), rules, plain
        )
    return lines


def _numbers(config: AnalysisConfig, readings: Mapping[float, Reading]) -> list[str]:
    head = ["T", "pictures", "head top-1", "head top-3", "target top-1", "target top-10", "sum min(p, q)",
            "first draft, exact", f"LANTERN k={config.k[-1]}, delta={config.delta[-1]:g}"]  # fmt: skip
    rows = []
    for temperature, reading in readings.items():
        s = reading.summary()
        shares = (s["accuracy_top1"], s["accuracy_top3"], s["target_top1"], s["target_top10"], s["expected_acceptance"],
                  s["first_draft_exact"], s["first_draft_lantern"][-1][-1])  # fmt: skip
        rows.append([f"{temperature:g}", str(s["pictures"]), *(f"{share:.1%}" for share in shares)])
    lines = markdown_table(head, rows)
    lines += ["", "Read from pictures that the target drew plainly, from true features. At temperature 0 probabilities "
              "are those at temperature 1.", "", f"Bounds that LANTERN found alike, at k = {max(config.k)} (median ms "
              "for 59 drafts):", ""]  # fmt: skip
    bounds = [
        [f"{temperature:g}", b.divergence, f"{b.delta:g}", f"{b.accept:.1%}", f"{b.size:.1f}", f"{b.ms:.2f}"]
        for temperature, reading in readings.items()
        for b in reading.bounds
    ]
    return lines + markdown_table(["T", "divergence", "delta", "first draft", "size of A", "ms"], bounds)


def _overall(place: Path, readings: Mapping[float, Reading], encoded: Mapping[str, Reading]) -> list[str]:
    groups = {**encoded, **{f"drawn, T = {t:g}": reading for t, reading in readings.items()}}
    plots.accuracy_bars(
        place / "accuracy.png",
        {name.replace(" ", "\n", 1): {"top-1": r.accuracy(1), "top-3": r.accuracy(3)} for name, r in groups.items()},
    )
    plots.probability_bars(
        place / "probability.png",
        {f"T = {t:g}": {"top-1": float(r.top1.mean()), "top-10": float(r.top10.mean())} for t, r in readings.items()},
    )
    plots.rank_histogram(place / "ranks.png", {f"T = {t:g}": r.rank_drawn for t, r in readings.items()})
    return _shown(
        ("accuracy", "How often the head ranks the target's most likely token first, or among three."),
        ("probability", "How sure the target is."),
        ("ranks", "Where the head ranks the token that was drawn."),
    )


def _drawing(
    place: Path,
    tag: str,
    methods: Mapping[str, Sequence[Row]],
    tables: Mapping[str, Mapping[str, Any]],
    pictures: Mapping[str, Tensor],
) -> list[str]:
    """Where decoding stood: the first picture by each method, and counts over all."""
    names = list(methods)[: plots.MOST_COLUMNS]
    first = [pictures[name][0] for name in names]
    accepted = [methods[name][0]["accepted"] for name in names]
    grid = round((sum(accepted[0]) + len(accepted[0]) + 1) ** 0.5)
    plots.depth_map(place / f"depth-{tag}.png", first, [depth_map(a, grid) for a in accepted], names)
    plots.length_map(place / f"length-{tag}.png", first, [length_map(a, grid) for a in accepted], names)
    means = [mean_map([length_map(row["accepted"], grid) for row in methods[name]]) for name in names]
    plots.length_map(place / f"mean-length-{tag}.png", (), means, names)
    plots.accepted_histogram(
        place / f"accepted-{tag}.png",
        {name: accepted_histogram(methods[name]) for name in list(methods)[: len(plots.COLORS)]},
    )
    plots.initialisations(place / f"methods-{tag}.png", compare(methods))
    plots.latency_bars(place / f"latency-{tag}.png", tables)
    return _shown(
        (f"depth-{tag}", "Depth in its draft tree at which each token of the first picture stood; 0 was not drafted."),
        (f"length-{tag}", "How many tokens came in one cycle with each token of the first picture."),
        (f"mean-length-{tag}", f"The same, mean over {len(methods[names[0]])} pictures."),
        (f"accepted-{tag}", "Cycles by tokens emitted."),
        (f"methods-{tag}", "tau (95% of bootstraps), levels of a tree, speedup (quartiles)."),
        (f"latency-{tag}", "Where a cycle's time goes."),
    )


def _reading(
    place: Path, tag: str, config: AnalysisConfig, reading: Reading, pictures: Tensor, captions: Sequence[str]
) -> list[str]:
    """What target and head give the cells of plainly drawn pictures."""
    count = min(4, len(pictures), len(reading.top1))
    maps = [cell_map(values, reading.grid) for values in reading.top1[:count]]
    plots.top1_map(place / f"top1-{tag}.png", list(pictures[:count]), maps, captions[:count])
    cells = config.cells_of(reading.top1[0], reading.grid)
    chosen = "The flattest and the sharpest cell" if config.cells is None else "Cells"
    plots.distributions_at(
        place / f"distributions-{tag}.png", pictures[0], reading.first.p, reading.first.q, cells, grid=reading.grid
    )
    plots.acceptance_grid(
        place / f"lantern-{tag}.png", reading.accept.mean((0, 3)), config.k, config.delta,
        exact=float(reading.exact.mean()),
    )  # fmt: skip
    widest = config.k.index(max(config.k))
    sizes = {
        f"delta = {delta:g}": cell_map(reading.size[:, widest, number].float().mean(0), reading.grid)
        for number, delta in enumerate(config.delta)
    }
    plots.set_size_grid(place / f"sizes-{tag}.png", sizes)
    return _shown(
        (f"top1-{tag}", "Probability of the target's most likely token."),
        (f"distributions-{tag}", f"{chosen} of the first picture: the target's likeliest tokens."),
        (f"lantern-{tag}", "How likely LANTERN accepts a cycle's first draft."),
        (f"sizes-{tag}", f"Mean size of LANTERN's sets over the cells, k = {max(config.k)}."),
    )


def _trade_offs(
    place: Path,
    tag: str,
    tables: Mapping[str, Mapping[str, Any]],
    quality: Mapping[str, Mapping[str, Any]],
    rules: Mapping[str, LanternConfig],
    plain: str,
) -> list[str]:
    """One figure for each metric, where several settings of LANTERN with the additive bound were measured."""
    settings = {name: rule for name, rule in rules.items() if name in tables and rule.delta is not None}
    if len({(rule.k, rule.delta) for rule in settings.values()}) < 2:
        return []
    found = []
    for metric in sorted({metric for name in settings for metric in quality.get(name, {})}):
        points = [
            plots.TradeOff(rule.k, rule.delta, tables[name]["tau"], quality[name][metric]["value"])
            for name, rule in settings.items()
            if rule.delta is not None and metric in quality.get(name, {})
        ]
        references = {
            name: (tables[name]["tau"] if name in tables else 1.0, quality[name][metric]["value"])
            for name in (plain, *tables)
            if name not in rules and metric in quality.get(name, {})
        }
        plots.trade_off(
            place / f"trade-{metric}-{tag}.png", points, speed="mean accepted length (tau)", quality=metric,
            higher_is_better=metric not in LOWER_IS_BETTER, references=references,
        )  # fmt: skip
        found += _shown((f"trade-{metric}-{tag}", f"{metric} against tau, by k and delta."))
    return found


def _shown(*figures: tuple[str, str]) -> list[str]:
    return [line for name, caption in figures for line in (f"![{name}]({FOLDER}/{name}.png)", "", caption, "")]
