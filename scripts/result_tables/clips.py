"""Tables of demo/video: heads on clips of three lengths, with the text-only window (VATA) and without."""

from __future__ import annotations

from collections.abc import Sequence

from .recorded import Cell, Rows, cells_of, each_and_mean, mean_of, span, speeds, table, tau, taus

FACTS = {"clips-222": "early facts", "late-222": "late facts"}
LENGTHS = ("36", "288", "1998")  # visual tokens
# What the pages call a method: the head with its training, and what it holds as it decodes.
HEADS = {
    "Sparrow": ("Sparrow, all (the paper's)", "VATA"),
    "matched": ("Sparrow, none (matched)", "VATA"),
    "half blind": ("Sparrow, none in half (half blind)", "VATA"),
    "Sparrow without VATA": ("Sparrow, all (the paper's)", "all inputs"),
    "half blind without VATA": ("Sparrow, none in half (half blind)", "all inputs"),
    "MSD": ("MSD, all", "all inputs"),
    "MSD with VATA": ("MSD, all", "VATA"),
}
_HEAD = ["head, and visual inputs in training", "decoding"]
_LENGTHS = ["early facts: 36 visual tokens", "288", "1,998", "late facts: 36", "288", "1,998"]


def clips(method: str, facts: Sequence[str] = (*FACTS,)) -> list[list[Cell]]:
    """A method's cells of each run at each length, with early facts and then with late ones."""
    return [cells_of("video", method, name, budget=length) for name in facts for length in LENGTHS]


@table
def video() -> Rows:
    return [[*_HEAD, *_LENGTHS], *([*HEADS[method], *map(tau, clips(method))] for method in HEADS)]


def _each_run(facts: str) -> Rows:
    rows = [
        [*names, *(each_and_mean(taus(cells)) for cells in clips(method, [facts]))] for method, names in HEADS.items()
    ]
    return [[*_HEAD, "36 visual tokens", "288", "1,998"], *rows]


@table
def video_early() -> Rows:
    return _each_run("clips-222")


@table
def video_late() -> Rows:
    return _each_run("late-222")


@table
def video_differences() -> Rows:
    """What the choice of head, training and window does to tau, run by run on the same clips."""
    pairs = {
        "the paper's: all inputs minus VATA": ("Sparrow without VATA", "Sparrow"),
        "VATA: matched minus the paper's": ("matched", "Sparrow"),
        "VATA: half blind minus matched": ("half blind", "matched"),
        "half blind with VATA minus MSD": ("half blind", "MSD"),
        "half blind with VATA minus the paper's with all inputs": ("half blind", "Sparrow without VATA"),
        "half blind: VATA minus all inputs": ("half blind", "half blind without VATA"),
    }
    rows = [["difference of tau", *_LENGTHS]]
    for label, (first, second) in pairs.items():
        both = zip(clips(first), clips(second), strict=True)
        rows.append([label, *(mean_of(_less(taus(one), taus(other)), "+") for one, other in both)])
    return rows


@table
def video_falls() -> Rows:
    """What tau loses from the shortest clips to the longest."""
    rows = [[*_HEAD, "early facts", "late facts"]]
    for method, names in HEADS.items():
        by_facts = ([taus(cells) for cells in clips(method, [facts])] for facts in FACTS)
        rows.append([*names, *(mean_of(_less(long, short), "+") for short, _, long in by_facts)])
    return rows


def _less(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(first, second, strict=True)]


@table
def video_speeds() -> Rows:
    """Speedup of decoding by chains of 5 and trees."""
    methods = {
        "half blind, chain": ("half blind, chain of 5", "VATA"),
        "matched, chain": ("matched, chain of 5", "VATA"),
        "MSD, chain": ("MSD, chain of 5", "all inputs"),
        "Sparrow, chain": ("the paper's, chain of 5", "VATA"),
        "half blind": ("half blind, tree of 25", "VATA"),
        "matched": ("matched, tree of 25", "VATA"),
        "MSD": ("MSD, tree of 25", "all inputs"),
        "Sparrow": ("the paper's, tree of 25", "VATA"),
        "Sparrow without VATA": ("the paper's, tree of 25", "all inputs"),
    }
    rows = [[*names, *map(speeds, clips(method))] for method, names in methods.items()]
    return [["method", "decoding", *_LENGTHS], *rows]


@table
def video_steps() -> Rows:
    """Time of a draft step at each length over that at the shortest one."""
    rows = [[*_HEAD, "early facts: 288 visual tokens / 36", "1,998 / 36", "late facts: 288 / 36", "1,998 / 36"]]
    for method in ("matched", "half blind", "half blind without VATA", "MSD"):
        times = [[cell["T_q_ms"] for cell in cells] for cells in clips(method)]
        ratios = [[one / short for one, short in zip(times[i], times[i - i % 3], strict=True)] for i in (1, 2, 4, 5)]
        rows.append([*HEADS[method], *map(span, ratios)])
    return rows
