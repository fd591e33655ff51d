#!/usr/bin/env python
"""Keep what finished runs measured in docs/results, of which `scripts/results.py` writes tables.

scripts/record_results.py runs/compare-0 runs/compare-1 runs/compare-2
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.core.errors import UserError
from draftsmith.core.files import read_yaml

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
CELL = (
    "benchmark", "budget", "temperature", "method", "requests", "answers", "tau", "tau_interval", "DSR",
    "DSR_spread", "expected_speedup", "T_q_ms", "T_q_over_T_p", "kept_depth", "mean_nodes", "drafter_ms", "identical",
    "exact", "relaxed",
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
    reports = {
        path.parent.name: json.loads(path.read_text(), parse_float=lambda digits: float(f"{float(digits):.6g}"))
        for path in sorted(folder.glob("*/report.json"))
    }  # tables show four digits
    if not reports:
        raise UserError("nothing was measured here", where=str(folder), hint="let the run end")
    seed = next(iter(reports.values()))["about"]["seed"]
    evaluations = {name: evaluation(report) for name, report in reports.items()}
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
    sections = {section["name"]: section for section in report["sections"]}
    if probes := {name: sections[name]["tables"][0]["rows"] for name in ("sight", "swapped") if name in sections}:
        result["probes"] = probes
    result["cells"] = [{key: cell[key] for key in CELL if key in cell} for cell in report["cells"]]
    return result


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


if __name__ == "__main__":
    try:
        record([Path(name) for name in sys.argv[1:]] or sys.exit(__doc__))
    except UserError as error:
        sys.exit(f"error: {error}")
