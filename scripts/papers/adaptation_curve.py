#!/usr/bin/env python
"""tau of adapted heads against their number of training steps, and of heads trained from scratch: a table, a figure.

    scripts/papers/adaptation_curve.py runs/demo-adapt

Takes a finished run of a recipe such as demo/adapt: training stages that start from a head of the old target or from
scratch, and a stage of kind evaluate that decodes the same requests with all of them. A head that starts from another
stage is compared with the longest training from scratch on the same states and of the same seed; the old head itself
stands at 0 steps. Writes adaptation.png beside that stage's report and prints the table.
"""

import argparse
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.core.errors import UserError
from draftsmith.eval.measured_rows import PLAIN, Row, grouped, read_rows
from draftsmith.eval.style import BLUE, GREY, ORANGE, one_panel, save, styled
from draftsmith.eval.summary import tau_of
from draftsmith.eval.tables import Table, markdown, text
from draftsmith.recipes.load import load
from draftsmith.recipes.schema import Recipe
from draftsmith.trainers.stages.evaluate import EvaluateStage
from draftsmith.trainers.stages.train import TrainStage
from draftsmith.trainers.train.fit import SCRATCH

ADAPTED, FRESH = "adapted", "from scratch"


@dataclass(frozen=True)
class Head:
    """tau of one trained head. `arm` is ADAPTED or FRESH; `steps` are those on the new target's answers."""

    arm: str
    steps: int
    seed: int
    tau: float


def heads_of(recipe: Recipe, taus: Mapping[str, float]) -> list[Head]:
    """Each head, and what the recipe's stages say that it is.

    Args:
        taus: stage that trained it -> its tau.

    Raises:
        UserError: no head was adapted from another one that was decoded too.
    """
    stages = {name: stage for name, stage in recipe.stages.items() if isinstance(stage, TrainStage) and name in taus}
    adapted = {name: stage for name, stage in stages.items() if stage.earlier in stages}
    olds = {str(stage.earlier) for stage in adapted.values()}
    if not adapted:
        raise UserError("no stage goes on from a head that was decoded beside it", hint="give a run of demo/adapt")

    def head(name: str, arm: str, steps: int) -> Head:
        seed = stages[name].seed
        return Head(arm, steps, recipe.seed if seed is None else seed, taus[name])

    found = [head(name, ADAPTED, 0) for name in sorted(olds)]
    for name, stage in stages.items():
        if name not in olds:
            assert stage.steps is not None
            found.append(head(name, FRESH if stage.from_stage == SCRATCH else ADAPTED, stage.steps))
    return sorted(found, key=lambda one: (one.arm, one.steps, one.seed))


def whole(heads: Sequence[Head]) -> dict[int, Head]:
    """Seed -> its longest training from scratch, which others are compared with."""
    fresh = [head for head in heads if head.arm == FRESH]
    return {head.seed: head for head in sorted(fresh, key=lambda one: one.steps)}


def measured(rows: Iterable[Row]) -> dict[str, float]:
    """Drafter -> its tau, over all requests."""
    return {name: tau_of(own) for (name,), own in grouped((r for r in rows if r.method != PLAIN), "drafter").items()}


def table(heads: Sequence[Head]) -> Table:
    """A line for each arm and number of steps: tau of each seed, and shares of the longest from scratch."""
    longest = whole(heads)
    most = max(head.steps for head in longest.values())
    seeds = [f"seed {seed}" for seed in longest]
    last = ("share of heads from scratch, by seed", "mean share")
    columns = [text(name) for name in ("head", "steps", *seeds, "mean", *last)]
    rows = []
    for (arm, steps), group in grouped(heads, "arm", "steps").items():
        shares = [head.tau / longest[head.seed].tau for head in group]
        mean = statistics.mean(shares)
        by_seed = ", ".join(f"{share:.1%}" for share in shares)
        taus = [f"{head.tau:.2f}" for head in group]
        mean_tau = f"{statistics.mean(head.tau for head in group):.2f}"
        rows.append((arm, f"{steps:,} ({steps / most:.1%})", *taus, mean_tau, by_seed, f"{mean:.1%}"))
    return Table("", tuple(columns), tuple(rows))


@styled
def figure(path: Path, heads: Sequence[Head], bar: float = 0.95) -> None:
    """tau against steps: each seed a point, the mean a line; `bar` is a share of the longest from scratch."""
    drawn, panel = one_panel((5.6, 3.4))
    for arm, color, marker in ((ADAPTED, BLUE, "o"), (FRESH, ORANGE, "s")):
        own = [head for head in heads if head.arm == arm]
        panel.scatter([h.steps for h in own], [h.tau for h in own], color=color, marker=marker, s=14, alpha=0.6)
        means = {steps: statistics.mean(h.tau for h in group) for (steps,), group in grouped(own, "steps").items()}
        panel.plot([*means], [*means.values()], color=color, marker=marker, markersize=4, label=f"{arm}, mean")
    goal = bar * statistics.mean(head.tau for head in whole(heads).values())
    panel.axhline(goal, color=GREY, linewidth=1, linestyle="--", label=f"{bar:.0%} of the longest from scratch")
    panel.set(xlabel="training steps on the new target's answers", ylabel="tau")
    panel.legend(loc="lower right")
    save(drawn, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    run = parser.parse_args().run
    try:
        recipe = load([f"recipe={run / 'recipe.yaml'}"]).recipe
        name = next(name for name, stage in recipe.stages.items() if isinstance(stage, EvaluateStage))
        heads = heads_of(recipe, measured(read_rows(run / name / "rows.jsonl")))
    except UserError as error:
        sys.exit(f"error: {error}")
    print("\n".join(markdown(table(heads))).rstrip())
    figure(run / name / "adaptation.png", heads)


if __name__ == "__main__":
    main()
