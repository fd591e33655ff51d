"""Stage kind `evaluate`: decode held-out requests plainly and with the drafter, in one run, and report.

`benchmarks` are files of one's own; `suite` is TABED's benchmark, first and second turns, with a table of its own.
"""

from __future__ import annotations

import platform
import time
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field, model_validator

from ...core import ranks
from ...core.section import Section
from ...data.conversations import PromptFormat
from ...data.dataset import ConversationData, ConversationDataset
from ...data.processor import Processor
from ...eval import benchmark_report as report
from ...eval import suite_table, text_quality
from ...eval.compare import Comparison, compare_trainings
from ...eval.loop import Decoding, generate
from ...eval.policies import Chain, Draw, TextTreeConfig, TreePolicy, check_combination
from ...eval.rules import RULES
from ...models.captioners import CaptionerConfig, LvlmCaptions
from ...models.decoding.warp import Warp
from ...models.drafters.ensemble import DraftingMode, preset
from ...models.drafters.lvlm import load_drafter, proposal
from ...models.drafters.modes import without_pictures
from ...models.targets.llava import LlavaTarget
from ...models.targets.load import LlavaTargetConfig, load_target
from ..context import Context
from ..describe.evaluate import describe_modes
from ..engine import init_distributed
from ..records import data_files
from .base import Planned, Stage
from .captions import stand_ins
from .measuring import Measuring
from .published import PublishedDraft, load_published
from .suite import SuiteRun, SuiteSection, open_suite
from .suite_quality import measure_quality
from .weights import record_weights


class Benchmark(Section):
    """A set of requests: each record's conversation up to its last answer."""

    name: str
    data: ConversationData


class Binding(Section):
    """Questions whose records carry the one-word `answer`: does the target say it, and does it need the picture?"""

    data: ConversationData


class EvaluateStage(Stage):
    kind: Literal["evaluate"]
    # Another target than the recipe's, by its path: a recipe can measure drafts against several.
    target: LlavaTargetConfig | None = None
    # Stages whose drafters are measured, all on the same requests (seeds of one training, say); null: the latest, or
    # none where `drafters` names some.
    from_stages: list[str] | None = Field(None, alias="from", min_length=1)
    # Drafts that no stage of the recipe trains, by what tables call them.
    drafters: dict[str, PublishedDraft] = Field(default_factory=dict)
    format: PromptFormat = PromptFormat()
    benchmarks: list[Benchmark] = Field(default_factory=list)
    # TABED's sets, two turns, one table: suite.md, suite.json and suite.png in the stage's folder.
    suite: SuiteSection | None = None
    # Names (M, T, C, P, T-text, T-raw; MT, MTCP: equal weights; MT*, MTCP*: adaptive), or {name, members, weights}.
    modes: list[DraftingMode] = Field([preset("M"), preset("T")], min_length=1)
    # What writes the captions of mode C; needed where a mode has it.
    captioner: CaptionerConfig | None = None
    # chain, or what drafts more than one continuation: a section with a kind (static, a published list; dynamic,
    # EAGLE-2's; sage, adaptive), or a name (30-4-8: total with the root, levels, width; sage; a published list's).
    tree: TextTreeConfig = "chain"
    # Tokens drafted in a cycle of tree: chain; null where the tree has sizes of its own.
    gamma: int | None = Field(5, ge=1)
    rule: Literal["greedy", "sampling"] = "greedy"
    draw: Literal["top-k", "sample"] = "top-k"
    temperature: float = Field(0.0, ge=0)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_new_tokens: int = Field(64, ge=2)
    # Requests decoded before the clock counts, and times that each is decoded.
    warmup: int = Field(2, ge=0)
    repeats: int = Field(1, ge=1)
    binding: Binding | None = None
    # Requests of each benchmark whose ensembles' weights over time are kept and drawn (weights/), decoded once more.
    record_weights: int = Field(0, ge=0)
    # Two ways of training among the `from` stages, over seeds.
    compare: Comparison | None = None
    # What one change does: name -> two of the measured drafts, the one with the change first.
    contrasts: dict[str, tuple[str, str]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _allowed(self) -> EvaluateStage:
        if self.compare is not None:
            unknown = {*self.compare.first, *self.compare.second} - set(self.from_stages or ())
            if unknown:
                raise ValueError(f"compare names {sorted(unknown)}, which `from` does not")
        measured = {*(self.from_stages or ()), *self.drafters}
        if unknown := {draft for pair in self.contrasts.values() for draft in pair} - measured:
            raise ValueError(f"contrasts name {sorted(unknown)}, which are not among the measured drafts")
        policy = self.policy()
        check_combination(
            temperature=self.temperature,
            draw=self.draw,
            policy=policy.name,
            prunes_by_token=policy.prunes_by_token,
            rule=self.rule,
        )
        if self.tree != "chain" and self.gamma is not None and "gamma" in self.model_fields_set:
            raise ValueError("gamma is of tree: chain; set it to null where the tree is a section with its own sizes")
        return self

    @model_validator(mode="after")
    def _whole(self) -> EvaluateStage:
        if not self.benchmarks and self.suite is None:
            raise ValueError("nothing to measure: give benchmarks or a suite")
        if self.target is not None and self.target.path is None:
            raise ValueError("target.path is missing: what a stage trains is the recipe's own target")
        if self.suite is not None and self.suite.transcript == "released" and self.format.template != "v1":
            raise ValueError("suite.transcript: released is of template v1; set it to training")
        if same := self.drafters.keys() & set(self.from_stages or ()):
            raise ValueError(f"drafters and from name {', '.join(sorted(same))} both")
        return self

    @model_validator(mode="after")
    def _captioned(self) -> EvaluateStage:
        if len(set(self.mode_names)) < len(self.modes):
            raise ValueError(f"modes name one twice: {', '.join(self.mode_names)}")
        if self.captioner is None and any("C" in mode.members for mode in self.modes):
            raise ValueError("mode C needs a captioner: add `captioner`, or leave C out of modes")
        return self

    @property
    def mode_names(self) -> list[str]:
        return [mode.name for mode in self.modes]

    def policy(self) -> TreePolicy:
        if self.tree != "chain":
            return self.tree.build()
        if self.gamma is None:
            raise ValueError("gamma is null, and a chain needs its length")
        return Chain(self.gamma)

    @property
    def data(self) -> list[ConversationData]:
        """Every data section, whatever is done with it."""
        parts = (*self.benchmarks, self.binding, self.suite)
        return [part.data for part in parts if part is not None]

    @property
    def capacity(self) -> int:
        """Positions that a request may take: the longest prompt, what is emitted, and a cycle's tree behind it."""
        return max(data.max_length for data in self.data) + self.max_new_tokens + self.policy().max_nodes + 2

    def makes(self) -> set[str]:
        return {"report"}

    def needs(self) -> dict[str, str | None]:
        made = {d.from_stage for d in self.data} - {None}
        wanted: dict[str, str | None] = {} if self.target is not None else {"processor": None, "target": None}
        if self.from_stages:
            wanted |= {f"drafter/{name}": name for name in self.from_stages}
        elif not self.drafters:
            wanted["drafter"] = None
        if isinstance(self.captioner, LvlmCaptions):
            wanted["captioner"] = self.captioner.from_stage
        return wanted | ({"data": made.pop()} if made else {})

    def run(self, context: Context) -> None:
        run(self, context)

    def describe(self, plan: Planned) -> list[str]:
        return describe_modes(self)


def run(stage: EvaluateStage, context: Context) -> None:
    init_distributed()
    if stage.target is not None:
        context = replace(context, target=stage.target)
    processor, device = context.processor(), context.device()
    # Before a large target is loaded: a set may be out of reach, or a metric's library missing.
    opened = open_suite(stage.suite, context) if stage.suite is not None else None
    quality = stage.suite.quality if stage.suite is not None else None
    score = text_quality.scorers(quality.sets) if quality is not None else {}
    num_token_ids, image = len(processor.tokenizer), processor.image_token_id
    target = load_target(
        context.target, context.target_source(), num_token_ids=num_token_ids, image_token_id=image, device=device
    )
    stands = stand_ins(stage.captioner, stage.format, context, processor, device)
    models = _drafters(stage, context, processor, target)
    drafters = {
        (name, mode.name): proposal(
            model,
            mode,
            stand_ins=stands,
            num_token_ids=num_token_ids,
            image_token_id=image,
            newline_id=processor.newline_id,
            chain=stage.gamma if stage.tree == "chain" and stage.draw == "top-k" else None,
            capacity=stage.capacity,
        )
        for name, model in models.items()
        for mode in stage.modes
    }
    measuring = Measuring(stage, context, processor, target, drafters, _decoding(stage, processor))
    results: report.Results = {}
    for benchmark in stage.benchmarks:
        dataset = _dataset(benchmark.data, stage, context, processor)
        measuring.check(benchmark.name, dataset)
        shards = ranks.gather(measuring.all(dataset))
        results[benchmark.name] = {mode: [r for shard in shards for r in shard[mode]] for mode in stage.mode_names}
        context.say(f"{benchmark.name}: {len(dataset)} requests decoded")
        if stage.record_weights and ranks.is_main():
            record_weights(measuring, benchmark.name, dataset, stage.record_weights)
    binding = _binding(stage, context, target, processor) if stage.binding else None
    about = _about(stage, context, device)
    if ranks.is_main() and results:
        built = report.build(
            results, gamma=stage.policy().num_levels, about=about, binding=binding, contrasts=stage.contrasts
        )
        if stage.compare is not None:
            built["comparison"] = {
                b: {
                    m: compare_trainings(rows, stage.compare, gamma=stage.policy().num_levels)
                    for m, rows in modes.items()
                }
                for b, modes in results.items()
            }
        report.write(context.folder, built)
        context.say("\n".join(report.findings(built)))
        context.say(f"report: {context.folder / 'report.md'}")
    if stage.suite is not None and opened is not None:
        suite = SuiteRun(stage.suite, opened, measuring)
        rows, notes = suite.measure()
        if ranks.is_main():
            table = suite_table.build(rows, suite.plan(list(models)), about=about | suite.about(), notes=notes)
            suite_table.write(context.folder, table)
            context.say("\n".join(f"- {note}" for note in table["notes"]))
            context.say(f"suite: {context.folder / 'suite.md'}")
        if quality is not None:
            measure_quality(quality, suite, models, score)
    ranks.barrier()


def _drafters(stage: EvaluateStage, context: Context, processor: Processor, target: LlavaTarget) -> dict[str, Any]:
    """The drafts' models by name: of stages, and those that `drafters` names."""
    folders = [folder for thing, folder in context.inputs.items() if thing.split("/")[0] == "drafter"]
    whole = target.decoder.model
    models = {
        folder.name: load_drafter(folder, tokenizer_hash=processor.tokenizer_hash, dtype=whole.dtype)
        for folder in folders
    }
    models |= {name: load_published(name, draft, processor, whole) for name, draft in stage.drafters.items()}
    return {name: model.to(target.device) for name, model in models.items()}


def _dataset(
    data: ConversationData, stage: EvaluateStage, context: Context, processor: Processor
) -> ConversationDataset:
    return ConversationDataset(
        data,
        stage.format,
        processor,
        files=data_files(data, context),
        skipped_log=context.folder / "skipped.jsonl",
        cache=context.folder / "cache",
        drafter_processor=context.own_eyes(),
    )


def _decoding(stage: EvaluateStage, processor: Processor) -> Decoding:
    return Decoding(
        stage.policy(),
        RULES[stage.rule],
        Draw(stage.draw),
        Warp(stage.temperature, stage.top_k, stage.top_p),
        stage.max_new_tokens,
        (processor.eos_id,),
    )


def _binding(stage: EvaluateStage, context: Context, target: Any, processor: Processor) -> dict[str, Any]:
    """Share of questions whose answer names the record's key word, with the picture and without it."""
    assert stage.binding is not None
    dataset = _dataset(stage.binding.data, stage, context, processor)
    decoding = _decoding(stage, processor).with_length(12)
    right = blind = 0
    answers = {str(dataset.record(i)["answer"]) for i in range(len(dataset))}
    for index in range(ranks.rank(), len(dataset), ranks.world_size()):
        asked, _ = dataset.request(index)
        answer = str(dataset.record(index)["answer"])
        unseen = without_pictures(asked, processor.newline_id)
        right += _names(target, asked, decoding, processor, answers) == answer
        blind += _names(target, unseen, decoding, processor, answers) == answer
    right, blind = (sum(counts) for counts in zip(*ranks.gather((right, blind)), strict=True))
    return {"questions": len(dataset), "accuracy": right / len(dataset), "blind_accuracy": blind / len(dataset)}


def _names(target: Any, asked: Any, decoding: Decoding, processor: Processor, answers: set[str]) -> str | None:
    """The last of the known answers that the first clause names ("The circle is red, ...": red)."""
    tokens = generate(target, None, asked, decoding, torch.Generator()).tokens
    clause = processor.tokenizer.decode(tokens, skip_special_tokens=True).split(",")[0].replace(".", " ")
    named = [word for word in clause.split() if word in answers]
    return named[-1] if named else None


def _about(stage: EvaluateStage, context: Context, device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    return {
        "command": context.command,
        "device": f"{name}, {torch.get_num_threads()} threads, {ranks.world_size()} rank(s)",
        "date": time.strftime("%Y-%m-%d"),
        "seed": context.seed,
        "temperature": stage.temperature,
        "rule": stage.rule,
        "tree": f"chain of {stage.gamma}" if stage.tree == "chain" else str(stage.tree),
        "repeats": stage.repeats,
        "max_new_tokens": stage.max_new_tokens,
        "torch": torch.__version__,
    }
