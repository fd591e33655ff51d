"""The target's scores that a draft is compared with: over the draft's own ids, where it has a vocabulary of its own.

Of all other ids a loss reads how high the highest scores (EAGLE-3 counts no place whose likeliest token the draft does
not have), and a chance of acceptance their log-sum-exp. The LM head is run a part of its rows at a time, so that no
scores of the whole vocabulary are held. Letters: C states, D width, V' ids of the draft, V of the target.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..targets.base import Target
from .draft_vocabulary import OwnVocabulary

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
    own: slice  # of the draft's ids, which ascend: those among them
    within: Tensor  # int64, where these stand in the part


class GoalScores:
    """`goals(states)` of the target's true states, without gradients.

    Args:
        draft: says which ids it scores; asked in the first call, when its weights are in place.
    """

    def __init__(self, target: Target, draft: OwnVocabulary):
        self.target, self.draft, self.scores, self.dtype = target, draft, target.scores, target.embedding.dtype
        self._parts: list[_Part] | None = None

    @torch.no_grad()
    def __call__(self, states: Tensor, *, sums: bool = False) -> Goals:
        """Scores of the states [C,D].

        Args:
            sums: whether `log_sum` is wanted.
        """
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
            picked[:, part.own] = scores.index_select(-1, part.within.to(scores.device))
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
                own = slice(bisect.bisect_left(known, first), bisect.bisect_left(known, end))
                self._parts.append(_Part(scores, own, ids[own] - first))
        return self._parts
