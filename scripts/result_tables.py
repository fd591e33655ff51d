"""The tables of `results.py`: a function for each, named as pages name it; its first row is the heading."""

import json
import statistics
from collections.abc import Callable, Sequence

from results import (
    RESULTS,
    Cell,
    Rows,
    cells_of,
    each,
    each_and_mean,
    mean_of,
    methods_of,
    named,
    runs_of,
    same,
    span,
    speed,
    speed_of_run,
    speeds,
    tau_of_run,
    taus,
    taus_by_drafter,
    with_interval,
)  # fmt: skip

TABLES: dict[str, Callable[[], Rows]] = {}


def table(function: Callable[[], Rows]) -> Callable[[], Rows]:
    """Registers a table under its function's name."""
    TABLES[function.__name__.replace("_", "-")] = function
    return function


# demo/smollm2-full


@table
def smollm2_full_readme() -> Rows:
    """The fastest row of each drafter, and what is free."""
    rows = [["drafter", "tau [95%]", "measured [IQR]", "identical", "at temperature 1"]]
    for method in ("EAGLE-3, tree of 12", "DFlash, chain of 5", "DSpark, chain of 5", "Medusa, chain of 3",
                   "prompt lookup, chain", "suffix lookup, chain"):  # fmt: skip
        (cell,), (hot,) = (cells_of("smollm2-full", method, temperature=t) for t in (0.0, 1.0))
        last = f"{hot['tau']:.2f}, {hot['DSR']:.2f}x"
        rows.append([method, tau_of_run(cell), speed_of_run(cell), same(cell), last])
    return rows


# demo/lvlm and its family


@table
def lvlm_seeds() -> Rows:
    """Each run of demo/lvlm-from-nothing, and the means."""
    rows = [["seed", "right attribute named with the picture, without it", "pictures: tau M", "tau T", "text: tau M",
             "tau T"]]  # fmt: skip
    both = [cells_of("lvlm-from-nothing", mode, benchmark=name) for name in ("pictures", "text") for mode in "MT"]
    for number, run in enumerate(runs_of("lvlm-from-nothing")):
        named_right = f"{run['binding']['accuracy']:.0%}, {run['binding']['blind_accuracy']:.0%}"
        rows.append([run["seed"], named_right,
                     *(f"{cells[number]['tau']:.2f}, {cells[number]['DSR']:.2f}x" for cells in both)])  # fmt: skip
    return [*rows, ["mean", "", *(f"{mean_of(taus(cells))}, {speed(cells)}" for cells in both)]]


@table
def distilled() -> Rows:
    """Drafts that learned from the target against drafts that learned from the data, over the drafts of one run."""
    rows = [["benchmark", "learned from the target", "learned from the data", "difference", "verdict"]]
    for where, compared in runs_of("lvlm-distilled")[0]["comparison"].items():
        place = where.removesuffix(", mode M")
        requests = cells_of("lvlm-distilled", "M", benchmark=place)[0]["requests"] // 6  # of six drafts
        by_drafter = taus_by_drafter("lvlm-distilled", "M", place)
        sides = [[value for name, (value, *_) in by_drafter.items() if name.startswith(way)]
                 for way in ("distill", "finetune")]  # fmt: skip
        difference = mean_of(list(compared["each"].values()), "+")
        rows.append([f"{place} ({requests} requests for each draft)", *map(each, sides), difference,
                     compared["verdict"]])  # fmt: skip
    return rows


@table
def ov() -> Rows:
    """tau with the pictures of four drafts of demo/lvlm-ov that differ in positions and in training."""
    drafts = {
        "few_single_only": "64 positions, trained on single pictures",
        "few_onevision": "64 positions, trained on several",
        "single_only": "256 positions, trained on single pictures",
        "onevision": "256 positions, trained on several",
    }
    by_place = [taus_by_drafter("lvlm-ov", "M", place) for place in ("single", "pairs", "stories", "clips")]
    rows = [[label, *(with_interval(taus[name][0], taus[name][1:]) for taus in by_place)]
            for name, label in drafts.items()]  # fmt: skip
    return [["draft", "single", "pairs", "stories (5 pictures)", "clips"], *rows]


@table
def adapt() -> Rows:
    """tau of adapted heads and of heads from scratch, by steps; shares of the longest from scratch, seed by seed."""
    by_drafter = taus_by_drafter("adapt", "chain", "new")
    heads = {"old": ("adapted", 0), "fortieth": ("adapted", 37), "twentieth": ("adapted", 75),
             "tenth": ("adapted", 150), "adapted": ("adapted", 300), "short": ("from scratch", 300),
             "fresh": ("from scratch", 1500)}  # fmt: skip
    rows = [["head", "steps", "seed 0", "seed 1", "seed 2", "mean", "share of heads from scratch, by seed",
             "mean share"]]  # fmt: skip
    seeds = ("", "_1", "_2")
    for name, (head, steps) in heads.items():
        values = [by_drafter[name + seed][0] for seed in seeds]
        shares = [value / by_drafter["fresh" + seed][0] for value, seed in zip(values, seeds, strict=True)]
        rows.append([head, f"{steps:,} ({steps / 1500:.1%})", *(f"{value:.2f}" for value in values),
                     f"{statistics.fmean(values):.2f}", ", ".join(f"{share:.1%}" for share in shares),
                     f"{statistics.fmean(shares):.1%}"])  # fmt: skip
    return rows


# demo/compare

SETS = ("single", "pairs", "clips")


@table
def compare() -> Rows:
    """Every method; of each column the best is bold and the second underlined."""
    by_method = {method: [cells_of("compare", method, benchmark=name) for name in SETS]
                 for method in methods_of("compare")}  # fmt: skip
    rows = {method: [method] for method in by_method}
    for place in range(len(SETS)):
        for key in ("tau", "DSR"):
            means = {method: round(statistics.fmean(cell[key] for cell in by_set[place]), 2)
                     for method, by_set in by_method.items()}  # fmt: skip
            best, second, *_ = sorted({*means.values()}, reverse=True)
            for method, by_set in by_method.items():
                shown = mean_of(taus(by_set[place])) if key == "tau" else speed(by_set[place])
                value, *rest = shown.split(" ", 1)
                value = {best: f"**{value}**", second: f"<u>{value}</u>"}.get(means[method], value)
                rows[method].append(" ".join([value, *rest]))
    heading = ["method", *(text for name in SETS for text in (f"{name} tau [95%]", f"{name} DSR"))]
    return [heading, *rows.values()]


# demo/sage, demo/dflash


@table
def sage() -> Rows:
    labels = {"SAGE, template": "SAGE as printed", "SAGE, online": "SAGE, grown online (ours)"}
    rows = [["tree", "tau of three drafts: mean [95%]", "mean nodes of a cycle", "DSR [IQR]", "expected", "identical"]]
    for method in methods_of("sage"):
        (cell,) = cells_of("sage", method)
        drafts = [value for value, *_ in taus_by_drafter("sage", method, "tales").values()]
        rows.append([labels.get(method, method), each_and_mean(drafts), f"{cell['mean_nodes']:.1f}",
                     speed_of_run(cell), f"{cell['expected_speedup']:.2f}x", same(cell)])  # fmt: skip
    return rows


def sampled(method: str) -> list[Cell]:
    """Cells of a method of demo/dflash at temperature 1; none where it was not sampled."""
    head, _, cut = method.partition(", cut")
    name = f"{head}, sampled" + (f", cut{cut}" if cut else "")
    return cells_of("dflash", name, temperature=1.0) if name in methods_of("dflash", 1.0) else []


def drafting(cells: Sequence[Cell]) -> list[float]:
    """Milliseconds of a cycle in the drafter."""
    return [cell["drafter_ms"] for cell in cells]


@table
def dflash() -> Rows:
    labels = {
        "DFlash from distributions": "DFlash, trained on the target's distribution",
        **{f"{name}, 25 nodes": f"{name}, tree of 25 nodes" for name in ("DFlash", "DSpark", "EAGLE-3")},
    }
    rows = [["method", "passes", "T = 0: tau", "drafting, ms", "DSR", "T = 1: tau", "DSR"]]
    for method in methods_of("dflash"):
        cold, hot = cells_of("dflash", method), sampled(method)
        rows.append([labels.get(method, method), "7" if method.startswith("EAGLE") else "1", each_and_mean(taus(cold)),
                     span(drafting(cold)), speeds(cold),
                     *((each_and_mean(taus(hot)), speeds(hot)) if hot else ("-", "-"))])  # fmt: skip
    return rows


# demo/video

FACTS = {"clips-222": "early facts", "late-222": "late facts"}
LENGTHS = ["early facts: 36 visual tokens", "288", "1,998", "late facts: 36", "288", "1,998"]
PAPERS, MATCHED = "Sparrow, all (the paper's)", "Sparrow, none (matched)"
HALF_BLIND = "Sparrow, none in half (half blind)"


def clips(method: str) -> list[list[Cell]]:
    """A method's cells of each run at each length in visual tokens, with early facts and then with late ones."""
    return [cells_of("video", method, benchmark=name, budget=n) for name in FACTS for n in ("36", "288", "1998")]


@table
def video() -> Rows:
    heads = {
        "Sparrow": (PAPERS, "VATA"), "matched": (MATCHED, "VATA"), "half blind": (HALF_BLIND, "VATA"),
        "Sparrow without VATA": (PAPERS, "all inputs"), "half blind without VATA": (HALF_BLIND, "all inputs"),
        "MSD": ("MSD, all", "all inputs"), "MSD with VATA": ("MSD, all", "VATA"),
    }  # fmt: skip
    rows = [[*labels, *(mean_of(taus(cells)) for cells in clips(method))] for method, labels in heads.items()]
    return [["head, and visual inputs in training", "decoding", *LENGTHS], *rows]


# demo/visual-ar and its family

TEXTURES, PLAIN = "visual-ar-textures", "plain decoding"


def score(recipe: str, method: str, temperature: float, metric: str) -> float:
    """A score of a method's pictures, the mean of the runs; `as_captioned`: the share that a network reads as such."""
    return statistics.fmean(run["quality"][f"{temperature:g}"][method][metric] for run in runs_of(recipe))


@table
def textures() -> Rows:
    """Every method of demo/visual-ar-textures at both temperatures."""
    rows = [["method", *(text for t in ("T = 0", "T = 1") for text in (f"tau [95%], {t}", "DSR", "as captioned",
                                                                       "FID"))]]  # fmt: skip
    for method in [PLAIN, *dict.fromkeys(method for t in (0.0, 1.0) for method in methods_of(TEXTURES, t))]:
        row = ["plain decoding" if method == PLAIN else method]
        for t in (0.0, 1.0):
            if method == PLAIN:
                row += ["1", "1.00x"]
            elif method in methods_of(TEXTURES, t):
                found = cells_of(TEXTURES, method, temperature=t)
                row[0] = named(found[0])
                row += [mean_of(taus(found)), speeds(found)]
            else:
                row += ["-"] * 4
                continue
            row += [f"{score(TEXTURES, method, t, 'as_captioned'):.0%}",
                    f"{score(TEXTURES, method, t, 'fid_of_reader'):.0f}"]  # fmt: skip
        rows.append(row)
    return rows


# What was required before measuring, beside what was measured


@table
def runs() -> Rows:
    """What was run: every recipe of docs/results."""
    rows = [["recipe", "seeds", "commit", "date", "device", "torch"]]
    for path in sorted(RESULTS.glob("*.json")):
        by_seed = json.loads(path.read_text())
        about = [evaluation["about"] for run in by_seed.values() for evaluation in run["evaluations"].values()]
        values = [sorted({run["commit"][:7] for run in by_seed.values()})]
        values += [sorted({one[key] for one in about}) for key in ("date", "device", "torch")]
        rows.append([f"`demo/{path.stem}`", ", ".join(sorted(by_seed, key=int)), *map(", ".join, values)])
    return rows
