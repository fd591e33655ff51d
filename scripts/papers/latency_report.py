"""Measured latencies as tables, beside the numbers of TABED (Tables 4 and 6, appendices D.2 and G).

Every cell is a median with quartiles; ratios are of neighbouring runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from draftsmith.eval.tables import Column, Table, Value, text, words
from draftsmith.scripts.papers.latency import Measured, variation
from draftsmith.scripts.timing import median, ratios

# T_q / T_p on an A6000, and ms for 1, 2 and 5 images on a GPU that is not named (LLaVA-1.5 7B's prefill).
TABED_RATIOS = {("68M", "7B"): 0.063, ("160M", "7B"): 0.206, ("68M", "13B"): 0.042, ("160M", "13B"): 0.137}
TABED_CAPTIONS_MS = {
    ("prefill", 1): 112, ("prefill", 2): 207, ("prefill", 5): 540,
    ("BLIP", 1): 54, ("BLIP", 2): 55, ("BLIP", 5): 74,
    ("Florence-2", 1): 105, ("Florence-2", 2): 149, ("Florence-2", 5): 292,
}  # fmt: skip


def steps_table(steps: Sequence[Measured], gamma: int, *, full: bool) -> Table:
    """Table 6, from `latency.step_times`, and the tau above which drafting pays.

    Args:
        full: the models are of the real sizes, so that TABED's numbers stand beside them.
    """
    targets = {m.what: m for m in steps if m.what == m.at["target"]}
    rows: list[tuple[Value, ...]] = []
    for m in (m for m in steps if m.what not in targets):
        target = targets[m.at["target"]]
        ratio = ratios(m.seconds, target.seconds)
        tabed = TABED_RATIOS.get((m.what, target.what)) if full else None
        pays = median([gamma * r + 1 for r in ratio])
        rows.append((target.what, m.what, _ms(m), _ms(target), median(ratio), tabed, pays))
    columns = (text("target"), text("draft"), _spread("T_q, ms"), _spread("T_p, ms"), _spread("T_q / T_p", ".3f"),
               Column("TABED, A6000", "g"), _spread(f"gamma T_q / T_p + 1, gamma {gamma}"))  # fmt: skip
    return Table("", columns, tuple(rows))


def remarks_table(draft: Sequence[Measured], target: Sequence[Measured]) -> Table:
    """Figs. 5 and 6, from `latency.grid_times`: how far T moves while one of B, S and gamma does (Remarks 1 to 3)."""
    rows: list[tuple[str, ...]] = []
    for measured, over, remark in (
        (target, "gamma", 1), (draft, "S", 2), (draft, "B", 3), (target, "S", 2), (target, "B", 3),
    ):  # fmt: skip
        if not measured:
            continue
        moved = variation(measured, over).values()
        values = {k: ", ".join(f"{v}" for v in sorted({m.at[k] for m in measured})) for k in measured[0].at}
        others = "; ".join(f"{k} {v}" for k, v in values.items() if k != over)
        least, most = (f"{100 * v:.0f}%" for v in (min(moved), max(moved)))
        rows.append((f"{remark}", measured[0].what, f"{over} {values[over]}", others, f"{least} to {most}"))
    head = ("remark", "model", "varied", "each at", "(T_max - T_min) / T_min of medians; TABED: at most 5%")
    return words(head, rows)


def stages_table(stages: Sequence[Measured]) -> Table:
    """Fig. 9, from `latency.stage_times`."""
    by, names, images = _by_images(stages)
    rows: list[tuple[Value, ...]] = []
    for count in images:
        total = [sum(parts) for parts in zip(*(by[name, count].seconds for name in names), strict=True)]
        share = median(ratios(by["decoding", count].seconds, total), 100)
        rows.append((count, *(_ms(by[name, count]) for name in names), share))
    times = (_spread(f"{name}, ms", ".1f") for name in names)
    columns = (Column("images", "d"), *times, _spread("share of decoding", ".0f", "%"))
    return Table("", columns, tuple(rows))


def captions_table(captions: Sequence[Measured], *, full: bool) -> Table:
    """Table 4, from `latency.caption_times`: each captioner's time, its share of the target's prefill, TABED's time.

    Args:
        full: the models are of the real sizes, so that TABED's numbers stand beside them.
    """
    by, names, images = _by_images(captions)
    columns = [text("model")]
    for count in images:
        group = f"{count} image{'s' if count > 1 else ''},"
        columns += [_spread("ms", ".1f", group=group), _spread("of the prefill", group=group)]
        columns += [Column("TABED's ms", "d", group=group)] if full else []
    rows: list[tuple[Value, ...]] = []
    for name in names:
        cells: list[Value] = [name]
        for count in images:
            own, prefill = by[name, count], by["prefill", count]
            cells += [_ms(own), None if name == "prefill" else median(ratios(own.seconds, prefill.seconds))]
            cells += [TABED_CAPTIONS_MS.get((name, count))] if full else []
        rows.append(tuple(cells))
    return Table("", tuple(columns), tuple(rows))


def _by_images(measured: Sequence[Measured]) -> tuple[Mapping[tuple[str, int], Measured], list[str], list[int]]:
    """By name and number of images, and both in the order of the measurement."""
    names, images = (
        list(dict.fromkeys(values)) for values in zip(*((m.what, m.at["images"]) for m in measured), strict=True)
    )
    return {(m.what, m.at["images"]): m for m in measured}, names, images


def _spread(name: str, form: str = ".2f", unit: str = "", group: str = "") -> Column:
    return Column(name, form, unit, "interval", group)


def _ms(m: Measured) -> Value:
    return median(m.seconds, 1e3)
