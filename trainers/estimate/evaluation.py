"""An evaluate stage's lines of a dry run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from ...models.targets.load import target_config
from ...models.targets.section import TargetSection
from ...models.targets.sizes import parameter_counts
from ...models.targets.table import TargetConfig
from ..evaluate.evaluate_settings import EvaluateSettings
from ..evaluate.methods import Method
from ..evaluate.requests import frames_in


def describe_evaluation(stage: EvaluateSettings) -> list[str]:
    """Requests, methods and drafters, counted without the data.

    Args:
        stage: an evaluate stage's section.
    """
    files = [name for name, benchmark in stage.benchmarks.items() if benchmark.kind == "files"]
    lines = [f"  benchmarks {', '.join(files)}"] if files else []
    lines += [line for benchmark in stage.benchmarks.values() for line in benchmark.lines()]
    for key, lengths in stage.listed_lengths().items():
        clips = (f"{length} {'visual tokens' if frames_in(length) is None else 'frames'}" for length in lengths)
        of = key.removeprefix("lengths").replace(".", " of ")
        lines.append(f"  clips{of} at {', '.join(clips)}")
    answers = "" if stage.draws else f"answers of up to {', '.join(map(str, stage.max_new_tokens))} tokens; "
    temperatures = ", ".join(f"{t:g}" for t in stage.temperatures)
    lines.append(f"  temperatures {temperatures}; {answers}each request is decoded plainly and by:")
    lines += [
        f"    {name}: {method.line(stage.drafters)}{_own_temperatures(method, stage.temperatures)}"
        for name, method in stage.methods.items()
    ]
    lines += _untimed_lines(stage) + stage.engine.lines()
    if stage.target is not None:
        lines.append(f"  target {stage.target.path}: {_num_parameters(stage.target):,} parameters")
    for name, section in stage.drafters.items():
        lines.append(f"  drafter {name}: {dict(section).get('path') or section.kind}")
    sections = [method.section for method in stage.methods.values()] + list(stage.drafters.values())
    models = [dict(section).get("model") for section in sections if section is not None]
    published = {model.path: model for model in models if isinstance(model, TargetSection)}
    return lines + [
        f"  draft {p}: {_num_parameters(cast(TargetConfig, model)):,} parameters" for p, model in published.items()
    ]


def _own_temperatures(method: Method, temperatures: Sequence[float]) -> str:
    """Those that a method is used at, where it is not used at all of the evaluation's."""
    own = [t for t in temperatures if method.allowed(t)]
    if len(own) == len(temperatures):
        return ""
    return f"; temperature{'s' * (len(own) > 1)} {', '.join(f'{t:g}' for t in own)} alone"


def _untimed_lines(stage: EvaluateSettings) -> list[str]:
    if not stage.draws or stage.drawing.untimed is None:
        return []
    lines = [f"  for their quality alone, untimed: plain decoding in batches of {stage.drawing.untimed.batch_size}"]
    left_out = [name for name, method in stage.methods.items() if not stage.is_drawn(method)]
    if left_out:
        lines.append(f"  not drawn, because their pictures equal plain decoding's: {', '.join(left_out)}")
    return lines


def _num_parameters(section: TargetConfig) -> int:
    """The number of parameters of a published model that reads pictures."""
    return sum(parameter_counts(target_config(section, None, network=False)).values())
