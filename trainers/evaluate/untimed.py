"""Pictures drawn for their quality alone: nothing is timed, so plain decoding's are drawn side by side.

Methods of an exact rule have plain decoding's distribution: their pictures are drawn only where they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.batch import ImageRequest
from ...core.json_types import JsonMapping
from ...data.captioned.prompts import ImagePrompt
from ...eval.loop import generate
from ...eval.measured_rows import PLAIN
from ...eval.tables import Column, Table, text
from ...models.decoding.batched import draw_pictures
from ...models.families.generators import Generator
from ..run.context import Context
from .drafters import Drafting
from .evaluate_settings import EvaluateSettings
from .kept_pictures import KeptPicture, drawn_once, identity_of
from .measuring import Measuring

Pictures = Mapping[float, Mapping[str, Sequence[KeptPicture]]]  # temperature -> method -> one of each prompt


@dataclass(frozen=True)
class Untimed:
    """Draws what a table of quality needs.

    Args:
        stage: the evaluate stage's section, whose benchmark has `untimed`.
        measuring: with the drafters of the methods that are drawn.
    """

    stage: EvaluateSettings
    context: Context
    generator: Generator
    prompts: Sequence[ImagePrompt]
    measuring: Measuring

    def all(self) -> Pictures:
        """Plain decoding's pictures first, then those of each method, at every temperature."""
        return {temperature: self._at(temperature) for temperature in self.stage.temperatures}

    def _at(self, temperature: float) -> dict[str, list[KeptPicture]]:
        untimed = self.stage.drawing.untimed
        assert untimed is not None, "see `stage`"
        size = untimed.batch_size
        pictures = {PLAIN: self._drawn(temperature, None, lambda some: self._plainly(some, temperature), size)}
        self._say(PLAIN, temperature)
        decodings = self.measuring.decodings(temperature, self.generator.target.num_codes)
        for drafting, decoding in decodings.items():

            def one(
                some: Sequence[int], drafting: Drafting = drafting, decoding: object = decoding
            ) -> list[KeptPicture]:
                return [self._drafted(number, drafting, decoding) for number in some]

            pictures[drafting.title] = self._drawn(temperature, drafting, one, 1)
            self._say(drafting.title, temperature)
        return pictures

    def _drawn(self, temperature: float, drafting: Drafting | None, draw: object, size: int) -> list[KeptPicture]:
        identity = identity_of(self.stage, self.context, temperature, drafting)
        return drawn_once(self.context.folder.parent, identity, self.prompts, draw, self.context.stop, batch_size=size)

    def _plainly(self, numbers: Sequence[int], temperature: float) -> list[KeptPicture]:
        target, warp = self.generator.target, self.measuring.warp(temperature)
        requests = [self._request(number) for number in numbers]
        seeds = [self.measuring.seed(number) for number in numbers]
        drawn = draw_pictures(target, requests, warp, seeds=seeds)
        return [KeptPicture(tuple(tokens), len(tokens) - 1) for tokens in drawn]

    def _drafted(self, number: int, drafting: Drafting, decoding: Any) -> KeptPicture:
        uniforms = self.measuring.uniforms(number)
        result = generate(self.generator.target, drafting.drafter, self._request(number), decoding, uniforms)
        return KeptPicture(tuple(result.tokens), len(result.cycles))

    def _request(self, number: int) -> ImageRequest:
        prompt = self.prompts[number]
        return self.generator.request(prompt.caption, prompt.label, prompt.key)

    def _say(self, method: str, temperature: float) -> None:
        self.context.say(f"{len(self.prompts)} pictures of {method} at temperature {temperature:g}")


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
