"""What an `evaluate` stage would measure, for dry runs: requests, methods and drafters, counted without the data."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from ...data.benchmark_sets import SAMPLES
from ...data.suite import BENCHMARK, INDEX, read_index
from ...data.suite_hub import PUBLISHED
from ...models.sizes import parameter_counts
from ...models.targets.load import target_config
from .benchmarks import PromptsBenchmark, SetsBenchmark, TabedBenchmark
from .methods import Method


def describe(stage: Any) -> list[str]:
    """Lines of the report."""
    lines = []
    files = [name for name, benchmark in stage.benchmarks.items() if benchmark.kind == "files"]
    if files:
        lines.append(f"  benchmarks {', '.join(files)}")
    for benchmark in stage.benchmarks.values():
        if isinstance(benchmark, PromptsBenchmark):
            where = benchmark.prompts.path or f"{benchmark.prompts.classes} classes"
            lines.append(f"  {benchmark.prompts.max_samples or 'all'} prompts of {where}")
        elif isinstance(benchmark, SetsBenchmark):
            lines.append(_sets(benchmark))
        elif isinstance(benchmark, TabedBenchmark):
            lines += _tabed(benchmark)
    if stage.lengths:
        lines.append(f"  clips at {', '.join(_length(length) for length in stage.lengths)}")
    answers = "" if stage.draws else f"answers of up to {', '.join(map(str, stage.max_new_tokens))} tokens; "
    lines.append(
        f"  temperatures {', '.join(f'{t:g}' for t in stage.temperatures)}; {answers}each decoded plainly, and by"
    )
    lines += [f"    {name}: {_method(method, stage.drafters)}" for name, method in stage.methods.items()]
    if stage.target is not None:
        counts = parameter_counts(target_config(stage.target, None, network=False))
        lines.append(f"  target {stage.target.path}: {sum(counts.values()):,} parameters")
    for name, section in stage.drafters.items():
        lines.append(f"  drafter {name}: {getattr(section, 'path', None) or section.kind}")
    return lines + _siblings(stage)


def _sets(benchmark: SetsBenchmark) -> str:
    names = benchmark.names or ["the sets that it has"]
    rows = benchmark.data.max_samples or ("all" if not benchmark.on_hub else f"all (the papers: {SAMPLES})")
    return f"  suite {benchmark.data.path}: {', '.join(names)}; rows of a set: {rows}; {benchmark.convention} prompts"


def _tabed(suite: TabedBenchmark) -> list[str]:
    """Each request is decoded plainly and once by every method with each of its drafters."""
    limit, path, names = suite.data.max_samples, Path(str(suite.data.path)), suite.names
    if names is None and suite.data.from_stage is None and (path / INDEX).is_file():
        names = list(read_index(path).sets)
    turns = f"{suite.convention} prompts, {suite.turns} turn(s)"
    if suite.turns == 2:
        turns += f" ({', '.join(suite.tasks)}; {suite.transcript} transcripts)"
    lines = [f"  suite {suite.data.path}: {', '.join(names) if names else 'the sets that it has'}; {turns}"]
    if suite.on_hub and names and all(name in PUBLISHED for name in names):
        counts = {name: min(n for n in (PUBLISHED[name].rows, limit) if n is not None) for name in names}
        first = sum(counts.values())
        second = sum(counts[name] for name in names if name in BENCHMARK) * len(suite.tasks) * (suite.turns == 2)
        lines.append(f"  requests {first:,} of the first turn and {second:,} of the second")
    if suite.quality is not None:
        lines.append(f"  quality of answers on {', '.join(suite.quality.sets)}")
    return lines


def _method(method: Method, drafters: Collection[str]) -> str:
    if method.names:
        what = ", ".join(name if name in drafters else f"of stage {name}" for name in method.names)
    elif method.drafter is None:
        what = "the recipe's drafter"
    else:
        what = f"kind {method.drafter.kind}"  # type: ignore[union-attr]
    mode = "" if method.mode is None else f", mode {method.mode.name}"
    policy = method.policy(grid=1)
    rule = "" if method.rule.kind == "exact" else f", rule {method.rule.kind}"
    shape = f"tree {policy.name}, {policy.num_levels} levels, at most {_nodes(method)} nodes"
    return f"{what}{mode}; {shape}{rule}{', sampled draws' if method.draw == 'sample' else ''}"


def _nodes(method: Method) -> int:
    """Nodes of its tree, without the root."""
    tree: Any = method.tree
    if tree.kind in ("dynamic", "adt"):
        return int(tree.total - 1)
    return int(tree.max_nodes if tree.kind == "sage" else tree.build().max_nodes)


def _siblings(stage: Any) -> list[str]:
    """Published models that draft behind a pruned prompt."""
    sections = [method.drafter for method in stage.methods.values()] + list(stage.drafters.values())
    models = {s.model.path: s.model for s in sections if getattr(s, "kind", "") == "pruned" and s.model != "target"}
    counts = {path: parameter_counts(target_config(model, None, network=False)) for path, model in models.items()}
    return [f"  draft {path}: {sum(count.values()):,} parameters" for path, count in counts.items()]


def _length(length: int | str) -> str:
    return f"{length} frames" if isinstance(length, int) else f"{length} visual tokens"
