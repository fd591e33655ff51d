#!/usr/bin/env python
"""Tables of README.md and docs/ that show what demos measured, written from recorded runs.

    scripts/results.py record runs/compare-0 runs/compare-1 runs/compare-2    # finished runs, into docs/results
    scripts/results.py write                                                  # the tables of every page
    scripts/results.py check                                                  # exit code 1 where a page has another

A page says `<!-- results: NAME -->` above a table. NAME is a function of `result_tables.py`, with dashes, or
`cells RECIPE: COLUMN, ...`. Over several seeds a value is the mean of the runs: tau with Student's 95% interval, a
speedup alone or with the range of the runs. In a table of one run, tau has its bootstrap interval over requests and a
speedup its quartiles.
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
from draftsmith.core.files import read_yaml
from draftsmith.eval.intervals import student_half_width

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
MARK = re.compile(r"(?P<mark>^<!-- results: (?P<name>.+?) -->\n\n)(?P<table>(?:^\|.*\n)*)\n?", re.M)
Cell = dict[str, Any]
Rows = list[list[str]]

# Recording


CELL = (
    "benchmark", "budget", "temperature", "method", "requests", "tau", "tau_interval", "DSR", "DSR_spread",
    "expected_speedup", "T_q_ms", "T_q_over_T_p", "kept_depth", "mean_nodes", "drafter_ms", "identical", "exact",
    "relaxed",
)  # fmt: skip


def recorded(folder: Path) -> tuple[str, dict[str, Any]]:
    """The name of a finished run's recipe without `demo/`, and what is kept of the run.

    Raises:
        UserError: the run measured nothing, or its code was not that of a commit.
    """
    about = read_yaml(folder / "run.yaml", dict[str, Any], hint="give the output folder of a run")
    commit, changed = about["git"]["commit"], about["git"]["changed_files"]
    if commit is None or changed:
        raise UserError("its code is not that of a commit", where=str(folder), hint="run it in a clone without changes")
    reports = {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/report.json"))}
    if not reports:
        raise UserError("nothing was measured here", where=str(folder), hint="let the run end")
    seed = next(iter(reports.values()))["about"]["seed"]
    evaluations = {name: shortened(evaluation(report)) for name, report in reports.items()}
    return Path(about["recipe"]).stem, {"seed": seed, "commit": commit, "evaluations": evaluations}


def evaluation(report: dict[str, Any]) -> dict[str, Any]:
    """What tables read of one report."""
    result: dict[str, Any] = {"about": {key: report["about"][key] for key in ("device", "date", "torch")}}
    if report.get("binding"):
        result["binding"] = report["binding"]
    if report.get("quality"):  # temperature -> method -> metric
        result["quality"] = {
            t: {method: {name: score["value"] for name, score in scores.items()} for method, scores in methods.items()}
            for t, methods in report["quality"].items()
        }
    if report.get("contrasts"):
        result["contrasts"] = [
            {"name": one["name"], "mode": one["mode"], "place": one["place"]}
            | {"difference": one["result"]["difference"], "interval": one["result"]["interval"]}
            for one in report["contrasts"]
        ]
    if report.get("comparison"):  # place -> two ways of training over seeds
        keys = ("each", "mean", "interval", "verdict")
        result["comparison"] = {place: {k: one[k] for k in keys} for place, one in report["comparison"].items()}
    for table in report["tables"]:
        if table["title"] == "By drafter":
            places = [column["name"] for column in table["columns"]][2:-1]
            result["by_drafter"] = [
                {"drafter": drafter, "method": method, "tau": dict(zip(places, taus, strict=True))}
                for drafter, method, *taus, _ in table["rows"]
            ]
    for section in report["sections"]:
        if section["name"] == "suite":  # title of each table -> method -> heading -> number
            result["suite"] = {table["title"]: by_method(table) for table in section["tables"]}
    result["cells"] = [{key: cell[key] for key in CELL if key in cell} for cell in report["cells"]]
    return result


def by_method(table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    names = [" ".join(filter(None, (column["group"], column["name"]))) for column in table["columns"]]
    return {method: dict(zip(names[2:], values, strict=True)) for _, method, *values in table["rows"]}


def shortened(value: Any) -> Any:
    """Floats with six digits: tables show four."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: shortened(part) for key, part in value.items()}
    return [shortened(part) for part in value] if isinstance(value, list) else value


def record(folders: Sequence[Path]) -> None:
    """Keep finished runs by recipe and seed. Runs of an earlier commit go: a table never mixes two."""
    runs: dict[str, dict[str, Any]] = {}
    for folder in folders:
        recipe, run = recorded(folder)
        runs.setdefault(recipe, {})[str(run["seed"])] = run
    for recipe, by_seed in runs.items():
        path = RESULTS / f"{recipe}.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        commits = {run["commit"] for run in by_seed.values()}
        by_seed = {seed: run for seed, run in before.items() if run["commit"] in commits} | by_seed
        # A line for each cell, so that a difference of two versions can be read.
        lines = [f'"{seed}": ' + json.dumps(by_seed[seed]).replace('{"benchmark"', '\n{"benchmark"')
                 for seed in sorted(by_seed, key=int)]  # fmt: skip
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(f"{path.relative_to(ROOT)}: seeds {', '.join(sorted(by_seed, key=int))}")


# Recorded runs


@cache
def runs_of(recipe: str) -> list[dict[str, Any]]:
    """The runs of a recipe in the order of their seeds: the evaluation that its tables are of, with `seed`."""
    runs = json.loads((RESULTS / f"{recipe}.json").read_text())
    stage = {"suite": "suite", "lvlm-distilled": "compare"}.get(recipe, "evaluate")
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
    mean, half = statistics.fmean(values), student_half_width(statistics.stdev(values), len(values))
    return with_interval(mean, (mean - half, mean + half), sign)


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


def speed(cells: Sequence[Cell]) -> str:
    return f"{statistics.fmean(cell['DSR'] for cell in cells):.2f}x"


def speeds(cells: Sequence[Cell]) -> str:
    return span([cell["DSR"] for cell in cells], "x")


def tau_of_run(cell: Cell) -> str:
    return with_interval(cell["tau"], cell["tau_interval"])


def speed_of_run(cell: Cell) -> str:
    low, high = cell["DSR_spread"]
    return f"{cell['DSR']:.2f}x [{low:.2f}, {high:.2f}]"


def same(cell: Cell) -> str:
    """How many outputs equal plain decoding's, where they must."""
    return f"{cell['identical']}/{cell['requests']}" if cell["exact"] else "-"


def named(cell: Cell) -> str:
    """The method, and whether its outputs are distributed otherwise than the target's."""
    return f"{cell['method']} (relaxed)" if cell["relaxed"] and "relaxed" not in cell["method"] else cell["method"]


# Heading -> what a column of this name shows of one run's cell.
COLUMNS: dict[str, Callable[[Cell], str]] = {
    "T": lambda cell: f"{cell['temperature']:g}",
    "method": named,
    "n": lambda cell: str(cell["requests"]),
    "identical": lambda cell: "-" if cell["temperature"] else same(cell),
    "tau [95%]": tau_of_run,
    "T_q/T_p": lambda cell: f"{cell['T_q_over_T_p']:.2f}",
    "expected": lambda cell: f"{cell['expected_speedup']:.2f}x",
    "DSR [IQR]": speed_of_run,
}


def cells(recipe: str, columns: Sequence[str]) -> Rows:
    """A line for each cell of a recipe's first run, at all temperatures in turn.

    Raises:
        UserError: no column has one of the names.
    """
    if unknown := [name for name in columns if name not in COLUMNS]:
        raise UserError(f"a page asks for columns {unknown}, and none has this name", where="COLUMNS in results.py",
                        hint="correct the mark or add the column")  # fmt: skip
    run = runs_of(recipe)[0]
    rows = [list(columns)]
    for cell in sorted(run["cells"], key=lambda cell: cell["temperature"]):
        rows.append([COLUMNS[name](cell) for name in columns])
    return rows


# Pages


def markdown(name: str) -> str:
    """A table in Markdown. Raises `UserError` where no function or column has this name."""
    import result_tables

    if query := re.fullmatch(r"cells ([\w-]+): (.+)", name):
        rows = cells(query[1], query[2].split(", "))
    elif name in result_tables.TABLES:
        rows = result_tables.TABLES[name]()
    else:
        raise UserError(f"a page marks a table {name!r}, and none has this name", where="scripts/result_tables.py",
                        hint="correct the mark or add the function")  # fmt: skip
    heading, *lines = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([heading, "|" + " --- |" * len(rows[0]), *lines])


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rewritten(page: str) -> str:
    """The page with each of its tables as the recorded runs have it."""
    return MARK.sub(lambda match: f"{match['mark']}{markdown(match['name'])}\n\n", page)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("record", help="keep what finished runs measured").add_argument("runs", nargs="+", type=Path)
    verbs.add_parser("write", help="write the tables of all pages")
    verbs.add_parser("check", help="name the pages whose tables are not those of the recorded runs")
    options = parser.parse_args(arguments)
    if options.verb == "record":
        record(options.runs)
        return 0
    stale = {path: new for path in pages() if (new := rewritten(old := path.read_text())) != old}
    for path, new in stale.items():
        print(path.relative_to(ROOT))
        if options.verb == "write":
            path.write_text(new)
    return int(bool(stale) and options.verb == "check")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
