"""Stage kind `evaluate`: decode held-out requests plainly and with the drafter, in one run, and report."""

from __future__ import annotations

import functools
import platform
import time
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator

from ...core import ranks
from ...core.section import Section
from ...data.conversations import PromptFormat
from ...data.dataset import ConversationData, ConversationDataset
from ...data.processor import Processor
from ...eval import report
from ...eval.loop import Decoding, Generation, generate
from ...eval.measure import measure_request
from ...eval.policies import Chain, Draw, check_combination
from ...eval.rules import RULES
from ...models.decoding.warp import Warp
from ...models.drafters.independent import Mode, without_pictures
from ...models.drafters.lvlm import load_drafter, proposal
from ...models.targets.load import load_target
from ..context import Context
from ..engine import init_distributed
from .train import data_files


class Benchmark(Section):
    """A set of requests: each record's conversation up to its last answer."""

    name: str
    data: ConversationData


class Binding(Section):
    """Questions whose records carry the one-word `answer`: does the target say it, and does it need the picture?"""

    data: ConversationData


class EvaluateStage(Section):
    kind: Literal["evaluate"]
    # Stages whose drafters are measured, all on the same requests (seeds of one training, say); null: the latest.
    from_stages: list[str] | None = Field(None, alias="from", min_length=1)
    format: PromptFormat = PromptFormat()
    benchmarks: list[Benchmark] = Field(min_length=1)
    modes: list[Mode] = Field(["M", "T"], min_length=1)
    tree: Literal["chain"] = "chain"
    # Tokens drafted in a cycle.
    gamma: int = Field(5, ge=1)
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

    @model_validator(mode="after")
    def _allowed(self) -> EvaluateStage:
        check_combination(
            temperature=self.temperature, draw=self.draw, policy=self.tree, prunes_by_token=False, rule=self.rule
        )
        return self

    @property
    def capacity(self) -> int:
        """Positions that a request may take: the longest prompt, what is emitted, and a cycle's tree behind it."""
        return max(b.data.max_length for b in self.benchmarks) + self.max_new_tokens + self.gamma + 2

    def makes(self) -> set[str]:
        return {"report"}

    def needs(self) -> dict[str, str | None]:
        data = [b.data for b in self.benchmarks] + ([self.binding.data] if self.binding else [])
        made = {d.from_stage for d in data} - {None}
        wanted: dict[str, str | None] = {"processor": None, "target": None}
        wanted |= {f"drafter/{name}": name for name in self.from_stages} if self.from_stages else {"drafter": None}
        return wanted | ({"data": made.pop()} if made else {})


def run(stage: EvaluateStage, context: Context) -> None:
    init_distributed()
    processor, device = context.processor(), context.device()
    num_token_ids, image = len(processor.tokenizer), processor.image_token_id
    target = load_target(
        context.target, context.target_source(), num_token_ids=num_token_ids, image_token_id=image, device=device
    )
    drafters = {
        (folder.name, mode): proposal(
            model,
            mode,
            num_token_ids=num_token_ids,
            image_token_id=image,
            newline_id=processor.newline_id,
            chain=stage.gamma if stage.draw == "top-k" else None,
            capacity=stage.capacity,
        )
        for folder, model in _drafters(context, processor, target.decoder.model.dtype, device)
        for mode in stage.modes
    }
    results: report.Results = {}
    for benchmark in stage.benchmarks:
        dataset = _dataset(benchmark.data, stage, context, processor)
        mine = _decode_all(stage, context, dataset, target, drafters, processor)
        shards = ranks.gather(mine)
        results[benchmark.name] = {mode: [r for shard in shards for r in shard[mode]] for mode in stage.modes}
        context.say(f"{benchmark.name}: {len(dataset)} requests decoded")
    binding = _binding(stage, context, target, processor) if stage.binding else None
    if ranks.is_main():
        about = _about(stage, context, device)
        built = report.build(results, gamma=stage.gamma, about=about, binding=binding)
        report.write(context.folder, built)
        context.say("\n".join(report.findings(built)))
        context.say(f"report: {context.folder / 'report.md'}")
    ranks.barrier()


def _drafters(
    context: Context, processor: Processor, dtype: torch.dtype, device: torch.device
) -> list[tuple[Path, Any]]:
    folders = [folder for thing, folder in context.inputs.items() if thing.split("/")[0] == "drafter"]
    load = functools.partial(load_drafter, tokenizer_hash=processor.tokenizer_hash, dtype=dtype)
    return [(folder, load(folder).to(device)) for folder in folders]


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
    )


def _decode_all(
    stage: EvaluateStage,
    context: Context,
    dataset: ConversationDataset,
    target: Any,
    drafters: dict[tuple[str, Mode], Any],
    processor: Processor,
) -> dict[str, list[dict[str, Any]]]:
    """This rank's share of the requests, each decoded plainly and in every mode, one after the other."""
    decoding = _decoding(stage, processor)
    mine = range(ranks.rank(), len(dataset), ranks.world_size())
    rows: dict[str, list[dict[str, Any]]] = {mode: [] for mode in stage.modes}
    for index in [*mine][: stage.warmup]:
        asked, _ = dataset.request(index)
        for drafter in (None, *drafters.values()):
            generate(target, drafter, asked, decoding, _generator(context.seed, index))
    for index in mine:
        asked, _ = dataset.request(index)
        plain: list[Generation] = []
        drafted: dict[tuple[str, Mode], list[Generation]] = {key: [] for key in drafters}
        for _ in range(stage.repeats):  # interleaved, so that a slow minute hits all alike
            plain.append(generate(target, None, asked, decoding, _generator(context.seed, index)))
            for key, drafter in drafters.items():
                drafted[key].append(generate(target, drafter, asked, decoding, _generator(context.seed, index)))
        for (name, mode), drafter in drafters.items():
            row = measure_request(asked.name, name, plain, drafted[name, mode])
            row["beyond_positions"] = drafter.last_position(asked, stage.max_new_tokens) > drafter.decoder.max_positions
            rows[mode].append(row)
    return rows


def _decoding(stage: EvaluateStage, processor: Processor) -> Decoding:
    return Decoding(
        Chain(stage.gamma),
        RULES[stage.rule],
        Draw(stage.draw),
        Warp(stage.temperature, stage.top_k, stage.top_p),
        stage.max_new_tokens,
        (processor.eos_id,),
    )


def _generator(seed: int, index: int) -> torch.Generator:
    """Of the request, not of the rank: the same report with one rank and with two."""
    return torch.Generator().manual_seed(seed * 1_000_003 + index)


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
        "repeats": stage.repeats,
        "max_new_tokens": stage.max_new_tokens,
        "torch": torch.__version__,
    }
