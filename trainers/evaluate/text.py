"""An evaluation of a target that writes text, over conversations with pictures and clips or without."""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...core import ranks
from ...core.batch import Request
from ...core.errors import UserError
from ...core.json_types import JsonObject
from ...core.pictures import Picture
from ...data.conversations import PromptFormat, encode, end_ids
from ...data.families.processor import Processor
from ...data.suites.suite import Suite
from ...eval import text_quality
from ...eval.by_category import turns_section
from ...eval.loop import generate
from ...eval.measured_rows import Row
from ...eval.pair import open_pair
from ...eval.summary import ratio
from ...models.attention import GROUPED
from ...models.decoding.cache import Cache
from ...models.decoding.decoder import CachedDecoder
from ...models.decoding.identical import MOST, Identical
from ...models.decoding.tapped import is_cut
from ...models.drafters.base import DraftingOptions
from ...models.drafters.beside import members_in
from ...models.drafters.captioners import Captioner, LvlmCaptioner, LvlmCaptions, load_captioner
from ...models.drafters.head_proposal import Recursive
from ...models.drafters.independent import IndependentProposal
from ...models.drafters.lvlm import load_drafter
from ...models.drafters.modes import ImageSubstitutes, without_pictures
from ...models.fast.cuda_graphs import Graphs
from ...models.hub import config_value, has_windows, num_experts, recurrent_layers, rope_of
from ...models.targets.language import GROWING_ROTATIONS, LanguageTarget
from ...models.targets.table import family_of
from ..run.context import Context
from ..run.stage_records import data_files
from .answer_quality import measure_quality
from .benchmarks import SetsBenchmark, TabedBenchmark, of_class
from .drafters import Drafters, Drafting
from .evaluate_settings import EvaluateSettings
from .measuring import Measuring
from .probe_settings import Binding
from .reporting import Reporting, examples
from .requests import Opening
from .studies import OF_ROWS, OF_TEXT
from .turns import TabedRun, open_tabed, suite_names, turn_runs


def run(stage: EvaluateSettings, context: Context) -> None:
    """Measure and report.

    Args:
        context: its target is the stage's own, where the stage has one.
    """
    processor = context.processor()
    # Before a large target is loaded: a set may be out of reach, or a metric's library missing.
    opening = Opening(context, processor, stage.format, stage.lengths, originals=stage.captioner is not None)
    sets = opening.all(stage.benchmarks)
    suites = [(b, open_tabed(b, context)) for b in of_class(stage.benchmarks, TabedBenchmark)]
    talks = turn_runs(of_class(stage.benchmarks, SetsBenchmark), opening)
    refuse_twice(context.name, {part.benchmark for part in sets} | {talk.name for talk in talks}, suites)
    scorers = {id(b): text_quality.scorers(b.quality.sets) for b, _ in suites if b.quality is not None}
    pair = open_pair(context.target, context.inputs, device=context.device(), processor=processor)
    target = pair.target
    captioner = None if stage.captioner is None else _captioner(stage.captioner, stage.format, context, processor)
    modes = ImageSubstitutes.of(processor.tokenizer, newline_id=processor.newline_id, captioner=captioner)
    options = DraftingOptions(substitutes=modes)
    drafters = Drafters(stage, context, pair, options=options)
    ends = end_ids(processor, stage.format) if stage.stop_at_end else ()
    measuring = Measuring(stage, context, target, drafters.all(), ends, tokenizer=processor.tokenizer)
    capture(stage.graphs, target, measuring.drafting, stage.capacity)
    if stage.identical:
        make_identical(target, measuring.drafting, f"stages.{context.name}.identical")
    measuring.announce(sets, others=bool(suites or talks))
    rows: list[Row] = []
    # The lengths of a benchmark follow each other.
    for _, at_lengths in itertools.groupby(sets, key=lambda requests: requests.benchmark):
        rows.extend(measuring.all([*at_lengths]))
    probe = stage.probes.binding
    bound = None if probe is None else binding(probe, opening, measuring, processor)
    runs = [TabedRun(section, suite, opening, measuring) for section, suite in suites]
    notes: list[str] = []
    early: list[str] = []
    for talk in talks:
        of_turns, said = talk.measure(measuring)
        rows.extend(of_turns)
        early, sets = early + said, sets + talk.first_turns
    for suite_run in runs:
        some, said = suite_run.measure()
        rows.extend(some)
        notes += said
        sets = sets + suite_run.first_turns
    if not rows:
        raise UserError("no request of any set could be read", where=str(context.folder / "skipped.jsonl"),
                        hint="check the folders of pictures and clips")  # fmt: skip
    about = _about(stage, rows) | about_graphs(target, measuring.drafting)
    about["identical"] = "off" if target.identical is None else target.identical.summary
    with context.stop.together():
        if ranks.is_main():
            for suite_run in runs:
                about |= suite_run.about()
            reporting = Reporting(measuring, rows, about)
            sections = [section for study in OF_ROWS for section in study(measuring, rows)]
            sections += [suite_run.report(rows, notes) for suite_run in runs]
            sections += [section for section in [turns_section(rows, early)] if section is not None]
            reporting.write(*sections, binding=bound)
            # Runs after the report is written, so that a failing study loses no measurements.
            more = [*examples(measuring, rows, sets)]
            more += [section for study in OF_TEXT for section in study(measuring, sets)]
            if more:
                reporting.write(*sections, *more, binding=bound, again=True)
        elif context.is_in_step:
            # What the studies decode, on a rank that holds a part of the target; its numbers are thrown away.
            with tempfile.TemporaryDirectory() as folder:
                aside = replace(context, folder=Path(folder), say=lambda text: None)
                for study in OF_TEXT:
                    study(replace(measuring, context=aside), sets)
    for suite_run in runs:
        quality = suite_run.section.quality
        if quality is not None:
            # Draft LVLMs answer on their own.
            models = {
                name: model
                for called, method in stage.methods.items()
                for name, model in drafters.modules(method, called, kind="lvlm").items()
            }
            measure_quality(quality, suite_run, models, scorers[id(suite_run.section)])
    ranks.barrier()


def _about(stage: EvaluateSettings, rows: Sequence[Row]) -> JsonObject:
    tower = "runs once for each request and repeat; its time counts in every method's prefill, also in plain decoding's"
    prompts = {b.convention for b in of_class(stage.benchmarks, SetsBenchmark)}
    return {
        "max_new_tokens": stage.max_new_tokens,
        "answers": "end at the end token" if stage.stop_at_end else "go on after the end token",
        **({"prompts": ", ".join(sorted(prompts))} if prompts else {}),
        **({"vision tower": tower} if any(row.visual_tokens for row in rows) else {}),
    }


def refuse_twice(stage: str, names: set[str], suites: Sequence[tuple[TabedBenchmark, Suite]]) -> None:
    """Raises `UserError` where two benchmarks have sets of one name, of which a report would show one.

    Args:
        names: of the sets of other kinds of benchmarks. What a directory holds is known once it is opened.
    """
    for section, suite in suites:
        more = set(suite_names(section, suite))
        if twice := more & names:
            raise UserError(f"two benchmarks have sets called {', '.join(sorted(twice))}",
                            key=f"stages.{stage}.benchmarks",
                            hint="name the sets that are wanted with `sets`, or measure in two stages")  # fmt: skip
        names = names | more


def _captioner(config: Any, form: PromptFormat, context: Context, processor: Processor) -> Captioner:
    """A published captioner, or the one that an earlier stage trained, asked in the stage's own prompt format."""
    if not isinstance(config, LvlmCaptions):
        return load_captioner(config, context.device())
    folder, device = context.inputs["captioner"], context.device()
    model = load_drafter(folder, tokenizer_hash=processor.tokenizer_hash, dtype=torch.float32, device=device)
    turns = [{"from": "human", "value": config.prompt}, {"from": "gpt", "value": "-"}]
    # The captioner is built like the drafter and uses the drafter's image processor.
    patches = (context.own_image_processor() or processor).patches
    encoded = encode(turns, form, processor, pictures=[Picture(patches)], open_ended=True)
    never = (processor.image_token_id,)
    decoder = family_of(model.config).decoder(model, num_token_ids=processor.num_token_ids, never=never)
    return LvlmCaptioner(
        decoder,
        encoded.ids,
        image_token_id=processor.image_token_id,
        stop_ids=end_ids(processor, form),
        tokenizer=processor.tokenizer,
        max_new_tokens=config.max_new_tokens,
    )


# ---- Whether the target's answers depend on the picture


def binding(probe: Binding, opening: Opening, measuring: Measuring, processor: Processor) -> JsonObject:
    """Share of questions whose answer names the record's key word, with the picture and without it."""
    questions = opening.requests("binding", probe.data, data_files(probe.data, opening.context))
    dataset = questions.dataset
    # The key word is looked for in the first tokens of an answer.
    decoding = measuring.plainly(min(measuring.stage.temperatures), 16)
    words = {str(dataset.record(i)["answer"]) for i in range(len(dataset))}

    def named(index: int, request: Request) -> str | None:
        tokens = generate(measuring.target, None, request, decoding, torch.Generator()).tokens
        turns = dataset.record(index)["conversations"]
        asked_last = next(turn["value"] for turn in reversed(turns) if turn["from"] == "human")
        return key_word(measuring.text(tokens), asked_last, words)

    count = right = blind = 0
    stop = measuring.context.stop
    with stop.together():
        for index in stop.watch(ranks.share(len(dataset), in_step=stop.in_step), "while probing binding"):
            opened = questions.open(index, measuring.target)
            if opened is None:
                continue
            request, answer = opened.request, str(dataset.record(index)["answer"])
            assert isinstance(request, Request)
            count += 1
            right += named(index, request) == answer
            blind += named(index, without_pictures(request, processor.newline_id)) == answer
    each = [(count, right, blind)] if stop.in_step else ranks.gather((count, right, blind))
    count, right, blind = (sum(counts) for counts in zip(*each, strict=True))
    return {"questions": count, "accuracy": ratio(right, count), "blind_accuracy": ratio(blind, count)}


def key_word(answer: str, question: str, words: Collection[str]) -> str | None:
    """Which of `words` an answer gives, whatever its wording; None: none of them.

    It is the last one in the first clause that names one which the question does not: "You can see that the circle is
    red, as ..." gives red where the circle was asked for, and "I see a red circle, ..." does, too.
    """
    of_question = set(re.findall(r"\w+", question))
    for clause in re.split(r"[,.;:]", answer):
        if said := [word for word in clause.split() if word in words and word not in of_question]:
            return said[-1]
    return None


# ---- Which passes are CUDA graphs, and what the report says of them


def capture(wanted: bool, target: LanguageTarget, drafting: Sequence[Drafting], capacity: int) -> None:
    """Let the passes of the target, of heads and of draft LVLMs be graphs, where they can be. A request takes
    `capacity` positions without a cycle's tree.
    """
    most = capacity + max((one.policy.max_nodes for one in drafting), default=0)
    for _, part in _parts(target, drafting):
        is_head = isinstance(part, Recursive)
        can_be = target.device.type == "cuda" if is_head else why_not(part) is None
        device, new_cache = (target.device, partial(Cache, 1)) if is_head else (part.device, part.new_cache)
        part.graphs = Graphs(device, most, new_cache) if wanted and can_be else None


def why_not(decoder: CachedDecoder, device: str = "cuda") -> str | None:
    """Why a decoder's passes cannot be CUDA graphs, or on a CPU `Identical`'s; None: they can."""
    config, held = decoder.language_model.config, list(decoder.model.parameters())
    rope = rope_of(config)
    reasons = {
        f"the model is on no {'GPU' if device == 'cuda' else 'CPU'}": decoder.device.type != device,
        "the model lies on several devices": len({parameter.device for parameter in held}) > 1,
        "several ranks hold the model together": any(map(is_cut, held)),
        "rotations grow with positions": (rope.get("rope_type") or rope.get("type")) in GROWING_ROTATIONS,
        "the shapes of a mixture of experts depend on its tokens": bool(num_experts(config)),
        "recurrent layers keep what a tree wrote in tensors of its own size": bool(recurrent_layers(config)),
        "layers see a window of positions": has_windows(config),
        "attention takes no mask": config._attn_implementation not in ("sdpa", GROUPED, "eager"),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def make_identical(target: LanguageTarget, drafting: Sequence[Drafting], key: str) -> None:
    """Give plain steps and verification the same score bits. Raises `UserError` where they would differ."""
    decoder, dtype, most = target.decoder, target.embedding.dtype, 1 + max(one.policy.max_nodes for one in drafting)
    reasons = {
        f"bits were compared in bfloat16, and target.dtype is {dtype}": dtype != torch.bfloat16,
        "the target's weights are quantised": config_value(decoder.model.config, "quantization_config") is not None,
        f"bits were compared in passes of up to {MOST} places, and a tree may have {most}": most > MOST,
        "a drafter has the target run prompts eagerly": any(one.drafter.taps.prefill_attention for one in drafting),
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), why_not(decoder, "cpu")):
        raise UserError(f"{key}: {reason}", key=key, hint="leave it out; in float32 (target.dtype) near ties are rare")
    target.identical = Identical(decoder, trees=any(one.policy.name != "chain" for one in drafting))


def about_graphs(target: LanguageTarget, drafting: Sequence[Drafting]) -> dict[str, str]:
    """The report's line of an evaluation on a GPU."""
    if target.device.type != "cuda":
        return {}
    said = [f"{name}: {part.graphs.summary if part.graphs else 'off'}" for name, part in _parts(target, drafting)]
    return {"CUDA graphs": "; ".join(said)}


def _parts(target: LanguageTarget, drafting: Sequence[Drafting]) -> Iterator[tuple[str, Any]]:
    """What has passes over few positions: the target's decoder, and of each method a head or a draft's decoder."""
    yield "the target", target.decoder
    for one in drafting:
        yield from ((one.title, part) for part in _drafting(one.drafter))


def _drafting(drafter: object) -> Iterator[Any]:
    if isinstance(drafter, Recursive) and drafter.captures:
        yield drafter
    elif isinstance(drafter, IndependentProposal):
        yield drafter.decoder
    for member in members_in(drafter):
        yield from _drafting(member)
