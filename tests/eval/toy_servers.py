"""A tiny language model behind two servers, one of which drafts, rightly or with a planted fault.

The model's law depends on the last two tokens: some contexts are sure, some are not, and the drafter knows most of it.
Noise is fixed by context and by what computes it: the decode pass, the prompt pass, and each place of a draft.
"""

import functools
import zlib

import numpy as np
from draftsmith.eval.engines.audit import END, Answer

VOCABULARY, EOS, GAMMA = 40, 0, 4


def _generator(*key):
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


@functools.lru_cache(None)
def scores(model, context, pass_of, noise):
    """[V] log-probabilities after the last two tokens of a text."""
    rng = _generator(model, context)
    values = rng.normal(size=VOCABULARY) * rng.choice([0.6, 1.5, 2.5])
    if rng.random() < 0.5:
        values[rng.integers(1, VOCABULARY)] += 9.0
    values[EOS] -= 1.0
    if pass_of == "draft":
        values += _generator(model, context, "drafter").normal(size=VOCABULARY) * 1.0
    elif noise:
        values += _generator(model, context, pass_of).normal(size=VOCABULARY) * noise
    return values - np.log(np.exp(values).sum())


def cut(logprobs, sampling, wrong=False):
    """[V] the law that is drawn from. `wrong`: top-p before top-k."""
    p = np.exp(logprobs / (sampling.temperature or 1.0))
    p /= p.sum()
    steps = [_top_k, _top_p]
    for step in steps[::-1] if wrong else steps:
        p = step(p, sampling)
    return p


def _top_k(p, sampling):
    if sampling.top_k:
        p = np.where(p >= np.sort(p)[-sampling.top_k], p, 0)
    return p / p.sum()


def _top_p(p, sampling):
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    kept = np.zeros_like(p)
    kept[order[before < sampling.top_p]] = p[order[before < sampling.top_p]]
    return kept / kept.sum()


class Toy:
    """A server. `fault`: None drafts rightly; "plain": drafts nothing. `own`: it has noise of its own, as one that
    computes attention otherwise, or rounds its cache, than the server beside it.
    """

    def __init__(self, fault=None, model=0, noise=0.0, own=""):
        self.fault, self.model, self.noise, self.own = fault, model, noise, own
        self.drafts, self.accepted = 0, [0] * GAMMA

    def counters(self):
        places = {f"spec_decode_num_accepted_tokens_per_pos/{n}": count for n, count in enumerate(self.accepted)}
        return {"spec_decode_num_drafts": self.drafts} | places

    def scores(self, text, pass_of):
        computed = pass_of if pass_of == "draft" else pass_of + self.own
        return scores(self.model, tuple(map(int, text[-2:])), computed, self.noise)

    def answer(self, prompt, said, count, sampling, *, seed=0, shown=0):
        text, tokens, laws = [*prompt, *said], [], []
        rng = _generator("draws", seed)
        step = self.plain_step if self.fault == "plain" or (sampling.temperature == 0 and shown) else self.step
        while len(tokens) < count and (not tokens or tokens[-1] != EOS or self.fault == "stop tokens skipped"):
            start = not tokens
            new = self.plain_step(text, sampling, rng, True) if start else step(text, sampling, rng, False)
            for place, token in enumerate(new[: count - len(tokens)]):
                if shown:
                    values = self.scores([*text, *new[:place]], "prompt" if start else "decode")
                    laws.append({int(t): float(values[t]) for t in np.argsort(-values)[:shown]})
                tokens.append(int(token))
                if token == EOS and self.fault != "stop tokens skipped":
                    break
            text = [*prompt, *said, *tokens]
        ended = tokens[-1] == EOS and self.fault != "stop tokens skipped"
        return Answer((*tokens, END) if ended else tuple(tokens), tuple(laws))

    def plain_step(self, text, sampling, rng, start):
        values = self.scores(text, "prompt" if start else "decode")
        if sampling.temperature == 0:
            return [int(values.argmax())]
        return [int(rng.choice(VOCABULARY, p=cut(values, sampling)))]

    def step(self, text, sampling, rng, start):
        """The tokens of one pass: drafted ones that were kept, and one of the target's."""
        new, fault = [], self.fault
        self.drafts += 1
        for place in range(GAMMA):
            values = self.scores([*text, *new], f"place {place}")
            drafted = self.scores([*text, *new], "draft")
            if sampling.temperature == 0:
                p, q = np.eye(VOCABULARY)[values.argmax()], np.eye(VOCABULARY)[drafted.argmax()]
            else:
                p = cut(values, sampling, wrong=fault == "top-p before top-k")
                q = cut(drafted, sampling)
            if fault == "greedy under sampling" and sampling.temperature:
                p = np.eye(VOCABULARY)[p.argmax()]
            proposal = int(rng.choice(VOCABULARY, p=q))
            kept, residual = self.kept(p, q, proposal, place, sampling, rng)
            if not kept:
                if fault == "residual not used":
                    residual = p
                return [*new, int(rng.choice(VOCABULARY, p=residual / residual.sum()))]
            new.append(kept - 1)
            self.accepted[place] += 1
        last = self.scores([*text, *new], f"place {GAMMA}")
        if fault == "bonus of the draft":
            last = self.scores([*text, *new], "draft")
        if sampling.temperature == 0:
            return [*new, int(last.argmax())]
        return [*new, int(rng.choice(VOCABULARY, p=cut(last, sampling, wrong=fault == "top-p before top-k")))]

    def kept(self, p, q, proposal, place, sampling, rng):
        """1 + the drafted token that is kept, or 0; and the residual to draw from."""
        fault, residual = self.fault, np.maximum(p - q, 0)
        if residual.sum() < 1e-12:
            residual = p
        if fault == "first drafted token unverified" and place == 0:
            return proposal + 1, residual
        if fault == "1 of 50 unverified" and rng.random() < 0.02:
            return proposal + 1, residual
        if fault == "typical acceptance" and sampling.temperature:
            entropy = -(p[p > 0] * np.log(p[p > 0])).sum()
            return (proposal + 1) * (p[proposal] > min(0.09, 0.3 * np.exp(-entropy))), p
        if fault == "acceptance threshold" and p[proposal] >= 0.5 * q[proposal]:
            return proposal + 1, residual
        said = cut(np.log(np.maximum(q, 1e-30)) / 0.5, sampling) if fault == "draft's temperature" else q
        if rng.random() * said[proposal] < p[proposal]:
            return proposal + 1, residual
        if fault in ("a sibling kept twice", "siblings") and sampling.temperature:
            again = p if fault == "a sibling kept twice" else residual / residual.sum()
            second = int(rng.choice(VOCABULARY, p=q))
            if rng.random() * q[second] < again[second]:
                return second + 1, residual
            residual = np.maximum(again - q, 0)
            residual = residual if residual.sum() > 1e-12 else again
        return 0, residual


FAULTS = (
    "first drafted token unverified", "greedy under sampling", "1 of 50 unverified", "bonus of the draft",
    "residual not used", "typical acceptance", "acceptance threshold", "draft's temperature", "top-p before top-k",
    "a sibling kept twice", "stop tokens skipped",
)  # fmt: skip
