#!/usr/bin/env python
"""Tables of README.md and docs/ that show what demos measured, written from recorded runs.

    scripts/results.py write    # the tables of every page
    scripts/results.py check    # exit code 1 where a page has another

A page says `<!-- results: NAME -->` above a table: a function here, with dashes, whose first row is the heading.
Over several seeds a value is the mean of the runs: tau with Student's 95% interval, a speedup alone or with the range
of the runs. In a table of one run, tau has its bootstrap interval over requests and a speedup its quartiles.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from draftsmith.core.errors import UserError
from draftsmith.eval.summary import student_interval
from draftsmith.recipes.config.files import recipe_names

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
MARK = re.compile(r"^(?P<mark><!-- results: (?P<name>.+?) -->)\n+(?:^\|.*\n)*\n*", re.M)
Cell = dict[str, Any]
Rows = list[list[str]]


@cache
def runs_of(recipe: str) -> list[dict[str, Any]]:
    """The runs of a recipe in the order of their seeds: the evaluation that its tables are of, with `seed`."""
    runs = json.loads((RESULTS / f"{recipe}.json").read_text())
    stage = "compare" if recipe == "lvlm-distilled" else "evaluate"
    return [{"seed": seed, **runs[seed]["evaluations"][stage]} for seed in sorted(runs, key=int)]


def methods_of(recipe: str, temperature: float = 0.0) -> list[str]:
    """The methods of a recipe at a temperature, in its order."""
    cells = runs_of(recipe)[0]["cells"]
    return list(dict.fromkeys(cell["method"] for cell in cells if cell["temperature"] == temperature))


def cells_of(recipe: str, method: str, **where: Any) -> list[Cell]:
    """A method's cell in each run; at temperature 0 where `where` names none."""
    wanted = {"method": method, "temperature": 0.0, **where}
    matches = [
        [cell for cell in run["cells"] if all(cell.get(key) == value for key, value in wanted.items())]
        for run in runs_of(recipe)
    ]
    assert all(len(cells) == 1 for cells in matches), f"{recipe}: {wanted} is not one cell of each run"
    return [cells[0] for cells in matches]


def taus_by_drafter(recipe: str, method: str, place: str) -> dict[str, list[float]]:
    """Drafter -> its tau and the interval's ends, of the only run of a recipe whose methods have several drafters."""
    (run,) = runs_of(recipe)
    return {line["drafter"]: line["tau"][place] for line in run["by_drafter"] if line["method"] == method}


# Cells of tables


def mean_of(values: Sequence[float], sign: str = "") -> str:
    """The mean with Student's 95% interval."""
    mean, *ends = student_interval(values)
    return with_interval(mean, ends, sign)


def with_interval(value: float, ends: Sequence[float], sign: str = "") -> str:
    return f"{value:{sign}.2f} [{ends[0]:.2f}, {ends[1]:.2f}]"


def each(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def each_and_mean(values: Sequence[float]) -> str:
    return f"{each(values)}: {mean_of(values)}"


def span(values: Sequence[float], unit: str = "") -> str:
    """The mean with the lowest and the highest value."""
    return f"{statistics.fmean(values):.2f}{unit} ({min(values):.2f} to {max(values):.2f})"


def taus(cells: Sequence[Cell]) -> list[float]:
    return [cell["tau"] for cell in cells]


def speeds(cells: Sequence[Cell]) -> str:
    return span([cell["DSR"] for cell in cells], "x")


def tau_of_run(cell: Cell) -> str:
    return with_interval(cell["tau"], cell["tau_interval"])


def speed_of_run(cell: Cell) -> str:
    low, high = cell["DSR_spread"]
    return f"{cell['DSR']:.2f}x [{low:.2f}, {high:.2f}]"


def same(cell: Cell) -> str:
    """How many outputs equal plain decoding's, where they must."""
    return f"{cell['identical']}/{cell.get('answers', cell['requests'])}" if cell["exact"] else "-"


TABLES: dict[str, Callable[[], Rows]] = {}


def table(function: Callable[[], Rows]) -> Callable[[], Rows]:
    """Registers a table under its function's name."""
    TABLES[function.__name__.replace("_", "-")] = function
    return function


# demo/smollm2-full


@table
def smollm2_full() -> Rows:
    """Every method at temperature 0."""
    rows = [["method", "identical", "tau [95%]", "expected", "DSR [IQR]"]]
    for method in methods_of("smollm2-full"):
        (cell,) = cells_of("smollm2-full", method)
        rows.append([method, same(cell), tau_of_run(cell), f"{cell['expected_speedup']:.2f}x", speed_of_run(cell)])
    return rows


# demo/emoji-vlm


SHOWN = ("EAGLE-3, tree of 12", "MSD, tree of 12", "Medusa, tree of 12", "draft LVLM, M", "prompt lookup, chain")


def by_kind(cells: Sequence[Cell], temperature: float = 0.0) -> Rows:
    """Every method on each kind of question, and the range of its speedups over the kinds."""
    cells = [cell for cell in cells if cell["temperature"] == temperature]
    kinds = [*dict.fromkeys(cell["benchmark"] for cell in cells)]
    rows = [["drafter: tau [95%]", *kinds, "measured"]]
    for method in dict.fromkeys(cell["method"] for cell in cells):
        by_kind = {cell["benchmark"]: cell for cell in cells if cell["method"] == method}
        speedups = [cell["DSR"] for cell in by_kind.values()]
        taus = [tau_of_run(by_kind[kind]) for kind in kinds]
        rows.append([method, *taus, f"{min(speedups):.2f}–{max(speedups):.2f}x"])
    return rows


def without_intervals(rows: Rows) -> Rows:
    return [[text.split(" [")[0] for text in row] for row in rows]


def emoji_stages() -> dict[str, Any]:
    """The evaluations of demo/emoji-vlm-full's folder, in which emoji_vlm/exact ran last."""
    (run,) = json.loads((RESULTS / "exact.json").read_text()).values()
    return run["evaluations"]


def emoji_cells() -> list[Cell]:
    """Of the demo's own stages, which have every drafter once."""
    own = (stage for name, stage in emoji_stages().items() if name.startswith(("evaluate", "measure_")))
    return [cell for stage in own for cell in stage["cells"]]


@table
def emoji_vlm() -> Rows:
    """What README shows."""
    return without_intervals([row for row in emoji_vlm_full() if row[-1] == "measured" or row[0] in SHOWN])


@table
def emoji_vlm_full() -> Rows:
    return by_kind(emoji_cells())


@table
def emoji_vlm_drawn() -> Rows:
    return without_intervals(by_kind(emoji_cells(), 1.0))


@table
def emoji_vlm_seeds() -> Rows:
    """tau of three drafters each, by kind of question at temperature 0."""
    lines = emoji_stages()["seeds"]["by_drafter"]
    places = [place for place in lines[0]["tau"] if place.endswith("T = 0")]
    rows = [["drafter: tau of seeds 0, 1, 2", *(place.partition(",")[0] for place in places)]]
    for method in dict.fromkeys(line["method"] for line in lines):
        of = [line["tau"] for line in lines if line["method"] == method]
        rows.append([method, *(each([taus[place][0] for taus in of]) for place in places)])
    return rows


@table
def emoji_vlm_curve() -> Rows:
    """tau on naming after a quarter, half and all of the steps."""
    cells = {cell["method"]: cell for cell in emoji_stages()["curve"]["cells"]}
    rows = [["drafter: tau on naming [95%]", "a quarter of its steps", "half", "all"]]
    for one in dict.fromkeys(name.rpartition(", ")[0] for name in cells):
        rows.append([one, *(tau_of_run(cell) for name, cell in cells.items() if name.startswith(one))])
    return rows


@table
def emoji_vlm_picture() -> Rows:
    """What drafters accept by what they read: all places, the first cycle's, and words that hang on the picture."""
    rows = [["drafter", "of", "right [95%]", "another's", "none", "right - another's"]]
    for method, number, group, _, *values in emoji_stages()["need_picture"]["probes"]["swapped"]:
        if group in ("all", "first cycle", "words that hang on it") and not method.endswith((", T", "ViSkip")):
            of = number if group == "all" else f"{number}, {group}"
            rows.append([method, of, *(with_interval(value, ends) for value, *ends in values[:3]),
                         with_interval(values[3][0], values[3][1:], "+")])  # fmt: skip
    return rows


@table
def emoji_vlm_gates() -> Rows:
    """What targets of three seeds owe to pictures, each with its interval over head nouns; no gaps of names."""
    each_run = json.loads((RESULTS / "gates.json").read_text())
    stages = [each_run[seed]["evaluations"]["gates"]["probes"]["sight"] for seed in sorted(each_run, key=int)]
    rows = [["measured", "on", "n", *(f"seed {seed}" for seed in sorted(each_run, key=int))]]
    for of in zip(*stages, strict=True):
        if of[0][0].startswith("name,") or not of[0][1].endswith(("names", "all", "first turns")):
            continue
        values = [value if isinstance(value, list) else [value] for *_, value in of]
        rows.append([*map(str, of[0][:3]), *(with_interval(value, ends) if ends else f"{value:.2f}"
                     for value, *ends in values)])  # fmt: skip
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
    means = [f"{mean_of(taus(cells))}, {statistics.fmean(cell['DSR'] for cell in cells):.2f}x" for cells in both]
    return [*rows, ["mean", "", *means]]


@table
def distilled() -> Rows:
    """Drafts that learned from the target against drafts that learned from the data, over the drafts of one run."""
    rows = [["benchmark", "learned from the target", "learned from the data", "difference", "verdict"]]
    for where, compared in runs_of("lvlm-distilled")[0]["comparison"].items():
        place = where.removesuffix(", mode M")
        requests = cells_of("lvlm-distilled", "M", benchmark=place)[0]["requests"]
        by_drafter = taus_by_drafter("lvlm-distilled", "M", place)
        sides = [[value for name, (value, *_) in by_drafter.items() if name.startswith(way)]
                 for way in ("distill", "finetune")]  # fmt: skip
        difference = mean_of(list(compared["each"].values()), "+")
        rows.append([f"{place} ({requests} requests for each draft)", *map(each, sides), difference,
                     compared["verdict"]])  # fmt: skip
    return rows


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


@table
def dflash() -> Rows:
    labels = {
        "DFlash from distributions": "DFlash, trained on the target's distribution",
        **{f"{name}, 25 nodes": f"{name}, tree of 25 nodes" for name in ("DFlash", "DSpark", "EAGLE-3")},
    }
    rows = [["method", "passes", "T = 0: tau", "drafting, ms", "DSR", "T = 1: tau", "DSR"]]
    for method in methods_of("dflash"):
        head, *cut = method.partition(", cut")
        hotter = "".join([head, ", sampled", *cut])
        cold = cells_of("dflash", method)
        hot = cells_of("dflash", hotter, temperature=1.0) if hotter in methods_of("dflash", 1.0) else []
        rows.append([labels.get(method, method), "7" if method.startswith("EAGLE") else "1", each_and_mean(taus(cold)),
                     span([cell["drafter_ms"] for cell in cold]), speeds(cold),
                     *((each_and_mean(taus(hot)), speeds(hot)) if hot else ("-", "-"))])  # fmt: skip
    return rows


@table
def runs() -> Rows:
    """What was run: every recipe of docs/results."""
    rows = [["recipe", "seeds", "commit", "date"]]
    names = {name.rpartition("/")[2]: name for name in sorted(recipe_names(), key=lambda name: "demo/" in name)}
    for path in sorted(RESULTS.glob("*.json")):
        by_seed = json.loads(path.read_text())
        about = [evaluation["about"] for run in by_seed.values() for evaluation in run["evaluations"].values()]
        values = by_seed, {run["commit"][:7] for run in by_seed.values()}, {one["date"] for one in about}
        rows.append([f"`{names[path.stem]}`", *map(", ".join, map(sorted, values))])
    return rows


# Pages


def markdown(name: str) -> str:
    """A table in Markdown. Raises `UserError` where no function has this name."""
    if name not in TABLES:
        raise UserError(f"a page marks a table {name!r}, and none has this name", where="scripts/results.py",
                        hint="correct the mark or add the function")  # fmt: skip
    rows = TABLES[name]()
    heading, *lines = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([heading, "|" + " --- |" * len(rows[0]), *lines])


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rewritten(page: str) -> str:
    """The page with each of its tables as the recorded runs have it."""
    return MARK.sub(lambda match: f"{match['mark']}\n\n{markdown(match['name'])}\n\n", page).rstrip("\n") + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("write", "check"))
    verb = parser.parse_args(arguments).verb
    stale = {path: new for path in pages() if (new := rewritten(old := path.read_text())) != old}
    for path, new in stale.items():
        print(path.relative_to(ROOT))
        if verb == "write":
            path.write_text(new)
    return int(bool(stale) and verb == "check")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
