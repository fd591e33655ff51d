"""Distillation: a draft learns the target's whole distribution at each supervised position, not only its token.

The vocabulary is projected a chunk of positions at a time, and each chunk's gradient is taken on the spot, so that
what a step holds beyond the models' own states does not grow with the number of supervised tokens.
Letters: B rows, T tokens, S supervised positions, C positions of a chunk, D width, V vocabulary, K kept tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.batch import Batch, StepLoss
from ...core.section import Section
from ...core.states import TargetStates, TopLogProbs, at_places, places_of
from ..losses import NEVER, ChunkedHead, Divergence, divergence_of_logs, log_probs
from ..parts import Part
from ..targets.table import training_of
from .lvlm import LvlmTraining

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CrossEntropyObjective(Section):
    """The samples' own next tokens."""

    kind: Literal["cross_entropy"] = "cross_entropy"


class DistillObjective(Section):
    """The frozen target's distribution at every supervised position."""

    kind: Literal["distill"]
    # kl covers all that the target may say; tvd and lk_alpha go for what is accepted and learn slowly from far away;
    # lk_hybrid goes from the one to the other as the draft gets better.
    divergence: Divergence = "lk_hybrid"
    # Of jsd: near 0 it behaves like kl, near 1 like reverse_kl.
    beta: float = Field(0.5, gt=0, lt=1)
    # Of lk_hybrid: larger leaves kl sooner.
    eta: float = Field(3.0, ge=0)
    # Both distributions are softened by it before they are compared; 1 compares what decoding at 1 compares.
    temperature: float = Field(1.0, gt=0)
    # Weight of cross-entropy on the sample's own tokens; the divergence has the rest.
    cross_entropy: float = Field(0.0, ge=0, lt=1)
    # online runs the target on each batch; kept reads what a regenerate stage kept of it (keep_logprobs).
    probabilities: Literal["online", "kept"] = "online"
    # Positions whose vocabulary is projected at once: about 40 bytes for each position and id.
    chunk: int = Field(256, ge=1)


def with_rest(logs: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities [C,V] of the named tokens [C,K], and of all others together: [C,K+1]."""
    rest = logs.scatter(-1, ids, NEVER).logsumexp(-1, keepdim=True)
    return torch.cat([logs.gather(-1, ids), rest], dim=-1)


def keep_scores(scores: Tensor, count: int) -> TopLogProbs:
    """The `count` likeliest tokens of scores [S,V] (minus infinity where no token may come), the likeliest first.

    At least one token that may come must be left to the rest.
    """
    logs = log_probs(scores)
    ids = logs.topk(count, dim=-1).indices
    outcomes = with_rest(logs, ids)
    return TopLogProbs(ids, outcomes[:, :-1], outcomes[:, -1])


class Teacher:
    """The frozen target on a draft LVLM's batches. It is a plain object, so that no engine treats it as a submodule."""

    def __init__(self, model: PreTrainedModel):
        self.model: Any = model
        self._module = training_of(model, (), gradient_checkpointing=False).eval()

    @property
    def lm_head(self) -> nn.Module:
        """The target's projection of features [...,D] to scores [...,V]."""
        return self.model.lm_head

    @torch.no_grad()
    def states(self, batch: Batch) -> TargetStates:
        """The feature [B,T,D] of every token."""
        return TargetStates(feature=self._module.hidden_states(batch))


class DistillTraining(LvlmTraining):
    """A draft with its target, which is no submodule: neither the optimizer nor a checkpoint sees it. Without a
    `teacher` every batch brings kept scores. Ids that are never emitted, `banned` [V] bool, are taken out of both
    distributions.
    """

    metrics = ("accuracy", "agreement", "alpha")
    banned: Tensor

    def __init__(
        self,
        model: PreTrainedModel,
        trainable: Sequence[Part],
        *,
        objective: DistillObjective,
        teacher: Teacher | None,
        banned: Tensor,
        **settings: Any,
    ):
        super().__init__(model, trainable, **settings)
        self.objective = objective
        self.head = ChunkedHead(self.model.lm_head, objective.chunk)
        self.register_buffer("banned", banned, persistent=False)
        self.teacher = teacher

    def states(self, batch: Batch) -> TargetStates | None:
        return batch.states if self.teacher is None else self.teacher.states(batch)

    @property
    def target_beside(self) -> PreTrainedModel | None:
        return None if self.teacher is None else self.teacher.model

    def forward(
        self, batch: Batch, states: TargetStates | None = None, target_choice: Tensor | None = None
    ) -> StepLoss:
        """The divergence (mixed with cross-entropy) summed over supervised tokens. Metrics: "accuracy" against the
        sample's tokens, "agreement" with the target's likeliest one, and alpha at the objective's temperature. In
        evaluation it is plain cross-entropy, whatever the objective: validation compares drafts that were trained in
        different ways.
        """
        if not self.training:
            return super().forward(batch, None, target_choice)
        assert states is not None, "distillation compares with the target"
        places = places_of(batch.predicting, batch.ids.device)
        labels = at_places(batch.ids, places, 1)  # [S]
        theirs = None
        if states.top_log_probs is None:
            assert states.feature is not None and self.teacher is not None
            feature, head = at_places(states.feature, places), self.teacher.lm_head  # called as a module
            theirs = lambda piece: head(feature[piece])  # noqa: E731
        hidden = at_places(self.hidden_states(batch), places)  # [S,D]
        loss, sums = self.head(hidden, functools.partial(self._compare, theirs, states.top_log_probs, labels))
        return StepLoss(loss, batch.loss_mask[:, 1:].sum(), dict(zip(self.metrics, sums, strict=True)))

    def _compare(
        self, theirs: Callable[[slice], Tensor] | None, top: TopLogProbs | None, labels: Tensor, piece: slice,
        scores: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The loss summed over a piece, with the draft's scores [C,V] there, and the metrics' sums [3]. `theirs` gives
        the target's scores [C,V] of a piece; None: its likeliest tokens are `top`, and all others as one
        outcome.
        """
        objective = self.objective
        scores = scores.masked_fill(self.banned, float("-inf"))
        log_q = log_probs(scores / objective.temperature)
        with torch.no_grad():
            if top is None:
                assert theirs is not None
                goal = theirs(piece).to(self.banned.device).float().masked_fill_(self.banned, float("-inf"))
                log_p = log_probs(goal.div_(objective.temperature))  # [C,N] over the outcomes that are compared
                best = log_p.argmax(-1)
            else:
                log_p = torch.cat([top.log_probs[piece], top.log_rest[piece, None]], dim=-1)
                best = top.ids[piece, 0]
        if top is not None:
            log_q = with_rest(log_q, top.ids[piece])
        loss = divergence_of_logs(objective.divergence, log_p, log_q, beta=objective.beta, eta=objective.eta).sum()
        if objective.cross_entropy:
            on_labels = F.cross_entropy(scores, labels[piece], reduction="sum")
            loss = (1 - objective.cross_entropy) * loss + objective.cross_entropy * on_labels
        with torch.no_grad():
            choice = scores.argmax(-1)
            alpha = torch.minimum(log_p, log_q).exp().sum()
            right, agreed = choice == labels[piece], choice == best
            return loss, torch.stack([right.sum(), agreed.sum(), alpha]).float()
