"""Whether a target that reads pictures needs them: names among candidates, right answers with the right picture and
with others, what its own answers are like. And whether its drafters need them.

The measures are of this project; no paper has them in this form. Pictures are changed behind the tower, for others of
as many places, so that prompts keep their ids. Intervals are of a bootstrap over head nouns (`summary.py`): pictures of
one thing, and questions about it, have much in common.
Letters: I pictures of a request, P places of one, C width of the tower, n tokens of an answer, R records, U names.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.batch import Request
from ...core.errors import UserError
from ...data.emoji import head_noun
from ...data.sources import is_loop, words_of
from ...models.decoding.tree import ROOT, Tree
from ...models.decoding.warp import Warp
from ...models.drafters.base import Drafter
from ...models.drafters.modes import without_pictures
from ...models.targets.base import Taps, TargetStep
from ...models.targets.language import LanguageTarget
from ..figures import draw_curves
from ..loop import Decoding, EmbeddedRequest, Generation, generate
from ..summary import ends, ratio, resampled
from ..tables import Column, Table, Value, text

ALL, FIRST_TURNS = "all", "first turns"


@dataclass(frozen=True)
class Shown:
    """A record whose pictures the target's tower has read."""

    request: Request
    features: Tensor  # [I,P,C], what the projector reads
    name: str = ""  # of what the pictures show
    kind: str = ""  # of question
    answer: tuple[int, ...] = ()  # a right one, its end token included; none: not known
    turns: int = 1  # its question's place: behind others the text may name what the picture shows


def shown(target: LanguageTarget, request: Request, **about: Any) -> Shown:
    """Run the tower once. Raises `UserError` for a request or a target whose pictures cannot be changed behind it."""
    view = target.view(request).to(target.device)
    features = None if view.pixels is None else target.decoder.see(view.pixels, view.pictures)
    if not isinstance(features, Tensor) or features.dim() != 3:
        raise UserError("its pictures are no row of tiles behind a tower, which could be changed for others",
                        where=request.name, hint="probe a LLaVA, and records with pictures")  # fmt: skip
    return Shown(request, features, **about)


def mean_picture(records: Sequence[Shown]) -> Tensor:
    """[1,P,C], the mean over all pictures of the records."""
    return torch.cat([record.features for record in records]).mean(0, keepdim=True)


def another(records: Sequence[Shown], number: int) -> Shown | None:
    """The next record whose pictures can stand in the place of this one's and show a thing with another head noun."""
    record, after = records[number], (*records[number + 1 :], *records[:number])
    fitting = (one for one in after if one.features.shape == record.features.shape)
    return next((one for one in fitting if not one.name or head_noun(one.name) != head_noun(record.name)), None)


def _trees(answers: Sequence[tuple[int, ...]]) -> dict[int, tuple[Tree, dict[tuple[int, ...], int]]]:
    """Token that answers begin with -> the tree of what follows it, and the node that each beginning ends in."""
    trees = {}
    for root in dict.fromkeys(ids[0] for ids in answers):
        nodes: dict[tuple[int, ...], int] = {(root,): ROOT}
        for ids in answers:
            for end in range(2, len(ids)) if ids[0] == root else ():
                nodes.setdefault(ids[:end], len(nodes) - 1)
        _, *paths = nodes
        tokens = torch.tensor([path[-1] for path in paths], dtype=torch.int64)
        trees[root] = Tree(tokens, tuple(nodes[path[:-1]] for path in paths), (-1,) * len(paths)), nodes
    return trees


@torch.inference_mode()
def answer_scores(
    target: LanguageTarget, request: Request, features: Tensor, answers: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    """[2,n] of each answer to a request with pictures [I,P,C]: log-probabilities of its ids, and of the likeliest ids
    in their places. The prompt is read once, and so is what answers have in common at their beginnings.
    """
    trees = _trees(answers)
    most = max(tree.num_nodes for tree, _ in trees.values()) + 1
    embedded = target.embed_prompt(request, encoded=features)
    session, step = target.prefill(request, Taps(), capacity=most, embedded=embedded)
    first = step.logits[-1:].float().log_softmax(-1)
    after = {root: target.verify(session, root, tree).logits.float() for root, (tree, _) in trees.items()}
    scores = []
    for ids in answers:
        ends_in = [trees[ids[0]][1][ids[:end]] + 1 for end in range(1, len(ids))]
        rows = torch.cat([first, after[ids[0]][ends_in].log_softmax(-1)])
        scores.append(torch.stack([rows[range(len(ids)), list(ids)], rows.max(-1).values]).cpu())
    return scores


Watch = Callable[[Iterable[Any]], Iterable[Any]]  # goes through records until the run is to stop
Measured = tuple[str, str, int, Value]  # what, of which records, how many, the value with its 95% interval


def value_of(parts: Sequence[float], names: Sequence[str], wholes: Sequence[float] | None = None) -> Value:
    """The mean of some records' numbers, or the ratio of two sums, with the ends of its 95% interval, for which the
    records of one head noun are drawn together; records without a name each by itself.
    """
    sums: dict[object, tuple[float, float]] = {}
    for number, (name, part) in enumerate(zip(names, parts, strict=True)):
        one = sums.get(unit := head_noun(name) if name else number, (0.0, 0.0))
        sums[unit] = one[0] + part, one[1] + (1.0 if wholes is None else wholes[number])
    above, below = zip(*sums.values(), strict=True)
    (draws,) = resampled([(above, below)])
    return (ratio(sum(above), sum(below)), *ends(draws))


def naming(
    target: LanguageTarget, records: Sequence[Shown], watch: Watch, *, title: str, candidates: int, seed: int
) -> list[Measured]:
    """How often the right name is the likeliest of so many, and how much likelier the picture makes it.

    Every picture stands behind the first record's question, and an answer's score is the sum of its log-probabilities,
    the end token's included. Candidates are drawn by the seed from the file's names with another head noun than the
    picture's. With the prior taken off, each candidate's score is less its mean over the file's other pictures whose
    name has another head noun than the candidate: names are more and less common, and that they owe to no picture. The
    right name with another's picture is its mean over the same pictures; a mean picture is `mean_picture` of the file.

    Raises `UserError` for pictures of several sizes, and for too few names or pictures.
    """
    commonest = max(Counter(head_noun(record.name) for record in records).values(), default=0)
    if len(records) - commonest < 2:  # nothing that a prior could be the mean of
        raise UserError(f"{title} has pictures of too few things", key="probes.sight.names",
                        hint="give records of more things; skipped.jsonl names what was left out")  # fmt: skip
    answers = {record.name: record.answer for record in records}
    names, request = [*answers], records[0].request
    if len({record.features.shape for record in records}) > 1 or not all(names) or not all(answers.values()):
        raise UserError(f"a record of {title} has no name, no answer, or pictures unlike the first one's",
                        key="probes.sight.names", hint="give records of one picture, cut alike")  # fmt: skip
    nouns = [head_noun(name) for name in names]
    unlike = torch.tensor([[head_noun(record.name) != noun for noun in nouns] for record in records])  # [R,U]
    if int(unlike.sum(1).min()) < candidates - 1:
        raise UserError(f"{title} has too few names for {candidates} candidates with a head noun each",
                        key="probes.sight.candidates", hint=f"set at most {int(unlike.sum(1).min()) + 1}")  # fmt: skip
    ids, pictures = [*answers.values()], [record.features for record in records]
    each_scored = [answer_scores(target, request, one, ids) for one in watch([*pictures, mean_picture(records)])]
    *rows, without = [torch.stack([of[0].sum() for of in scored]) for scored in each_scored]
    scores = torch.stack(rows)  # [R,U]
    counted = scores * unlike
    prior = (counted.sum(0) - counted) / (unlike.sum(0) - unlike.int())
    draw, right = random.Random(seed), [names.index(record.name) for record in records]
    drawn = [draw.sample(row.nonzero().flatten().tolist(), candidates - 1) for row in unlike]

    among, each = f"the right name is the likeliest of {candidates}", [*zip(right, drawn, strict=True)]
    wins = [[float(row[one] > row[rest].max()) for row, (one, rest) in zip(of, each, strict=True)]
            for of in (scores - prior, scores)]  # fmt: skip
    gaps = [[float(row[one]) / len(ids[one]) for row, one in zip(scores - less, right, strict=True)]
            for less in (prior, without)]  # fmt: skip
    names = [f"{among}, prior taken off", among, "name, right - another's picture", "name, right - mean picture"]
    shows = [record.name for record in records]
    return [(what, title, len(right), value_of(of, shows)) for what, of in zip(names, wins + gaps, strict=True)]


def right_answers(target: LanguageTarget, records: Sequence[Shown], watch: Watch) -> list[Measured]:
    """Nats a token that the picture adds to right answers, over another record's pictures and over a mean picture in
    the place of each: the mean over records, of all, of first turns and of each kind of question.
    """
    mean, gaps = mean_picture(records), list[tuple[Shown, tuple[float, float]]]()
    for number in watch(range(len(records))):
        record, other = records[number], another(records, number)
        if record.answer and other is not None:
            pictures = record.features, other.features, mean.expand_as(record.features)
            scored = [answer_scores(target, record.request, one, [record.answer])[0] for one in pictures]
            scores = [float(of[0].mean()) for of in scored]
            gaps.append((record, (scores[0] - scores[1], scores[0] - scores[2])))
    groups = {ALL: gaps, FIRST_TURNS: [one for one in gaps if one[0].turns == 1]}
    groups |= {kind: [one for one in gaps if one[0].kind == kind] for kind in sorted({one.kind for one, _ in gaps})}
    return [
        (f"right answers, right - {what} picture", group, len(some), value_of([gap[number] for _, gap in some], shows))
        for what, number in (("another's", 0), ("mean", 1))
        for group, some in groups.items()
        if group and (shows := [one.name for one, _ in some])
    ]


def own_answers(likeliest: Sequence[Sequence[float]], texts: Sequence[str], shows: Sequence[str]) -> list[Measured]:
    """What greedy answers are like: `likeliest` has for each the probability of every token of it, `texts` its text,
    `shows` the name of what its picture shows.
    """
    words = [words_of(answer) for answer in texts]
    openings, count = len({tuple(of[:3]) for of in words}), len(texts)
    sums, counts, loops = [*map(sum, likeliest)], [*map(len, likeliest)], [float(is_loop(of)) for of in words]
    return [
        ("its own answers: mean p_max", ALL, count, value_of(sums, shows, counts)),
        ("its own answers: three words follow each other twice", ALL, count, value_of(loops, shows)),
        ("its own answers: distinct openings of three words", ALL, count, openings / count),
    ]  # fmt: skip


def measures_table(rows: Sequence[Measured]) -> Table:
    """A line for each measure."""
    columns = text("measured"), text("on"), Column("n", "d"), Column("value [95%]", ".3f", kind="interval")
    note = "Differences are in nats a token of the answer, the mean over n records; intervals are over head nouns."
    return Table("", columns, tuple(rows), note=note)


# ---- Whether drafters need the picture

READINGS = ("right", "another's", "none")
FIRST, EARLY, LATER = ("first cycle", "tokens 3 to 8", "later tokens")
# Of acceptance: by the nats that the right picture adds to the log-probability of a word, over another's.
HANGS, HANGS_NOT, HANGING = "words that hang on it", "other words", 0.5
BINS = {"below 0": -math.inf, "0 to 0.5": 0.0, "0.5 to 1": 0.5, "1 to 2": 1.0, "from 2 on": 2.0}
_TAU, _ACCEPTED = (ALL, FIRST, EARLY, LATER), (HANGS, HANGS_NOT, *BINS)
Counts = Mapping[str, tuple[int, int]]  # group -> what tau or acceptance divides, and by what
Readings = dict[tuple[str, str], list[list[tuple[int, int]]]]  # method and group -> of each record by reading


class Misled:
    """A drafter that begins after another prompt than the target's. What it hears of each cycle stays the target's.

    A draft with eyes of its own reads another record's pictures, or none: a newline in the place of each. A head reads
    the target's states of the prompt with the other's pictures, or with a mean picture [1,P,C] in the place of each.
    """

    def __init__(self, drafter: Drafter, target: LanguageTarget, record: Shown, other: Shown | Tensor, newline_id: int):
        request, self._drafter = record.request, drafter
        features = other if isinstance(other, Tensor) else other.features
        embedded = target.embed_prompt(request, encoded=features.expand_as(record.features))
        _, self._prefill = target.prefill(request, drafter.taps, capacity=1, embedded=embedded)
        if isinstance(other, Tensor):
            self._request = without_pictures(request, newline_id)
        else:
            view, its = request.drafter_view, other.request.drafter_view
            view = None if view is None or its is None else replace(view, pixels=its.pixels)
            originals = other.request.originals
            self._request = replace(request, pixels=other.request.pixels, drafter_view=view, originals=originals)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def start(self, request: object, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        """Begin with its own prompt in the place of the given one."""
        self._drafter.start(self._request, self._prefill, warp, capacity=capacity)


def counts_of(generation: Generation, kind: str, gaps: Sequence[float]) -> Counts:
    """What one answer adds to each group: to those of tau tokens emitted and cycles, by kind of question and by the
    answer's token that a cycle drafts first (the prefill gives the first one, the first cycle drafts the second); to
    those of acceptance drafted tokens that the target took, of those that it came to, by what the picture adds to the
    token which it emits there: `gaps` in nats, of the answer's tokens whose acceptance counts.
    """
    parts, wholes, place = Counter[str](), Counter[str](), 1  # tokens emitted so far
    for cycle in generation.cycles:
        groups = {ALL, kind or ALL, FIRST if place == 1 else EARLY if place < 8 else LATER}
        parts.update(dict.fromkeys(groups, cycle.num_emitted))
        wholes.update(groups)
        for level, gap in enumerate(gaps[place : place + min(cycle.num_drafted, cycle.num_accepted + 1)]):
            *_, above = [name for name, least in BINS.items() if gap >= least]
            groups = {above, HANGS if gap >= HANGING else HANGS_NOT}
            parts.update(dict.fromkeys(groups, int(level < cycle.num_accepted)))
            wholes.update(groups)
        place += cycle.num_emitted
    return {group: (parts[group], whole) for group, whole in wholes.items()}


def swapped_pictures(
    target: LanguageTarget, records: Sequence[Shown], decodings: Mapping[str, tuple[Drafter, Decoding]],
    newline_id: int, watch: Watch,
) -> Readings:  # fmt: skip
    """Decode each record where the drafter reads the right pictures, another's or none, and the target the right ones,
    so that greedy answers stay the same. An end token's acceptance does not count, nor what stands behind a place where
    two passes round differently.
    """
    mean, results = mean_picture(records), Readings()
    for number in watch(range(len(records))):
        record, other, answer = records[number], another(records, number), list[int]()
        if other is None:
            continue
        embedded = EmbeddedRequest(target.embed_prompt(record.request, encoded=record.features), 0.0)
        for name, (drafter, decoding) in decodings.items():
            counts = []
            for shows in (None, other, mean):
                reads = drafter if shows is None else Misled(drafter, target, record, shows, newline_id)
                generation = generate(target, reads, record.request, decoding, embedded=embedded)
                if not answer:
                    answer = generation.tokens
                    each = [answer_scores(target, record.request, one.features, [tuple(answer)])[0][0]
                            for one in (record, other)]  # fmt: skip
                    gaps = (each[0] - each[1]).tolist()[: len(answer) - (generation.stop == "eos")]
                places = range(min(len(answer), len(generation.tokens)))
                differs = next((place for place in places if answer[place] != generation.tokens[place]), len(answer))
                counts.append(counts_of(generation, record.kind, gaps[:differs]))
            for group in {*counts[0], *counts[1], *counts[2]}:
                results.setdefault((name, group), []).append([of.get(group, (0, 0)) for of in counts])
    return results


def swapped_table(results: Readings) -> Table:
    """A line for each method and group: what it is with each reading, and what the right picture adds to the others."""
    lines: list[tuple[Value, ...]] = []
    kinds = sorted({group for _, group in results} - {*_TAU, *_ACCEPTED})
    names = dict.fromkeys(name for name, _ in results)
    for name, group in itertools.product(names, (*_TAU, *kinds, *_ACCEPTED)):
        if (name, group) not in results:
            continue
        ratios: list[tuple[tuple[float, ...], tuple[float, ...]]] = []
        for of in zip(*results[name, group], strict=True):
            parts, wholes = zip(*of, strict=True)
            ratios.append((parts, wholes))
        draws, means = resampled(ratios), [ratio(*map(sum, pair)) for pair in ratios]
        values = [(mean, *ends(some)) for mean, some in zip(means, draws, strict=True)]
        less = [(means[0] - means[at], *ends(draws[0] - draws[at])) for at in (1, 2)]
        what = "accepted" if group in _ACCEPTED else "tau"
        lines.append((name, what, group, len(results[name, group]), *values, *less))
    columns = (text("method"), text("number"), text("of"), Column("n", "d"),
               *(Column(reading, kind="interval") for reading in READINGS),
               *(Column(f"right - {reading}", "+.2f", kind="interval") for reading in READINGS[1:]))  # fmt: skip
    note = f"""The drafter reads the right pictures, another's or none, with 95% intervals over n requests. Accepted: of
        the drafted tokens that the target came to, by the nats that the right picture adds to the token over another's
        ({HANGING:g} and more: it hangs on the picture)."""
    return Table("", columns, tuple(lines), note=" ".join(note.split()))


def draw_swapped(path: Path, table: Table) -> None:
    """The figure of the table: tau of the first cycle by reading, and acceptance by what the right picture adds."""
    rows: list[Any] = [row for row in table.rows if row[4] is not None]
    taus = {row[0]: [(place, value[0]) for place, value in enumerate(row[4:7])] for row in rows if row[2] == FIRST}
    shares = {name: [([*BINS].index(row[2]), row[4][0]) for row in rows if row[0] == name and row[2] in BINS]
              for name in taus}  # fmt: skip
    panels = [("tau of the first cycle by what the drafter reads", taus),
              ("share of drafts accepted by nats that the picture adds", shares)]  # fmt: skip
    draw_curves(path, panels, places=(READINGS, [*BINS]))
