"""What an `evaluate` stage looks into besides speed, on a few requests that are decoded or read once more, untimed.

How sure drafters are and what of it is accepted (SAGE's premises, and the planner's tree); where heads look, how far
visual tokens live on in the target, and from which layer on it can do without them (Sparrow's).
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from ....core.errors import UserError, did_you_mean
from ....core.nouns import Request
from ....core.section import Section
from ....data.visual_budget import visual_tokens
from ....eval import confidence_plots, reading_analysis, video_plots
from ....eval.loop import Decoding, generate
from ....eval.measure import Row
from ....eval.planner import Costs, Plan, plan
from ....eval.policies import Draw, Sage, Static
from ....eval.rules import RULES
from ....eval.visual_plots.style import COLORS
from ....eval.watched import Watched, by_confidence, entropy_autocorrelation, rates_by_rank
from ....models.decoding.warp import Warp
from ...context import Context
from .methods import OpenMethod
from .requests import Asked

_WIDTH = 10  # ranks that a planned tree may have


class Importance(Section):
    """Right answers where visual tokens are hidden from a layer on (Sparrow, figures 3a and 5)."""

    # Of the stage's sets those whose questions have options and end in a letter: of a suite asked so (convention: stock
    # or verbatim), or files of one's own whose records have the right option's `letter`.
    sets: list[str] = Field(min_length=1)
    # Layers from which on visual tokens are hidden, 0 to the target's number of them; null: every other one.
    layers: list[Annotated[int, Field(ge=0)]] | None = None
    # Tokens of an answer: a letter, and what may stand before it.
    max_new_tokens: int = Field(8, ge=1)

    def check(self, benchmarks: Sequence[str], suite: Any) -> None:
        """Raises `ValueError` where the stage does not ask these sets for letters."""
        asked = [name for name in self.sets if name not in benchmarks]
        known = [] if suite is None else suite.names
        # A directory whose sets are not named has those that it has.
        if known is not None and (unknown := [name for name in asked if name not in known]):
            near = did_you_mean(unknown[0], [*benchmarks, *known])
            raise ValueError(f"looks.importance.sets: {unknown[0]!r} is not among the stage's sets; {near}")
        if asked and suite.convention == "describe":
            raise ValueError(
                f"looks.importance.sets: {asked[0]} is asked for descriptions; set suite.convention: stock, in a stage "
                "beside the one that measures speed"
            )


class Looks(Section):
    # Requests of each set that are decoded or read once more, of clips at the longest length.
    requests: int = Field(8, ge=1)
    # Where heads look, which layers of the target look at visual tokens, and the target's states against their
    # embeddings, layer by layer (Sparrow, figures 2, 3b and 6).
    states: bool = True
    # From which layer on the target can do without visual tokens (Sparrow, figures 3a and 5); null: not asked.
    importance: Importance | None = None


@dataclass(frozen=True)
class Looking:
    """Looks into what a stage measured; rank 0 does it alone."""

    settings: Looks
    context: Context
    target: Any
    methods: Mapping[str, OpenMethod]
    decoding: Decoding  # of plain decoding at the lowest temperature

    def report(self, asked: Sequence[Asked], rows: Sequence[Row], *, watched: Sequence[str]) -> list[str]:
        """Lines of the report; numbers and figures go to the stage's folder.

        Args:
            watched: methods whose confidence is of interest.
        """
        longest = _longest(asked)
        found: dict[str, Any] = {}
        lines = self._watch(longest, rows, watched, found) if watched else []
        clips = [part for part in longest if part.medium == "video"]
        if self.settings.states and clips:
            lines += self._shares(asked, found) + self._in_the_target(clips, found)
        if self.settings.importance is not None:
            lines += self._importance(self.settings.importance, asked, found)
        (self.context.folder / "looks.json").write_text(json.dumps(found, indent=1))
        return lines

    def _requests(self, asked: Asked) -> list[tuple[int, Request]]:
        """The first of those that can be read, by their numbers."""
        readable = ((i, request) for i in range(len(asked.dataset)) if (request := asked.request(i, self.target)))
        return list(itertools.islice(readable, self.settings.requests))

    def _watch(
        self, asked: Sequence[Asked], rows: Sequence[Row], watched: Sequence[str], found: dict[str, Any]
    ) -> list[str]:
        bins, lags, plans = {}, {}, {}
        for name in watched:
            method = self.methods[name]
            policy = Watched(method.policy)
            decoding = replace(self.decoding, policy=policy, draw=Draw(method.method.draw))
            for part in asked:
                for number, request in self._requests(part):
                    generator = torch.Generator().manual_seed(self.context.seed * 1_000_003 + number)
                    generate(self.target, method.drafter, request, decoding, generator)
            places = [place for request in policy.requests for place in request]
            rates = rates_by_rank(places, levels=method.policy.num_levels, width=_WIDTH)
            mine = [row for row in rows if row["drafter"] == name]
            bins[name], lags[name] = by_confidence(places), entropy_autocorrelation(policy.requests)
            plans[name] = planned(rates, mine)
            found[name] = {
                "by_confidence": [one._asdict() for one in bins[name]],
                "entropy_autocorrelation": [one._asdict() for one in lags[name]],
                "rates": rates,
                "plan": {"choices": plans[name].choices, "accepted": plans[name].accepted,
                         "speedup": plans[name].speedup},
            }  # fmt: skip
        lines = ["## Confidence and acceptance", ""]
        for start in range(0, len(watched), len(COLORS)):
            end = f"-{start // len(COLORS) + 1}.png" if start else ".png"
            shown = watched[start : start + len(COLORS)]
            confidence_plots.acceptance_by_confidence(self._path("confidence" + end), {n: bins[n] for n in shown})
            confidence_plots.entropy_autocorrelation(self._path("entropy" + end), {n: lags[n] for n in shown})
            lines += [f"![accepted by confidence](confidence{end})", "", f"![entropy over cycles](entropy{end})", ""]
        lines += ["The best static tree by the rates and times that were measured (eval/planner.py); a proposal, to be "
                  "measured itself:", ""]  # fmt: skip
        return [*lines, *(f"- {name}: {_shown(found)}" for name, found in plans.items()), ""]

    def _shares(self, asked: Sequence[Asked], found: dict[str, Any]) -> list[str]:
        """Of every head, on the first set of clips, at each of its lengths."""
        first = next(part.set for part in asked if part.medium == "video")
        shares: dict[str, dict[str, float]] = {}
        for name, method in self.methods.items():
            if method.parts is None:
                continue
            for part in (p for p in asked if p.set == first):
                try:
                    each = [reading_analysis.head_shares(self.target, method.drafter, r)
                            for _, r in self._requests(part)]  # fmt: skip
                except AssertionError:
                    continue  # it holds some of the visual slots, or others in their place
                label = f"{name}, {part.budget}" if part.budget else name
                shares[label] = {kind: statistics.fmean(s[kind] for s in each) for kind in reading_analysis.KINDS}
        if not shares:
            return []
        found["attention_shares"] = shares
        video_plots.attention_bars(self._path("attention.png"), shares)
        return ["## Where heads look", "", f"From the first token behind the prompt, on {first}.", "",
                "![attention shares](attention.png)", ""]  # fmt: skip

    def _in_the_target(self, clips: Sequence[Asked], found: dict[str, Any]) -> list[str]:
        requests = [request for part in clips for _, request in self._requests(part)]
        curve = found["retention"] = reading_analysis.retention(self.target, requests)
        bridge = self._bridge()
        video_plots.retention_curve(self._path("retention.png"), curve, bridge=bridge)
        each = [reading_analysis.target_visual_attention(self.target, request) for request in requests]
        looks = found["visual_attention"] = torch.stack(each).mean(0).tolist()
        video_plots.attention_map(self._path("visual-attention.png"), looks, bridge=bridge)
        layer = reading_analysis.fused_from(curve["visual"])
        told = f"below {reading_analysis.THRESHOLD:g} " + ("at no layer" if layer is None else f"from layer {layer} on")
        middle = "" if bridge is None else f"; heads read layer {bridge} at visual places"
        return ["## Visual tokens in the target", "",
                f"The cosine of their states with their embeddings is {told}{middle}.",
                "", "![retention](retention.png)", "",
                "![attention to visual tokens by layer and head](visual-attention.png)", ""]  # fmt: skip

    def _importance(self, settings: Importance, asked: Sequence[Asked], found: dict[str, Any]) -> list[str]:
        count = self.target.decoder.num_layers
        layers = settings.layers or list(range(0, count, 2))
        if max(layers) > count:
            raise UserError(f"layer {max(layers)}, and the target has {count}", where="key looks.importance.layers",
                            cure=f"give layers from 0 to {count}")  # fmt: skip
        # Answers are compared with the right one, whatever the stage's temperatures are.
        decoding = replace(self.decoding, rule=RULES["greedy"], warp=Warp(0.0)).with_length(settings.max_new_tokens)
        accuracy = {}
        for part in _longest(asked):
            if part.set in settings.sets:
                questions = self._questions(part)
                accuracy[part.set] = reading_analysis.importance(self.target, questions, [*layers, count], decoding)
        if missing := [name for name in settings.sets if name not in accuracy]:
            raise UserError(f"{missing[0]!r} is no set of this stage", where="key looks.importance.sets",
                            cure=did_you_mean(missing[0], [part.set for part in asked]))  # fmt: skip
        found["importance"] = accuracy
        video_plots.importance_curve(self._path("importance.png"), accuracy, bridge=self._bridge())
        return ["## From which layer on the target can do without visual tokens", "",
                f"Stock prompts of {', '.join(accuracy)}.", "", "![importance](importance.png)", ""]  # fmt: skip

    def _questions(self, asked: Asked) -> list[reading_analysis.Question]:
        tokenizer, found = asked.dataset.processor.tokenizer, []
        for index, request in self._requests(asked):
            letter = asked.dataset.record(index).get("letter")
            if letter is not None:
                found.append(reading_analysis.Question(request, reading_analysis.says_letter(tokenizer.decode, letter)))
        if not found:
            raise UserError(f"no record of {asked.set} says which letter is right", where="key looks.importance.sets",
                            cure="name sets with options, and ask them with suite.convention: stock")  # fmt: skip
        return found

    def _bridge(self) -> int | None:
        """The middle layer that some head was trained with."""
        heads = [m.config for m in self.methods.values() if getattr(m.config, "kind", None) == "sparrow"]
        return heads[0]._middle(self.target.shape) if heads else None

    def _path(self, name: str) -> Path:
        return self.context.folder / name


def plain_decoding(temperature: float, max_new_tokens: int, eos_ids: Sequence[int], stage: Any) -> Decoding:
    """What looks decode with: its policy is replaced by a method's."""
    rule = RULES["sampling" if temperature else "greedy"]
    warp = Warp(temperature, stage.top_k, stage.top_p)
    return Decoding(Static([(0,)]), rule, Draw("top-k"), warp, max_new_tokens, tuple(eos_ids))


def planned(rates: Sequence[Sequence[float | None]], rows: Sequence[Row]) -> Plan:
    """The planner's tree for measured rates and the median times of `rows`; what was not offered is not grown."""
    known = [[rate or 0.0 for rate in level] for level in rates]
    verify_s, draft_s, plain_s = (
        statistics.median(row[key] for row in rows) for key in ("verify_s", "draft_s", "plain_cycle_s")
    )
    return plan(known, Costs(verify_s, draft_s), plain_s=plain_s)


def watched_methods(methods: Mapping[str, OpenMethod], settings: Looks | None) -> list[str]:
    """With `looks` all methods; without those whose tree is SAGE's."""
    return [name for name, found in methods.items() if settings is not None or isinstance(found.policy, Sage)]


def _longest(asked: Sequence[Asked]) -> list[Asked]:
    """Each set once, at the most visual tokens."""
    rising = sorted(asked, key=lambda part: visual_tokens(part.budget) if part.budget else 0)
    return list({part.set: part for part in rising}.values())


def _shown(found: Plan) -> str:
    if not found.choices:
        return "none; drafting does not pay here"
    return (
        f"{len(found.choices)} nodes on {found.levels} levels, up to {found.width} wide; {found.accepted:.2f} accepted "
        f"in a cycle, {found.speedup:.2f}x expected"
    )
