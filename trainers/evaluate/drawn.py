"""An evaluation of an image generator: the same prompts drawn plainly and by every method, timed or not."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...core import ranks
from ...core.batch import ImageRequest
from ...core.json_types import Json, JsonMapping, JsonObject
from ...core.results import DATASET_FOLDER
from ...data.captioned.prompts import ImagePrompt, read_prompts
from ...eval.cells import Quality, quality_table
from ...eval.loop import Decoding, generate
from ...eval.measured_rows import PLAIN, Row, drawn_tokens
from ...eval.pair import open_pair
from ...eval.rules import Codes
from ...eval.summary import ratio
from ...eval.tables import Column, Table
from ...models.decoding.batched import draw_pictures, even_batches
from ...models.decoding.warp import Warp
from ...models.targets.drawing import Generator
from ...models.targets.table import image_section
from ..run.context import Context
from ..run.stopping import Stop
from .drafters import Drafters, Drafting
from .evaluate_settings import EvaluateSettings
from .judge import Drawn, Judge
from .measuring import Measuring
from .reporting import Reporting, picture_grids
from .requests import PromptSet
from .resume_log import resumed
from .studies import CHECKS_OF_PICTURES, OF_PICTURES


@dataclass(frozen=True)
class DrawnPicture:
    """A picture that was drawn without the clock."""

    tokens: Sequence[int]
    num_cycles: int  # target passes after the prefill


Pictures = Mapping[float, Mapping[str, Sequence[DrawnPicture]]]  # temperature -> method -> one of each prompt


def run(stage: EvaluateSettings, context: Context) -> None:
    """Measure and report."""
    device, benchmark = context.device(), stage.drawing
    pair = open_pair(context.target, context.inputs, device=device)
    generator = pair.generator
    assert generator is not None
    source = benchmark.prompts.resolved(
        context.inputs["data"] / DATASET_FOLDER if benchmark.prompts.from_stage else None
    )
    prompts, target = read_prompts(source), image_section(context.target)
    target.check_labels([(p.caption, p.label) for p in prompts])
    judge = Judge(
        benchmark.quality,
        prompts,
        reader=context.inputs["reader"] if benchmark.reader else None,
        real=Path(source.path) if source.path and source.path.endswith(".tar") else None,
        size=target.image_size,
        device=device,
    )
    # What LANTERN's rules read of the target.
    codebook = generator.codebook.to(generator.target.device)
    codes = Codes(codebook, generator.first_id, context.seed, context.folder / "neighbours")
    drafting = Drafters(stage, context, pair).all(codes, grid=generator.target.grid, wanted=stage.is_drawn)
    measuring = Measuring(stage, context, generator.target, drafting, ())
    rows: Sequence[Row] = ()
    pictures: Pictures = {}
    if benchmark.untimed is not None:
        pictures = draw_untimed(measuring, generator, prompts, benchmark.untimed.batch_size)
    else:
        for check in CHECKS_OF_PICTURES:
            check(stage, generator, drafting)
        (name,) = stage.benchmarks
        requests = PromptSet(benchmark=name, prompts=prompts, generator=generator)
        measuring.announce([requests])
        rows = measuring.all([requests])
    with context.stop.together():
        if ranks.is_main():
            tokens = {t: {m: [p.tokens for p in of] for m, of in by.items()} for t, by in pictures.items()}
            quality, shown = _judged(generator, judge, tokens or drawn_tokens(rows), benchmark.shown, context.stop)
            reporting = Reporting(measuring, rows, _about(stage, context, prompts, judge))
            grids = picture_grids(context.folder, shown, prompts)
            if benchmark.untimed is not None:
                reporting.write_scores(scores_table(stage, pictures, quality), grids, quality=quality)
                return
            reporting.write(grids, quality=quality)
            # Runs after the report is written, so that a failing study loses no measurements.
            if more := [section for study in OF_PICTURES for section in study(measuring, generator, prompts, rows)]:
                reporting.write(grids, *more, quality=quality, again=True)


def draw_untimed(
    measuring: Measuring, generator: Generator, prompts: Sequence[ImagePrompt], batch_size: int
) -> Pictures:
    """What a table of quality needs, drawn without the clock: plain decoding's pictures, `batch_size` side by side,
    then those of each method whose drafter `measuring` has, at every temperature. A killed run keeps what it has drawn.
    """
    target, stage, context = generator.target, measuring.stage, measuring.context

    def request(number: int) -> ImageRequest:
        prompt = prompts[number]
        return generator.request(prompt.caption, prompt.label, prompt.key)

    def plainly(warp: Warp, numbers: Sequence[int]) -> Json:
        seeds = [measuring.seed(number) for number in numbers]
        drawn = draw_pictures(target, [request(number) for number in numbers], warp, seeds=seeds)
        return [(tokens, len(tokens) - 1) for tokens in drawn]

    def drafted(drafting: Drafting, decoding: Decoding, numbers: Sequence[int]) -> Json:
        results = (generate(target, drafting.drafter, request(n), decoding, measuring.uniforms(n)) for n in numbers)
        return [(result.tokens, len(result.cycles)) for result in results]

    def drawn(
        temperature: float, by: Drafting | None, draw: Callable[[Sequence[int]], Json], at_once: int = 1
    ) -> list[DrawnPicture]:
        method, batches = PLAIN if by is None else by.title, even_batches(range(len(prompts)), at_once)
        stem = context.folder / "rows" / f"{method}-T{temperature:g}"
        each = resumed(stem, len(batches), lambda index: draw(batches[index]), context.stop)
        context.say(f"{len(prompts)} pictures of {method} at temperature {temperature:g}")
        # 30,000 pictures of each method are held: four bytes a token.
        return [DrawnPicture(array("I", tokens), cycles) for batch in each for tokens, cycles in batch]

    pictures: dict[float, dict[str, list[DrawnPicture]]] = {}
    for temperature in stage.temperatures:
        plain = partial(plainly, measuring.warp(temperature))
        its = pictures[temperature] = {PLAIN: drawn(temperature, None, plain, batch_size)}
        for drafting, decoding in measuring.decodings(temperature, target.num_codes).items():
            its[drafting.title] = drawn(temperature, drafting, partial(drafted, drafting, decoding))
    return pictures


def scores_table(stage: EvaluateSettings, pictures: Pictures, quality: Quality) -> Table:
    """A line for each method and temperature: pictures, tau and every metric.

    Methods of an exact rule have plain decoding's distribution: they are drawn only where they are asked for.
    """
    note = "tau as in every report. Nothing was timed."
    if left_out := [name for name, method in stage.methods.items() if not stage.is_drawn(method)]:
        note += f" Not drawn, because exact methods have plain decoding's distribution: {', '.join(left_out)}."
    numbers = {}
    for temperature, methods in pictures.items():
        for method, drawn in methods.items():
            # The first token comes from the prefill.
            emitted, cycles = sum(len(p.tokens) - 1 for p in drawn), sum(p.num_cycles for p in drawn)
            numbers[temperature, method] = (len(drawn), ratio(emitted, cycles))
    return quality_table(quality, (Column("n", "d", ranked=False), Column("tau")), numbers, note)


def codes_of(generator: Generator, tokens: Sequence[Sequence[int]]) -> Tensor:
    """Pictures' tokens as codes [B,n] of the image tokenizer."""
    return torch.stack([generator.target.codes(list(row)) for row in tokens])


def _judged(
    generator: Generator, judge: Judge, tokens: Mapping[float, JsonMapping], shown: int, stop: Stop
) -> tuple[dict[float, JsonObject], dict[float, dict[str, Tensor]]]:
    """temperature -> method -> scores of all of its pictures, and the first of them."""

    def decode(codes: Tensor) -> Tensor:
        stop.check("while pictures were judged; all of them are kept")
        return generator.pictures(codes)

    quality = {
        t: {m: judge(Drawn(decode, codes_of(generator, codes))) for m, codes in by.items()} for t, by in tokens.items()
    }
    first = {
        t: {m: generator.pictures(codes_of(generator, codes[:shown])) for m, codes in by.items()}
        for t, by in tokens.items()
    }
    return quality, first


def _about(stage: EvaluateSettings, context: Context, prompts: Sequence[ImagePrompt], judge: Judge) -> JsonObject:
    real, source, distance = judge.score_of_real(), stage.drawing.prompts, judge.fid_of_real()
    fid = "" if distance is None else f"; their FID on its features is {distance:.3g}"
    return {
        "prompts": f"{len(prompts)} of {source.path or f'{source.classes} classes'}",
        "guidance": f"scale {image_section(context.target).cfg_scale:g}",
    } | (
        {} if real is None else {"reader": f"reads {real:.1%} of the real pictures of these prompts as captioned{fid}"}
    )
