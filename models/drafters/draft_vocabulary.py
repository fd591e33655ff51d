"""A draft's own vocabulary: the ids that its training data has most often, scored by an LM head of its own (EAGLE-3,
section 3; FR-Spec, arXiv 2502.14856, has such a head for EAGLE-2). In decoding all other ids have probability 0, so
that verification stays exact. Files have `d2t` as EAGLE-3's: the target's id of entry i is i + d2t[i].
Letters: N outputs, D width, V' draft vocabulary, V the target's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...core.errors import UserError
from ..losses import ChunkedHead, FrozenHead
from ..targets.base import Target
from ..targets.language import LanguageTarget
from .base import CountTokens

Scores = Callable[[Tensor], Tensor]  # [...,D] -> [...,V], the target's LM head


class OwnVocabulary(nn.Module):
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
        """The LM head under a loss: (hidden [S,D], `Compare`) -> loss and sums, `chunk` inputs at a time.

        Args:
            scores: [...,D] -> [...,V], the target's frozen head.
            dtype: the target's.
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


def entries(ids: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries [S] of `tokens` [S] in the vocabulary `ids` [V'], and whether they are in it, [S] bool."""
    entry = torch.searchsorted(ids, tokens).clamp(max=len(ids) - 1)
    return entry, ids[entry] == tokens


def drafted_ids(size: int | None, target: Target, count_tokens: CountTokens | None) -> Tensor | None:
    """The `size` ids that the training data has most often, [size] int64 ascending; None: all of the target's.

    Args:
        count_tokens: says how often each comes.

    Raises:
        UserError: fewer ids can come.
    """
    if size is None:
        return None
    if target.device.type == "meta":
        return torch.arange(size)
    assert count_tokens is not None, "a reduced vocabulary needs to know how often each id comes"
    never = target.scores(target.embedding.new_zeros(1, target.shape.hidden_size))[0].isneginf().cpu()
    return likeliest_ids(count_tokens(), size, never)


def likeliest_ids(counts: Tensor, size: int, never: Tensor | None = None) -> Tensor:
    """The `size` most frequent ids in ascending order (equal counts: the smaller id), [V] -> [size] int64.

    Args:
        counts: [V] how often the target's answers hold each id.
        never: [V] bool, ids that cannot come.

    Raises:
        UserError: fewer ids can come than are asked for.
    """
    ranked = counts.double()
    if never is not None:
        ranked = ranked.masked_fill(never, -1.0)
    if size > int((ranked >= 0).sum()):
        raise UserError(
            f"drafter.draft_vocab_size is {size}, and {int((ranked >= 0).sum())} ids can come",
            key="drafter.draft_vocab_size",
            hint="make it smaller",
        )
    return ranked.sort(descending=True, stable=True).indices[:size].sort().values


def lm_head_rows(target: Target, ids: Tensor | None) -> Tensor:
    """Rows [V',D] float32 on the CPU of the target's LM head at `ids` [V'], read from the scores of unit vectors."""
    assert ids is not None
    width, step = target.shape.hidden_size, 256
    units = torch.eye(width, dtype=target.embedding.dtype, device=target.embedding.device)
    # Scores may be capped, which is not linear.
    project = target.decoder.projected if isinstance(target, LanguageTarget) else target.scores
    columns = [project(units[start : start + step])[:, ids.to(units.device)] for start in range(0, width, step)]
    return torch.cat(columns).T.float().cpu().contiguous()
