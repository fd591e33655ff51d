"""Probes: what an `evaluate` stage asks of the models while they decode once more, untimed, on a few requests.

Where heads attend, how far visual tokens survive in the target, and from which layer on it can do without them
(Sparrow, figures 2, 3, 5 and 6). Each probe is a table of the report, and its numbers are in `probes.json`, from which
docs/notebooks/sparrow.ipynb draws the figures.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from ...core.batch import Request
from ...core.errors import UserError, did_you_mean
from ...core.json_types import JsonObject
from ...data.pictures.videos import visual_tokens as num_visual_tokens
from ...eval.loop import Decoding
from ...eval.measured_rows import Row
from ...eval.rules import RULES
from ...eval.studies import visual_tokens
from ...eval.studies.video import video_sections
from ...eval.tables import Column, ReportSection, Table, text
from ...models.decoding.warp import Warp
from ...models.drafters.head_config import FusedHeadConfig
from ...models.drafters.head_settings import HeadSettings
from ...models.targets.language import LanguageTarget
from ..run.context import Context
from .benchmarks import SetsBenchmark, of_class
from .drafters import Drafting
from .measuring import Measuring
from .probe_settings import Importance, Probes
from .reporting import infos
from .requests import ConversationSet

PROBING = "while probing, after the report"


@dataclass(frozen=True)
class Probing:
    """Probes of what a stage measured; rank 0 runs them alone, or all ranks in step."""

    settings: Probes
    context: Context
    target: LanguageTarget
    drafting: Mapping[str, Drafting]
    decoding: Decoding  # plain decoding at the lowest temperature

    def report(self, sets: Sequence[ConversationSet]) -> list[ReportSection]:
        """Sections of the report; numbers go to the stage's folder."""
        data: JsonObject = {"bridge": self._bridge()}
        sections: list[ReportSection] = []
        clips = [part for part in _longest(sets) if part.medium == "video"]
        if self.settings.states and clips:
            sections += [*self._shares(sets, data), self._in_the_target(clips, data)]
        if self.settings.importance is not None:
            sections.append(self._importance(self.settings.importance, sets, data))
        (self.context.folder / "probes.json").write_text(json.dumps(data, indent=1))
        return sections

    def _requests(self, requests: ConversationSet) -> list[tuple[int, Request]]:
        """The first of those that can be read, by their numbers."""
        numbers = self.context.stop.watch(range(len(requests)), PROBING)
        readable = ((i, request) for i in numbers if (request := requests.request(i, self.target)))
        return list(itertools.islice(readable, self.settings.requests))

    def _shares(self, sets: Sequence[ConversationSet], data: JsonObject) -> list[ReportSection]:
        """The sections of every head, on the first set of clips, at each of its lengths."""
        first = next(part.benchmark for part in sets if part.medium == "video")
        shares: dict[str, dict[str, float]] = {}
        for name, drafting in self.drafting.items():
            if not isinstance(drafting.config, HeadSettings):
                continue
            for part in (p for p in sets if p.benchmark == first):
                try:
                    each = [visual_tokens.head_shares(self.target, drafting.drafter, r)
                            for _, r in self.context.stop.watch(self._requests(part), PROBING)]  # fmt: skip
                except AssertionError:
                    continue  # it holds some of the visual inputs, or others in their place
                if not each:  # no request of this set can be read
                    continue
                label = f"{name}, {part.budget}" if part.budget else name
                shares[label] = {kind: statistics.fmean(s[kind] for s in each) for kind in visual_tokens.KINDS}
        if not shares:
            return []
        data["attention_shares"] = shares
        note = f"Attention of the first token after the prompt, on {first}."
        lines = ((name, *of.values()) for name, of in shares.items())
        table = _table("head", visual_tokens.KINDS, lines, "Sparrow, figure 2", note)
        return [ReportSection("Where heads attend", (table,))]

    def _in_the_target(self, clips: Sequence[ConversationSet], data: JsonObject) -> ReportSection:
        requests = [request for part in clips for _, request in self._requests(part)]
        self.context.stop.check(PROBING)
        curve = data["retention"] = visual_tokens.retention(self.target, requests)
        watched = self.context.stop.watch(requests, PROBING)
        each = [visual_tokens.target_visual_attention(self.target, request) for request in watched]
        attention = data["visual_attention"] = torch.stack(each).mean(0).tolist()
        layer = visual_tokens.fused_from(curve["visual"])
        sentence = f"below {visual_tokens.THRESHOLD:g} " + (
            "at no layer" if layer is None else f"from layer {layer} on"
        )
        bridge = data["bridge"]
        middle = "" if bridge is None else f"; heads read layer {bridge} at visual tokens"
        said = f"The cosine similarity of visual tokens' states with their embeddings is {sentence}{middle}."
        # Layer 0 is the embedding, which attends to nothing.
        heads = [None, *map(statistics.fmean, attention)]
        lines = ((str(i), *(of[i] for of in curve.values()), heads[i]) for i in range(len(heads)))
        names = [*(f"cosine, {kind} tokens" for kind in curve), "attention to visual tokens"]
        table = _table("layer", names, lines, "Sparrow, figures 3b and 6", "The attention is a mean over the heads.")
        return ReportSection("Visual tokens in the target", (said, table))

    def _importance(self, settings: Importance, sets: Sequence[ConversationSet], data: JsonObject) -> ReportSection:
        count = self.target.decoder.num_layers
        layers = settings.layers or list(range(0, count, 2))
        if max(layers) > count:
            raise UserError(f"layer {max(layers)}, and the target has {count}", key="probes.importance.layers",
                            hint=f"give layers from 0 to {count}")  # fmt: skip
        # Answers are compared with the right one, whatever the stage's temperatures are.
        decoding = replace(self.decoding, rule=RULES["greedy"], warp=Warp(0.0), max_new_tokens=settings.max_new_tokens)
        accuracy = {}
        for part in _longest(sets):
            if part.benchmark in settings.sets:
                questions = self._questions(part)
                accuracy[part.benchmark] = visual_tokens.importance(self.target, questions, [*layers, count], decoding)
        if missing := [name for name in settings.sets if name not in accuracy]:
            raise UserError(f"{missing[0]!r} is no set of this evaluation", key="probes.importance.sets",
                            hint=did_you_mean(missing[0], [part.benchmark for part in sets]))  # fmt: skip
        data["importance"] = accuracy
        lines = ((str(layer), *(of[layer] for of in accuracy.values())) for layer in sorted({*layers, count}))
        note = f"Measured with the sets' stock prompts. From layer {count} on: with all visual tokens."
        table = _table("unseen from layer", [*accuracy], lines, "Sparrow, figures 3a and 5", note)
        return ReportSection("From which layer on the target no longer needs visual tokens", (table,))

    def _questions(self, requests: ConversationSet) -> list[visual_tokens.Question]:
        tokenizer, questions = requests.dataset.processor.tokenizer, []

        def decode(tokens: list[int]) -> str:
            return str(tokenizer.decode(tokens))

        for index, request in self._requests(requests):
            letter = requests.dataset.record(index).get("letter")
            if letter is not None:
                questions.append(visual_tokens.Question(request, visual_tokens.says_letter(decode, letter)))
        if not questions:
            raise UserError(f"no record of {requests.benchmark} says which letter is right",
                            key="probes.importance.sets",
                            hint="name sets with options, and ask them with convention: stock")  # fmt: skip
        return questions

    def _bridge(self) -> int | None:
        """The middle layer that some head was trained with."""
        heads = [
            cast(FusedHeadConfig, one.config) for one in self.drafting.values() if one.config.base_kind == "sparrow"
        ]
        return heads[0].visual_layer(self.target.shape, training=True) or None if heads else None


def _table(first: str, names: Sequence[str], lines: Iterable[tuple[Any, ...]], source: str, note: str = "") -> Table:
    """Shares under `names`, each line under its name."""
    return Table("", (text(first), *(Column(name, ".1%") for name in names)), tuple(lines), source, note)


def probe(measuring: Measuring, sets: Sequence[ConversationSet], rows: Sequence[Row]) -> list[ReportSection]:
    """The report's sections on what the probes read; `rows` are not read."""
    settings = measuring.stage.probes
    if not settings.states and settings.importance is None:
        return []
    temperature = min(measuring.stage.temperatures)
    labelled = by_label([d for d in measuring.drafting if d.method.allowed(temperature)])
    decoding = measuring.plainly(temperature, max(measuring.lengths))
    return Probing(settings, measuring.context, measuring.target, labelled, decoding).report(sets)


def clip_tables(measuring: Measuring, rows: Sequence[Row]) -> list[ReportSection]:
    """Those that were measured."""
    stage = measuring.stage
    measured = stage.lengths or of_class(stage.benchmarks, SetsBenchmark)
    return video_sections(rows, infos(measuring.drafting)) if measured else []


def by_label(drafting: Sequence[Drafting]) -> dict[str, Drafting]:
    """Each by its method's name, and by its drafter's too where a method has several."""
    names = [one.name for one in drafting]
    return {one.name if names.count(one.name) == 1 else f"{one.name}, {one.drafter_name}": one for one in drafting}


def _longest(sets: Sequence[ConversationSet]) -> list[ConversationSet]:
    """Each set once, at the most visual tokens."""
    rising = sorted(sets, key=lambda part: num_visual_tokens(part.budget) if part.budget else 0)
    return list({part.benchmark: part for part in rising}.values())
