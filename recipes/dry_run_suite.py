"""What an `evaluate` stage would measure: requests, methods and drafts, counted without the data."""

from __future__ import annotations

from pathlib import Path

from ..data.suite import BENCHMARK, INDEX, OOD, read_index
from ..data.suite_hub import PUBLISHED
from ..trainers.stages.evaluate import EvaluateStage
from ..trainers.stages.suite import HUB, SuiteSection


def evaluation(stage: EvaluateStage) -> list[str]:
    """Lines of the report."""
    policy = stage.policy()
    shape = f"gamma {stage.gamma}" if stage.tree == "chain" else f"tree {policy.name}, {policy.num_levels} levels"
    lines = []
    if stage.benchmarks:
        lines.append(f"  benchmarks {', '.join(b.name for b in stage.benchmarks)}")
    if stage.suite is not None:
        lines += _suite(stage.suite)
    lines.append(f"  modes {', '.join(stage.mode_names)}; {shape}; up to {stage.max_new_tokens} tokens")
    if stage.target is not None:
        lines.append(f"  target {stage.target.path}")
    for name, draft in stage.drafters.items():
        lines.append(f"  draft {name}: {draft.path}")
    return lines


def _suite(suite: SuiteSection) -> list[str]:
    """Each request is decoded plainly and once in every mode of every draft."""
    limit, path = suite.data.max_samples, Path(str(suite.data.path))
    on_hub = suite.data.from_stage is None and suite.data.path == HUB
    names = suite.sets
    if names is None and on_hub:
        names = [*BENCHMARK, *OOD]
    elif names is None and suite.data.from_stage is None and (path / INDEX).is_file():
        names = list(read_index(path).sets)
    turns = f"{suite.convention} prompts, {suite.turns} turn(s)"
    if suite.turns == 2:
        turns += f" ({', '.join(suite.tasks)}; {suite.transcript} transcripts)"
    lines = [f"  suite {suite.data.path}: {', '.join(names) if names else 'the sets that it has'}; {turns}"]
    if on_hub and names and all(name in PUBLISHED for name in names):
        counts = {name: min(n for n in (PUBLISHED[name].rows, limit) if n is not None) for name in names}
        first = sum(counts.values())
        second = sum(counts[name] for name in names if name in BENCHMARK) * len(suite.tasks) * (suite.turns == 2)
        lines.append(f"  requests {first:,} of the first turn and {second:,} of the second")
    if suite.quality is not None:
        lines.append(f"  quality of answers on {', '.join(suite.quality.sets)}")
    return lines
