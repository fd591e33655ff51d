"""An evaluation of a target that writes text, over conversations with pictures and clips or without."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...core import ranks
from ...core.batch import Request
from ...core.errors import UserError
from ...data.end_tokens import end_ids
from ...data.suites.suite import Suite
from ...eval import text_quality
from ...eval.by_category import turns_section
from ...eval.measured_rows import Row
from ...eval.pair import open_pair
from ...eval.studies.ensemble_weights import (
    WeightsFigure,
    as_data,
    plot_weights,
    trace_weights,
    weights_over_time,
    weights_section,
)
from ...eval.studies.video import video_sections
from ...eval.studies.video_figures import HeldVisual
from ...eval.tables import ReportSection
from ...models.drafters.base import DraftingOptions
from ..run.context import Context
from . import probes
from .answer_quality import measure_quality
from .benchmarks import FilesBenchmark, SetsBenchmark, TabedBenchmark
from .captioning import substitutes_of
from .drafters import Drafters
from .evaluate_settings import EvaluateSettings
from .graphs import about_graphs, capture_heads, capture_target
from .many_turns import turn_runs
from .measuring import Measuring
from .reporting import Reporting, infos
from .requests import ConversationSet, Opening
from .two_turns import TabedRun, open_tabed, suite_names


def run(stage: EvaluateSettings, context: Context) -> None:
    """Measure and report.

    Args:
        context: its target is the stage's own, where the stage has one.
    """
    processor = context.processor()
    # Before a large target is loaded: a set may be out of reach, or a metric's library missing.
    opening = Opening(context, processor, stage.format, stage.lengths, originals=stage.captioner is not None)
    sets = _sets(stage, opening)
    suites = [(b, open_tabed(b, context)) for b in stage.benchmarks.values() if isinstance(b, TabedBenchmark)]
    talks = turn_runs([b for b in stage.benchmarks.values() if isinstance(b, SetsBenchmark)], opening)
    refuse_twice(context.name, {part.benchmark for part in sets} | {talk.name for talk in talks}, suites)
    scorers = {id(b): text_quality.scorers(b.quality.sets) for b, _ in suites if b.quality is not None}
    pair = open_pair(context.target, context.inputs, device=context.device(), processor=processor)
    target = pair.target
    options = DraftingOptions(substitutes=substitutes_of(stage, context, processor), capacity=stage.capacity)
    drafters = Drafters(stage, context, pair, options=options)
    ends = stage.ends(*end_ids(processor, stage.format))
    measuring = Measuring(stage, context, target, drafters.all(), ends, tokenizer=processor.tokenizer)
    capture_target(stage.graphs, target, measuring.drafting, stage.capacity)
    capture_heads(stage.graphs, target, measuring.drafting, stage.capacity)
    measuring.announce(sets, others=bool(suites or talks))
    rows: list[Row] = []
    # The lengths of a benchmark follow each other.
    for _, at_lengths in itertools.groupby(sets, key=lambda requests: requests.benchmark):
        rows += measuring.all([*at_lengths])
    binding = stage.probes.binding
    bound = None if binding is None else probes.binding(binding, opening, measuring, processor)
    runs = [TabedRun(section, suite, opening, measuring) for section, suite in suites]
    notes: list[str] = []
    early: list[str] = []
    for talk in talks:
        some, said = talk.measure(measuring)
        rows, early, sets = rows + some, early + said, sets + talk.first_turns
    for suite_run in runs:
        some, said = suite_run.measure()
        rows, notes = rows + some, notes + said
        sets = sets + suite_run.first_turns
    if not rows:
        raise UserError("no request of any set could be read", where=str(context.folder / "skipped.jsonl"),
                        hint="check the folders of pictures and clips")  # fmt: skip
    with context.stop.together():
        if ranks.is_main():
            _report(stage, context, measuring, runs, sets, rows, notes, early, bound)
        elif context.is_in_step:
            _decode_along(stage, context, measuring, sets, rows)
    for suite_run in runs:
        quality = suite_run.section.quality
        if quality is not None:
            measure_quality(quality, suite_run, _draft_models(stage, drafters), scorers[id(suite_run.section)])
    ranks.barrier()


def _report(
    stage: EvaluateSettings,
    context: Context,
    measuring: Measuring,
    runs: list[TabedRun],
    sets: list[ConversationSet],
    rows: list[Row],
    notes: list[str],
    early: list[str],
    bound: dict[str, Any] | None,
) -> None:
    """The report, by rank 0 alone, and then the probes."""
    about = _about(stage, rows) | about_graphs(stage.graphs, measuring.target, measuring.drafting)
    for suite_run in runs:
        about |= suite_run.about()
    reporting = Reporting(stage, context, measuring, rows, about)
    # The papers' own tables are of the papers' kind of sets, and of clips at several lengths.
    published = stage.lengths or any(isinstance(b, SetsBenchmark) for b in stage.benchmarks.values())
    sections = (
        video_sections(context.folder, rows, infos(measuring.drafting), held=_held(measuring)) if published else []
    )
    sections += [suite_run.report(rows, notes) for suite_run in runs]
    sections += [section for section in [turns_section(rows, early)] if section is not None]
    reporting.write(*sections, binding=bound)
    # Runs after the report is written, so that a failing probe loses no measurements.
    drawn = [part for requests in sets for part in record_weights(measuring, requests, stage.record_weights)]
    more = [weights_section(drawn)] if drawn else []
    more += _probe(stage, context, measuring, sets, rows)
    if more:
        reporting.write(*sections, *more, binding=bound, again=True)


def _decode_along(
    stage: EvaluateSettings, context: Context, measuring: Measuring, sets: list[ConversationSet], rows: list[Row]
) -> None:
    """What `_report` decodes, on a rank that holds a part of the target. Its figures and numbers are thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        context = replace(context, folder=Path(folder), say=lambda text: None)
        for requests in sets:
            record_weights(replace(measuring, context=context), requests, stage.record_weights)
        _probe(stage, context, measuring, sets, rows)


def _held(measuring: Measuring) -> dict[str, HeldVisual]:
    """Method -> the visual input that its head holds."""
    return {one.name: one.held_visual for one in measuring.drafting if one.held_visual is not None}


def _about(stage: EvaluateSettings, rows: list[Row]) -> dict[str, Any]:
    tower = "runs once for each request and repeat; its time counts in every method's prefill, also in plain decoding's"
    prompts = {b.convention for b in stage.benchmarks.values() if isinstance(b, SetsBenchmark)}
    return {
        "max_new_tokens": stage.max_new_tokens,
        "answers": "end at the end token" if stage.stop_at_end else "go on after the end token",
        **({"prompts": ", ".join(sorted(prompts))} if prompts else {}),
        **({"vision tower": tower} if any(row.visual_tokens for row in rows) else {}),
    }


def _sets(stage: EvaluateSettings, opening: Opening) -> list[ConversationSet]:
    sets: list[ConversationSet] = []
    for name, benchmark in stage.benchmarks.items():
        if isinstance(benchmark, FilesBenchmark):
            more = opening.files(name, benchmark.data)
        elif isinstance(benchmark, SetsBenchmark):
            more = list(opening.sets(benchmark))
        else:
            continue
        if twice := {part.benchmark for part in more} & {part.benchmark for part in sets}:
            raise UserError(f"two benchmarks are called {', '.join(sorted(twice))}",
                            where=f"key stages.{opening.context.name}.benchmarks.{name}",
                            hint="name the sets that are wanted with `sets`")  # fmt: skip
        sets += more
    return sets


def refuse_twice(stage: str, names: set[str], suites: Sequence[tuple[TabedBenchmark, Suite]]) -> None:
    """Raises `UserError` where two benchmarks have sets of one name, of which a report would show one.

    Args:
        names: of the sets of other kinds of benchmarks. What a directory holds is known once it is opened.
    """
    for section, suite in suites:
        more = set(suite_names(section, suite))
        if twice := more & names:
            raise UserError(f"two benchmarks have sets called {', '.join(sorted(twice))}",
                            where=f"key stages.{stage}.benchmarks",
                            hint="name the sets that are wanted with `sets`, or measure in two stages")  # fmt: skip
        names = names | more


def _draft_models(stage: EvaluateSettings, drafters: Drafters) -> dict[str, Any]:
    """Models of draft LVLMs, by name: they answer on their own."""
    return {
        name: model
        for called, method in stage.methods.items()
        for name, model in drafters.modules(method, called, kind="lvlm").items()
    }


def _probe(
    stage: EvaluateSettings, context: Context, measuring: Measuring, sets: list[ConversationSet], rows: list[Row]
) -> list[ReportSection]:
    """The report's sections on what the probes read; at the lowest temperature, where most methods can be used."""
    settings = stage.probes
    temperature = min(stage.temperatures)
    labelled = probes.by_label([d for d in measuring.drafting if d.method.allowed(temperature)])
    watched = probes.watched(labelled, settings)
    if not watched and not settings.states and settings.importance is None:
        return []
    decoding = measuring.plainly(temperature, max(measuring.lengths))
    probing = probes.Probing(settings, context, measuring.target, labelled, decoding)
    return probing.report(sets, [row for row in rows if row.temperature == temperature], watched=watched)


def record_weights(measuring: Measuring, requests: ConversationSet, count: int) -> list[WeightsFigure]:
    """The first `count` requests of a set, decoded once more by each ensemble of modes, after all that is timed.

    Writes `weights/SET-DRAFTER-METHOD.json` and `.png` in the stage's folder; none where `count` is 0.
    """
    if not count:
        return []
    folder = measuring.context.folder / "weights"
    folder.mkdir(parents=True, exist_ok=True)
    temperature = min(measuring.stage.temperatures)
    figures: list[WeightsFigure] = []
    for drafting, decoding in measuring.decodings(temperature, max(measuring.lengths)).items():
        if len(drafting.members) < 2:
            continue
        traces = {}
        numbers = range(min(count, len(requests)))
        for index in measuring.context.stop.watch(numbers, "while weights were recorded, after the report"):
            opened = requests.open(index, measuring.target)
            if opened is None or not isinstance(opened.request, Request):
                continue
            uniforms = measuring.uniforms(index)
            traces[opened.request.name] = trace_weights(
                measuring.target, drafting.drafter, opened.request, decoding, uniforms
            )
        if not traces:
            continue
        method = drafting.name.replace("*", "-adaptive")
        parts = requests.benchmark, requests.turn, requests.budget, drafting.drafter_name, method
        name = "-".join(part for part in parts if part).replace("/", "-")
        (folder / f"{name}.json").write_text(json.dumps({k: as_data(t) for k, t in traces.items()}))
        curves = {f"{k}, {drafting.name}": weights_over_time(t) for k, t in traces.items()}
        plot_weights(folder / f"{name}.png", curves)
        place = ", ".join(part for part in (requests.benchmark, requests.turn, requests.budget) if part)
        figures.append(WeightsFigure(f"weights/{name}.png", place, drafting.drafter_name, drafting.name, curves))
    return figures
