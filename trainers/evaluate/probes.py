"""What an `evaluate` stage asks of the models once its report is written: they decode or read once more, untimed.

Of language targets: where heads attend, how far visual tokens survive in the target, and from which layer on it can do
without them (Sparrow, figures 2, 3, 5 and 6), and ensembles' weights over time (TABED, figures 3 and 4). Of image
generators what target and head make of each cell of the pictures (`analysis`). Each is a table of the report, and its
numbers are in `probes.json`, `weights/` or `analysis-T*.safetensors`, from which docs/notebooks draws figures.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...core.batch import Request
from ...core.errors import UserError, did_you_mean
from ...core.json_types import JsonObject, nulls
from ...core.results import CODES
from ...data.captioned.prompts import ImagePrompt
from ...data.pictures.videos import visual_tokens as num_visual_tokens
from ...data.states.samples import StatesSamples
from ...eval.loop import Decoding, EmbeddedRequest, generate
from ...eval.measured_rows import PLAIN, Row, drawn_tokens
from ...eval.policies.chain import Chain
from ...eval.studies import sight, visual_tokens
from ...eval.studies.drawn_cells import CellStatistics, encoded_pictures, read_pictures
from ...eval.studies.drawn_law import DrawnLaw, law_section, read_law
from ...eval.studies.drawn_tables import contrasts, drawn_section
from ...eval.studies.video import tables
from ...eval.tables import Column, Figure, ReportSection, Table, text
from ...models.decoding.warp import Warp
from ...models.drafters.beside import head_in
from ...models.drafters.eagle_images import ImageEagleHead
from ...models.drafters.ensemble import EnsembleProposal, WeightTrace
from ...models.drafters.head_config import FusedHeadConfig
from ...models.drafters.head_settings import HeadSettings
from ...models.targets.base import Target
from ...models.targets.drawing import Generator
from ...models.targets.table import image_section
from ..serve.states_builder import open_samples
from .benchmarks import SetsBenchmark, of_class
from .drafters import Drafting
from .evaluate_settings import EvaluateSettings
from .measuring import Measuring
from .probe_settings import Importance
from .reporting import infos
from .requests import ConversationSet

PROBING = "while probing, after the report"


def clip_tables(measuring: Measuring, rows: Sequence[Row]) -> list[ReportSection]:
    """Those of Sparrow and SAGE that were measured."""
    stage = measuring.stage
    measured = stage.lengths or of_class(stage.benchmarks, SetsBenchmark)
    content = tables(rows, infos(measuring.drafting)) if measured else []
    return [ReportSection("Tables of Sparrow and SAGE", tuple(content))] if content else []


def probe(measuring: Measuring, sets: Sequence[ConversationSet]) -> list[ReportSection]:
    """The sections of `states` and `importance`; rank 0 reads them alone, or all ranks in step."""
    settings = measuring.stage.probes
    if not settings.states and settings.importance is None:
        return []
    heads = [cast(FusedHeadConfig, d.config) for d in _drafting(measuring) if d.config.base_kind == "sparrow"]
    # The middle layer that some head was trained with.
    bridge = heads[0].visual_layer(measuring.target.shape, training=True) or None if heads else None
    data: JsonObject = {"bridge": bridge}
    sections: list[ReportSection] = []
    clips = [part for part in _longest(sets) if part.medium == "video"]
    if settings.states and clips:
        sections += [*_shares(measuring, sets, data), _in_the_target(measuring, clips, data)]
    if settings.importance is not None:
        sections.append(_importance(measuring, settings.importance, sets, data))
    (measuring.context.folder / "probes.json").write_text(json.dumps(nulls(data), indent=1))
    return sections


def _longest(sets: Sequence[ConversationSet]) -> list[ConversationSet]:
    """Each set once, at the most visual tokens."""
    rising = sorted(sets, key=lambda part: num_visual_tokens(part.budget) if part.budget else 0)
    return list({part.benchmark: part for part in rising}.values())


def _requests(measuring: Measuring, requests: ConversationSet) -> list[tuple[int, Request]]:
    """The first of those that can be read, by their numbers."""
    numbers = measuring.context.stop.watch(range(len(requests)), PROBING)
    readable = ((i, request) for i in numbers if (request := requests.request(i, measuring.target)))
    return list(itertools.islice(readable, measuring.stage.probes.requests))


def _drafting(measuring: Measuring) -> list[Drafting]:
    """What drafts at the lowest temperature."""
    return [one for one in measuring.drafting if one.method.allowed(min(measuring.stage.temperatures))]


def _shares(measuring: Measuring, sets: Sequence[ConversationSet], data: JsonObject) -> list[ReportSection]:
    """The sections of every head, on the first set of clips, at each of its lengths."""
    first = next(part.benchmark for part in sets if part.medium == "video")
    shares: dict[str, dict[str, float]] = {}
    drafting = _drafting(measuring)
    names = [one.name for one in drafting]
    for one in (one for one in drafting if isinstance(one.config, HeadSettings)):
        name = one.name if names.count(one.name) == 1 else f"{one.name}, {one.drafter_name}"
        for part in (part for part in sets if part.benchmark == first):
            try:
                watched = measuring.context.stop.watch(_requests(measuring, part), PROBING)
                each = [visual_tokens.head_shares(measuring.target, one.drafter, request) for _, request in watched]
            except AssertionError:
                continue  # it holds some of the visual inputs, or others in their place
            if each:  # else no request of this set can be read
                label = f"{name}, {part.budget}" if part.budget else name
                shares[label] = {kind: statistics.fmean(s[kind] for s in each) for kind in visual_tokens.KINDS}
    if not shares:
        return []
    data["attention_shares"] = shares
    note = f"Attention of the first token after the prompt, on {first}."
    lines = ((name, *of.values()) for name, of in shares.items())
    table = _table("head", visual_tokens.KINDS, lines, "Sparrow, figure 2", note)
    return [ReportSection("Where heads attend", (table,))]


def _in_the_target(measuring: Measuring, clips: Sequence[ConversationSet], data: JsonObject) -> ReportSection:
    requests, stop = [request for part in clips for _, request in _requests(measuring, part)], measuring.context.stop
    stop.check(PROBING)
    curve = data["retention"] = visual_tokens.retention(measuring.target, requests)
    watched = stop.watch(requests, PROBING)
    each = [visual_tokens.target_visual_attention(measuring.target, request) for request in watched]
    attention = data["visual_attention"] = torch.stack(each).mean(0).tolist()
    layer = visual_tokens.fused_from(curve["visual"])
    where = "at no layer" if layer is None else f"from layer {layer} on"
    middle = "" if data["bridge"] is None else f"; heads read layer {data['bridge']} at visual tokens"
    said = (f"The cosine similarity of visual tokens' states with their embeddings is below "
            f"{visual_tokens.THRESHOLD:g} {where}{middle}.")  # fmt: skip
    # Layer 0 is the embedding, which attends to nothing.
    heads = [None, *map(statistics.fmean, attention)]
    lines = ((str(i), *(of[i] for of in curve.values()), heads[i]) for i in range(len(heads)))
    names = [*(f"cosine, {kind} tokens" for kind in curve), "attention to visual tokens"]
    table = _table("layer", names, lines, "Sparrow, figures 3b and 6", "The attention is a mean over the heads.")
    return ReportSection("Visual tokens in the target", (said, table))


def _importance(
    measuring: Measuring, settings: Importance, sets: Sequence[ConversationSet], data: JsonObject
) -> ReportSection:
    count = measuring.target.decoder.num_layers
    layers = settings.layers or list(range(0, count, 2))
    if max(layers) > count:
        raise UserError(f"layer {max(layers)}, and the target has {count}", key="probes.importance.layers",
                        hint=f"give layers from 0 to {count}")  # fmt: skip
    # Answers are compared with the right one, whatever the stage's temperatures are.
    decoding = replace(measuring.plainly(0.0, settings.max_new_tokens), warp=Warp(0.0))
    accuracy = {}
    for part in (part for part in _longest(sets) if part.benchmark in settings.sets):
        questions = _questions(measuring, part)
        accuracy[part.benchmark] = visual_tokens.importance(measuring.target, questions, [*layers, count], decoding)
    if missing := [name for name in settings.sets if name not in accuracy]:
        raise UserError(f"{missing[0]!r} is no set of this evaluation", key="probes.importance.sets",
                        hint=did_you_mean(missing[0], [part.benchmark for part in sets]))  # fmt: skip
    data["importance"] = accuracy
    lines = ((str(layer), *(of[layer] for of in accuracy.values())) for layer in sorted({*layers, count}))
    note = f"Measured with the sets' stock prompts. From layer {count} on: with all visual tokens."
    table = _table("unseen from layer", [*accuracy], lines, "Sparrow, figures 3a and 5", note)
    return ReportSection("From which layer on the target no longer needs visual tokens", (table,))


def _questions(measuring: Measuring, requests: ConversationSet) -> list[visual_tokens.Question]:
    questions = []
    for index, request in _requests(measuring, requests):
        letter = requests.dataset.record(index).get("letter")
        if letter is not None:
            is_right = visual_tokens.says_letter(lambda tokens: measuring.text(tokens, special=True), letter)
            questions.append(visual_tokens.Question(request, is_right))
    if not questions:
        raise UserError(f"no record of {requests.benchmark} says which letter is right", key="probes.importance.sets",
                        hint="name sets with options, and ask them with convention: stock")  # fmt: skip
    return questions


# ---- Whether the target needs the picture


def sight_section(measuring: Measuring, sets: Sequence[ConversationSet]) -> list[ReportSection]:
    """What a LLaVA makes of pictures (`probes.sight`), as one table."""
    settings, target = measuring.stage.probes.sight, measuring.target
    if settings is None:
        return []
    context, form, rows = measuring.context, measuring.stage.format, list[sight.Measured]()
    watch, processor = partial(context.stop.watch, place=PROBING), context.processor()
    for title, data in settings.names.items():
        named = _records(measuring, open_samples(data, form, None, context, processor))
        count, seed = settings.candidates, context.seed
        rows += sight.naming(target, named, watch, title=title, candidates=count, seed=seed)
    records = _records(measuring, open_samples(settings.questions, form, settings.answers, context, processor))
    rows += sight.right_answers(target, records, watch)
    likeliest, texts, decoding = [], [], replace(measuring.plainly(0.0, settings.max_new_tokens), warp=Warp(0.0))
    for record in watch(records):
        embedded = EmbeddedRequest(target.embed_prompt(record.request, encoded=record.features), 0.0)
        tokens = generate(target, None, record.request, decoding, embedded=embedded).tokens
        ((_, best),) = sight.answer_scores(target, record.request, record.features, [tuple(tokens)])
        likeliest.append(best.exp().tolist())
        texts.append(measuring.text(tokens))
    rows += sight.own_answers(likeliest, texts, [record.name for record in records])
    return [ReportSection("What the target owes to pictures", (sight.measures_table(rows),), name="sight")]


def swapped_section(measuring: Measuring, sets: Sequence[ConversationSet]) -> list[ReportSection]:
    """What drafters owe to pictures (`probes.swapped`): a table and a figure of the requests of all sets together."""
    if not measuring.stage.probes.swapped:
        return []
    context, most = measuring.context, measuring.stage.probes.requests
    records = [record for part in sets for record in _records(measuring, StatesSamples(part.dataset, None), most)]
    decodings = measuring.decodings(0.0, max(measuring.lengths)).items()
    for one, decoding in decodings:
        if not isinstance(decoding.policy, Chain):  # of a tree it is not known at which levels something was drafted
            raise UserError(f"probes.swapped is of chains, and {one.title} drafts trees",
                            key=f"stages.{context.name}.methods", hint="leave its tree out")  # fmt: skip
    methods = {one.title: (one.drafter, replace(decoding, warp=Warp(0.0))) for one, decoding in decodings}
    watch, newline_id = partial(context.stop.watch, place=PROBING), context.processor().newline_id
    table = sight.swapped_table(sight.swapped_pictures(measuring.target, records, methods, newline_id, watch))
    figure = Figure("swapped.png", "What drafters read, and what they gain by it.")
    sight.draw_swapped(context.folder / figure.path, table)
    return [ReportSection("What drafters owe to pictures", (table, figure), name="swapped")]


def _records(measuring: Measuring, samples: StatesSamples, most: int | None = None) -> list[sight.Shown]:
    """The records that can be read, with their pictures' features, and the answers that came to their ends; `most`:
    the first ones, without answers.
    """
    records, dataset = list[sight.Shown](), samples.dataset
    part = ConversationSet(benchmark="", medium="image", dataset=dataset)
    for index in measuring.context.stop.watch(range(len(dataset)), PROBING):
        if len(records) == most:
            break
        opened, record, ids = part.open(index, measuring.target), dataset.record(index), list[int]()
        if opened is None or not isinstance(opened.request, Request):
            continue
        if most is None:
            sample, start = samples.outline(index), opened.prompt_tokens
            learned = zip(sample.ids[start:], sample.loss_mask[start:], strict=True)
            ids = [token for token, is_learned in learned if is_learned]
        about = {key: str(record.get(key) or "") for key in ("name", "kind")}
        answer = tuple(ids) if ids and ids[-1] in measuring.eos_ids else ()
        turns = sum(turn.get("from") == "human" for turn in record["conversations"])
        records.append(sight.shown(measuring.target, opened.request, **about, answer=answer, turns=turns))
    return records


def _table(first: str, names: Sequence[str], lines: Iterable[tuple[Any, ...]], source: str, note: str = "") -> Table:
    """Shares under `names`, each line under its name."""
    return Table("", (text(first), *(Column(name, ".1%") for name in names)), tuple(lines), source, note)


# ---- Ensembles' weights over time


def recorded_weights(measuring: Measuring, sets: Sequence[ConversationSet]) -> list[ReportSection]:
    """The first `record_weights` requests of each set, by each ensemble of modes.

    Writes `weights/SET-DRAFTER-METHOD.json` in the stage's folder, a trace for each request.
    """
    count, folder = measuring.stage.record_weights, measuring.context.folder / "weights"
    if not count:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    for requests in sets:
        decodings = measuring.decodings(min(measuring.stage.temperatures), max(measuring.lengths))
        for drafting, decoding in ((d, decoding) for d, decoding in decodings.items() if len(d.members) > 1):
            traces, numbers = {}, range(min(count, len(requests)))
            for index in measuring.context.stop.watch(numbers, "while weights were recorded, after the report"):
                opened = requests.open(index, measuring.target)
                if opened is not None and isinstance(opened.request, Request):
                    traces[opened.request.name] = trace_weights(
                        measuring.target, drafting.drafter, opened.request, decoding, measuring.uniforms(index)
                    )
            if traces:
                method = drafting.name.replace("*", "-adaptive")
                place = (requests.benchmark, requests.turn, requests.budget, drafting.drafter_name, method)
                name = "-".join(part for part in place if part).replace("/", "-")
                data = {request: asdict(trace) for request, trace in traces.items()}
                (folder / f"{name}.json").write_text(json.dumps(nulls(data)))
    return [ReportSection("Weights over time", (f"Traces of {count} requests of each set are in weights/.",))]


def trace_weights(
    target: Target,
    drafter: EnsembleProposal,
    request: Request,
    decoding: Decoding,
    generator: torch.Generator | None = None,
) -> WeightTrace:
    """Decode once more with the trace on: it waits for the device in each cycle, which no measurement should."""
    before, drafter.record = drafter.record, True
    try:
        generate(target, drafter, request, decoding, generator)
    finally:
        drafter.record = before
    assert drafter.trace is not None
    return drafter.trace


# ---- Drawn pictures


def eagle_head(drafting: Sequence[Drafting]) -> ImageEagleHead:
    """The head of the first method. Raises `UserError` where it is none of EAGLE's."""
    head: ImageEagleHead | None = head_in(drafting[0].drafter)
    if drafting[0].config.base_kind != "eagle" or head is None:
        raise UserError("probes.analysis reads an EAGLE head, and the first method drafts with another",
                        key="probes.analysis",
                        hint="put a method with an eagle drafter first, or leave analysis out")  # fmt: skip
    return head


def check_analysis(stage: EvaluateSettings, generator: Generator, drafting: Sequence[Drafting]) -> None:
    """Raises `UserError` for settings beyond the codebook, and for a first method without an EAGLE head."""
    if (config := stage.probes.analysis) is not None:
        config.check(len(generator.codebook))
        eagle_head(drafting)


def analysis(
    measuring: Measuring, generator: Generator, prompts: Sequence[ImagePrompt], rows: Sequence[Row]
) -> list[ReportSection]:
    """Of the pictures that were drawn plainly, at every temperature. Numbers of each cell go to the stage's folder, as
    `analysis-T1.safetensors`.
    """
    stage, context, config = measuring.stage, measuring.context, measuring.stage.probes.analysis
    if config is None:
        return []
    target, head = generator.target, eagle_head(measuring.drafting)
    codebook = generator.codebook.to(target.device)
    table = config.table(codebook, offset=generator.first_id, folder=context.folder / "neighbours")

    def read(drawn: list[tuple[Tensor, Tensor]], temperature: float) -> CellStatistics:
        return read_pictures(config, target, head, drawn, measuring.warp(temperature), table)

    conditions = [generator.request(p.caption, p.label, p.key).condition for p in prompts[: config.pictures]]
    by_temperature, contrast = {}, {}
    for temperature, by_method in drawn_tokens(rows).items():
        codes = [target.codes(list(row)) for row in by_method[PLAIN][: len(conditions)]]
        by_temperature[temperature] = cells = read(list(zip(conditions, codes, strict=True)), temperature)
        save_file(cells.arrays(), context.folder / f"analysis-T{temperature:g}.safetensors")
        contrast[temperature] = contrasts(generator.pictures(torch.stack(codes)), target.grid)
    encoded = {}
    if (data := config.head_data) is not None:
        folder = Path(data.path) if data.path else context.inputs["codes"] / CODES
        for name, samples in encoded_pictures(config, folder, image_section(context.target).sample_condition()).items():
            encoded[name] = read(samples, stage.temperatures[0])
    return [drawn_section(config, by_temperature, encoded=encoded, contrast=contrast)]


def law(
    measuring: Measuring, generator: Generator, prompts: Sequence[ImagePrompt], rows: Sequence[Row]
) -> list[ReportSection]:
    """Of all pictures that were drawn above temperature 0, by every method."""
    if not measuring.stage.probes.law:
        return []
    target, seed = generator.target, measuring.context.seed
    conditions = [generator.request(p.caption, p.label, p.key).condition for p in prompts]

    def read(drawn: Sequence[Sequence[int]], temperature: float) -> DrawnLaw:
        codes = [target.codes(list(row)) for row in drawn]
        return read_law(target, list(zip(conditions, codes, strict=True)), measuring.warp(temperature), seed)

    laws = {temperature: {method: read(drawn, temperature) for method, drawn in by_method.items()}
            for temperature, by_method in drawn_tokens(rows).items() if temperature}  # fmt: skip
    return [law_section(laws, PLAIN, target.grid, measuring.context.folder)]
