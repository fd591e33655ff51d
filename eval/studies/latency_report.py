"""Measured latencies as Markdown, beside the numbers of TABED (Tables 4 and 6, appendices D.2 and G).

Every cell is a median with quartiles; ratios are of neighbouring runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..tables import markdown_table
from ..timing import ratios, spread
from .latency import Measured, variation

# T_q / T_p on an A6000, and ms for 1, 2 and 5 images on a GPU that is not named (LLaVA-1.5 7B's prefill).
TABED_RATIOS = {("68M", "7B"): 0.063, ("160M", "7B"): 0.206, ("68M", "13B"): 0.042, ("160M", "13B"): 0.137}
TABED_CAPTIONS_MS = {
    ("prefill", 1): 112, ("prefill", 2): 207, ("prefill", 5): 540,
    ("BLIP", 1): 54, ("BLIP", 2): 55, ("BLIP", 5): 74,
    ("Florence-2", 1): 105, ("Florence-2", 2): 149, ("Florence-2", 5): 292,
}  # fmt: skip


def steps_table(steps: Sequence[Measured], gamma: int, *, full: bool) -> str:
    """Table 6, from `latency.step_times`, and the tau above which drafting pays.

    Args:
        full: the models are of the real sizes, so that TABED's numbers stand beside them.
    """
    targets = {m.what: m for m in steps if m.what == m.at["target"]}
    rows = []
    for m in (m for m in steps if m.what not in targets):
        target = targets[m.at["target"]]
        ratio = ratios(m.seconds, target.seconds)
        tabed = TABED_RATIOS.get((m.what, target.what)) if full else None
        pays = spread([gamma * r + 1 for r in ratio], 2)
        rows.append(
            [target.what, m.what, _ms(m), _ms(target), spread(ratio), "" if tabed is None else f"{tabed}", pays]
        )
    head = ["target", "draft", "T_q, ms", "T_p, ms", "T_q / T_p", "TABED, A6000", f"gamma T_q / T_p + 1, gamma {gamma}"]
    return _joined(head, rows)


def remarks_table(draft: Sequence[Measured], target: Sequence[Measured]) -> str:
    """Figs. 5 and 6, from `latency.grid_times`: how far T moves while one of B, S and gamma does (Remarks 1 to 3)."""
    rows = []
    for measured, over, remark in (
        (target, "gamma", 1), (draft, "S", 2), (draft, "B", 3), (target, "S", 2), (target, "B", 3),
    ):  # fmt: skip
        if not measured:
            continue
        moved = variation(measured, over).values()
        values = {k: ", ".join(f"{v}" for v in sorted({m.at[k] for m in measured})) for k in measured[0].at}
        others = "; ".join(f"{k} {v}" for k, v in values.items() if k != over)
        least, most = (f"{100 * v:.0f}%" for v in (min(moved), max(moved)))
        rows.append([f"{remark}", measured[0].what, f"{over} {values[over]}", others, f"{least} to {most}"])
    head = ["remark", "model", "varied", "each at", "(T_max - T_min) / T_min of medians; TABED: at most 5%"]
    return _joined(head, rows)


def stages_table(stages: Sequence[Measured]) -> str:
    """Fig. 9, from `latency.stage_times`."""
    by, names, images = _by_images(stages)
    rows = []
    for count in images:
        total = [sum(parts) for parts in zip(*(by[name, count].seconds for name in names), strict=True)]
        share = spread(ratios(by["decoding", count].seconds, total), 0, 100, "%")
        rows.append([f"{count}", *(_ms(by[name, count], 1) for name in names), share])
    return _joined(["images", *(f"{name}, ms" for name in names), "share of decoding"], rows)


def captions_table(captions: Sequence[Measured], *, full: bool) -> str:
    """Table 4, from `latency.caption_times`."""
    by, names, images = _by_images(captions)

    def cell(name: str, count: int) -> str:
        parts = [_ms(by[name, count], 1)]
        if name != "prefill":
            ratio = ratios(by[name, count].seconds, by["prefill", count].seconds)
            parts.append(f"{spread(ratio, 2)} of the prefill")
        if full and (name, count) in TABED_CAPTIONS_MS:
            parts.append(f"TABED {TABED_CAPTIONS_MS[name, count]}")
        return "; ".join(parts)

    head = ["model", *(f"{n} image{'s' if n > 1 else ''}, ms" for n in images)]
    return _joined(head, [[name, *(cell(name, count) for count in images)] for name in names])


def _by_images(measured: Sequence[Measured]) -> tuple[Mapping[tuple[str, int], Measured], list[str], list[int]]:
    """By name and number of images, and both in the order of the measurement."""
    names, images = (
        list(dict.fromkeys(values)) for values in zip(*((m.what, m.at["images"]) for m in measured), strict=True)
    )
    return {(m.what, m.at["images"]): m for m in measured}, names, images


def _joined(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(markdown_table(head, rows))


def _ms(m: Measured, digits: int = 2) -> str:
    return spread(m.seconds, digits, 1e3)
