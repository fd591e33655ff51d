"""Stage kind `evaluate`: decode held-out requests plainly and by every method, in one run, and report.

One stage for every target: a language model over text, pictures and clips, or an image generator. Speeds compare with
plain decoding of the same target at the same temperature and length in the same run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from ...core.errors import Refused
from ...models.drafters.captioners import LvlmCaptions
from ..estimate.evaluation import describe_evaluation
from ..evaluate.evaluate_settings import EvaluateSettings
from ..run.context import Context
from ..run.stage import Planned
from ..train.engine import init_distributed
from ..train.on_codes import lacking
from ..train.settings import other_drafters


class EvaluateStage(EvaluateSettings):
    loads_target: ClassVar[bool] = True
    usual_purpose: ClassVar[str] = "every method decodes the same requests"

    def makes(self) -> set[str]:
        return {"report"}

    def needs(self) -> dict[str, str | None]:
        """Raises `Refused` where the benchmarks come from more than one stage."""
        wanted: dict[str, str | None] = {}
        if self.draws:
            wanted |= {"target": None, "text": None, "vq": None}
        elif self.target is None:
            wanted |= {"processor": None, "target": None}
        for method in self.methods.values():
            wanted |= {f"drafter/{name}": name for name in method.names if name not in self.drafters}
            if method.drafter is None and method.drafters is None:
                wanted["drafter"] = None
        wanted |= {f"drafter/{name}": name for name in sorted(self._members() - {*self.drafters})}
        if isinstance(self.captioner, LvlmCaptions):
            wanted["captioner"] = self.captioner.from_stage
        if self.draws and self.drawing.reader:
            wanted["reader"] = None
        sections = [self.drawing.prompts] if self.draws else self.data
        sources = {section.from_stage for section in sections} - {None}
        if len(sources) > 1:
            named = " and ".join(sorted(map(str, sources)))
            problem = f"come from {len(sources)} stages, {named}: a stage takes data from one"
            raise Refused("benchmarks", problem, "take all from one stage, or name files by path")
        if sources:
            wanted["data"] = sources.pop()
        if self.engine.beside_stage is not None:
            wanted["report"] = self.engine.beside_stage
        analysis = self.probes.analysis
        if analysis is not None and analysis.head_data is not None and not analysis.head_data.path:
            wanted["codes"] = analysis.head_data.from_stage
        return wanted

    def misfits(self, thing: str, makers: Sequence[Planned], inputs: Mapping[str, Planned]) -> dict[str, str]:
        """Another drafter than the recipe's, where a method names none; shards without what the head reads."""
        if thing == "codes":
            return lacking(makers, "drafter")
        return other_drafters(makers) if thing == "drafter" else {}

    def run(self, context: Context) -> None:
        from ..evaluate import drawn, text
        from ..evaluate.studies import OF_ENGINES

        init_distributed()
        if self.draws:
            drawn.run(self, context)
            return
        if self.target is not None:
            context = replace(context, target=self.target)
        if self.engine.is_served:
            OF_ENGINES[self.engine.name](self, context)
            return
        with context.in_step():
            text.run(self, context)

    def describe(self, plan: Planned) -> list[str]:
        """Requests, methods and drafters, counted without the data."""
        return describe_evaluation(self)
