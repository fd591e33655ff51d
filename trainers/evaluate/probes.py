"""Probes: what an `evaluate` stage reads besides speed, on a few requests that are decoded once more, untimed.

How sure drafters are and how much of it is accepted (SAGE's premises, and the planner's tree); where heads attend, how
far visual tokens survive in the target, and from which layer on it can do without them (Sparrow); whether the target's
answers depend on the picture.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from ...core.batch import Request
from ...core.errors import UserError, did_you_mean
from ...core.json_types import JsonObject
from ...data.pictures.visual_budget import visual_tokens as num_visual_tokens
from ...eval.loop import Decoding, generate
from ...eval.measured_rows import Row
from ...eval.policies import Draw
from ...eval.rules import RULES
from ...eval.studies import confidence, video_figures, visual_tokens
from ...eval.studies.confidence import Watched, by_confidence, entropy_autocorrelation, rates_by_rank
from ...eval.studies.planner import Costs, Plan, plan
from ...eval.style import COLORS
from ...eval.tables import Figure, ReportSection
from ...models.decoding.warp import Warp
from ...models.drafters.head_config import FusedHeadConfig
from ...models.targets.language import LanguageTarget
from ..run.context import Context
from .drafters import Drafting
from .measuring import Measuring
from .probe_settings import Importance, Probes
from .requests import ConversationSet

PROBING = "while probing, after the report"
_WIDTH = 10  # ranks that a planned tree may have


@dataclass(frozen=True)
class Probing:
    """Probes of what a stage measured; rank 0 runs them alone, or all ranks in step."""

    settings: Probes
    context: Context
    target: LanguageTarget
    drafting: Mapping[str, Drafting]
    decoding: Decoding  # plain decoding at the lowest temperature

    def report(
        self, sets: Sequence[ConversationSet], rows: Sequence[Row], *, watched: Sequence[str]
    ) -> list[ReportSection]:
        """Sections of the report; numbers and figures go to the stage's folder.

        Args:
            watched: methods whose confidence is of interest.
        """
        longest = _longest(sets)
        data: JsonObject = {}
        sections = [self._watch(longest, rows, watched, data)] if watched else []
        clips = [part for part in longest if part.medium == "video"]
        if self.settings.states and clips:
            sections += [*self._shares(sets, data), self._in_the_target(clips, data)]
        if self.settings.importance is not None:
            sections.append(self._importance(self.settings.importance, sets, data))
        (self.context.folder / "probes.json").write_text(json.dumps(data, indent=1))
        return sections

    def _requests(self, requests: ConversationSet) -> list[tuple[int, Request]]:
        """The first of those that can be read, by their numbers."""
        numbers = self.context.stop.watch(range(len(requests)), PROBING)
        readable = ((i, seen) for i in numbers if (seen := requests.request(i, self.target)))
        return list(itertools.islice(readable, self.settings.requests))

    def _watch(
        self, sets: Sequence[ConversationSet], rows: Sequence[Row], watched: Sequence[str], data: JsonObject
    ) -> ReportSection:
        bins, lags, plans = {}, {}, {}
        for name in watched:
            drafting = self.drafting[name]
            policy: Any = Watched(drafting.policy)
            decoding = replace(self.decoding, policy=policy, draw=Draw(drafting.method.draw))
            for part in sets:
                for number, request in self.context.stop.watch(self._requests(part), PROBING):
                    generator = torch.Generator().manual_seed(self.context.seed * 1_000_003 + number)
                    generate(self.target, drafting.drafter, request, decoding, generator)
            places = [place for request in policy.requests for place in request]
            rates = rates_by_rank(places, levels=drafting.policy.num_levels, width=_WIDTH)
            mine = [r for r in rows if (r.method, r.drafter) == (drafting.name, drafting.drafter_name)]
            bins[name], lags[name] = by_confidence(places), entropy_autocorrelation(policy.requests)
            proposal = plans[name] = planned(rates, mine)
            data[name] = {
                "by_confidence": [one._asdict() for one in bins[name]],
                "entropy_autocorrelation": [one._asdict() for one in lags[name]],
                "rates": rates,
                "plan": proposal and {"choices": proposal.choices, "accepted": proposal.accepted,
                                      "speedup": proposal.speedup},
            }  # fmt: skip
        content: list[str | Figure] = []
        for start in range(0, len(watched), len(COLORS)):
            end = f"-{start // len(COLORS) + 1}.png" if start else ".png"
            shown = watched[start : start + len(COLORS)]
            confidence.plot_acceptance(self._path("confidence" + end), {n: bins[n] for n in shown})
            confidence.plot_autocorrelation(self._path("entropy" + end), {n: lags[n] for n in shown})
            content += [Figure(f"confidence{end}", "Share of drafted tokens accepted, by the draft's confidence."),
                        Figure(f"entropy{end}", "Autocorrelation of the draft's entropy over cycles.")]  # fmt: skip
        content.append("The best static tree, computed from the measured acceptance rates and times "
                       "(eval/studies/planner.py). It is a proposal, and was not measured:")  # fmt: skip
        content.append("\n".join(f"- {name}: {_shown(data)}" for name, data in plans.items()))
        return ReportSection("Confidence and acceptance", tuple(content))

    def _shares(self, sets: Sequence[ConversationSet], data: JsonObject) -> list[ReportSection]:
        """The sections of every head, on the first set of clips, at each of its lengths."""
        first = next(part.benchmark for part in sets if part.medium == "video")
        shares: dict[str, dict[str, float]] = {}
        for name, drafting in self.drafting.items():
            if drafting.config.parts is None:
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
        video_figures.attention_bars(self._path("attention.png"), shares)
        text = f"Attention of the first token after the prompt, on {first}."
        return [ReportSection("Where heads attend", (text, Figure("attention.png", "Attention shares.")))]

    def _in_the_target(self, clips: Sequence[ConversationSet], data: JsonObject) -> ReportSection:
        requests = [request for part in clips for _, request in self._requests(part)]
        self.context.stop.check(PROBING)
        curve = data["retention"] = visual_tokens.retention(self.target, requests)
        bridge = self._bridge()
        video_figures.retention_curve(self._path("retention.png"), curve, bridge=bridge)
        watched = self.context.stop.watch(requests, PROBING)
        each = [visual_tokens.target_visual_attention(self.target, request) for request in watched]
        attention = data["visual_attention"] = torch.stack(each).mean(0).tolist()
        video_figures.attention_map(self._path("visual-attention.png"), attention, bridge=bridge)
        layer = visual_tokens.fused_from(curve["visual"])
        sentence = f"below {visual_tokens.THRESHOLD:g} " + (
            "at no layer" if layer is None else f"from layer {layer} on"
        )
        middle = "" if bridge is None else f"; heads read layer {bridge} at visual tokens"
        content = (
            f"The cosine similarity of visual tokens' states with their embeddings is {sentence}{middle}.",
            Figure("retention.png", "Cosine similarity of states with embeddings, by layer."),
            Figure("visual-attention.png", "Attention to visual tokens by layer and head."),
        )
        return ReportSection("Visual tokens in the target", content)

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
        video_figures.importance_curve(self._path("importance.png"), accuracy, bridge=self._bridge())
        content = (
            f"Measured with the stock prompts of {', '.join(accuracy)}.",
            Figure("importance.png", "Right answers without visual tokens from a layer on; dashed: with all of them."),
        )
        return ReportSection("From which layer on the target no longer needs visual tokens", content)

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

    def _path(self, name: str) -> Path:
        return self.context.folder / name


def probe(measuring: Measuring, sets: Sequence[ConversationSet], rows: Sequence[Row]) -> list[ReportSection]:
    """The report's sections on what the probes read; at the lowest temperature, where most methods can be used."""
    settings = measuring.stage.probes
    temperature = min(measuring.stage.temperatures)
    labelled = by_label([d for d in measuring.drafting if d.method.allowed(temperature)])
    methods = watched(labelled, settings)
    if not methods and not settings.states and settings.importance is None:
        return []
    decoding = measuring.plainly(temperature, max(measuring.lengths))
    probing = Probing(settings, measuring.context, measuring.target, labelled, decoding)
    return probing.report(sets, [row for row in rows if row.temperature == temperature], watched=methods)


def planned(rates: Sequence[Sequence[float | None]], rows: Sequence[Row]) -> Plan | None:
    """The planner's tree for measured rates and the median times of `rows`; what was not offered is not grown. None
    without a row that has a cycle.
    """
    rows = [row for row in rows if row.num_cycles]
    if not rows:
        return None
    known = [[rate or 0.0 for rate in level] for level in rates]
    costs = Costs(statistics.median(row.verify_s for row in rows), statistics.median(row.draft_s for row in rows))
    return plan(known, costs, plain_s=statistics.median(row.plain_cycle_s for row in rows))


def by_label(drafting: Sequence[Drafting]) -> dict[str, Drafting]:
    """Each by its method's name, and by its drafter's too where a method has several."""
    names = [one.name for one in drafting]
    return {one.name if names.count(one.name) == 1 else f"{one.name}, {one.drafter_name}": one for one in drafting}


def watched(drafting: Mapping[str, Drafting], settings: Probes) -> list[str]:
    """Whose confidence is probed."""
    every = settings.confidence
    return [name for name, one in drafting.items() if (one.policy.name == "sage" if every is None else every)]


def _longest(sets: Sequence[ConversationSet]) -> list[ConversationSet]:
    """Each set once, at the most visual tokens."""
    rising = sorted(sets, key=lambda part: num_visual_tokens(part.budget) if part.budget else 0)
    return list({part.benchmark: part for part in rising}.values())


def _shown(plan: Plan | None) -> str:
    if plan is None:
        return "none; no cycle was run, so nothing was measured"
    if not plan.choices:
        return "none; drafting does not pay here"
    return (
        f"{len(plan.choices)} nodes on {plan.levels} levels, up to {plan.width} wide; {plan.accepted:.2f} accepted "
        f"in a cycle, {plan.speedup:.2f}x expected at that tau of {plan.accepted + 1:.2f}"
    )
