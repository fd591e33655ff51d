"""Stage kind `evaluate` of the visual track: draw the same prompts plainly and by every method, in one run.

Methods are interleaved request by request, so that a slow minute hits all alike; speeds compare with plain decoding of
the same target at the same temperature in the same run.
"""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from ....core import ranks
from ....core.errors import UserError
from ....core.refused import Refused
from ....core.section import Section
from ....data.prompts import ImagePrompt, PromptSource, read_prompts
from ....eval import visual_report
from ....eval.analysis import AnalysisConfig, Reading, encoded_pictures, read_pictures
from ....eval.block import Block, BlockConfig
from ....eval.lantern import LanternConfig, lantern
from ....eval.loop import Decoding, Generation, generate
from ....eval.measure import measure_request
from ....eval.policies import Draw, TreeConfig, TreePolicy, check_combination
from ....eval.quality import QualityConfig
from ....eval.rules import RULES, Rule
from ....eval.visual_analysis import write_section
from ....models.decoding.warp import Warp
from ....models.drafters.base import TargetIdentity
from ....models.drafters.eagle import ImageEagleHead, ImageEagleProposal
from ....models.generators import Generator, check_labels, load_generator, sample_condition
from ...context import Context
from ...describe.evaluate import describe_pictures
from ...engine import init_distributed
from ..base import Planned, Stage
from ..encode import SHARDS
from ..generate import WORLD
from .judge import Drawn, Judge


class ExactRule(Section):
    """Greedy at temperature 0, speculative sampling above."""

    kind: Literal["exact"] = "exact"


RuleConfig = Annotated[ExactRule | LanternConfig | BlockConfig, Field(discriminator="kind")]


class Method(Section):
    """One way of decoding."""

    tree: TreeConfig
    rule: RuleConfig = ExactRule()
    # sample draws proposals from the drafter without replacement, for trees whose shape is fixed.
    draw: Literal["top-k", "sample"] = "top-k"
    # The stage whose drafter proposes; null: the latest.
    drafter: str | None = None
    # Only at these temperatures of the stage; null: at all that this method can be used at.
    temperatures: list[float] | None = None

    def allowed(self, temperature: float) -> bool:
        if self.temperatures is not None and temperature not in self.temperatures:
            return False
        return temperature > 0 or (self.draw == "top-k" and self.rule.kind != "block")

    def rule_name(self, temperature: float) -> str:
        return ("sampling" if temperature else "greedy") if self.rule.kind == "exact" else self.rule.kind


# LANTERN's and ADT-Tree's own comparisons; methods that a recipe names beside a preset are added to it.
_EAGLE2: dict[str, Any] = {"tree": {"kind": "dynamic", "total": 60, "depth": 4, "width": 10}}
_RELAXED: dict[str, Any] = {"rule": {"kind": "lantern", "k": 1000, "delta": 0.4}}


def _adt(family: str) -> dict[str, dict[str, Any]]:
    tree: dict[str, Any] = {"tree": {"kind": "adt", "preset": family}}
    return {
        "EAGLE-2": _EAGLE2,
        "LANTERN": {**_EAGLE2, **_RELAXED},
        "ADT-Tree": tree,
        "ADT-Tree + LANTERN": {**tree, **_RELAXED},
    }


PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "adt": _adt("anole"),
    "adt-llamagen": _adt("llamagen"),
    "lantern": {
        "EAGLE-2": _EAGLE2,
        **{
            f"LANTERN (delta = {delta:g}, k = 1000)": {
                **_EAGLE2,
                "rule": {"kind": "lantern", "k": 1000, "delta": delta},
                "temperatures": [temperature],
            }
            for delta, temperature in ((0.05, 0.0), (0.2, 0.0), (0.1, 1.0), (0.4, 1.0))
        },
    },
}


class VisualEvaluateStage(Stage):
    kind: Literal["evaluate"]
    prompts: PromptSource
    # adt (Anole) or adt-llamagen (100 captions, Tables I to V), which differ in ADT-Tree's steps and widths, or lantern
    # (1,000 captions for speed, 30,000 for quality, Tables 2 and 6); null: the methods below. How many prompts there
    # are is for `prompts` to say.
    preset: Literal["adt", "adt-llamagen", "lantern"] | None = None
    # Name in the tables -> how it decodes.
    methods: dict[str, Method] = Field(default_factory=dict)
    temperatures: list[float] = Field([0.0, 1.0], min_length=1)
    # The targets' own: 1000 for text-conditional LlamaGen, 2000 for class-conditional and Anole, 0 keeps all.
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    # Requests decoded before the clock counts, and times that each is decoded.
    warmup: int = Field(1, ge=0)
    repeats: int = Field(1, ge=1)
    # Pictures of each method in the report's grids.
    shown: int = Field(8, ge=1)
    # Metrics on every picture that was drawn; null: none.
    quality: QualityConfig | None = None
    # Score the pictures with the reader of a world (a stage with model: reader).
    reader: bool = False
    # Figures and numbers of what target and head make of the pictures; true: the papers' settings. null: none.
    analysis: AnalysisConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("preset") not in PRESETS:
            return given
        return {**given, "methods": {**PRESETS[given["preset"]], **given.get("methods", {})}}

    @model_validator(mode="after")
    def _allowed(self) -> VisualEvaluateStage:
        if not self.methods:
            raise ValueError("give methods or a preset")
        for name, method in self.methods.items():
            used = [t for t in self.temperatures if method.allowed(t)]
            if not used:
                raise ValueError(f"methods.{name} fits none of the temperatures")
            for temperature in used:
                check_combination(
                    temperature=temperature,
                    draw=method.draw,
                    policy=method.tree.kind,
                    prunes_by_token=method.tree.build(grid=1).prunes_by_token,  # of any side
                    rule=method.rule_name(temperature),
                )
        return self

    def makes(self) -> set[str]:
        return {"report"}

    def needs(self) -> dict[str, str | None]:
        wanted: dict[str, str | None] = {"target": None, "text": None, "vq": None}
        named = {m.drafter for m in self.methods.values()}
        wanted |= {"drafter" if name is None else f"drafter/{name}": name for name in named}
        if self.reader:
            wanted["reader"] = None
        if self.prompts.from_stage is not None:
            wanted["data"] = self.prompts.from_stage
        if self.analysis is not None and self.analysis.head_data is not None and not self.analysis.head_data.path:
            wanted["codes"] = self.analysis.head_data.from_stage
        return wanted

    def check(self, target: Any, drafter: Any) -> None:
        own, other = ("adt", "adt-llamagen") if target.kind == "anole" else ("adt-llamagen", "adt")
        if self.preset == other:
            raise Refused("preset", f"{other} has the trees of another target", f"use {own}")

    def run(self, context: Context) -> None:
        run(self, context)

    def describe(self, plan: Planned) -> list[str]:
        return describe_pictures(self)


def run(stage: VisualEvaluateStage, context: Context) -> None:
    init_distributed()
    device = context.device()
    generator = load_generator(context.target, context.inputs, device=device)
    world = None if stage.prompts.from_stage is None else context.inputs["data"] / WORLD
    source = stage.prompts.resolved(world)
    prompts = read_prompts(source)
    check_labels(context.target, [(p.caption, p.label) for p in prompts])
    judge = Judge(
        stage.quality,
        prompts,
        reader=context.inputs["reader"] if stage.reader else None,
        real=Path(source.path) if source.path and source.path.endswith(".tar") else None,
        size=context.target.image_size,
        device=device,
    )
    if stage.analysis is not None:
        stage.analysis.check(len(generator.codebook), generator.target.grid)
        _eagle_head(stage, generator, context)
    proposals = {name: _proposal(method, generator, context) for name, method in stage.methods.items()}
    results: visual_report.Results = {}
    tokens: dict[float, dict[str, list[list[int]]]] = {}
    for temperature in stage.temperatures:
        decoders = _decoders(stage, context, generator, temperature)
        rows = _decode_all(stage, context, generator, prompts, decoders, proposals, temperature)
        shards = ranks.gather(rows)
        merged = {name: sorted((r for s in shards for r in s[name]), key=lambda r: r["number"]) for name in rows}
        tokens[temperature] = {name: [r.pop("picture") for r in found] for name, found in merged.items()}
        results[temperature] = {name: found for name, found in merged.items() if name != visual_report.PLAIN}
        context.say(f"temperature {temperature:g}: {len(prompts)} prompts drawn plainly and by {len(decoders)} methods")
    if ranks.is_main():
        quality = {
            temperature: {
                name: judge(Drawn(generator.pictures, _codes(generator, codes))) for name, codes in by_name.items()
            }
            for temperature, by_name in tokens.items()
        }
        pictures = {
            temperature: {
                name: generator.pictures(_codes(generator, codes[: stage.shown])) for name, codes in by_name.items()
            }
            for temperature, by_name in tokens.items()
        }
        built = visual_report.build(
            results, quality, about=_about(stage, context, prompts, device, judge), grid=generator.target.grid
        )
        explained = _explain(stage, context, generator, prompts, tokens, results, built, pictures)
        visual_report.write(context.folder, built, results, pictures, explained)
        context.say("\n".join(visual_report.findings(built)))
        context.say(f"report: {context.folder / 'report.md'}")
    ranks.barrier()


def _explain(
    stage: VisualEvaluateStage,
    context: Context,
    generator: Generator,
    prompts: list[ImagePrompt],
    tokens: dict[float, dict[str, list[list[int]]]],
    results: visual_report.Results,
    built: dict[str, Any],
    pictures: dict[float, dict[str, Tensor]],
) -> list[str]:
    """The report's section on why and where, with its figures; empty without `analysis`."""
    config, target = stage.analysis, generator.target
    if config is None:
        return []
    head = _eagle_head(stage, generator, context)
    codebook = generator.codebook.to(target.device)
    table = config.table(codebook, offset=generator.first_id, folder=context.folder / "neighbours")

    def read(asked: list[tuple[Tensor, Tensor]], temperature: float) -> Reading:
        warp = Warp(temperature, stage.top_k, stage.top_p)
        return read_pictures(config, target, head, asked, warp, table, seed=context.seed)

    asked = [generator.request(p.caption, p.label, p.key).condition for p in prompts[: config.pictures]]
    readings = {}
    for temperature, by_name in tokens.items():
        drawn = [target.codes(row) for row in by_name[visual_report.PLAIN][: len(asked)]]
        readings[temperature] = read(list(zip(asked, drawn, strict=True)), temperature)
    relaxed = {name: (m.tree, m.rule) for name, m in stage.methods.items() if isinstance(m.rule, LanternConfig)}
    tree = next((tree for tree, _ in relaxed.values()), None)
    encoded = {}
    if config.head_data is not None:
        data = config.head_data
        folder = Path(data.path) if data.path else context.inputs["codes"] / SHARDS
        for name, found in encoded_pictures(config, folder, sample_condition(context.target)).items():
            encoded[name] = read(found, stage.temperatures[0])
    built["analysis"] = {t: reading.summary() for t, reading in readings.items()}
    return write_section(
        context.folder, config, readings, results, built["tables"], pictures, [p.caption for p in prompts],
        plain=visual_report.PLAIN, quality=built["quality"], encoded=encoded,
        rules={name: rule for name, (its, rule) in relaxed.items() if its == tree},
    )  # fmt: skip


def _eagle_head(stage: VisualEvaluateStage, generator: Generator, context: Context) -> ImageEagleHead:
    """The head of the first method."""
    proposal = _proposal(next(iter(stage.methods.values())), generator, context)
    if not isinstance(proposal, ImageEagleProposal):
        raise UserError("analysis reads an EAGLE head, and the first method drafts with another", where="analysis",
                        cure="put a method with an eagle drafter first, or leave analysis out")  # fmt: skip
    return proposal.head


def _proposal(method: Method, generator: Generator, context: Context) -> Any:
    folder = context.inputs.get("drafter" if method.drafter is None else f"drafter/{method.drafter}")
    identity = TargetIdentity(context.target.model_dump(mode="json"))
    module = context.drafter.load(folder, generator.target, identity=identity)
    return context.drafter.drafter(module, generator.target)


def _decoders(
    stage: VisualEvaluateStage, context: Context, generator: Generator, temperature: float
) -> dict[str, Decoding]:
    warp = Warp(temperature, stage.top_k, stage.top_p)
    target = generator.target
    found = {}
    for name, method in stage.methods.items():
        if method.allowed(temperature):
            policy: TreePolicy = method.tree.build(grid=target.grid, seed=context.seed)
            rule = _rule(method, generator, context, temperature)
            found[name] = Decoding(policy, rule, Draw(method.draw), warp, target.num_codes, ())
    return found


def _rule(method: Method, generator: Generator, context: Context, temperature: float) -> Rule:
    if isinstance(method.rule, LanternConfig):
        codebook = generator.codebook.to(generator.target.device)
        folder = context.folder / "neighbours"
        return lantern(
            method.rule, codebook, greedy=temperature == 0, offset=generator.first_id, seed=context.seed, folder=folder
        )
    if isinstance(method.rule, BlockConfig):
        return Block()
    return RULES[method.rule_name(temperature)]


def _decode_all(
    stage: VisualEvaluateStage,
    context: Context,
    generator: Generator,
    prompts: list[ImagePrompt],
    decoders: dict[str, Decoding],
    proposals: dict[str, Any],
    temperature: float,
) -> dict[str, list[dict[str, Any]]]:
    """This rank's share of the prompts: rows of every method, and the pictures' tokens."""
    target = generator.target
    plainly = next(iter(decoders.values()))
    # Plain decoding proposes nothing; its rule only draws the next token.
    plainly = Decoding(plainly.policy, RULES["sampling" if temperature else "greedy"], plainly.draw, plainly.warp,
                       plainly.max_new_tokens, ())  # fmt: skip
    mine = range(ranks.rank(), len(prompts), ranks.world_size())
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in (visual_report.PLAIN, *decoders)}

    def request(number: int) -> Any:
        prompt = prompts[number]
        return generator.request(prompt.caption, prompt.label, prompt.key)

    for number in [*mine][: stage.warmup]:
        asked = request(number)
        generate(target, None, asked, plainly, _uniforms(context.seed, number))
        for name, decoding in decoders.items():
            generate(target, proposals[name], asked, decoding, _uniforms(context.seed, number))
    for number in mine:
        asked = request(number)
        plain: list[Generation] = []
        drafted: dict[str, list[Generation]] = {name: [] for name in decoders}
        logs: dict[str, Any] = {}
        for _ in range(stage.repeats):
            plain.append(generate(target, None, asked, plainly, _uniforms(context.seed, number)))
            for name, decoding in decoders.items():
                drafted[name].append(
                    generate(target, proposals[name], asked, decoding, _uniforms(context.seed, number))
                )
                logs[name] = [list(cycle) for cycle in getattr(decoding.policy, "log", ())]
        rows[visual_report.PLAIN].append({"number": number, "picture": plain[0].tokens})
        for name, found in drafted.items():
            row = measure_request(asked.name, name, plain, found)
            first = found[0]
            row |= {"number": number, "picture": row.pop("tokens"), "adaptation": logs[name]}
            row["rule"] = stage.methods[name].rule.kind
            row["nodes"] = [c.num_nodes for c in first.cycles]
            row["draft_cycle_s"] = float(np.median([c.draft_s for g in found for c in g.cycles]))
            row["rule_s"] = float(np.median([c.rule_s for g in found for c in g.cycles]))
            rows[name].append(row)
    return rows


def _uniforms(seed: int, number: int) -> torch.Generator:
    """Of the request, not of the rank or the method."""
    return torch.Generator().manual_seed(seed * 1_000_003 + number)


def _codes(generator: Generator, tokens: list[list[int]]) -> Tensor:
    return torch.stack([generator.target.codes(row) for row in tokens])


def _about(
    stage: VisualEvaluateStage, context: Context, prompts: list[ImagePrompt], device: torch.device, judge: Judge
) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    real = judge.score_of_real()
    return {
        "command": context.command,
        "device": f"{name}, {ranks.world_size()} rank(s) of {torch.get_num_threads()} thread(s)",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "seed": context.seed,
        "prompts": f"{len(prompts)} of {stage.prompts.path or f'{stage.prompts.classes} classes'}",
        "guidance": f"scale {context.target.cfg_scale:g}, top-k {stage.top_k or 'all'}, top-p {stage.top_p:g}",
        "repeats": stage.repeats,
    } | ({} if real is None else {"reader": f"reads {real:.1%} of the real pictures of these prompts as captioned"})
