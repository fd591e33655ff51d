"""Does a server that drafts write what its target alone would? It is asked beside a plain server of the same target.

Greedy answers are checked token by token: the plain server goes on from the drafting one's prefix after each
difference, since one early tie would hide all that follows. Drawn tokens are compared with the plain server's exact law
(`exact_law.py`). The drafting server's own log-probabilities are never used, but for first tokens, which no draft made:
two engines show wrong ones, or none, of drafted tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from ...core.errors import UserError
from ...core.json_types import JsonObject
from .exact_law import GREEDY, TESTS, Evidence, Ids, Sampling, law_of

END = -1  # in the place of a token: the server ended its answer
SHOWN = 20  # log-probabilities at a place: as many as vLLM shows by default
ALPHA = 1e-3  # how often a right server may be called faulty, over all tests and looks of an audit
GROUPS = ("first", "drafted")  # a prompt's first token, which no draft made, and the others
_MOST_SURE = 5  # sure tokens before an uncertain one: few contexts, so that each is drawn from often
_AFTER = 3  # tokens that are drawn from there on
_LOOKS = 6
_NOISE_PLACES = 2  # of an answer, that the plain server computes twice


@dataclass(frozen=True)
class Answer:
    """What a server wrote."""

    tokens: Ids  # `END` last, where the server ended it by itself
    laws: tuple[Mapping[int, float], ...] = ()  # likeliest log-probabilities in each token's place, where asked for


class Engine(Protocol):
    """A server. A prompt is what its maker understands; `said` are tokens of the answer so far."""

    def counters(self) -> Mapping[str, float]:
        """Its counters of speculation; empty: it shows none."""

    def answer(
        self, prompt: Any, said: Ids, count: int, sampling: Sampling, *, seed: int = 0, shown: int = 0
    ) -> Answer | None:
        """At most `count` further tokens. None: this prefix cannot be asked for."""


@dataclass(frozen=True)
class Difference:
    """A place where two greedy answers part."""

    prompt: int
    place: int  # token of the answer, from 0
    drafting: int
    plain: int
    gap: float  # log-probability of the likeliest token less that of the drafting server's; infinite: it is not shown
    verdict: str  # arithmetic: the plain server writes it too, after a prompt pass; tie: within the noise; or fault
    at_once: int = 1  # requests side by side when the drafting server wrote the answer


@dataclass
class Walk:
    """What the plain server says of one greedy answer."""

    said: Ids
    laws: list[Mapping[int, float]] = field(default_factory=list)  # in each place that was checked
    noise: list[float] = field(default_factory=list)  # between two computations of one log-probability
    apart: list[Difference] = field(default_factory=list)  # where not arithmetic a tie, or by the noise a fault


def walk(drafting: Engine, plain: Engine, prompt: Any, said: Ids, number: int = 0, at_once: int = 1) -> Walk:
    """Check an answer of the drafting server. It ends early where the plain server cannot be asked to go on."""
    found, start = Walk(said), 0
    first = drafting.answer(prompt, (), 1, GREEDY, shown=SHOWN)
    again = plain.answer(prompt, (), 1, GREEDY, shown=SHOWN)
    if first and again:
        found.noise += _apart(first.laws, again.laws)
    while start < len(said):
        going_on = plain.answer(prompt, said[:start], len(said) - start, GREEDY, shown=SHOWN)
        if going_on is None:
            break
        pairs = list(zip(going_on.tokens, said[start:], strict=False))
        place = next((place for place, (b, a) in enumerate(pairs) if a != b), None)
        found.laws += going_on.laws[: len(pairs) if place is None else place + 1]
        if start == 0:
            for at in _some(len(going_on.laws)):
                again = plain.answer(prompt, going_on.tokens[:at], 1, GREEDY, shown=SHOWN)
                found.noise += _apart(again.laws, going_on.laws[at : at + 1]) if again else []
        if place is None:
            break
        b, a = pairs[place]
        start += place
        if a == END and found.apart and found.apart[-1].place == start - 1:
            break  # behind the very token that they part by, which may end answers: from there it can only go on
        # An end that the plain server took may be a token before it, after which it would go on: asked from there.
        before = int(b == END and start > 0)
        again = plain.answer(prompt, said[: start - before], 1 + before, GREEDY, shown=SHOWN)
        law = again.laws[before] if again and len(again.laws) > before else {}
        gap = max(law.values()) - law[a] if a in law else math.inf
        same = again is not None and again.tokens[: 1 + before] == said[start - before : start + 1]
        found.apart.append(Difference(number, start, a, b, gap, "arithmetic" if same else "tie", at_once))
        start += 1
        if len(found.laws) < start and a != END:  # the plain server ended its answer here, and shows no law
            found.laws.append(law)
    return found


def _some(number: int) -> list[int]:
    """Places after the first one, spread over the answer."""
    return sorted({number * (n + 1) // (_NOISE_PLACES + 1) for n in range(_NOISE_PLACES)} & set(range(1, number)))


def _apart(some: Sequence[Mapping[int, float]], others: Sequence[Mapping[int, float]]) -> list[float]:
    """Differences of the five likeliest log-probabilities, place by place."""
    return [value - other[token] for one, other in zip(some, others, strict=False)
            for token, value in sorted(one.items(), key=lambda pair: -pair[1])[:5] if token in other]  # fmt: skip


def differences(walks: Sequence[Walk]) -> list[Difference]:
    """Each place where answers part, with its verdict."""
    most = most_noise(walks)
    wrong = (replace(one, verdict="fault") if one.verdict == "tie" and one.gap > most else one
             for walked in walks for one in walked.apart)  # fmt: skip
    return list(wrong)


def most_noise(walks: Sequence[Walk]) -> float:
    """The gap up to which a difference is a tie: twice the largest noise."""
    return 2 * max((abs(value) for one in walks for value in one.noise), default=0.0) + 1e-5


def noise_of(walks: Sequence[Walk]) -> float:
    """Standard deviation of a log-probability between two computations."""
    values = np.array([value for one in walks for value in one.noise])
    return float(np.sqrt((values**2).mean())) if len(values) else 0.0


@dataclass(frozen=True)
class Context:
    """Where draws begin, and how many tokens they have."""

    prompt: int
    said: Ids
    count: int


def contexts(walks: Sequence[Walk]) -> list[Context]:
    """Where to draw from: for one to five sure tokens before an uncertain one, the best place in greedy answers.

    Nearly all draws then share the context of the uncertain token, which a draft made, and its tokens can be counted
    one by one; with as many sure tokens as a draft has, it is the bonus token.
    """
    best: dict[int, tuple[float, Context]] = {}
    for prompt, one in enumerate(walks):
        p = [{token: math.exp(value) for token, value in law.items()} for law in one.laws]
        for place in range(1, len(p)):
            uncertain = min(-sum(q * math.log(q) for q in p[place].values() if q > 0), 1.5)
            path = 1.0
            for sure in range(1, min(_MOST_SURE, place) + 1):
                path *= p[place - sure].get(one.said[place - sure], 0.0)
                if path * uncertain > best.get(sure, (0.0,))[0]:
                    best[sure] = path * uncertain, Context(prompt, one.said[: place - sure], sure + _AFTER)
    chosen = [context for _, (_, context) in sorted(best.items())]
    return chosen or [Context(prompt, (), _AFTER) for prompt in range(len(walks))]


@dataclass
class Draws:
    """Draws of the drafting server against the plain server's laws, looked at while they grow."""

    drafting: Engine
    plain: Engine
    prompts: Sequence[Any]
    contexts: Sequence[Context]
    samplings: Sequence[Sampling]
    noise: float
    most: int
    seed: int = 0
    number: int = 0
    evidence: dict[str, Evidence] = field(default_factory=lambda: {group: Evidence() for group in GROUPS})
    p_values: dict[str, dict[str, float]] = field(default_factory=dict)
    _logprobs: dict[tuple[int, Ids], Mapping[int, float]] = field(default_factory=dict)

    @property
    def looks(self) -> list[int]:
        """Numbers of draws after which the tests are made: each one twice the one before."""
        return sorted({self.most >> look for look in range(_LOOKS)} - {0})

    @property
    def bound(self) -> float:
        """On each p value (Bonferroni); looks need no correction."""
        return ALPHA / (len(GROUPS) * len(TESTS))

    @property
    def faults(self) -> list[tuple[str, str, float]]:
        """Group, test and p value of the tests that call the server faulty."""
        return [
            (group, test, p) for group, tests in self.p_values.items() for test, p in tests.items() if p < self.bound
        ]

    def run(self, pool: ThreadPoolExecutor, say: Callable[[str], None] = lambda text: None) -> None:
        """Draw until a test fails, or all is drawn."""
        for look in self.looks:
            for tokens in pool.map(self._drawn, range(self.number, look)):
                for group, context, law, token in tokens:
                    self.evidence[group].add(context, law, token)
            self.number = look
            self.p_values = {group: some.p_values(self.noise) for group, some in self.evidence.items()}
            lowest = min(p for tests in self.p_values.values() for p in tests.values())
            say(f"{look} draws: least p {lowest:.1e}, bound {self.bound:.1e}")
            if self.faults:
                return

    def _drawn(self, number: int) -> list[tuple[str, Any, Any, int]]:
        """The tokens of one draw: group, context, law, token."""
        turn, which = divmod(number, len(self.contexts))
        begin, sampling = self.contexts[which], self.samplings[turn % len(self.samplings)]
        prompt, found = self.prompts[begin.prompt], []
        answer = self.drafting.answer(prompt, begin.said, begin.count, sampling, seed=self.seed + number)
        said = begin.said
        for token in answer.tokens if answer else ():
            if token == END:
                break
            key = (begin.prompt, said)
            if key not in self._logprobs:
                scored = self.plain.answer(prompt, said, 1, GREEDY, shown=SHOWN)
                self._logprobs[key] = scored.laws[0] if scored and scored.laws else {}
            logprobs = self._logprobs[key]
            law = law_of(logprobs, sampling, self.noise) if logprobs else None
            found.append((GROUPS[said != begin.said], (*key, sampling, begin.said == said), law, token))
            said = (*said, token)
        return found


# ---- The whole audit.

# What an audit must be able to see, or it ends without a verdict: greedy, a rule that keeps 1 drafted token in so many
# unverified; drawn, one that takes the likeliest token undrawn in 1 of so many places.
NEEDED = {"greedy": 50, "drawn": 5}
_REJECTED = 0.3  # share of verified drafted tokens that are rejected, where the server shows no counters
_DRAFTS, _ACCEPTED = "spec_decode_num_drafts", "spec_decode_num_accepted_tokens_per_pos"
AT_ONCE = (1, 8)


def speculation(before: Mapping[str, float], after: Mapping[str, float]) -> JsonObject:
    """What counters say of what lies between them: drafts, tau (1 and accepted tokens of a draft), the share of drafts
    that have each position accepted, and the share of verified tokens that were rejected. Empty: no counters.
    """
    if _DRAFTS not in after:
        return {}
    counted = {name: value - before.get(name, 0.0) for name, value in after.items()}
    places = sorted(int(name.rpartition("/")[2]) for name in counted if name.startswith(f"{_ACCEPTED}/"))
    accepted, drafts = [counted[f"{_ACCEPTED}/{place}"] for place in places], counted[_DRAFTS]
    verified = drafts + sum(accepted[:-1])
    return {
        "drafts": int(drafts), "tau": 1 + sum(accepted) / drafts if drafts else math.nan,
        "accepted": [number / drafts for number in accepted] if drafts else [],
        "rejected": 1 - sum(accepted) / verified if verified else 0.0,
    }  # fmt: skip


@dataclass(frozen=True)
class Findings:
    """What an audit found."""

    answers: int  # greedy ones, each of other tokens
    ended: int  # of these, by themselves
    tokens: int  # of these, that were checked
    differences: Sequence[Difference]
    widest_tie: float  # the gap up to which a difference is a tie
    noise: float
    draws: Draws
    cells: Sequence[JsonObject]  # by server and requests at once: mean request, tokens/s, speculation
    drawn_speculation: JsonObject

    @property
    def faults(self) -> list[str]:
        """Sentences; empty: none was seen."""
        wrong = [one for one in self.differences if one.verdict == "fault"]
        greedy = [f"greedy: {len(wrong)} of {self.tokens} tokens are not the target's"] if wrong else []
        return greedy + [f"drawn: {group} tokens depart by {test} (p = {p:.1e}, bound {self.draws.bound:.1e})"
                         for group, test, p in self.draws.faults]  # fmt: skip

    @property
    def verdict(self) -> str:
        """In a word."""
        return "fault" if self.faults else "not enough power" if self.missing else "no fault"

    @property
    def seen(self) -> dict[str, float]:
        """1 in how many tokens a rule would have to get wrong to be seen with 95%, as in `NEEDED`."""
        rejected = [cell["rejected"] for cell in self.cells if cell["drafting"] and "rejected" in cell]
        greedy = self.tokens * (rejected[0] if rejected else _REJECTED) / 3
        alive = self.draws.number > 0 and self.drawn_speculation.get("drafts", 1) > 0
        share = self.draws.evidence["drafted"].least_share(self.draws.bound, self.noise)
        return {"greedy": greedy, "drawn": 1 / share if alive else 0.0}

    @property
    def missing(self) -> list[str]:
        """Sentences on the power that was not reached, and what reaches it."""
        none = [] if any(cell.get("drafts", 1) for cell in self.cells if cell["drafting"]) else [
            "the server drafted nothing, and so nothing of drafts was seen"]  # fmt: skip
        seen = self.seen
        more = {name: NEEDED[name] / value for name, value in seen.items() if value}
        # A share is seen by the root of the draws, and one wrong token of greedy answers by their number.
        cures = {"greedy": (self.tokens * more.get("greedy", 0), "tokens: --limit, --tokens"),
                 "drawn": (self.draws.number * more.get("drawn", 0) ** 2, "draws: --draws")}  # fmt: skip
        return none + [
            f"{name}: 1 in {value:.0f} would have been seen, and 1 in {NEEDED[name]} is asked for"
            + (f" (about {cures[name][0]:,.0f} {cures[name][1]})" if value else "")
            for name, value in seen.items() if value < NEEDED[name]
        ]  # fmt: skip


def audit(
    drafting: Engine, plain: Engine, prompts: Sequence[Any], samplings: Sequence[Sampling], *,
    count: int, most_draws: int, seed: int = 0, at_once: Sequence[int] = AT_ONCE, say: Callable[[str], None] = print,
) -> Findings:  # fmt: skip
    """Audit a server. Raises `UserError`: the plain one drafts, or a server fails.

    Args:
        count: tokens of a greedy answer.
        most_draws: 0: greedy answers alone.
        at_once: requests side by side, each of which both servers are timed at.
    """
    cells, answers = [], dict[tuple[int, Ids], int]()
    say(f"{len(prompts)} prompts, answers of at most {count} tokens; "
        f"{' and '.join(map(str, at_once))} at once, each server by itself")  # fmt: skip
    for server, drafts in ((plain, False), (drafting, True)):
        _check_plain(drafts, _timed(server, prompts[:1], count, 1)[1])  # it warms up
        for together in at_once:
            said, cell = _timed(server, prompts, count, together)
            _check_plain(drafts, cell)
            cells.append({"drafting": drafts, "at once": together} | cell)
            say(f"{'drafting' if drafts else 'plain'}, {together} at once: {cell['tokens_per_s']:,.1f} tokens/s")
            for number, answer in enumerate(said if drafts else ()):
                answers.setdefault((number, answer), together)

    def checked(one: tuple[int, Ids]) -> Walk:
        number, said = one
        return walk(drafting, plain, prompts[number], said, number, answers[one])

    with ThreadPoolExecutor(max(at_once)) as pool:
        walks = list(pool.map(checked, answers))
        apart = differences(walks)
        tokens = sum(len(one.laws) for one in walks)
        say(f"greedy: {tokens} tokens checked, {len(apart)} differences")
        draws = Draws(drafting, plain, [prompts[number] for number, _ in answers], contexts(walks), samplings,
                      noise_of(walks), most_draws, seed)  # fmt: skip
        before = drafting.counters()
        draws.run(pool, say)
    ended = sum(END in said for _, said in answers)
    return Findings(
        len(walks), ended, tokens, apart, most_noise(walks), draws.noise, draws, cells,
        speculation(before, drafting.counters()),
    )  # fmt: skip


def _check_plain(drafts: bool, cell: JsonObject) -> None:
    """Raises `UserError`: a server that is to draft nothing does."""
    if cell.get("drafts") and not drafts:
        raise UserError("the server beside drafts itself, and is to say what the target alone writes",
                        hint="start it without a drafter; it is the one that --beside names")  # fmt: skip


def _timed(server: Engine, prompts: Sequence[Any], count: int, together: int) -> tuple[list[Ids], JsonObject]:
    """Greedy answers, and the cell of so many requests at once."""

    def one(prompt: Any) -> tuple[Ids, float]:
        began = time.perf_counter()
        answer = server.answer(prompt, (), count, GREEDY)
        assert answer is not None, "a whole prompt"
        return answer.tokens, time.perf_counter() - began

    before, began = server.counters(), time.perf_counter()
    with ThreadPoolExecutor(together) as pool:
        found = list(pool.map(one, prompts))
    seconds = time.perf_counter() - began
    tokens = sum(token != END for said, _ in found for token in said)
    return [said for said, _ in found], {
        "requests": len(found), "tokens": tokens, "request_s": float(np.mean([taken for _, taken in found])),
        "tokens_per_s": tokens / seconds,
    } | speculation(before, server.counters())  # fmt: skip
