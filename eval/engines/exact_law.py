"""Are drawn tokens distributed as the target's own law says? Tests against laws that are known exactly.

Leviathan et al. (2023), appendix A.1, prove that speculative sampling draws from the target's law; an engine's code may
not. Each test is an e-value: the likelihood of the draws under laws that a fault would make, over their likelihood
under the right ones. A right server reaches 1/a with probability a at most (Ville's inequality), however few or
unlikely the draws are and however often one looks, so that an audit may stop at any look. Ramdas et al. (2023),
"Game-theoretic statistics and safe anytime-valid inference", sections 2 to 4.

Letters: S symbols of a law (its tokens, then all others as one), F features, L tilts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import numpy as np

Ids = tuple[int, ...]
_FLOOR = 1e-4  # the least that all other tokens have together: servers round, and noise moves a cut's edge
_NEVER = -50.0  # engines write "never" as some large number below
_TILTS = np.array([sign * size for size in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6) for sign in (1, -1)])
_RANKS = (1, 2, 4, 8)
# Edges of log p + entropy. Typical acceptance (Medusa, section 2.3) keeps a token above log(0.3) = -1.2.
_TYPICAL = (-2.5, -1.75, -1.2, -0.6, 0.0, 0.6)
_CLOSENESS = (2.0, 8.0, 32.0, 128.0, 512.0)  # of a faulty law to the right one: draws that it weighs as much as
_FAULTY = np.array([0.03, 0.3, 0.9])  # share of contexts that a fault shows in
TESTS = ("rank", "surprise", "typicality", "outside", "context")
_SPANS = (slice(0, 4), slice(4, 5), slice(5, 11), slice(11, 12))  # features of each test but the last


@dataclass(frozen=True)
class Sampling:
    """How a server is asked to draw. `temperature` 0: greedy. `top_k` 0, `top_p` 1: no cut."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __str__(self) -> str:
        cuts = [f"top-k {self.top_k}"] * (self.top_k > 0) + [f"top-p {self.top_p:g}"] * (self.top_p < 1)
        return ", ".join([f"T = {self.temperature:g}", *cuts])


GREEDY = Sampling(0.0)


@dataclass(frozen=True)
class Law:
    """The law of one token."""

    tokens: Ids  # likeliest first
    p: np.ndarray  # [S], the last one of all other tokens

    def symbol(self, token: int) -> int:
        """The token's place in `p`."""
        return self.tokens.index(token) if token in self.tokens else len(self.tokens)

    @property
    def entropy(self) -> float:
        """Nats."""
        return float(-(self.p * np.log(self.p)).sum())


def law_of(logprobs: Mapping[int, float], sampling: Sampling, noise: float) -> Law | None:
    """The law of a token that is drawn so, where these are the target's likeliest tokens. None: they do not tell it, or
    noise decides how much top-p keeps, so that two right servers have two laws.

    Args:
        logprobs: natural, over the whole vocabulary and before any cut.
        noise: standard deviation of a log-probability between two right servers. What a cut keeps within it, and what
            it may keep instead, is one symbol.
    """
    possible = ((token, value) for token, value in logprobs.items() if value > _NEVER)
    shown = sorted(possible, key=lambda pair: (-pair[1], pair[0]))
    values = np.array([value for _, value in shown])
    mass = np.exp(values)
    if not shown:
        return None
    if sampling.top_k:
        mass = np.exp((values - values[0]) / sampling.temperature)[: sampling.top_k]
        mass /= mass.sum()
    elif sampling.temperature != 1:
        return None
    if sampling.top_p < 1:
        before, squares = np.cumsum(mass) - mass, np.cumsum(mass**2) - mass**2
        spread = noise * np.sqrt(squares * (1 - before) ** 2 + ((mass**2).sum() - squares) * before**2)
        if mass.sum() <= sampling.top_p or (np.abs(before - sampling.top_p) < 4 * spread + 1e-6).any():
            return None
        mass = mass[before < sampling.top_p]
        mass /= mass.sum()
    kept = len(mass)
    if kept < len(values):
        kept = int((values[:kept] - values[kept] > 6 * noise + 1e-6).sum())
    p = np.append(mass[:kept], max(1 - mass[:kept].sum(), _FLOOR))
    return Law(tuple(token for token, _ in shown[:kept]), p / p.sum()) if kept else None


@dataclass
class Evidence:
    """What was drawn, by context: equal prefixes and cuts have one law."""

    seen: dict[Hashable, tuple[Law, np.ndarray]] = field(default_factory=dict)  # counts [S]
    passed_over: int = 0  # tokens whose law is not known

    def add(self, context: Hashable, law: Law | None, token: int) -> None:
        """One drawn token."""
        if law is None:
            self.passed_over += 1
            return
        known, counts = self.seen.setdefault(context, (law, np.zeros(len(law.p))))
        counts[known.symbol(token)] += 1

    @property
    def num_tokens(self) -> int:
        """Tokens that were compared."""
        return int(sum(counts.sum() for _, counts in self.seen.values()))

    def p_values(self, noise: float) -> dict[str, float]:
        """How likely a right server's draws depart so far at any look, by each of `TESTS`: 1 over the e-value."""
        logs = np.zeros((_SPANS[-1].stop, len(_TILTS)))
        contexts = np.zeros(len(_FAULTY))
        for law, counts in self.seen.values():
            features, number = _features(law), counts.sum()
            norms = np.log(np.einsum("s,sfl->fl", law.p, np.exp(features[:, :, None] * _TILTS)))
            logs += (counts @ features)[:, None] * _TILTS - number * norms
            logs -= _noise(law, features, number, noise)[:, None] * _TILTS**2 / 2
            contexts += _context(law, counts, noise)
        tried = [*(logs[span].ravel() for span in _SPANS), contexts]
        return {test: min(1.0, math.exp(math.log(len(e)) - np.logaddexp.reduce(e)))
                for test, e in zip(TESTS, tried, strict=True)}  # fmt: skip

    def least_share(self, bound: float, noise: float) -> float:
        """The share of tokens that a rule would have to take as the likeliest one, undrawn, for the test of ranks to
        see it with 95% at this bound on p. Above 1: no rule of this kind would have been seen.
        """
        shift, variance = 0.0, 0.0
        for law, counts in self.seen.values():
            first, number = law.p[0], counts.sum()
            shift += number * (1 - first)
            variance += number * first * (1 - first) + float(_noise(law, _features(law), number, noise)[0])
        # The log of the best tilt's e-value is normal around M with variance 2 M, where shift^2 / variance is 2 M.
        least = math.log(len(_RANKS) * len(_TILTS) / bound)
        root = (1.645 * math.sqrt(2) + math.sqrt(2 * 1.645**2 + 4 * least)) / 2
        return root * math.sqrt(2 * variance) / shift if shift > 0 else math.inf


def _features(law: Law) -> np.ndarray:
    """[S,F] what a fault has more or less of: likely ranks; surprise; typical tokens, as a lossy rule moves mass across
    one of the edges in every context, whatever the rank there; tokens outside.
    """
    rank, log_p, inside = np.arange(len(law.p)), np.log(law.p), np.arange(len(law.p)) < len(law.tokens)
    surprise = np.where(inside, -log_p, law.p[:-1] @ -log_p[:-1] / law.p[:-1].sum())
    return np.stack([
        *(inside & (rank < most) for most in _RANKS), surprise,
        *(inside & (log_p + law.entropy > edge) for edge in _TYPICAL), ~inside,
    ], 1).astype(float)  # fmt: skip


def _noise(law: Law, features: np.ndarray, number: float, noise: float) -> np.ndarray:
    """[F] variance of the features' expected sums by noise, which is one for all draws from a context."""
    parts = law.p[:, None] * (features - law.p @ features)
    return (noise * number) ** 2 * (parts**2).sum(0)


def _context(law: Law, counts: np.ndarray, noise: float) -> np.ndarray:
    """Logs of e-values of one context, by the share of contexts that a fault shows in; those of several add up.

    Each is a Bayes factor: that the tokens come from some other law around the right one (a Dirichlet mixture) in this
    share of the contexts. So counts of single tokens add up over contexts, and one context alone can show a fault.
    """
    number, seen = counts.sum(), counts > 0
    if number < 2:
        return np.zeros(len(_FAULTY))
    p, c = law.p[seen], counts[seen]
    factors = [
        sum(map(math.lgamma, k * p + c)) - sum(map(math.lgamma, k * p)) + math.lgamma(k) - math.lgamma(k + number)
        for k in _CLOSENESS
    ]
    log = float(np.logaddexp.reduce(factors) - math.log(len(factors)) - c @ np.log(p)) - number * noise**2
    return np.logaddexp(np.log(1 - _FAULTY), np.log(_FAULTY) + log)
