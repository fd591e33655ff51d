#!/usr/bin/env python
"""Sweep LANTERN's relaxed acceptance over k, its bound and temperature: its figure 5 and tables 3, 7, 10 and 11.

    scripts/papers/sweep_lantern.py recipe=NAME output=RUN [key=value ...] ["k=[100,300]"] ["delta=[0.1]"] [own options]

    scripts/papers/sweep_lantern.py recipe=demo/visual-ar output=runs/demo-visual-ar "k=[2,5]" "delta=[0.1]" count=20
    scripts/papers/sweep_lantern.py recipe=eagle-llamagen-xl-stage1 count=5000 "counts=[100,1000,2000,5000]"
    scripts/papers/sweep_lantern.py recipe=eagle-llamagen-xl-stage1 count=1000 \\
        "k=[1000]" "delta=[0.2]" "metric=[l2,cosine,random]"
    scripts/papers/sweep_lantern.py recipe=lanternpp-llamagen-xl-stage1 \\
        "k=[10]" "lambda=[1,4,9,19]" "delta=[]" "temperatures=[1.0]"

Takes a finished run of a recipe, or one whose weights are published, and the recipe's stage of kind evaluate: its
prompts, truncation, quality metrics, the synthetic dataset's reader, and the tree of one method. Other keys are the
recipe's, as for draftsmith; recipe=RUN/recipe.yaml is a run's own recipe. For each prompt the exact rule and all
settings are decoded in turn by the evaluate stage's own code, which writes its report to RUN/sweep; beside it come
sweep.md, sweep.json and the trade-off plots. Under `deepspeed` the ranks share the prompts. Table 9, the time of the
bounds, is in the report of the stage's `probes.analysis`.

Own options:
"""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from draftsmith.core import ranks
from draftsmith.core.errors import UserError, did_you_mean
from draftsmith.core.secrets import redact_argument, redact_tree
from draftsmith.eval import tables
from draftsmith.eval.lantern import LanternConfig
from draftsmith.eval.measured_rows import PLAIN, Row, grouped, read_rows
from draftsmith.eval.quality import LOWER_IS_BETTER
from draftsmith.eval.studies.drawn.method_figures import TradeOff, trade_off
from draftsmith.recipes.commands.cli import say
from draftsmith.scripts.papers import proximity
from draftsmith.scripts.papers.finished import Finished, ScriptOptions, run_script
from draftsmith.scripts.papers.proximity import Bound, Point, Setting
from draftsmith.trainers.run.context import Context
from draftsmith.trainers.stages.evaluate import EvaluateStage
from pydantic import Field, model_validator

EXACT = "exact rule"
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]


class Options(ScriptOptions):
    """The script's own options, beside the recipe's keys."""

    # The plot has six colours and six marks.
    k: list[Positive] = Field([100, 300, 1000], min_length=1, max_length=6, description="neighbours that may lend")
    delta: list[Share] = Field([0.05, 0.1, 0.2, 0.4], max_length=6, description="LANTERN's bounds; []: none")
    lambda_: list[Annotated[float, Field(gt=0)]] = Field(
        [], alias="lambda", max_length=6, description="LANTERN++'s bounds, in multiples of p(x); []: none"
    )
    temperatures: list[Annotated[float, Field(ge=0)]] = Field([0.0, 1.0], min_length=1, description="each swept whole")
    metric: list[Literal["l2", "cosine", "random"]] = Field(
        ["l2"], min_length=1, description="distances between codes, each swept whole"
    )
    divergence: list[Literal["tvd", "jsd"]] = Field(["tvd"], min_length=1, description="each swept whole")
    bounds: list[tuple[Share, Share]] = Field(
        [(0.2, 0.13), (0.3, 0.2)],
        description="a TVD and a JSD delta that accept alike, compared at the largest k and temperature",
    )
    counts: list[Positive] = Field([], description="captions to give the speedup over; []: 100, 1000, 2000, 5000, all")
    method: str | None = Field(None, description="the stage's method whose tree is swept; null: the first with LANTERN")
    name: str = Field("sweep", min_length=1, description="folder inside the run")

    @model_validator(mode="after")
    def _some_bound(self) -> "Options":
        if not self.delta and not self.lambda_:
            raise ValueError("delta and lambda are both empty: there is nothing to sweep")
        return self

    @property
    def limits(self) -> dict[Bound, list[float]]:
        """Bound -> its values, of those that are swept."""
        swept: dict[Bound, list[float]] = {"delta": self.delta, "lambda": self.lambda_}
        return {bound: values for bound, values in swept.items() if values}

    def divergences(self, bound: Bound) -> list[str]:
        """Those that a bound is swept with: lambda bounds the mass itself, which is the tvd."""
        return list(self.divergence) if bound == "delta" else ["tvd"]

    @property
    def grid(self) -> list[Setting]:
        """Every setting of the sweep."""
        return [
            Setting(k, limit, metric, divergence, bound)
            for bound, limits in self.limits.items()
            for metric in self.metric
            for divergence in self.divergences(bound)
            for k in self.k
            for limit in limits
        ]

    @property
    def pairs(self) -> list[Setting]:
        """The settings that compare TVD with JSD, which bound by delta."""
        k = max(self.k)
        return (
            []
            if not self.delta
            else [Setting(k, d, "l2", v) for tvd, jsd in self.bounds for d, v in ((tvd, "tvd"), (jsd, "jsd"))]
        )

    def captions(self) -> list[int]:
        """Numbers of captions to give the speedup over. Raises `UserError` where one exceeds `count`."""
        if any(n > self.count for n in self.counts):
            raise UserError(f"counts={self.counts}, and count={self.count}", hint="raise count")
        return sorted({*(self.counts or (n for n in (100, 1000, 2000, 5000) if n <= self.count)), self.count})


def swept(options: Options, stage: EvaluateStage, where: str) -> EvaluateStage:
    """`stage` with a method for each setting, all with the tree, draw, drafter and residual of one of its methods."""
    base = options.method or next(
        (name for name, method in stage.methods.items() if method.rule.kind == "lantern"), next(iter(stage.methods))
    )
    if base not in stage.methods:
        hint = did_you_mean(base, stage.methods)
        raise UserError(f"method={base}: no method of the stage", where=where, hint=hint)
    like = {**stage.methods[base].model_dump(mode="json", by_alias=True), "temperatures": None}
    if like["draw"] == "sample" and 0.0 in options.temperatures:
        raise UserError(f"method {base} samples its drafts, which temperature 0 cannot", hint="temperatures=[1]")
    rule = stage.methods[base].rule
    kept = {"residual": rule.residual} if isinstance(rule, LanternConfig) else {}
    warmest = max(options.temperatures)
    methods = {s.name: {**like, "rule": s.rule | kept, "temperatures": [warmest]} for s in options.pairs}
    methods |= {s.name: {**like, "rule": s.rule | kept} for s in options.grid}
    values = stage.model_dump(mode="json", by_alias=True) | {
        "preset": None,
        "methods": {EXACT: {**like, "rule": {"kind": "exact"}}, **methods},
        "temperatures": options.temperatures,
    }
    for benchmark in values["benchmarks"].values():
        benchmark["untimed"] = None  # a sweep measures speed, too
    return EvaluateStage.model_validate(values)


def points_of(report: dict[str, Any], temperature: float, settings: Sequence[Setting]) -> dict[Setting, Point]:
    """Setting -> its measured speed and quality at one temperature."""
    return {s: proximity.point_of(report, temperature, s.name) for s in settings}


def markdown(options: Options, report: dict[str, Any], rows: Sequence[Row]) -> str:
    """The whole page."""
    lines = ["# LANTERN over k, delta and temperature, measured", ""]
    for temperature in options.temperatures:
        lines += [f"## Temperature {temperature:g}", ""]
        lines += of_temperature(options, report, rows, temperature)
    warmest = max(options.temperatures)
    if len(options.metric) > 1:
        points = points_of(report, warmest, [s for s in options.grid if s.k == max(options.k)])
        lines += [f"## Distances between codes, temperature {warmest:g}", ""]
        lines += tables.markdown(proximity.measures_table(points, metrics_of(report)))
    if options.pairs:
        points = points_of(report, warmest, options.pairs)
        lines += [f"## TVD and JSD, temperature {warmest:g}", ""]
        lines += tables.markdown(proximity.measures_table(points, metrics_of(report)))
    quality_notes = {m: f["what"] for m, f in proximity.scores_of(report, warmest, PLAIN).items()}
    lines += [
        "Speedup: wall clock with prefill against plain decoding of the same target, temperature and run; quartiles "
        "are over captions, intervals over resampled captions. tau: tokens of a verification pass, bonus token "
        "included. A relaxed rule does not draw as the target does.", "", "## How it was measured", "",
        *(f"- {key}: {value}" for key, value in (report["about"] | quality_notes).items()), "",
    ]  # fmt: skip
    return "\n".join(lines)


def metrics_of(report: dict[str, Any]) -> list[str]:
    """Names of the report's quality metrics."""
    return sorted(next(iter(report["quality"].values()))[PLAIN])


def of_temperature(options: Options, report: dict[str, Any], rows: Sequence[Row], temperature: float) -> list[str]:
    """Lines of the page about one temperature."""
    lines: list[str] = []
    exact, plain = proximity.point_of(report, temperature, EXACT), proximity.scores_of(report, temperature, PLAIN)
    scores = [proximity.quality(metric) for metric in metrics_of(report)]
    alone = [1.0, 1.0, *(score.value(Point({}, plain)) for score in scores)]
    for place, same in grouped(options.grid, "bound", "metric", "divergence").items():
        bound, metric, divergence = place
        points = points_of(report, temperature, same)
        for measure, value in zip((proximity.SPEEDUP, proximity.TAU, *scores), alone, strict=True):
            references = {PLAIN: value, EXACT: measure.value(exact)}
            lines += [f"{measure.name}, {metric}, {divergence}, n = {exact.table['requests']}:", ""]
            table = proximity.grid_table(points, options.k, options.limits[bound], measure, references)
            lines += tables.markdown(table)
    lines += [f"![trade-off]({plot_name(temperature, metric, bound)})" for bound in options.limits
              for metric in metrics_of(report)]  # fmt: skip
    of_setting = {
        name: [row for row in rows if (row.method, row.temperature) == (name, temperature)]
        for name in (EXACT, *(s.name for s in options.grid))
    }
    counts = options.captions()
    lines += ["", "Speedup over the first so many captions [95%]:", ""]
    speedups = {name: proximity.speedups(*seconds(result), counts) for name, result in of_setting.items()}
    return lines + tables.markdown(proximity.counts_table(counts, speedups))


def seconds(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Return the seconds of each caption, decoded plainly and by the method."""
    return [row.plain_total_s for row in rows], [row.total_s for row in rows]


def plot_name(temperature: float, metric: str, bound: Bound) -> str:
    """File name of a plot."""
    return f"trade-off-T{temperature:g}-{metric}{'-lambda' if bound == 'lambda' else ''}.png"


def plot(folder: Path, options: Options, report: dict[str, Any]) -> None:
    """Quality against tau for each bound, for its first distance and divergence."""
    for temperature in options.temperatures:
        exact, plain = proximity.point_of(report, temperature, EXACT), proximity.scores_of(report, temperature, PLAIN)
        for bound in options.limits:
            of_bound = [s for s in options.grid if s.bound == bound]
            first = [s for s in of_bound if (s.metric, s.divergence) == (of_bound[0].metric, of_bound[0].divergence)]
            points = points_of(report, temperature, first)
            for metric in metrics_of(report):
                trade_off(
                    folder / plot_name(temperature, metric, bound),
                    [TradeOff(s.k, s.limit, p.table["tau"], p.quality[metric]["value"]) for s, p in points.items()],
                    quality=metric,
                    higher_is_better=metric not in LOWER_IS_BETTER,
                    references={
                        PLAIN: (1.0, plain[metric]["value"]),
                        EXACT: (exact.table["tau"], exact.quality[metric]["value"]),
                    },
                    bound=bound,
                )


def run(arguments: list[str]) -> None:
    """Sweep, and write report, tables and plots."""
    opened = Finished(arguments, Options)
    options, recipe, folder = opened.options, opened.recipe, opened.folder
    options.captions()  # a mistake in them is told before an hour of decoding
    opened.refuse_old("sweep.json")
    stage = swept(options, opened.stage, str(opened.loaded.path))
    inputs = opened.inputs(stage.needs())
    opened.prompts(inputs)  # that there are so many
    context = Context(
        name=options.name, folder=folder, seed=recipe.seed, fingerprint="", target=recipe.target,
        drafter=recipe.drafter, engine=recipe.engine, tracking=recipe.tracking, inputs=inputs, say=say,
        recipe=redact_tree(opened.loaded.tree),
        command=shlex.join(["scripts/papers/sweep_lantern.py", *(redact_argument(a) for a in arguments)]),
    )  # fmt: skip
    stage.run(context)
    if not ranks.is_main():
        return
    report = json.loads((folder / "report.json").read_text())
    rows = read_rows(folder / "rows.jsonl")
    plot(folder, options, report)
    text = markdown(options, report, rows)
    (folder / "sweep.md").write_text(text)
    settings = {s.name: s.to_json() for s in (*options.grid, *options.pairs)}
    data = {"about": report["about"], "settings": settings, "cells": report["cells"], "quality": report["quality"]}
    (folder / "sweep.json").write_text(json.dumps(data, indent=1))
    say(text)


def main(arguments: list[str] | None = None) -> int:
    """Runs the sweep for `key=value` arguments (None: the command line's). Returns the exit code."""
    return run_script(run, __doc__, Options, arguments)


if __name__ == "__main__":
    sys.exit(main())
