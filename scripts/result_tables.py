"""What the tables of `results.py` hold: a function for each, named as pages name it, in Markdown.

Over several seeds a value is the mean of the runs: tau with Student's 95% interval, a speedup alone or with the range
of the runs. Of one run, tau has its bootstrap interval over requests and a speedup its quartiles.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from draftsmith.eval import tables
from draftsmith.eval.summary import student_half_width

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
Cell = dict[str, Any]
Rows = list[list[str]]
TABLES: dict[str, Callable[[], Rows]] = {}


def markdown(name: str) -> str:
    """A table of `TABLES`, its heading first.

    Raises:
        KeyError: no function has this name.
    """
    heading, *rows = TABLES[name]()
    return "\n".join(tables.markdown(tables.words(heading, rows)))


def _table(function: Callable[[], Rows]) -> Callable[[], Rows]:
    TABLES[function.__name__.replace("_", "-")] = function
    return function


@cache
def _runs(recipe: str) -> dict[int, dict[str, Any]]:
    """Seed -> the evaluation of a run."""
    runs = json.loads((RESULTS / f"{recipe}.json").read_text())
    return {int(seed): next(iter(run["evaluations"].values())) for seed, run in runs.items()}


def cells_of(recipe: str, method: str, benchmark: str | None = None, **where: Any) -> list[Cell]:
    """A method's cell in each run, in the order of the seeds."""
    wanted = {"method": method, "temperature": 0.0, **({"benchmark": benchmark} if benchmark else {}), **where}
    found = [
        [cell for cell in run["cells"] if all(cell.get(key) == value for key, value in wanted.items())]
        for run in _runs(recipe).values()
    ]
    assert all(len(each) == 1 for each in found), f"{recipe}: {wanted} is not one cell of each run"
    return [each[0] for each in found]


def _of_one(recipe: str, seed: int, method: str, benchmark: str | None = None, **where: Any) -> Cell:
    """A method's cell in one run."""
    return cells_of(recipe, method, benchmark, **where)[sorted(_runs(recipe)).index(seed)]


def student(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of some runs and the ends of Student's 95% interval."""
    mean, half = statistics.fmean(values), student_half_width(statistics.stdev(values), len(values))
    return mean, mean - half, mean + half


def _tau(cells: Sequence[Cell]) -> str:
    mean, low, high = student([cell["tau"] for cell in cells])
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def _taus(cells: Sequence[Cell]) -> str:
    return ", ".join(f"{cell['tau']:.2f}" for cell in cells)


def _speed(cells: Sequence[Cell]) -> str:
    return f"{statistics.fmean(cell['DSR'] for cell in cells):.2f}x"


def _range(cells: Sequence[Cell]) -> str:
    speeds = [cell["DSR"] for cell in cells]
    return f"{_speed(cells)} ({min(speeds):.2f} to {max(speeds):.2f})"


def _tau_of_run(cell: Cell) -> str:
    low, high = cell["tau_interval"]
    return f"{cell['tau']:.2f} [{low:.2f}, {high:.2f}]"


def _ratio_of_run(cell: Cell, what: str = "DSR") -> str:
    low, high = cell[f"{what}_spread"]
    return f"{cell[what]:.2f}x [{low:.2f}, {high:.2f}]"


def _same(cell: Cell) -> str:
    return f"{cell['identical']}/{cell['requests']}" if cell["exact"] else "-"


@_table
def runs() -> Rows:
    """What was run: every recipe of docs/results."""
    rows = [["recipe", "seeds", "commit", "date", "device", "torch"]]
    for path in sorted(RESULTS.glob("*.json")):
        kept = json.loads(path.read_text())
        about = [run["evaluations"][stage]["about"] for run in kept.values() for stage in run["evaluations"]]
        said = [sorted({run["commit"][:7] for run in kept.values()})]
        said += [sorted({one[key] for one in about}) for key in ("date", "device", "torch")]
        rows.append([f"`demo/{path.stem}`", ", ".join(sorted(kept, key=int)), *(", ".join(values) for values in said)])
    return rows


# demo/lvlm


@_table
def lvlm_readme() -> Rows:
    """The first demo's report, on pictures, of seed 0."""
    means = {"M": "M: the draft sees the picture", "T": "T: it sees the text alone"}
    rows = [["benchmark", "mode", "n", "tau [95%]", "expected speedup", "measured [IQR]", "identical"]]
    for mode, label in means.items():
        cell = _of_one("lvlm", 0, mode, "pictures")
        expected = f"{cell['expected_speedup']:.2f}x"
        rows.append(["pictures", label, f"{cell['requests']}", _tau_of_run(cell), expected, _ratio_of_run(cell),
                     _same(cell)])  # fmt: skip
    return rows


@_table
def lvlm_seeds() -> Rows:
    """Each run of the first demo, and the means."""
    sets = [("pictures", "M"), ("pictures", "T"), ("text", "M"), ("text", "T")]
    rows = [["seed", "right attribute named with the picture, without it",
             *(f"{name}: tau {mode}" if mode == "M" else f"tau {mode}" for name, mode in sets)]]  # fmt: skip
    for seed, run in sorted(_runs("lvlm").items()):
        seen = f"{run['binding']['accuracy']:.0%}, {run['binding']['blind_accuracy']:.0%}"
        cells = [_of_one("lvlm", seed, mode, name) for name, mode in sets]
        rows.append([str(seed), seen, *(f"{cell['tau']:.2f}, {cell['DSR']:.2f}x" for cell in cells)])
    both = [cells_of("lvlm", mode, name) for name, mode in sets]
    rows.append(["mean", "", *(f"{_tau(cells)}, {_speed(cells)}" for cells in both)])
    return rows


@_table
def lvlm_report() -> Rows:
    """The table of the first demo's report, seed 0."""
    rows = [["benchmark", "mode", "n", "tau [95%]", "tau per request", "T_q/T_p", "expected", "DSR [IQR]", "ESR [IQR]",
             "prefill", "identical"]]  # fmt: skip
    for name, mode in (("pictures", "M"), ("pictures", "T"), ("text", "M"), ("text", "T")):
        cell = _of_one("lvlm", 0, mode, name)
        rows.append([name, mode, f"{cell['requests']}", _tau_of_run(cell), f"{cell['tau_mean_of_requests']:.2f}",
                     f"{cell['T_q_over_T_p']:.2f}", f"{cell['expected_speedup']:.2f}x", _ratio_of_run(cell),
                     _ratio_of_run(cell, "ESR"), f"{cell['prefill_share']:.0%}", _same(cell)])  # fmt: skip
    return rows


@_table
def lvlm_tabed() -> Rows:
    """Means of the first demo's runs, by benchmark and mode."""
    rows = [["benchmark", "M", "T"]]
    for name in ("pictures", "text"):
        both = [cells_of("lvlm", mode, name) for mode in ("M", "T")]
        requests = both[0][0]["requests"]
        rows.append([f"{name} ({requests} a run)", *(f"{_tau(cells)}, {_speed(cells)}" for cells in both)])
    return rows


# demo/compare

SETS = ("single", "pairs", "clips")


def compared() -> list[str]:
    """The methods of demo/compare, in the order of the recipe."""
    return list(dict.fromkeys(cell["method"] for cell in next(iter(_runs("compare").values()))["cells"]))


def _beside(methods: dict[str, str]) -> Rows:
    """tau and speed of some methods on each set, in one column a set: the tables of methods' pages."""
    rows = [["method", *SETS]]
    for method, label in methods.items():
        both = [cells_of("compare", method, name) for name in SETS]
        rows.append([label, *(f"{_tau(cells)}, {_speed(cells)}" for cells in both)])
    return rows


@_table
def compare_readme() -> Rows:
    some = ("draft LVLM, M", "DFlash, chain", "EAGLE-3, chain", "EAGLE-3, tree", "Sparrow half blind, tree",
            "Medusa, tree", "draft LVLM, M, SAGE")  # fmt: skip
    rows = [["method", "single tau", "measured", "pairs tau", "measured", "clips tau", "measured"]]
    for method in some:
        both = [cells_of("compare", method, name) for name in SETS]
        rows.append([method, *(text for cells in both for text in (_tau(cells), _speed(cells)))])
    return rows


@_table
def compare() -> Rows:
    """Every method; of each column the best is bold and the second underlined."""
    by_method = {method: [cells_of("compare", method, name) for name in SETS] for method in compared()}
    rows = {method: [method] for method in by_method}
    for place in range(len(SETS)):
        for key, shown in (("tau", _tau), ("DSR", _speed)):
            means = [statistics.fmean(cell[key] for cell in cells[place]) for cells in by_method.values()]
            for (method, cells), mark in zip(by_method.items(), tables.best(means), strict=True):
                value, *rest = shown(cells[place]).split(" ", 1)
                value = {"best": f"**{value}**", "second": f"<u>{value}</u>"}.get(mark, value)
                rows[method].append(" ".join([value, *rest]))
    heading = ["method", *(text for name in SETS for text in (f"{name} tau [95%]", f"{name} DSR"))]
    return [heading, *rows.values()]


@_table
def compare_seeds() -> Rows:
    rows = [["method", *(text for name in SETS for text in (f"{name}: tau", "DSR"))]]
    for method in compared():
        both = [cells_of("compare", method, name) for name in SETS]
        rows.append([method, *(text for cells in both for text in (_taus(cells), _range(cells)))])
    return rows


@_table
def compare_eagle() -> Rows:
    return _beside({"EAGLE, tree": "EAGLE, tree", "EAGLE, chain": "EAGLE, chain"})


@_table
def compare_eagle_3() -> Rows:
    return _beside({name: name for name in ("EAGLE-3, tree", "EAGLE-3, chain", "EAGLE-3, SAGE")})


@_table
def compare_msd() -> Rows:
    return _beside({name: name for name in ("MSD, tree", "MSD, chain")})


@_table
def compare_medusa() -> Rows:
    return _beside({name: name for name in ("Medusa, tree", "Medusa, chain")})


@_table
def compare_vispec() -> Rows:
    return _beside({name: name for name in ("ViSpec, tree", "MSD, tree", "EAGLE, tree")})


@_table
def compare_hivis() -> Rows:
    return _beside({name: name for name in ("HiViS, tree", "Sparrow half blind, tree", "Sparrow, tree")})


@_table
def compare_block() -> Rows:
    """Drafters of one pass beside those of five."""
    return _beside({name: name for name in ("DFlash, chain", "DFlash, tree", "P-EAGLE, chain", "EAGLE-3, chain")})


@_table
def compare_sage() -> Rows:
    return _beside({"draft LVLM, M, SAGE": "draft LVLM, M, SAGE", "draft LVLM, M, tree": "the same, dynamic tree",
                    "EAGLE-3, SAGE": "EAGLE-3, SAGE"})  # fmt: skip


@_table
def compare_specvlm() -> Rows:
    return _beside({"pruned target, chain": "pruned target, chain"})


# demo/video: one run

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
_LENGTHS = ["early facts: 36 visual tokens", "288", "1,998", "late facts: 36", "288", "1,998"]


def _clips(method: str) -> list[Cell]:
    """A method's cells at each length, with early facts and then with late ones."""
    return [_of_one("video", 0, method, name, budget=length) for name in FACTS for length in LENGTHS]


@_table
def video_again() -> Rows:
    rows = [[*names, *map(_tau_of_run, _clips(method))] for method, names in HEADS.items()]
    return [["head, and visual inputs in training", "decoding", *_LENGTHS], *rows]


@_table
def video_steps() -> Rows:
    """Time of a draft step at each length over that at the shortest one."""
    rows = [["head, and visual inputs in training", "decoding", *_LENGTHS]]
    for method in ("matched", "half blind", "half blind without VATA", "MSD"):
        times = [cell["T_q_ms"] for cell in _clips(method)]
        rows.append([*HEADS[method], *(f"{time / times[i - i % 3]:.2f}" for i, time in enumerate(times))])
    return rows


# demo/visual-ar


def _captioned(method: str, temperature: float) -> str:
    """Share of the run's pictures that a reader network reads as captioned."""
    (run,) = _runs("visual-ar").values()
    return f"{run['quality'][f'{temperature:g}'][method]['as_captioned']:.0%}"


def _named(cell: Cell) -> str:
    return f"{cell['method']} (relaxed)" if cell["relaxed"] else cell["method"]


def _drawn(temperature: float) -> dict[str, Cell]:
    """Method -> its cell in the run of demo/visual-ar."""
    (run,) = _runs("visual-ar").values()
    return {cell["method"]: cell for cell in run["cells"] if cell["temperature"] == temperature}


@_table
def visual_ar_sampled() -> Rows:
    rows = [["method", "n", "speedup [IQR]", "tau [95%]", "kept depth", "nodes", "drawn as captioned"]]
    cells = _drawn(1.0)
    n = str(next(iter(cells.values()))["requests"])
    rows.append(["plain decoding", n, "1.00x", "1.00", "1.00", "0", _captioned("plain decoding", 1.0)])
    for method, cell in cells.items():
        rows.append([_named(cell), n, _ratio_of_run(cell), _tau_of_run(cell), f"{cell['kept_depth']:.2f}",
                     f"{cell['mean_nodes']:.0f}", _captioned(method, 1.0)])  # fmt: skip
    return rows


@_table
def visual_ar_greedy() -> Rows:
    rows = [["method", "speedup [IQR]", "tau [95%]", "kept depth", "drawn as captioned"]]
    for method, cell in _drawn(0.0).items():
        rows.append([_named(cell), _ratio_of_run(cell), _tau_of_run(cell), f"{cell['kept_depth']:.2f}",
                     _captioned(method, 0.0)])  # fmt: skip
    return rows


def _greedy_pair(methods: dict[str, str]) -> Rows:
    cells = _drawn(0.0)
    rows = [[label, _ratio_of_run(cells[method]), _tau_of_run(cells[method]), _captioned(method, 0.0)]
            for method, label in methods.items()]  # fmt: skip
    return [["method", "speedup [IQR]", "tau [95%]", "drawn as captioned"], *rows]


@_table
def visual_ar_adt() -> Rows:
    return _greedy_pair({"EAGLE-2": "EAGLE-2", "ADT-Tree": "ADT-Tree"})


@_table
def visual_ar_lantern() -> Rows:
    return _greedy_pair({"EAGLE-2": "EAGLE-2 (exact)", "LANTERN": "LANTERN"})
