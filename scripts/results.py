#!/usr/bin/env python
"""Tables and figures of README.md and of docs/ that show what was measured, written from what was measured.

    scripts/results.py record runs/compare-0 runs/compare-1 runs/compare-2    # finished runs, into docs/results
    scripts/results.py measure CLONE states starting                          # benchmark scripts on a clone's code
    scripts/results.py measure CLONE peers peers=FOLDER                       # one that needs a folder
    scripts/results.py write                                                  # the tables of every page, the figure
    scripts/results.py check                                                  # exit code 1 where one is another
    scripts/results.py label runs/visual-ar-0/evaluate/pictures-T1.png visual-ar 1 docs/images/visual-pictures.png

A page says `<!-- results: NAME -->` above a table; NAME is a function of `result_tables/`, which says what the table
holds, `printed NAME N`, the N-th table of a benchmark, or `cells RECIPE: COLUMN, ...`. `result_figures.py` draws the
figures. A run is recorded only where its checkout had no changed files, and the runs of all recipes and benchmarks
have one commit: so the tables are of one code (but for recipes that are newer than it, `LATER` in
result_tables/recorded.py). A run that was stopped and continued knows its last start alone: record runs that went
through in one. `result_benchmarks.py` has the benchmarks' commands.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.core.errors import UserError
from draftsmith.core.files import read_yaml

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
_TABLE = re.compile(r"(?P<mark>^<!-- results: (?P<name>.+?) -->\n\n)(?P<table>(?:^\|.*\n)*)\n?", re.M)
# Of a cell of report.json, what tables are made of.
CELL = (
    "benchmark", "budget", "temperature", "method", "requests", "tau", "tau_interval", "DSR", "DSR_spread",
    "ESR", "ESR_spread", "expected_speedup", "T_q_ms", "T_q_over_T_p", "prefill_share", "kept_depth", "mean_nodes",
    "tau_mean_of_requests", "drafter_ms", "identical", "exact", "relaxed",
)  # fmt: skip


def recorded(folder: Path) -> tuple[str, dict[str, Any]]:
    """The name of a finished run's recipe without `demo/`, and what is kept of it.

    Raises:
        UserError: the run measured nothing, or its code was not that of a commit.
    """
    about = read_yaml(folder / "run.yaml", dict[str, Any], hint="give the output folder of a run")
    commit, changed = about["git"]["commit"], about["git"]["changed_files"]
    if commit is None or changed:
        raise UserError("its code is not that of a commit", where=str(folder), hint="run it in a clone without changes")
    reports = sorted(folder.glob("*/report.json"))
    if not reports:
        raise UserError("nothing was measured here", where=str(folder), hint="let the run end")
    evaluations = {path.parent.name: _evaluation(json.loads(path.read_text())) for path in reports}
    seed = json.loads(reports[0].read_text())["about"]["seed"]
    return Path(about["recipe"]).stem, {"seed": seed, "commit": commit, "evaluations": evaluations}


def _evaluation(report: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {"about": {key: report["about"][key] for key in ("device", "date", "torch")}}
    if report.get("binding"):
        kept["binding"] = report["binding"]
    if report.get("quality"):  # temperature -> method -> metric
        kept["quality"] = {
            t: {method: {name: score["value"] for name, score in scores.items()} for method, scores in methods.items()}
            for t, methods in report["quality"].items()
        }
    if report.get("contrasts"):
        kept["contrasts"] = [
            {key: one[key] for key in ("name", "mode", "place")}
            | {key: one["result"][key] for key in ("difference", "interval")}
            for one in report["contrasts"]
        ]
    if report.get("comparison"):  # place -> two ways of training over seeds
        kept["comparison"] = {
            place: {key: one[key] for key in ("each", "mean", "interval", "verdict", "target_says_the_data")}
            for place, one in report["comparison"].items()
        }
    kept |= _by_drafter(report) | _analysis(report) | _suite(report)
    kept["cells"] = [{key: cell[key] for key in CELL if key in cell} for cell in report["cells"]]
    return _short(kept)


def _by_drafter(report: dict[str, Any]) -> dict[str, Any]:
    """tau with its interval of each drafter in each method by place, where methods have several drafters."""
    found = [table for table in report["tables"] if table["title"] == "By drafter"]
    if not found:
        return {}
    (table,) = found
    places = [column["name"] for column in table["columns"]][2:-1]
    lines = [
        {"drafter": drafter, "method": method, "tau": dict(zip(places, taus, strict=True))}
        for drafter, method, *taus, _ in table["rows"]
    ]
    return {"by_drafter": lines}


def _analysis(report: dict[str, Any]) -> dict[str, Any]:
    """Return the analysis of drawn pictures by temperature: how sure the target is, in all cells and by their kind."""
    found = [section["data"] for section in report["sections"] if section["name"] == "analysis"]
    if not found:
        return {}
    keys = ("target_top1", "target_top10", "first_draft_exact", "places")
    read = {t: {key: values[key] for key in keys} for t, values in found[0].items()}
    for t, values in found[0].items():
        read[t]["first_draft_lantern"] = values["first_draft_lantern"][-1][-1]  # of the widest setting
    return {"analysis": read}


def _suite(report: dict[str, Any]) -> dict[str, Any]:
    """Return TABED's suite: the title of each of its tables -> method -> heading -> number."""
    found = [section["tables"] for section in report["sections"] if section["name"] == "suite"]
    if not found:
        return {}
    kept = {}
    for table in found[0]:
        names = [" ".join(filter(None, (column["group"], column["name"]))) for column in table["columns"]]
        kept[table["title"]] = {
            method: dict(zip(names[2:], values, strict=True)) for _, method, *values in table["rows"]
        }
    return {"suite": kept}


def _short(value: Any) -> Any:
    """Floats with six digits: tables show four."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _short(part) for key, part in value.items()}
    return [_short(part) for part in value] if isinstance(value, list) else value


def record(folders: Sequence[Path]) -> None:
    by_recipe: dict[str, dict[str, Any]] = {}
    for folder in folders:
        recipe, run = recorded(folder)
        by_recipe.setdefault(recipe, {})[str(run["seed"])] = run
    for recipe, runs in by_recipe.items():
        path = RESULTS / f"{recipe}.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        newest = {run["commit"] for run in runs.values()}
        # Runs of an earlier commit go: a table never mixes two.
        kept = {seed: run for seed, run in kept.items() if run["commit"] in newest} | runs
        lines = ",\n".join(f'"{seed}": {_lines(kept[seed])}' for seed in sorted(kept, key=int))
        path.write_text(f"{{\n{lines}\n}}\n")
        print(f"{path.relative_to(ROOT)}: seeds {', '.join(sorted(kept, key=int))}")


def _lines(run: dict[str, Any]) -> str:
    """JSON with a line for each cell, so that a difference of two versions can be read."""
    text = json.dumps(run)
    return text.replace('{"benchmark"', '\n{"benchmark"')


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rewritten(page: str) -> str:
    """The page with each of its tables as the results have it. Raises `UserError` where it marks one that is none."""
    import result_tables

    def table(found: re.Match[str]) -> str:
        return f"{found['mark']}{result_tables.markdown(found['name'])}\n"

    return _TABLE.sub(table, page)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("record", help="keep what finished runs measured").add_argument("runs", nargs="+", type=Path)
    measure = verbs.add_parser("measure", help="run benchmarks on a clone's code, and keep what they print")
    measure.add_argument("clone", type=Path, help="a clone without changed files, with its environment in .venv")
    measure.add_argument("what", nargs="+", metavar="NAME|NAME=FOLDER", help="benchmarks, and folders that they need")
    verbs.add_parser("write", help="write the tables of all pages, and the figure")
    verbs.add_parser("check", help="name the pages whose tables are not those of the results")
    label = verbs.add_parser(
        "label", help="a sheet of pictures with the method of each row and the prompt of each column, as a picture"
    )
    label.add_argument("sheet", type=Path, help="pictures-T1.png of an evaluation")
    label.add_argument("recipe", help="whose recorded methods its rows are: visual-ar")
    label.add_argument("temperature", type=float)
    label.add_argument("picture", type=Path, help="where it is written")
    options = parser.parse_args(arguments)
    if options.verb == "record":
        record(options.runs)
        return 0
    if options.verb == "measure":
        import result_benchmarks

        folders = dict(one.split("=", 1) for one in options.what if "=" in one)
        for name in (one for one in options.what if "=" not in one):
            print(result_benchmarks.measure(name, options.clone.resolve(), folders).relative_to(ROOT), flush=True)
        return 0
    if options.verb == "label":
        import result_figures
        from result_tables.recorded import methods_of

        names = ["plain decoding", *methods_of(options.recipe, options.temperature)]
        result_figures.label_sheet(
            options.sheet, names, result_figures.prompts_of(options.sheet, names[0]), options.picture
        )
        return 0
    stale = {path: new for path in pages() if (new := rewritten(old := path.read_text())) != old}
    for path, new in stale.items():
        print(path.relative_to(ROOT))
        if options.verb == "write":
            path.write_text(new)
    if options.verb == "write":
        import result_figures

        result_figures.draw()
    return int(bool(stale) and options.verb == "check")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
