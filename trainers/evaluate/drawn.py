"""An evaluation of an image generator: the same prompts drawn plainly and by every method."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core import ranks
from ...core.errors import UserError
from ...data.captioned.prompts import ImagePrompt, read_prompts
from ...data.stage_folders import CODES, DATASET_FOLDER
from ...eval.lantern import LanternConfig, lantern
from ...eval.measured_rows import PLAIN, Row, grouped
from ...eval.pair import open_pair
from ...eval.rules import Rule
from ...eval.studies.drawn import AnalysisConfig, CellStatistics, encoded_pictures, read_pictures
from ...eval.studies.drawn.places import contrasts
from ...eval.tables import ReportSection
from ...models.decoding.warp import Warp
from ...models.families.generators import Generator
from ..run.context import Context
from ..run.stopping import Stop
from .drafters import Drafters, Drafting
from .evaluate_settings import EvaluateSettings
from .judge import Drawn, Judge
from .kept_pictures import KeptPicture, identity_of, keep
from .measuring import Measuring
from .methods import Method
from .reporting import Reporting, picture_grids
from .requests import PromptSet
from .untimed import Untimed, scores_table


def run(stage: EvaluateSettings, context: Context) -> None:
    """Measure and report."""
    device, benchmark = context.device(), stage.drawing
    pair = open_pair(context.target, context.inputs, device=device)
    generator = pair.generator
    assert generator is not None
    source = benchmark.prompts.resolved(
        context.inputs["data"] / DATASET_FOLDER if benchmark.prompts.from_stage else None
    )
    prompts = read_prompts(source)
    context.target.check_labels([(p.caption, p.label) for p in prompts])
    judge = Judge(
        benchmark.quality,
        prompts,
        reader=context.inputs["reader"] if benchmark.reader else None,
        real=Path(source.path) if source.path and source.path.endswith(".tar") else None,
        size=context.target.image_size,
        device=device,
    )
    rule_of = functools.partial(_rule, generator, context)
    drafting = Drafters(stage, context, pair).all(rule_of, grid=generator.target.grid, wanted=stage.is_drawn)
    if benchmark.untimed is not None:
        _scored(stage, context, generator, prompts, judge, Measuring(stage, context, generator.target, drafting, ()))
        return
    analysis = stage.probes.analysis
    if analysis is not None:
        analysis.check(len(generator.codebook), generator.target.grid)
        eagle_head(drafting)
    measuring = Measuring(stage, context, generator.target, drafting, ())
    (name,) = stage.benchmarks
    requests = PromptSet(name, prompts, generator)
    measuring.announce([requests])
    rows = measuring.all([requests])
    with context.stop.together():
        if ranks.is_main():
            _keep(stage, context, prompts, drafting, rows)
            quality, shown = _judged(generator, judge, drawn_tokens(rows), benchmark.shown, context.stop)
            reporting = Reporting(stage, context, measuring, rows, _about(stage, context, prompts, judge))
            grids = picture_grids(context.folder, shown, prompts)
            reporting.write(grids, quality=quality)
            # Runs after the report is written, so that a failing analysis loses no measurements.
            if analysis is not None:
                more = _analysis(stage, analysis, context, generator, prompts, drafting, rows, shown, quality)
                reporting.write(grids, more, quality=quality, again=True)


def _scored(
    stage: EvaluateSettings,
    context: Context,
    generator: Generator,
    prompts: Sequence[ImagePrompt],
    judge: Judge,
    measuring: Measuring,
) -> None:
    """Draw and judge, without the clock."""
    pictures = Untimed(stage, context, generator, prompts, measuring).all()
    with context.stop.together():
        if ranks.is_main():
            tokens = {t: {m: [p.tokens for p in of] for m, of in by.items()} for t, by in pictures.items()}
            quality, shown = _judged(generator, judge, tokens, stage.drawing.shown, context.stop)
            left_out = [name for name, method in stage.methods.items() if not stage.is_drawn(method)]
            note = "tau as in every report. Nothing was timed."
            if left_out:
                note += f" Not drawn, because exact methods have plain decoding's distribution: {', '.join(left_out)}."
            reporting = Reporting(stage, context, measuring, (), _about(stage, context, prompts, judge))
            table = scores_table(pictures, quality, note)
            reporting.write_scores(table, picture_grids(context.folder, shown, prompts), quality=quality)


def _judged(
    generator: Generator, judge: Judge, tokens: Mapping[float, Mapping[str, Any]], shown: int, stop: Stop
) -> tuple[dict[float, dict[str, Any]], dict[float, dict[str, Tensor]]]:
    """temperature -> method -> scores of all of its pictures, and the first of them."""
    quality = {t: {m: judge(_drawn(generator, codes, stop)) for m, codes in by.items()} for t, by in tokens.items()}
    first = {
        t: {m: generator.pictures(codes_of(generator, codes[:shown])) for m, codes in by.items()}
        for t, by in tokens.items()
    }
    return quality, first


def _keep(
    stage: EvaluateSettings,
    context: Context,
    prompts: Sequence[ImagePrompt],
    drafting: Sequence[Drafting],
    rows: Sequence[Row],
) -> None:
    """Keep what was drawn for tables of quality with the same settings."""
    by_setting = grouped(rows, "temperature", "method", "drafter")
    for (temperature, method, drafter), its in by_setting.items():
        one = next((d for d in drafting if (d.name, d.drafter_name) == (method, drafter)), None)
        identity = identity_of(stage, context, temperature, one)
        keep(context.folder.parent, identity, prompts, (KeptPicture(row.tokens, row.num_cycles) for row in its))


def _rule(generator: Generator, context: Context, method: Method) -> Callable[[float], Rule]:
    """Temperature -> a method's acceptance rule; LANTERN's read the target's codebook."""
    if not isinstance(method.rule, LanternConfig):
        return method.exact_rule
    codebook, folder = generator.codebook.to(generator.target.device), context.folder / "neighbours"
    made = functools.partial(
        lantern, method.rule, codebook, offset=generator.first_id, seed=context.seed, folder=folder
    )
    return lambda temperature: made(greedy=temperature == 0)


def drawn_tokens(rows: Sequence[Row]) -> dict[float, dict[str, list[tuple[int, ...]]]]:
    """temperature -> method (plain decoding first) -> the tokens of each picture, in the order of the prompts.

    Of a method with several drafters those of the first one by name: a picture for each prompt is judged.
    """
    tokens_by: dict[float, dict[str, list[tuple[int, ...]]]] = {}
    first = {method: min(row.drafter for row in its) for (method,), its in grouped(rows, "method").items()}
    for row in rows:
        if row.drafter == first[row.method]:
            tokens_by.setdefault(row.temperature, {}).setdefault(row.method, []).append(row.tokens)
    return tokens_by


def _about(stage: EvaluateSettings, context: Context, prompts: Sequence[ImagePrompt], judge: Judge) -> dict[str, Any]:
    real, source, distance = judge.score_of_real(), stage.prompts, judge.fid_of_real()
    fid = "" if distance is None else f"; their FID on its features is {distance:.3g}"
    return {
        "prompts": f"{len(prompts)} of {source.path or f'{source.classes} classes'}",
        "guidance": f"scale {context.target.cfg_scale:g}",
    } | (
        {} if real is None else {"reader": f"reads {real:.1%} of the real pictures of these prompts as captioned{fid}"}
    )


def _drawn(generator: Generator, tokens: Sequence[Sequence[int]], stop: Stop) -> Drawn:
    decode = stop.checked(generator.pictures, "while pictures were judged; all of them are kept")
    return Drawn(decode, codes_of(generator, tokens))


def codes_of(generator: Generator, tokens: Sequence[Sequence[int]]) -> Tensor:
    """Pictures' tokens as codes [B,n] of the image tokenizer."""
    return torch.stack([generator.target.codes(list(row)) for row in tokens])


def eagle_head(drafting: Sequence[Drafting]) -> Any:
    """The head of the first method. Raises `UserError` where it is none of EAGLE's."""
    head = getattr(drafting[0].drafter, "head", None)
    if drafting[0].config.base_kind != "eagle" or head is None:
        raise UserError("probes.analysis reads an EAGLE head, and the first method drafts with another",
                        where="probes.analysis",
                        hint="put a method with an eagle drafter first, or leave analysis out")  # fmt: skip
    return head


def _analysis(
    stage: EvaluateSettings,
    config: AnalysisConfig,
    context: Context,
    generator: Generator,
    prompts: Sequence[ImagePrompt],
    drafting: Sequence[Drafting],
    rows: Sequence[Row],
    shown: Mapping[float, Mapping[str, Tensor]],
    quality: Mapping[float, Mapping[str, Mapping[str, Any]]],
) -> ReportSection:
    """What target and head make of the pictures that were drawn plainly, at every temperature."""
    target, head = generator.target, eagle_head(drafting)
    codebook = generator.codebook.to(target.device)
    table = config.table(codebook, offset=generator.first_id, folder=context.folder / "neighbours")

    def read(pictures: list[tuple[Tensor, Tensor]], temperature: float) -> CellStatistics:
        warp = Warp(temperature, stage.top_k, stage.top_p)
        return read_pictures(config, target, head, pictures, warp, table, seed=context.seed)

    conditions = [generator.request(p.caption, p.label, p.key).condition for p in prompts[: config.pictures]]
    by_temperature = {}
    for temperature, by_method in drawn_tokens(rows).items():
        codes = [target.codes(list(row)) for row in by_method[PLAIN][: len(conditions)]]
        by_temperature[temperature] = read(list(zip(conditions, codes, strict=True)), temperature)
    encoded = {}
    if config.head_data is not None:
        data = config.head_data
        folder = Path(data.path) if data.path else context.inputs["codes"] / CODES
        for name, samples in encoded_pictures(config, folder, context.target.sample_condition()).items():
            encoded[name] = read(samples, stage.temperatures[0])
    relaxed = {name: (m.tree, m.rule) for name, m in stage.methods.items() if isinstance(m.rule, LanternConfig)}
    tree = next((tree for tree, _ in relaxed.values()), None)
    rules = {name: rule for name, (its, rule) in relaxed.items() if its == tree}
    captions = [p.caption for p in prompts]
    contrast = {
        t: {m: contrasts(generator.pictures(codes_of(generator, codes)), target.grid) for m, codes in by.items()}
        for t, by in drawn_tokens(rows).items()
    }
    from ...eval.studies.drawn.report_section import drawn_section  # and with it matplotlib

    return drawn_section(
        context.folder, config, by_temperature, rows, shown, captions, rules=rules, quality=quality, encoded=encoded,
        contrast=contrast,
    )  # fmt: skip
