"""What docs/results holds of demos' runs, and how tables print it.

Over several seeds a value is the mean of the runs: tau with Student's 95% interval, a speedup alone or with the range
of the runs. Of one run, tau has its bootstrap interval over requests and a speedup its quartiles.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from draftsmith.core.errors import UserError
from draftsmith.eval.intervals import student_half_width

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
Cell = dict[str, Any]
Rows = list[list[str]]
TABLES: dict[str, Callable[[], Rows]] = {}
# Recipes and benchmarks that were not there at the commit of all others: each has one commit of its own, and the line
# beside its table says so. The list is empty again when all are measured anew.
LATER = {
    "compare", "lvlm", "smollm2", "smollm2-full", "dflash", "visual-ar-blocks", "engines-own", "peers-blocks",
    "peers-speculators", "data", "peers", "peers-512", "peers-training", "peers-speculators-eagle3", "peers-specforge",
    "peers-specforge-dflash", "starting",
}  # fmt: skip
# The stage that measured, where it is not `evaluate`.
_STAGES = {"suite": "suite", "lvlm-distilled": "compare"}


def table(function: Callable[[], Rows]) -> Callable[[], Rows]:
    """Registers a table under its function's name; its first row is the heading."""
    TABLES[function.__name__.replace("_", "-")] = function
    return function


@cache
def evaluations(recipe: str) -> dict[int, dict[str, Any]]:
    """Seed -> the evaluation of a run, in the order of the seeds."""
    runs = json.loads((RESULTS / f"{recipe}.json").read_text())
    stage = _STAGES.get(recipe, "evaluate")
    return {int(seed): runs[seed]["evaluations"][stage] for seed in sorted(runs, key=int)}


def methods_of(recipe: str, temperature: float = 0.0) -> list[str]:
    """The methods of a recipe at a temperature, in its order."""
    cells = next(iter(evaluations(recipe).values()))["cells"]
    return list(dict.fromkeys(cell["method"] for cell in cells if cell["temperature"] == temperature))


def cells_of(recipe: str, method: str, benchmark: str | None = None, **where: Any) -> list[Cell]:
    """A method's cell in each run, in the order of the seeds; at temperature 0 where `where` names none."""
    wanted = {"method": method, "temperature": 0.0, **({"benchmark": benchmark} if benchmark else {}), **where}
    found = [
        [cell for cell in run["cells"] if all(cell.get(key) == value for key, value in wanted.items())]
        for run in evaluations(recipe).values()
    ]
    assert all(len(each) == 1 for each in found), f"{recipe}: {wanted} is not one cell of each run"
    return [each[0] for each in found]


def of_one(recipe: str, seed: int, method: str, benchmark: str | None = None, **where: Any) -> Cell:
    """A method's cell in one run."""
    return cells_of(recipe, method, benchmark, **where)[list(evaluations(recipe)).index(seed)]


def contrasts_of(recipe: str, name: str, **where: Any) -> list[dict[str, Any]]:
    """A contrast of each run (`difference`, `interval`), in the order of the seeds."""
    wanted = {"name": name, **where}
    found = [
        [one for one in run["contrasts"] if all(one[key] == value for key, value in wanted.items())]
        for run in evaluations(recipe).values()
    ]
    assert all(len(each) == 1 for each in found), f"{recipe}: {wanted} is not one contrast of each run"
    return [each[0] for each in found]


def taus_by_drafter(recipe: str, method: str, place: str) -> dict[str, tuple[float, float, float]]:
    """Drafter -> its tau and the interval's ends in the only run of a recipe whose methods have several drafters."""
    (run,) = evaluations(recipe).values()
    lines = (line for line in run["by_drafter"] if line["method"] == method)
    return {line["drafter"]: tuple(line["tau"][place]) for line in lines}


def student(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of some runs and the ends of Student's 95% interval."""
    mean, half = statistics.fmean(values), student_half_width(statistics.stdev(values), len(values))
    return mean, mean - half, mean + half


def mean_of(values: Sequence[float], sign: str = "") -> str:
    """The mean with Student's interval."""
    mean, low, high = student(values)
    return f"{mean:{sign}.2f} [{low:.2f}, {high:.2f}]"


def each(values: Sequence[float], sign: str = "") -> str:
    """Every value."""
    return ", ".join(f"{value:{sign}.2f}" for value in values)


def each_and_mean(values: Sequence[float], sign: str = "") -> str:
    return f"{each(values, sign)}: {mean_of(values, sign)}"


def span(values: Sequence[float], unit: str = "") -> str:
    """The mean with the lowest and the highest value."""
    return f"{statistics.fmean(values):.2f}{unit} ({min(values):.2f} to {max(values):.2f})"


def taus(cells: Sequence[Cell]) -> list[float]:
    return [cell["tau"] for cell in cells]


def tau(cells: Sequence[Cell]) -> str:
    return mean_of(taus(cells))


def speed(cells: Sequence[Cell]) -> str:
    return f"{statistics.fmean(cell['DSR'] for cell in cells):.2f}x"


def speeds(cells: Sequence[Cell]) -> str:
    return span([cell["DSR"] for cell in cells], "x")


def tau_of_run(cell: Cell) -> str:
    return with_interval(cell["tau"], cell["tau_interval"])


def with_interval(value: float, ends: Sequence[float], sign: str = "") -> str:
    """A value of one run with the interval that its report has."""
    low, high = ends
    return f"{value:{sign}.2f} [{low:.2f}, {high:.2f}]"


def ratio_of_run(cell: Cell, what: str = "DSR") -> str:
    low, high = cell[f"{what}_spread"]
    return f"{cell[what]:.2f}x [{low:.2f}, {high:.2f}]"


def same(cell: Cell) -> str:
    """How many outputs equal plain decoding's, where they must."""
    return f"{cell['identical']}/{cell['requests']}" if cell["exact"] else "-"


def named(cell: Cell) -> str:
    """The method, and whether its outputs are distributed otherwise than the target's."""
    return f"{cell['method']} (relaxed)" if cell["relaxed"] and "relaxed" not in cell["method"] else cell["method"]


def all_same(recipe: str) -> str:
    """How many greedy outputs of exact methods equal plain decoding's, over all runs."""
    exact = [cell for run in evaluations(recipe).values() for cell in run["cells"] if cell["exact"]]
    return f"{sum(cell['identical'] for cell in exact):,} of {sum(cell['requests'] for cell in exact):,}"


# Heading -> what a column of this name shows of one run's cell.
COLUMNS: dict[str, Callable[[Cell], str]] = {
    "benchmark": lambda cell: cell["benchmark"],
    "mode": lambda cell: cell["method"],
    "method": named,
    "T": lambda cell: f"{cell['temperature']:g}",
    "n": lambda cell: f"{cell['requests']}",
    "identical": lambda cell: "-" if cell["temperature"] else same(cell),
    "tau [95%]": tau_of_run,
    "tau per request": lambda cell: f"{cell['tau_mean_of_requests']:.2f}",
    "T_q/T_p": lambda cell: f"{cell['T_q_over_T_p']:.2f}",
    "expected": lambda cell: f"{cell['expected_speedup']:.2f}x",
    "DSR [IQR]": ratio_of_run,
    "ESR [IQR]": lambda cell: ratio_of_run(cell, "ESR"),
    "speedup [IQR]": ratio_of_run,
    "prefill": lambda cell: f"{cell['prefill_share']:.0%}",
    "kept depth": lambda cell: f"{cell['kept_depth']:.2f}",
    "nodes": lambda cell: f"{cell['mean_nodes']:.0f}",
    "drawn as captioned": lambda cell: f"{cell['as_captioned']:.0%}",
}


def cells_of_run(recipe: str, columns: Sequence[str], temperature: float | None = None) -> Rows:
    """A line for each cell of a recipe's first run, at all temperatures in turn or at one.

    Raises:
        UserError: no column has one of the names.
    """
    if unknown := [name for name in columns if name not in COLUMNS]:
        raise UserError(f"a page asks for columns {unknown}, and none has this name", where="COLUMNS in recorded.py",
                        hint="correct the mark or add the column")  # fmt: skip
    run = next(iter(evaluations(recipe).values()))
    rows = [list(columns)]
    for cell in sorted(run["cells"], key=lambda cell: cell["temperature"]):
        if temperature in (None, cell["temperature"]):
            read = run.get("quality", {}).get(f"{cell['temperature']:g}", {}).get(cell["method"], {})
            rows.append([COLUMNS[name](cell | read) for name in columns])
    return rows


def about_runs() -> Mapping[str, dict[str, Any]]:
    """Recipe -> what docs/results has of it: seed -> run."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
