"""Pictures drawn for their quality alone: nothing is timed, so plain decoding's are drawn side by side.

Methods of an exact rule have plain decoding's distribution: their pictures are drawn only where they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ...core.batch import ImageRequest
from ...core.json_types import JsonMapping
from ...data.captioned.prompts import ImagePrompt
from ...eval.loop import Decoding, generate
from ...eval.measured_rows import PLAIN
from ...eval.tables import Column, Table, text
from ...models.decoding.batched import draw_pictures
from ...models.decoding.warp import Warp
from ...models.targets.drawing import Generator
from ..run.context import Context
from .drafters import Drafting
from .evaluate_settings import EvaluateSettings
from .kept_pictures import KeptPicture, drawn_once, identity_of
from .measuring import Measuring

Pictures = Mapping[float, Mapping[str, Sequence[KeptPicture]]]  # temperature -> method -> one of each prompt


def draw_untimed(
    stage: EvaluateSettings,
    context: Context,
    generator: Generator,
    prompts: Sequence[ImagePrompt],
    measuring: Measuring,
) -> Pictures:
    """What a table of quality needs: plain decoding's pictures, then those of each method, at every temperature.

    Args:
        stage: the evaluate stage's section, whose benchmark has `untimed`.
        measuring: with the drafters of the methods that are drawn.
    """
    target, untimed = generator.target, stage.drawing.untimed
    assert untimed is not None, "see `stage`"

    def request(number: int) -> ImageRequest:
        prompt = prompts[number]
        return generator.request(prompt.caption, prompt.label, prompt.key)

    def plainly(warp: Warp, numbers: Sequence[int]) -> list[KeptPicture]:
        seeds = [measuring.seed(number) for number in numbers]
        drawn = draw_pictures(target, [request(number) for number in numbers], warp, seeds=seeds)
        return [KeptPicture(tuple(tokens), len(tokens) - 1) for tokens in drawn]

    def drafted(drafting: Drafting, decoding: Decoding, numbers: Sequence[int]) -> list[KeptPicture]:
        results = (generate(target, drafting.drafter, request(n), decoding, measuring.uniforms(n)) for n in numbers)
        return [KeptPicture(tuple(result.tokens), len(result.cycles)) for result in results]

    def drawn(temperature: float, by: Drafting | None, draw: object, batch_size: int = 1) -> list[KeptPicture]:
        identity = identity_of(stage, context, temperature, by)
        its = drawn_once(context.folder.parent, identity, prompts, draw, context.stop, batch_size=batch_size)
        method = PLAIN if by is None else by.title
        context.say(f"{len(prompts)} pictures of {method} at temperature {temperature:g}")
        return its

    pictures: dict[float, dict[str, list[KeptPicture]]] = {}
    for temperature in stage.temperatures:
        plain = partial(plainly, measuring.warp(temperature))
        its = pictures[temperature] = {PLAIN: drawn(temperature, None, plain, untimed.batch_size)}
        for drafting, decoding in measuring.decodings(temperature, target.num_codes).items():
            its[drafting.title] = drawn(temperature, drafting, partial(drafted, drafting, decoding))
    return pictures


def scores_table(pictures: Pictures, quality: Mapping[float, Mapping[str, JsonMapping]], note: str) -> Table:
    """A line for each method and temperature: pictures, tau and every metric."""
    metrics = sorted({metric for methods in quality.values() for scores in methods.values() for metric in scores})
    columns = [Column("T", "g", ranked=False), text("method"), Column("n", "d", ranked=False), Column("tau")]
    lines = []
    for temperature, methods in pictures.items():
        for method, drawn in methods.items():
            scores = quality[temperature][method]
            # The first token comes from the prefill.
            emitted, cycles = sum(len(p.tokens) - 1 for p in drawn), sum(p.num_cycles for p in drawn)
            values = [float(scores[metric]["value"]) if metric in scores else None for metric in metrics]
            lines.append((temperature, method, len(drawn), emitted / cycles if cycles else None, *values))
    whats = {metric: score for methods in quality.values() for of in methods.values() for metric, score in of.items()}
    footnotes = [
        f"{m}: {s['what']}" + (f" ({s['caution']})" if s.get("caution") else "") for m, s in sorted(whats.items())
    ]
    scored = tuple(Column(metric, ".4g") for metric in metrics)
    return Table("Pictures", (*columns, *scored), tuple(lines), note=note, footnotes=tuple(footnotes))
