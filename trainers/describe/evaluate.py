"""What `evaluate` stages would measure: requests, methods and drafts, counted without the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...data.benchmark_sets import SAMPLES
from ...data.suite import BENCHMARK, INDEX, OOD, read_index
from ...data.suite_hub import PUBLISHED
from ...models.sizes import parameter_counts
from ...models.targets.load import target_config
from .models import parameter_lines

HUB = "hub"  # where a suite's sets come from


def describe_modes(stage: Any) -> list[str]:
    """Of drafting modes of draft LVLMs."""
    policy = stage.policy()
    shape = f"gamma {stage.gamma}" if stage.tree == "chain" else f"tree {policy.name}, {policy.num_levels} levels"
    lines = parameter_lines(target_config(stage.target, None, network=False), vocabulary=True) if stage.target else []
    lines += _benchmarks(stage)
    if stage.suite is not None:
        lines += _suite(stage.suite)
    lines.append(f"  modes {', '.join(stage.mode_names)}; {shape}; up to {stage.max_new_tokens} tokens")
    if stage.target is not None:
        lines.append(f"  target {stage.target.path}")
    return [*lines, *(f"  draft {name}: {draft.path}" for name, draft in stage.drafters.items())]


def describe_methods(stage: Any) -> list[str]:
    """Of hidden-state heads and pruned copies."""
    lines = _benchmarks(stage)
    if (suite := stage.suite) is not None:
        names = suite.names or ["the sets that it has"]
        rows = suite.data.max_samples or ("all" if not suite.on_hub else f"all (the papers: {SAMPLES})")
        lines.append(
            f"  suite {suite.data.path}: {', '.join(names)}; rows of a set: {rows}; {suite.convention} prompts"
        )
    if stage.lengths:
        lines.append(f"  clips at {', '.join(_length(length) for length in stage.lengths)}")
    lines.append(
        f"  temperatures {', '.join(f'{t:g}' for t in stage.temperatures)}; answers of up to "
        f"{', '.join(map(str, stage.max_new_tokens))} tokens; each decoded plainly, and by"
    )
    lines += [_method(name, method) for name, method in stage.methods.items()]
    own = [method.drafter for method in stage.methods.values() if getattr(method.drafter, "kind", "") == "pruned"]
    for path, sibling in {config.model.path: config.model for config in own if config.model != "target"}.items():
        count = sum(parameter_counts(target_config(sibling, None, network=False)).values())
        lines.append(f"  draft {path}: {count:,} parameters")
    return lines


def describe_pictures(stage: Any) -> list[str]:
    """Of drafters of image generators."""
    where = stage.prompts.path or f"{stage.prompts.classes} classes"
    return [f"  {stage.prompts.max_samples or 'all'} prompts of {where}", f"  methods: {', '.join(stage.methods)}"]


def _benchmarks(stage: Any) -> list[str]:
    return [f"  benchmarks {', '.join(b.name for b in stage.benchmarks)}"] if stage.benchmarks else []


def _method(name: str, method: Any) -> str:
    what = "the recipe's drafter" if method.drafter is None else f"of stage {method.stage}"
    if method.drafter is not None and method.stage is None:
        what = f"kind {method.drafter.kind}"
    tree = method.tree.build()
    return f"    {name}: {what}; tree {tree.name}, {tree.num_levels} levels, at most {_nodes(method.tree)} nodes"


def _nodes(tree: Any) -> int:
    """Nodes of a tree at most, without the root."""
    if tree.kind == "dynamic":
        return tree.total - 1
    return tree.max_nodes if tree.kind == "sage" else tree.build().max_nodes


def _length(length: int | str) -> str:
    return f"{length} frames" if isinstance(length, int) else f"{length} visual tokens"


def _suite(suite: Any) -> list[str]:
    """Each request is decoded plainly and once in every mode of every draft."""
    names = _sets(suite)
    turns = f"{suite.convention} prompts, {suite.turns} turn(s)"
    if suite.turns == 2:
        turns += f" ({', '.join(suite.tasks)}; {suite.transcript} transcripts)"
    lines = [f"  suite {suite.data.path}: {', '.join(names) if names else 'the sets that it has'}; {turns}"]
    if _on_hub(suite) and names and all(name in PUBLISHED for name in names):
        limit = suite.data.max_samples
        counts = {name: min(n for n in (PUBLISHED[name].rows, limit) if n is not None) for name in names}
        second = sum(counts[name] for name in names if name in BENCHMARK) * len(suite.tasks) * (suite.turns == 2)
        lines.append(f"  requests {sum(counts.values()):,} of the first turn and {second:,} of the second")
    if suite.quality is not None:
        lines.append(f"  quality of answers on {', '.join(suite.quality.sets)}")
    return lines


def _sets(suite: Any) -> list[str] | None:
    """The suite's sets; None: those that its directory will have."""
    path = Path(str(suite.data.path))
    if suite.sets is not None or suite.data.from_stage is not None:
        return suite.sets
    if _on_hub(suite):
        return [*BENCHMARK, *OOD]
    return list(read_index(path).sets) if (path / INDEX).is_file() else None


def _on_hub(suite: Any) -> bool:
    return suite.data.from_stage is None and suite.data.path == HUB
