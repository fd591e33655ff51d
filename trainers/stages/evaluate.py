"""Stage kind `evaluate`: decode held-out requests plainly and by every method, in one run, and report.

One stage for every target: a language model over text, pictures and clips, or an image generator. Speeds compare with
plain decoding of the same target at the same temperature and length in the same run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, cast

from ...core.errors import Refused
from ...models.drafters.captioners import LvlmCaptions
from ...models.targets.load import target_config
from ...models.targets.section import TargetSection
from ...models.targets.sizes import parameter_counts
from ...models.targets.table import TargetConfig
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
        if (sight := self.probes.sight) is not None and sight.answers.path is None:
            wanted["answers"] = sight.answers.from_stage
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
        files = [name for name, benchmark in self.benchmarks.items() if benchmark.kind == "files"]
        lines = [f"  benchmarks {', '.join(files)}"] if files else []
        lines += [line for benchmark in self.benchmarks.values() for line in benchmark.lines()]
        for key, lengths in self.listed_lengths().items():
            clips = (f"{length} {'visual tokens' if isinstance(length, str) else 'frames'}" for length in lengths)
            of = key.removeprefix("lengths").replace(".", " of ")
            lines.append(f"  clips{of} at {', '.join(clips)}")
        answers = "" if self.draws else f"answers of up to {', '.join(map(str, self.max_new_tokens))} tokens; "
        temperatures = ", ".join(f"{t:g}" for t in self.temperatures)
        lines.append(f"  temperatures {temperatures}; {answers}each request is decoded plainly and by:")
        for name, method in self.methods.items():
            allowed, alone = [t for t in self.temperatures if method.allowed(t)], ""
            if len(allowed) < len(self.temperatures):
                alone = f"; temperature{'s' * (len(allowed) > 1)} {', '.join(f'{t:g}' for t in allowed)} alone"
            lines.append(f"    {name}: {method.line(self.drafters)}{alone}")
        if self.draws and (untimed := self.drawing.untimed) is not None:
            lines.append(f"  for their quality alone, untimed: plain decoding in batches of {untimed.batch_size}")
            if left_out := [name for name, method in self.methods.items() if not self.is_drawn(method)]:
                lines.append(f"  not drawn, because their pictures equal plain decoding's: {', '.join(left_out)}")
        lines += self.engine.lines()
        if self.target is not None:
            lines.append(f"  target {self.target.path}: {_num_parameters(self.target):,} parameters")
        for name, section in self.drafters.items():
            lines.append(f"  drafter {name}: {dict(section).get('path') or section.kind}")
        sections = [method.section for method in self.methods.values()] + list(self.drafters.values())
        models = [dict(section).get("model") for section in sections if section is not None]
        published = {model.path: model for model in models if isinstance(model, TargetSection)}
        return lines + [
            f"  draft {p}: {_num_parameters(cast(TargetConfig, model)):,} parameters" for p, model in published.items()
        ]


def _num_parameters(section: TargetConfig) -> int:
    """The number of parameters of a published model that reads pictures."""
    return sum(parameter_counts(target_config(section, None, network=False)).values())
