"""Stage kind `evaluate` of this track: decode the same requests plainly and by every method, in one run, and report.

Methods are interleaved request by request, so that a slow minute hits all alike; speeds compare with plain decoding of
the same target, temperature and length in the same run. Every request's measurements are kept as soon as it is decoded:
a killed run goes on behind them, with any number of ranks.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, model_validator

from ....core import ranks
from ....core.errors import UserError
from ....core.nouns import Request
from ....core.pictures import TEXT
from ....data.conversations import PromptFormat
from ....data.lengths import count_long
from ....data.processor import Processor
from ....eval import reading_report
from ....eval.loop import Decoding, Generation, generate
from ....eval.measure import Row, measure_request
from ....eval.policies import Draw, Sage
from ....eval.rules import RULES
from ....models.decoding.warp import Warp
from ...context import Context
from ...describe.evaluate import describe_methods
from ...engine import init_distributed
from ...training.states import open_target
from ..base import Planned, Stage
from ..evaluate import Benchmark
from ..kept import Kept
from .looks import Looking, Looks, plain_decoding, watched_methods
from .methods import Method, OpenMethod, open_methods, rule_name
from .requests import Asked, Length, Opening, VideoSuite, check_length


class ReadingEvaluateStage(Stage):
    kind: Literal["evaluate"]
    format: PromptFormat = PromptFormat()
    # Files of one's own: each record's conversation up to its last answer.
    benchmarks: list[Benchmark] = Field(default_factory=list)
    suite: VideoSuite | None = None
    # Of clips: numbers of frames, or as text of visual tokens ("0.5k", "25k"); each clip is decoded at every one of
    # them. none: once, as the data section reads it.
    lengths: list[Length] = Field(default_factory=list)
    # Name in the tables -> how it decodes.
    methods: dict[str, Method] = Field(min_length=1)
    temperatures: list[Annotated[float, Field(ge=0)]] = Field([0.0], min_length=1)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    # Tokens of an answer; several numbers decode every request anew for each (SAGE: 512, 1024, 2048).
    max_new_tokens: Annotated[
        list[Annotated[int, Field(ge=2)]], BeforeValidator(lambda given: [given] if isinstance(given, int) else given)
    ] = Field([256], min_length=1)
    # false: answers go on behind the end token, so that all have max_new_tokens (speed at 2,048 tokens, which few
    # descriptions have by themselves).
    stop_at_end: bool = True
    # Requests decoded before the clock counts, and times that each is decoded.
    warmup: int = Field(1, ge=0)
    repeats: int = Field(1, ge=1)
    # What else is looked into, untimed; null: of methods with tree: sage how confidence and acceptance go together.
    looks: Looks | None = None

    @model_validator(mode="after")
    def _whole(self) -> ReadingEvaluateStage:
        if not self.benchmarks and self.suite is None:
            raise ValueError("nothing to measure: give benchmarks or a suite")
        names = [benchmark.name for benchmark in self.benchmarks] + ((self.suite and self.suite.names) or [])
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"benchmarks and suite.sets name {', '.join(sorted(twice))} twice")
        for length in self.lengths:
            check_length(length)
        for key in ("lengths", "temperatures", "max_new_tokens"):
            given = getattr(self, key)
            if twice := {value for value in given if given.count(value) > 1}:
                raise ValueError(f"{key} name {', '.join(map(str, twice))} twice: its requests would count twice")
        if self.looks is not None and self.looks.importance is not None:
            self.looks.importance.check([benchmark.name for benchmark in self.benchmarks], self.suite)
        return self

    @model_validator(mode="after")
    def _allowed(self) -> ReadingEvaluateStage:
        for name, method in self.methods.items():
            used = [t for t in self.temperatures if method.allowed(t)]
            if not used:
                raise ValueError(f"methods.{name} fits none of the temperatures")
            for temperature in used:
                method.check(temperature)
        for temperature in self.temperatures:
            if not any(method.allowed(temperature) for method in self.methods.values()):
                raise ValueError(f"temperature {temperature:g} is used by no method")
        return self

    def ends(self, eos_id: int) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return (eos_id,) if self.stop_at_end else ()

    def makes(self) -> set[str]:
        return {"report"}

    def needs(self) -> dict[str, str | None]:
        wanted: dict[str, str | None] = {"processor": None, "target": None}
        for method in self.methods.values():
            if method.stage is not None:
                wanted[f"drafter/{method.stage}"] = method.stage
            elif method.drafter is None:
                wanted["drafter"] = None
        sections = [benchmark.data for benchmark in self.benchmarks] + ([self.suite.data] if self.suite else [])
        made = {data.from_stage for data in sections} - {None}
        if len(made) > 1:
            raise ValueError("benchmarks and suite come from two stages")
        return wanted | ({"data": made.pop()} if made else {})

    def run(self, context: Context) -> None:
        run(self, context)

    def describe(self, plan: Planned) -> list[str]:
        return describe_methods(self)


def run(stage: ReadingEvaluateStage, context: Context) -> None:
    init_distributed()
    processor = context.processor()
    # Before a large target is loaded: a set may be out of reach.
    opening = Opening(context, processor, stage.format, stage.lengths)
    asked = [found for benchmark in stage.benchmarks for found in opening.benchmark(benchmark.name, benchmark.data)]
    asked += opening.suite(stage.suite) if stage.suite is not None else []
    target = open_target(context, processor)
    methods = open_methods(stage.methods, context, target, processor)
    measuring = _Measuring(stage, context, processor, target, methods)
    rows = [row for part in asked for row in measuring.all(part)]
    if not rows:
        raise UserError("no request of any set could be read", where=str(context.folder / "skipped.jsonl"),
                        cure="check the folders of pictures and clips")  # fmt: skip
    if ranks.is_main():
        parts = {name: found for name, method in methods.items() if (found := method.parts) is not None}
        levels = {name: method.policy.num_levels for name, method in methods.items()}
        adaptive = [name for name, method in methods.items() if isinstance(method.policy, Sage)]
        about = _about(stage, context) | ({"left out": measuring.left_out} if measuring.left_out else {})
        report = reading_report.build(rows, levels=levels, parts=parts, adaptive=adaptive, about=about)
        reading_report.write(context.folder, report, rows)
        context.say("\n".join(report["findings"]))
        context.say(f"report: {context.folder / 'report.md'}")
        # Behind the report: what was measured is there, whatever becomes of this.
        if more := _look(stage, context, processor, target, methods, asked, rows):
            reading_report.write(context.folder, report, rows, more)
    ranks.barrier()


def _look(
    stage: ReadingEvaluateStage,
    context: Context,
    processor: Processor,
    target: Any,
    methods: Mapping[str, OpenMethod],
    asked: Sequence[Asked],
    rows: Sequence[Row],
) -> list[str]:
    """The report's sections on what was looked into; at the lowest temperature, where all methods can be used."""
    temperature = min(stage.temperatures)
    used = {name: found for name, found in methods.items() if found.method.allowed(temperature)}
    watched = watched_methods(used, stage.looks)
    if stage.looks is None and not watched:
        return []
    settings = stage.looks or Looks(states=False)
    decoding = plain_decoding(temperature, max(stage.max_new_tokens), stage.ends(processor.eos_id), stage)
    of_temperature = [row for row in rows if row["temperature"] == temperature]
    return Looking(settings, context, target, used, decoding).report(asked, of_temperature, watched=watched)


@dataclass(frozen=True)
class _Measuring:
    stage: ReadingEvaluateStage
    context: Context
    processor: Processor
    target: Any
    methods: Mapping[str, OpenMethod]
    left_out: dict[str, str] = field(default_factory=dict)  # set -> of how many requests how many cannot be read

    def all(self, asked: Asked) -> list[Row]:
        """Rows of all ranks for one set at one length."""
        self._check_positions(asked)
        rows = []
        for temperature in self.stage.temperatures:
            for length in self.stage.max_new_tokens:
                found = self._requests(asked, temperature, length)
                rows += [row for some in found for row in some]
        if count := sum(not some for some in found):
            self.left_out[asked.name] = f"{count} of {len(found)} (skipped.jsonl)"
        told = f", {count} left out: {self.context.folder / 'skipped.jsonl'}" if count else ""
        self.context.say(f"{asked.name}: {len(found) - count} requests decoded{told}")
        return rows

    def _requests(self, asked: Asked, temperature: float, max_new_tokens: int) -> list[list[Row]]:
        """Of each request the rows; none where it is left out."""
        stem = self.context.folder / "rows" / f"{asked.file}-T{temperature:g}-{max_new_tokens}"
        kept, decodings = Kept(stem), self._decodings(temperature, max_new_tokens)
        left = [
            index
            for index in range(ranks.rank(), len(asked.dataset), ranks.world_size())
            if str(index) not in kept.values
        ]
        for index in left[: self.stage.warmup]:
            request = asked.request(index, self.target)
            for name in (None, *decodings):
                if request is not None:
                    self._generate(index, name, request, decodings)
        common = {
            "set": asked.set, "medium": asked.medium, "budget": asked.budget, "temperature": temperature,
            "max_new_tokens": max_new_tokens,
        }  # fmt: skip
        unread = []
        for index in left:
            if some := self._one(index, asked, decodings):
                kept.add(str(index), [row | common for row in some])
            else:
                unread.append(index)
        nowhere = {index for each in ranks.gather(unread) for index in each}
        found = Kept(stem).values
        return [[] if index in nowhere else found[str(index)] for index in range(len(asked.dataset))]

    def _one(self, index: int, asked: Asked, decodings: Mapping[str, Decoding]) -> list[Row]:
        """A row for each method."""
        request = asked.request(index, self.target)
        if request is None:
            return []
        plain: list[Generation] = []
        drafted: dict[str, list[Generation]] = {name: [] for name in decodings}
        told: dict[str, Row] = {}
        for _ in range(self.stage.repeats):
            plain.append(self._generate(index, None, request, decodings))
            for name in decodings:
                drafted[name].append(self._generate(index, name, request, decodings))
                told[name] = _said(self.methods[name])
        visual = int((request.modality != TEXT).sum())
        about = {"visual_tokens": visual, "prompt_tokens": len(request.ids)}
        return [measure_request(request.name, n, plain, drafted[n]) | about | told[n] for n in decodings]

    def _decodings(self, temperature: float, max_new_tokens: int) -> dict[str, Decoding]:
        """Of the methods that this temperature can be used with."""
        warp = Warp(temperature, self.stage.top_k, self.stage.top_p)
        rule = RULES[rule_name(temperature)]
        return {
            name: Decoding(
                found.policy, rule, Draw(found.method.draw), warp, max_new_tokens,
                self.stage.ends(self.processor.eos_id),
            )
            for name, found in self.methods.items()
            if found.method.allowed(temperature)
        }  # fmt: skip

    def _generate(
        self, index: int, name: str | None, request: Request, decodings: Mapping[str, Decoding]
    ) -> Generation:
        # Of the request, not of the rank: the same report with one rank and with two.
        generator = torch.Generator().manual_seed(self.context.seed * 1_000_003 + index)
        if name is None:
            # Proposes nothing: any method's rule and warp are plain decoding's.
            return generate(self.target, None, request, next(iter(decodings.values())), generator)
        return generate(self.target, self.methods[name].drafter, request, decodings[name], generator)

    def _check_positions(self, asked: Asked) -> None:
        """Warn of requests beyond the target's positions: it then answers noise, plainly and with any drafter."""
        held, longest = self.target.decoder.max_positions, max(self.stage.max_new_tokens)
        if held is None or not ranks.is_main():
            return
        found = count_long(asked.dataset, held - longest, prompts=True)
        if found.first is not None:
            self.context.say(
                f"warning: {asked.name}: prompts that leave less than {longest:,} of the target's {held:,} positions: "
                f"{found}; its answers are noise there"
            )


def _said(found: OpenMethod) -> Row:
    """What a drafter and a policy have to tell of the request that was just decoded."""
    row: Row = {}
    for key in ("num_held", "num_kept"):
        if (value := getattr(found.drafter, key, None)) is not None:
            row[key] = int(value)
    if isinstance(found.policy, Sage):
        row["sage"] = [cycle._asdict() for cycle in found.policy.log]
    return row


def _about(stage: ReadingEvaluateStage, context: Context) -> dict[str, Any]:
    device = context.device()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    trees = {name: method.tree.model_dump(exclude_defaults=True) for name, method in stage.methods.items()}
    return {
        "command": context.command,
        "device": f"{name}, {torch.get_num_threads()} threads, {ranks.world_size()} rank(s)",
        "date": time.strftime("%Y-%m-%d"),
        "seed": context.seed,
        "target": context.target.path or "trained in this run",
        "temperatures": stage.temperatures,
        "trees": trees,
        "repeats": stage.repeats,
        "max_new_tokens": stage.max_new_tokens,
        "answers": "end at the end token" if stage.stop_at_end else "go on behind the end token",
        **({"prompts": stage.suite.convention} if stage.suite is not None else {}),
        "torch": torch.__version__,
    }
