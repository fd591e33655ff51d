"""An evaluation of an image generator: the same prompts drawn plainly and by every method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ...core import ranks
from ...core.json_types import JsonMapping, JsonObject
from ...core.results import DATASET_FOLDER
from ...data.captioned.prompts import ImagePrompt, read_prompts
from ...eval.measured_rows import grouped
from ...eval.pair import open_pair
from ...eval.rules import Codes
from ...models.targets.generators import Generator, image_section
from ..run.context import Context
from ..run.stopping import Stop
from .drafters import Drafters
from .evaluate_settings import EvaluateSettings
from .judge import Drawn, Judge
from .kept_pictures import KeptPicture, PicturesOfRows, codes_of, drawn_tokens, identity_of, keep
from .measuring import Measuring
from .reporting import Reporting, picture_grids
from .requests import PromptSet
from .studies import CHECKS_OF_PICTURES, OF_PICTURES
from .untimed import draw_untimed, scores_table


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
    if benchmark.untimed is not None:
        _scored(stage, context, generator, prompts, judge, measuring)
        return
    for check in CHECKS_OF_PICTURES:
        check(stage, generator, drafting)
    (name,) = stage.benchmarks
    requests = PromptSet(name, prompts, generator)
    measuring.announce([requests])
    rows = measuring.all([requests])
    with context.stop.together():
        if ranks.is_main():
            # For tables of quality with the same settings.
            for (temperature, method, drafter), its in grouped(rows, "temperature", "method", "drafter").items():
                one = next((d for d in drafting if (d.name, d.drafter_name) == (method, drafter)), None)
                drawn = (KeptPicture(tuple(row.tokens), row.num_cycles) for row in its)
                keep(context.folder.parent, identity_of(stage, context, temperature, one), prompts, drawn)
            quality, shown = _judged(generator, judge, drawn_tokens(rows), benchmark.shown, context.stop)
            reporting = Reporting(stage, context, measuring, rows, _about(stage, context, prompts, judge))
            grids = picture_grids(context.folder, shown, prompts)
            reporting.write(grids, quality=quality)
            # Runs after the report is written, so that a failing study loses no measurements.
            pictures = PicturesOfRows(measuring, generator, prompts, rows)
            if more := [section for study in OF_PICTURES for section in study(pictures)]:
                reporting.write(grids, *more, quality=quality, again=True)


def _scored(
    stage: EvaluateSettings,
    context: Context,
    generator: Generator,
    prompts: Sequence[ImagePrompt],
    judge: Judge,
    measuring: Measuring,
) -> None:
    """Draw and judge, without the clock."""
    pictures = draw_untimed(stage, context, generator, prompts, measuring)
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
