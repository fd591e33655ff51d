"""Tables of the demos that tell tales, whose frame is predictable and whose names are not: demo/sage, demo/dflash."""

from __future__ import annotations

import statistics

from .recorded import (
    Cell,
    Rows,
    all_same,
    cells_of,
    contrasts_of,
    each_and_mean,
    evaluations,
    mean_of,
    methods_of,
    ratio_of_run,
    same,
    span,
    speed,
    speeds,
    table,
    tau,
    taus,
    taus_by_drafter,
    with_interval,
)

# demo/sage: three drafts of one target

_SAGE = {"SAGE, template": "SAGE as printed", "SAGE, online": "SAGE, grown online (ours)"}


def _drafts(method: str) -> list[float]:
    """tau of each draft."""
    return [value for value, _, _ in taus_by_drafter("sage", method, "tales").values()]


@table
def sage() -> Rows:
    rows = [["tree", "tau of three drafts: mean [95%]", "mean nodes of a cycle", "DSR [IQR]", "expected", "identical"]]
    for method in methods_of("sage"):
        (cell,) = cells_of("sage", method)
        rows.append([_SAGE.get(method, method), each_and_mean(_drafts(method)), f"{cell['mean_nodes']:.1f}",
                     ratio_of_run(cell), f"{cell['expected_speedup']:.2f}x", same(cell)])  # fmt: skip
    return rows


@table
def sage_differences() -> Rows:
    """Mean difference over the drafts: a SAGE tree minus the tree of the column."""
    others = [method for method in methods_of("sage") if method not in _SAGE]
    rows = [["", *others]]
    for method, label in _SAGE.items():
        pairs = (zip(_drafts(method), _drafts(other), strict=True) for other in others)
        rows.append([f"{label}, minus", *(mean_of([a - b for a, b in pair], "+") for pair in pairs)])
    return rows


# demo/dflash: three runs, three drafts of each kind in each

_LABELS = {
    "DFlash from distributions": "DFlash, trained on the target's distribution",
    "DFlash, 25 nodes": "DFlash, tree of 25 nodes",
    "DSpark, 25 nodes": "DSpark, tree of 25 nodes",
    "EAGLE-3, 25 nodes": "EAGLE-3, tree of 25 nodes",
}


def _sampled(method: str) -> list[Cell]:
    """Its cells at temperature 1, none where it was not sampled."""
    head, _, cut = method.partition(", cut")
    name = f"{head}, sampled" + (f", cut{cut}" if cut else "")
    return cells_of("dflash", name, temperature=1.0) if name in methods_of("dflash", 1.0) else []


def _drafting(cells: list[Cell]) -> list[float]:
    """Milliseconds of a cycle in the drafter."""
    return [cell["drafter_ms"] for cell in cells]


@table
def dflash() -> Rows:
    rows = [["method", "passes", "T = 0: tau", "drafting, ms", "DSR", "T = 1: tau", "DSR"]]
    for method in methods_of("dflash"):
        cold, hot = cells_of("dflash", method), _sampled(method)
        passes = "7" if method.startswith("EAGLE") else "1"
        rows.append([_LABELS.get(method, method), passes, each_and_mean(taus(cold)), span(_drafting(cold)),
                     speeds(cold), *((each_and_mean(taus(hot)), speeds(hot)) if hot else ("-", "-"))])  # fmt: skip
    return rows


@table
def dflash_demo() -> Rows:
    methods = {name: f"{name}, one pass" for name in ("DFlash", "DSpark", "DFlash 2", "P-EAGLE")}
    methods["EAGLE-3"] = "EAGLE-3, seven passes"
    rows = [["", "tau, T = 0", "drafting of a cycle", "tau, T = 1", "speedup, T = 0 and T = 1"]]
    for method, label in methods.items():
        cold, hot = cells_of("dflash", method), _sampled(method)
        rows.append([label, tau(cold), f"{statistics.fmean(_drafting(cold)):.2f} ms", tau(hot),
                     f"{speed(cold)}, {speed(hot)}"])  # fmt: skip
    return rows


def dflash_bounds() -> Rows:
    """Lines of the table of bounds (`bounds.py`)."""

    def less(name: str, temperature: int, least: float = 0) -> str:
        found = contrasts_of("dflash", name, place=f"tales, T = {temperature}")
        texts = [with_interval(one["difference"], one["interval"], "+") for one in found]
        below = sum(one["interval"][1] < least for one in found)
        return ", ".join(texts) + (
            f" (**missed**: below {least:g} by its interval in {below} of {len(found)} runs)" if below else ""
        )

    def share(method: str, temperature: int) -> str:
        times = [_drafting(cells_of("dflash", name) if not temperature else _sampled(name))
                 for name in (method, "EAGLE-3")]  # fmt: skip
        return ", ".join(f"{own / theirs:.2f}" for own, theirs in zip(*times, strict=True))

    seeds, blocks = ", ".join(map(str, evaluations("dflash"))), ("DFlash", "DSpark", "DFlash 2", "P-EAGLE")
    return [
        ["what", "bound", f"measured, seeds {seeds}"],
        ["outputs identical to plain decoding (greedy)", "all", all_same("dflash")],
        ["tau of a DFlash block of 7, T = 0, minus that of EAGLE-3's chain of 7", "at or above 0",
         less("chains of seven", 0)],
        ["the same for P-EAGLE", "at or above 0", less("P-EAGLE less EAGLE-3", 0)],
        ["tau of a DFlash block of 7, T = 1, minus that of EAGLE-3's sampled chain of 7", "at or above 0",
         less("sampled chains of seven", 1)],
        ["the same for DSpark", "at or above -0.3", less("sampled DSpark less EAGLE-3", 1, -0.3)],
        ["the same for DFlash 2", "at or above -0.3", less("sampled DFlash 2 less EAGLE-3", 1, -0.3)],
        ["tau of a DSpark block of 7, T = 0, minus that of DFlash", "at or above 0", less("DSpark less DFlash", 0)],
        ["the same for DFlash 2", "at or above 0", less("DFlash 2 less DFlash", 0)],
        *(["time of a cycle's drafting over EAGLE-3's seven passes, " + f"T = {t}", "at most 1/3",
           "; ".join(f"{name} {share(name, t)}" for name in blocks)] for t in (0, 1)),
    ]  # fmt: skip
