"""The section of a report that explains the numbers of drawn pictures: every figure of this folder, and what it shows.

What a figure holds is the other modules' to say; here it is decided which are drawn, and under which name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ....core.json_types import JsonMapping
from ...lantern import LanternConfig
from ...measured_rows import PLAIN, Row, grouped
from ...quality import LOWER_IS_BETTER
from ...style import COLORS
from ...summary import Summary, summarize
from ...tables import Column, Figure, ReportSection, Table, text
from .drawn_cells import AnalysisConfig, CellStatistics
from .map_figures import MOST_COLUMNS, distributions_at, picture_maps, set_size_grid
from .maps import cell_map, depth_map, length_map, mean_map
from .method_figures import TradeOff, acceptance_grid, initialisations, latency_bars, trade_off
from .places import by_place, mixed_table, places_table
from .share_figures import accepted_histogram, rank_histogram, share_bars

FOLDER = "analysis"
Content = list[str | Table | Figure]


def drawn_section(
    folder: Path,
    config: AnalysisConfig,
    by_temperature: Mapping[float, CellStatistics],
    rows: Sequence[Row],
    pictures: Mapping[float, Mapping[str, Tensor]],
    captions: Sequence[str],
    *,
    rules: Mapping[str, LanternConfig],
    quality: Mapping[float, Mapping[str, JsonMapping]],
    encoded: Mapping[str, CellStatistics],
    contrast: Mapping[float, Mapping[str, Tensor]],
) -> ReportSection:
    """Writes figures into `folder`/analysis.

    Args:
        readings, pictures, quality: by temperature; then by method, plain decoding among the pictures.
        rows: of all requests, in the order of the pictures.
        pictures: uint8 [B,3,S,S] of the first requests.
        rules: of methods that relax acceptance and differ in nothing else; all others are references.
        encoded: "training pictures", "held-out pictures" -> what was read from the head's own data.
        contrast: by temperature, then by method: `places.contrasts` [I,n] of all pictures.
    """
    place, content = folder / FOLDER, _numbers(config, by_temperature)
    places = {t: by_place(s, contrast[t][PLAIN][: len(s.top1)]) for t, s in by_temperature.items()}
    content.append(places_table(places, _widest(config)))
    of_methods = {t: {name: c for name, c in of.items() if name != PLAIN} for t, of in contrast.items()}
    if (of_mixed := mixed_table(rows, of_methods)) is not None:
        content.append(of_mixed)
    content += _overall(place, by_temperature, encoded)
    for temperature, statistics in by_temperature.items():
        tag = f"T{temperature:g}"
        mine = [row for row in rows if row.temperature == temperature and row.method != PLAIN]
        methods = {name: some for (name,), some in grouped(mine, "method").items()}
        summaries = {name: summarize(some) for name, some in methods.items()}
        content += [f"### Temperature {temperature:g}"]
        content += _drawing(place, tag, methods, summaries, pictures[temperature])
        content += _statistics(place, tag, config, statistics, pictures[temperature][PLAIN], captions)
        content += _trade_offs(place, tag, summaries, quality.get(temperature, {}), rules)
    data = {f"{t:g}": s.summary() | {"places": places[t]} for t, s in by_temperature.items()}
    return ReportSection("Analysis of the pictures", tuple(content), "analysis", data)


def _numbers(config: AnalysisConfig, by_temperature: Mapping[float, CellStatistics]) -> Content:
    chance, widest = "first draft's chance", _widest(config)
    shares = ("head top-1", "head top-3", "target top-1", "target top-10", "sum min(p, q)", f"{chance}, exact",
              f"{chance}, LANTERN {widest}")  # fmt: skip
    columns = (Column("T", "g"), Column("pictures", "d"), *(Column(name, ".1%") for name in shares))
    rows = []
    for temperature, statistics in by_temperature.items():
        s = statistics.summary()
        values = (s["accuracy_top1"], s["accuracy_top3"], s["target_top1"], s["target_top10"], s["expected_acceptance"],
                  s["first_draft_exact"], s["first_draft_lantern"][-1][-1])  # fmt: skip
        rows.append((temperature, s["pictures"], *values))
    note = ("Measured on pictures that the target drew by plain decoding; the head reads the target's features. At "
            "temperature 0 the probabilities are those at temperature 1. A first draft's chance is the probability "
            "that the rule accepts the head's first draft of a cell, whether or not a cycle starts there.")  # fmt: skip
    bounds = (Column("T", "g"), text("divergence"), Column("delta", "g"), Column("first draft's chance", ".1%"),
              Column("size of A", ".1f"), Column("ms"))  # fmt: skip
    costs = tuple(
        (temperature, b.divergence, b.delta, b.accept, b.size, b.ms)
        for temperature, statistics in by_temperature.items()
        for b in statistics.bounds
    )
    alike = f"Bounds that LANTERN reports as equivalent, at k = {max(config.k)}; median ms for 59 drafts."
    return [
        Table("How well the head predicts the target", columns, tuple(rows), note=note),
        Table("Bounds of LANTERN", bounds, costs, source="LANTERN, tables 3 and 9", note=alike),
    ]


def _widest(config: AnalysisConfig) -> str:
    """The last setting of LANTERN in words."""
    return f"k={config.k[-1]}, delta={config.delta[-1]:g}"


def _overall(
    place: Path, by_temperature: Mapping[float, CellStatistics], encoded: Mapping[str, CellStatistics]
) -> Content:
    groups = {**encoded, **{f"drawn, T = {t:g}": statistics for t, statistics in by_temperature.items()}}
    # LANTERN, figures 2b and 2c; ADT-Tree, figure 1.
    share_bars(
        place / "accuracy.png",
        {name.replace(" ", "\n", 1): {"top-1": r.accuracy(1), "top-3": r.accuracy(3)} for name, r in groups.items()},
        "head's accuracy for the target's\nmost likely token",
    )
    share_bars(
        place / "probability.png",
        {
            f"T = {t:g}": {"top-1": float(r.top1.mean()), "top-10": float(r.top10.mean())}
            for t, r in by_temperature.items()
        },
        "mean probability under the target",
    )
    rank_histogram(place / "ranks.png", {f"T = {t:g}": r.rank_drawn for t, r in by_temperature.items()})
    return _shown(
        ("accuracy", "How often the target's most likely token is the head's first, or among its first three."),
        ("probability", "Mean probability of the target's most likely token, and of its ten most likely."),
        ("ranks", "The head's rank of the token that was drawn."),
    )


def _drawing(
    place: Path,
    tag: str,
    methods: Mapping[str, Sequence[Row]],
    summaries: Mapping[str, Summary],
    pictures: Mapping[str, Tensor],
) -> Content:
    """Where decoding stood: the first picture by each method, and counts over all."""
    names = list(methods)[:MOST_COLUMNS]
    first = [pictures[name][0] for name in names]
    accepted = [methods[name][0].accepted for name in names]
    grid = round((sum(accepted[0]) + len(accepted[0]) + 1) ** 0.5)
    depth, length = "depth in the draft tree (0: not drafted)", "tokens that the cycle emitted"
    picture_maps(place / f"depth-{tag}.png", first, [depth_map(a, grid) for a in accepted], depth, names)
    picture_maps(place / f"length-{tag}.png", first, [length_map(a, grid) for a in accepted], length, names)
    means = [mean_map([length_map(row.accepted, grid) for row in methods[name]]) for name in names]
    picture_maps(place / f"mean-length-{tag}.png", (), means, length, names)
    accepted_histogram(
        place / f"accepted-{tag}.png",
        {name: accepted_shares(summaries[name]) for name in list(methods)[: len(COLORS)]},
    )
    initialisations(place / f"methods-{tag}.png", summaries)
    latency_bars(place / f"latency-{tag}.png", summaries)
    return _shown(
        (f"depth-{tag}", "Depth in the draft tree of each token of the first picture; 0: the token was not drafted."),
        (f"length-{tag}", "Number of tokens that the cycle of each token of the first picture emitted."),
        (f"mean-length-{tag}", f"The same, mean over {len(methods[names[0]])} pictures."),
        (f"accepted-{tag}", "Share of cycles by the number of tokens that they emitted."),
        (
            f"methods-{tag}",
            "tau (95% interval), levels of a tree, and speedup (quartiles) at that tau.",
        ),
        (f"latency-{tag}", "Time of a cycle, by part."),
    )


def _statistics(
    place: Path, tag: str, config: AnalysisConfig, statistics: CellStatistics, pictures: Tensor, captions: Sequence[str]
) -> Content:
    """What target and head give the cells of plainly drawn pictures."""
    count = min(4, len(pictures), len(statistics.top1))
    maps = [cell_map(values, statistics.grid) for values in statistics.top1[:count]]
    label = "probability of the target's most likely token"
    picture_maps(place / f"top1-{tag}.png", list(pictures[:count]), maps, label, captions[:count], limits=(0.0, 1.0))
    cells = config.cells_of(statistics.top1[0], statistics.grid)
    chosen = "the flattest and the sharpest cell" if config.cells is None else "some cells"
    distributions_at(
        place / f"distributions-{tag}.png",
        pictures[0],
        statistics.first.p,
        statistics.first.q,
        cells,
        grid=statistics.grid,
    )
    acceptance_grid(
        place / f"lantern-{tag}.png", statistics.accept.mean((0, 3)), config.k, config.delta,
        exact=float(statistics.exact.mean()),
    )  # fmt: skip
    widest = config.k.index(max(config.k))
    sizes = {
        f"delta = {delta:g}": cell_map(statistics.size[:, widest, number].float().mean(0), statistics.grid)
        for number, delta in enumerate(config.delta)
    }
    set_size_grid(place / f"sizes-{tag}.png", sizes)
    return _shown(
        (f"top1-{tag}", "Probability of the target's most likely token."),
        (f"distributions-{tag}", f"The target's most likely tokens at {chosen} of the first picture."),
        (f"lantern-{tag}", "First draft's chance under LANTERN."),
        (f"sizes-{tag}", f"Mean size of LANTERN's sets over the cells, k = {max(config.k)}."),
    )


def _trade_offs(
    place: Path,
    tag: str,
    summaries: Mapping[str, Summary],
    quality: Mapping[str, JsonMapping],
    rules: Mapping[str, LanternConfig],
) -> Content:
    """One figure for each residual and metric, where several settings of the additive bound were measured."""
    content: Content = []
    for residual, name in (("paper", ""), ("reference", "-released")):
        settings = {n: r for n, r in rules.items() if n in summaries and r.delta is not None and r.residual == residual}
        if len({(rule.k, rule.delta) for rule in settings.values()}) < 2:
            continue
        for metric in sorted({metric for n in settings for metric in quality.get(n, {})}):
            points = [
                TradeOff(rule.k, rule.delta, summaries[n].tau, quality[n][metric]["value"])
                for n, rule in settings.items()
                if rule.delta is not None and metric in quality.get(n, {})
            ]
            references = {
                n: (summaries[n].tau if n in summaries else 1.0, quality[n][metric]["value"])
                for n in (PLAIN, *summaries)
                if n not in rules and metric in quality.get(n, {})
            }
            figure = f"trade-{metric}-{tag}{name}"
            trade_off(
                place / f"{figure}.png", points, quality=metric,
                higher_is_better=metric not in LOWER_IS_BETTER, references=references,
            )  # fmt: skip
            content += _shown((figure, f"{metric} against tau, by k and delta{name and ' (released rule)'}."))
    return content


def accepted_shares(summary: Summary) -> list[float]:
    """Share of cycles that emitted 1, 2, ...: accepted drafts and the bonus token, as tau counts."""
    total = sum(summary.accepted_histogram)
    return [count / total for count in summary.accepted_histogram]


def _shown(*figures: tuple[str, str]) -> Content:
    return [Figure(f"{FOLDER}/{name}.png", caption) for name, caption in figures]
