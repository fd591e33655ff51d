"""Whether a target that reads pictures needs them: names among candidates, right answers with the right picture and
with others, and what its own answers are like.

The measures are of this project; no paper has them in this form. Pictures are changed behind the tower, for others of
as many places, so that prompts keep their ids. Intervals are of one bootstrap over pictures (`summary.py`).
Letters: I pictures of a request, P places of one, C width of the tower, n tokens of an answer, R records, U names.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.batch import Request
from ...core.errors import UserError
from ...data.emoji import head_noun
from ...data.sources import is_loop, words_of
from ...models.decoding.tree import ROOT, Tree
from ...models.targets.base import Taps
from ...models.targets.language import LanguageTarget
from ..summary import ends, ratio, resampled
from ..tables import Column, Table, Value, text

ALL = "all"


@dataclass(frozen=True)
class Shown:
    """A record whose pictures the target's tower has read."""

    request: Request
    features: Tensor  # [I,P,C], what the projector reads
    name: str = ""  # of what the pictures show
    kind: str = ""  # of question
    answer: tuple[int, ...] = ()  # a right one, its end token included; none: not known

    def is_unlike(self, other: Shown) -> bool:
        """Whether the other's pictures can stand in the place of these and show another thing, by its head noun."""
        same = self is other or (self.name and head_noun(self.name) == head_noun(other.name))
        return not same and self.features.shape == other.features.shape


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
    """The next record whose pictures can stand in the place of this one's and show another thing."""
    after = (*records[number + 1 :], *records[:number])
    return next((record for record in after if records[number].is_unlike(record)), None)


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


def value_of(parts: Sequence[float], wholes: Sequence[float] | None = None) -> Value:
    """The mean of some records' numbers, or the ratio of two sums, with the ends of its 95% interval."""
    wholes = [1.0] * len(parts) if wholes is None else wholes
    (draws,) = resampled([(parts, wholes)])
    return (ratio(sum(parts), sum(wholes)), *ends(draws))


def naming(
    target: LanguageTarget, records: Sequence[Shown], watch: Watch, *, title: str, candidates: int, seed: int
) -> list[Measured]:
    """How often the right name is the likeliest of so many, and how much likelier the picture makes it.

    Every picture stands behind the first record's question, and an answer's score is the sum of its log-probabilities,
    the end token's included. Candidates are drawn by the seed from the file's names with another head noun than the
    picture's. With the prior taken off, each candidate's score is less its mean over the file's other pictures whose
    name has another head noun than the candidate: names are more and less common, and that they owe to no picture. The
    right name with another's picture is its mean over the same pictures; a mean picture is `mean_picture` of the file.

    Raises `UserError` for pictures of several sizes, and for fewer names than candidates.
    """
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
    ids = [*answers.values()]

    def scored(features: Tensor) -> Tensor:
        return torch.stack([of[0].sum() for of in answer_scores(target, request, features, ids)])

    scores = torch.stack([scored(record.features) for record in watch(records)])  # [R,U]
    counted = scores * unlike
    prior = (counted.sum(0) - counted) / (unlike.sum(0) - unlike.int())
    without = scored(mean_picture(records))
    draw, right = random.Random(seed), [names.index(record.name) for record in records]
    drawn = [draw.sample(row.nonzero().flatten().tolist(), candidates - 1) for row in unlike]

    def share(scores: Tensor) -> Value:
        best = [float(of[one] > of[rest].max()) for of, one, rest in zip(scores, right, drawn, strict=True)]
        return value_of(best)

    def gap(less: Tensor) -> Value:
        each = zip(scores, less, right, strict=True)
        return value_of([float(of[one] - by[one]) / len(ids[one]) for of, by, one in each])

    among, count = f"the right name is the likeliest of {candidates}", len(records)
    return [
        (f"{among}, prior taken off", title, count, share(scores - prior)), (among, title, count, share(scores)),
        ("the name, right - another's picture", title, count, gap(prior)),
        ("the name, right - mean picture", title, count, gap(without.expand_as(scores))),
    ]  # fmt: skip


def right_answers(target: LanguageTarget, records: Sequence[Shown], watch: Watch) -> list[Measured]:
    """Nats a token that the picture adds to right answers, over another record's pictures and over a mean picture in
    the place of each: the mean over records, of all and of each kind of question.
    """
    mean, gaps = mean_picture(records), list[tuple[str, float, float]]()
    for number in watch(range(len(records))):
        record, other = records[number], another(records, number)
        if record.answer and other is not None:
            pictures = record.features, other.features, mean.expand_as(record.features)
            scored = [answer_scores(target, record.request, one, [record.answer])[0] for one in pictures]
            scores = [float(of[0].mean()) for of in scored]
            gaps.append((record.kind, scores[0] - scores[1], scores[0] - scores[2]))
    return [
        (f"right answers, right - {what} picture", kind, len(some), value_of(some))
        for what, number in (("another's", 1), ("mean", 2))
        for kind in (ALL, *sorted({kind for kind, *_ in gaps} - {""}))
        if (some := [gap[number] for gap in gaps if kind in (ALL, gap[0])])
    ]


def own_answers(likeliest: Sequence[Sequence[float]], texts: Sequence[str]) -> list[Measured]:
    """What greedy answers are like: `likeliest` has for each the probability of every token of it, `texts` its text."""
    words = [words_of(answer) for answer in texts]
    openings, count = len({tuple(of[:3]) for of in words}), len(texts)
    sums, loops = (list(map(sum, likeliest)), list(map(len, likeliest))), [float(is_loop(of)) for of in words]
    return [
        ("its own answers: mean p_max", ALL, count, value_of(*sums)),
        ("its own answers: three words follow each other twice", ALL, count, value_of(loops)),
        ("its own answers: distinct openings of three words", ALL, count, openings / count),
    ]  # fmt: skip


def measures_table(rows: Sequence[Measured]) -> Table:
    """A line for each measure."""
    columns = text("measured"), text("on"), Column("n", "d"), Column("value [95%]", ".3f", kind="interval")
    note = "Differences are in nats a token of the answer, the mean over n records."
    return Table("", columns, tuple(rows), note=note)
