"""A draft's own vocabulary: the ids that its training data has most often, scored by an LM head of its own (EAGLE-3,
section 3; FR-Spec, arXiv 2502.14856, has such a head for EAGLE-2). In decoding all other ids have probability 0, so
that verification stays exact. Files have `d2t` as EAGLE-3's: the target's id of entry i is i + d2t[i].

A loss compares it with the target's scores of its own ids. Of all others it reads how high the highest scores (EAGLE-3
counts no place whose likeliest token the draft does not have), and a chance of acceptance their log-sum-exp.
Letters: N outputs, C states, D width, V' draft vocabulary, V the target's.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import UserError
from ...core.ranks import notice
from ..losses import ChunkedHead, FrozenHead
from ..targets.base import Target
from ..targets.language import LanguageTarget

Scores = Callable[[Tensor], Tensor]  # [...,D] -> [...,V], the target's LM head
# Counts how often each id is supervised in the training data: [V] int64.
CountTokens = Callable[[], Tensor]


class DraftVocabulary(nn.Module):
    """A module that scores either all ids by the target's LM head, or some by its own."""

    lm_head: nn.Linear | None
    vocab_size: int  # the target's
    d2t: Tensor

    def score_ids(self, width: int, vocab_size: int, ids: Tensor | None) -> None:
        """Make the LM head over `ids`, [V'] int64 ascending; None: there is none. A subclass's `__init__` calls it."""
        self.vocab_size = vocab_size
        if ids is None:
            self.lm_head = None
            return
        self.lm_head = nn.Linear(width, len(ids), bias=False)
        self.register_buffer("d2t", ids - torch.arange(len(ids), device=ids.device))

    @property
    def draft_ids(self) -> Tensor | None:
        """[V'] int64 ascending; None: the whole vocabulary."""
        if self.lm_head is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def ids_on_host(self) -> Tensor | None:
        """The ids on the CPU, for another module like this one."""
        return None if self.draft_ids is None else self.draft_ids.cpu()

    def lm_head_of(self, scores: Scores, chunk: int, dtype: torch.dtype) -> nn.Module:
        """The LM head under a loss: (hidden [S,D], `Compare`) -> loss and sums, `chunk` inputs at a time. `scores` is
        the target's frozen head, [...,D] -> [...,V], of `dtype`.
        """
        return FrozenHead(scores, chunk, dtype) if self.lm_head is None else ChunkedHead(self.lm_head, chunk)

    def draft_scores(self, outputs: Tensor, scores: Scores, dtype: torch.dtype) -> Tensor:
        """Outputs [N,D] -> [N,V] float32 over the target's vocabulary: minus infinity for ids that are not drafted."""
        if self.lm_head is None:
            return scores(outputs.to(dtype))
        return self.vocabulary(self.lm_head(outputs.to(self.lm_head.weight.dtype)))

    def vocabulary(self, scores: Tensor, elsewhere: float = float("-inf")) -> Tensor:
        """[...,V'] of `lm_head` -> [...,V] float32, with `elsewhere` at all other ids."""
        if scores.shape[-1] == self.vocab_size:  # ids ascend, so all of them are in order
            return scores.float()
        whole = scores.new_full((*scores.shape[:-1], self.vocab_size), elsewhere, dtype=torch.float32)
        whole[..., self.draft_ids] = scores.float()
        return whole

    def begin_as(self, target: Target) -> None:
        """Start the own LM head, where there is one, with the target's rows."""
        if self.lm_head is not None and target.device.type != "meta":
            self.lm_head.weight.data = lm_head_rows(target, self.draft_ids)


class BesideTarget(nn.Module):
    """A training forward of a drafter beside its frozen target, which is no module of it: neither the optimizer nor a
    checkpoint sees it.
    """

    part = "head"

    def __init__(self, head: nn.Module, target: Target):
        super().__init__()
        self.head, self.target = head, target

    def parts(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Return the trainable parameters as one part, for the optimizer's groups."""
        return {self.part: [(name, p) for name, p in self.head.named_parameters() if p.requires_grad]}


def entries(ids: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries [S] of `tokens` [S] in the vocabulary `ids` [V'], and whether they are in it, [S] bool."""
    entry = torch.searchsorted(ids, tokens).clamp(max=len(ids) - 1)
    return entry, ids[entry] == tokens


def drafted_ids(size: int | None, target: Target, count_tokens: CountTokens | None) -> Tensor | None:
    """The `size` ids that the training data has most often, [size] int64 ascending; None: all of the target's. Raises
    `UserError` where fewer ids can come.
    """
    if size is None:
        return None
    if target.device.type == "meta":
        return torch.arange(size)
    assert count_tokens is not None, "a reduced vocabulary needs to know how often each id comes"
    never = target.scores(target.embedding.new_zeros(1, target.shape.hidden_size))[0].isneginf().cpu()
    counts = count_tokens()
    ids = likeliest_ids(counts, size, never)
    share = float(counts[ids].sum() / counts.sum().clamp(min=1))
    if counts.min() < counts.max():  # else a file's ids are read into their place
        notice(f"the draft's own {size:,} ids are {share:.1%} of the supervised tokens (drafter.draft_vocab_size)")
    return ids


def likeliest_ids(counts: Tensor, size: int, never: Tensor | None = None) -> Tensor:
    """The `size` most frequent ids by `counts` [V] in ascending order (equal counts: the smaller id), [size] int64.
    Raises `UserError` where fewer can come, which `never` [V] bool says.
    """
    ranked = counts.double() if never is None else counts.double().masked_fill(never, -1.0)
    if size > (most := int((ranked >= 0).sum())):
        problem = f"drafter.draft_vocab_size is {size}, and {most} ids can come"
        raise UserError(problem, key="drafter.draft_vocab_size", hint="make it smaller")
    return ranked.sort(descending=True, stable=True).indices[:size].sort().values


def lm_head_rows(target: Target, ids: Tensor | None) -> Tensor:
    """Rows [V',D] float32 on the CPU of the target's LM head at `ids` [V'], read from the scores of unit vectors."""
    assert ids is not None
    units = torch.eye(target.shape.hidden_size, dtype=target.embedding.dtype, device=target.embedding.device)
    # Scores may be capped, which is not linear.
    project = target.decoder.model.lm_head if isinstance(target, LanguageTarget) else target.scores
    columns = [project(part).to(ids.device)[:, ids] for part in units.split(256)]
    return torch.cat(columns).T.float().cpu().contiguous()


# Rows of the LM head that are run at once. Smaller vocabularies are run whole.
ROWS = 1 << 14


@dataclass(frozen=True)
class Goals:
    """The target's scores of C states."""

    scores: Tensor  # [C,V'] float32 at least, of the draft's ids
    known: Tensor  # [C] bool: no other id scores higher
    log_sum: Tensor | None = None  # [C] log-sum-exp over all ids, where it was asked for and there are others

    def at(self, rows: Tensor | None, like: Tensor) -> Goals:
        """Those of `rows` [R], or all, with the dtype and the device of `like`."""
        scores, known, log_sum = self.scores, self.known, self.log_sum
        if rows is not None:
            scores, known, log_sum = scores[rows], known[rows], None if log_sum is None else log_sum[rows]
        return Goals(scores.to(like), known.to(like.device), None if log_sum is None else log_sum.to(like))


@dataclass(frozen=True)
class _Part:
    scores: Callable[[Tensor], Tensor]  # [C,D] -> [C,...] of neighbouring ids
    drafted: slice  # of the draft's ids, which ascend: those among them
    within: Tensor  # int64, where these stand in the part


class GoalScores:
    """`goals(states)` of the target's true states, without gradients. `draft` is asked in the first call, when its
    weights are in place, which ids it scores.
    """

    def __init__(self, target: Target, draft: DraftVocabulary):
        self.target, self.draft, self.scores, self.dtype = target, draft, target.scores, target.embedding.dtype
        self._parts: list[_Part] | None = None

    @torch.no_grad()
    def __call__(self, states: Tensor, *, sums: bool = False) -> Goals:
        """Scores of the states [C,D], with `log_sum` where `sums` says so."""
        states = states.to(self.dtype)
        if self.draft.lm_head is None:
            scores = self.scores(states)
            known = torch.ones(len(scores), dtype=torch.bool, device=scores.device)
            return Goals(scores, known)
        picked = highest = log_sum = None
        for part in self._split():
            scores = part.scores(states)
            if picked is None:
                picked = scores.new_empty(len(scores), self.draft.lm_head.out_features)
            picked[:, part.drafted] = scores.index_select(-1, part.within.to(scores.device))
            most = scores.amax(-1)
            highest = most if highest is None else torch.maximum(highest, most)
            if sums:
                more = scores.logsumexp(-1)
                log_sum = more if log_sum is None else torch.logaddexp(log_sum, more)
        assert picked is not None and highest is not None
        return Goals(picked, picked.amax(-1) == highest, log_sum)

    def _split(self) -> list[_Part]:
        if self._parts is None:
            ids = self.draft.draft_ids
            assert ids is not None
            # On meta memory is counted, and values are not known.
            known = list(range(len(ids))) if ids.is_meta else ids.tolist()
            target: Any = self.target
            parts = [(0, self.scores)]  # an image generator says no parts
            if self.draft.vocab_size > ROWS and hasattr(target, "score_parts"):
                parts = target.score_parts(ROWS)
            ends = [*(first for first, _ in parts[1:]), self.draft.vocab_size]
            self._parts = []
            for (first, scores), end in zip(parts, ends, strict=True):
                drafted = slice(bisect.bisect_left(known, first), bisect.bisect_left(known, end))
                self._parts.append(_Part(scores, drafted, ids[drafted] - first))
        return self._parts
