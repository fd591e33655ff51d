"""Medusa heads: one residual block per level on the target's feature (Cai et al. 2024), for language and image codes.

Head i reads the feature of the last committed token and scores the token i + 1 positions after it, without knowing
what is drafted in between: the published baseline of LANTERN's Fig. 2.
Letters: R rows, B samples, T tokens, N positions, F nodes, L levels, D width, V vocabulary, S trained positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.batch import Batch, CodeBatch, StepLoss
from ...core.json_types import JsonObject
from ...core.section import Section
from ...core.states import Taps, TargetStates, at_places, places_of, uploaded
from ..decoding.tree import Expansions
from ..decoding.warp import Warp
from ..losses import Divergence, divergence
from ..targets.base import Target, TargetShape, TargetStep, Verified
from .base import PLAIN, CountTokens, Drafter, DraftingOptions, HeadObjective
from .draft_vocabulary import BesideTarget, DraftVocabulary, GoalScores, drafted_ids, entries
from .plain_module import ModuleDrafter


class MedusaLoss(Section):
    # ce: against the image's own next codes (Medusa-1); others: against the target's distribution at that place.
    token_divergence: Literal["ce"] | Divergence = "ce"
    # Weight of level i is decay ** i: later levels are harder and matter less.
    decay: float = Field(0.8, gt=0, le=1)


class MedusaConfig(ModuleDrafter):
    """Residual blocks on the target's feature, each with the target's LM head after it."""

    kind: Literal["medusa"]
    # Levels that can be drafted.
    num_heads: int = Field(5, ge=1, le=64)
    # Residual blocks of a head (LANTERN's baseline: two linear layers, of which the LM head is one).
    num_layers: int = Field(1, ge=1, le=32)
    # Language models: the likeliest tokens, which one LM head for all levels scores in the target's place; null: the
    # whole vocabulary.
    draft_vocab_size: int | None = Field(None, ge=1)
    loss: MedusaLoss = MedusaLoss()

    layout: ClassVar[Literal["eagle", "dflash", "medusa"] | None] = "medusa"
    beside_states: ClassVar[frozenset[str]] = ModuleDrafter.beside_states | {
        "num_heads", "num_layers", "draft_vocab_size", "loss"
    }  # fmt: skip
    for_images: ClassVar[bool] = True
    least_supervised: ClassVar[int] = 2
    unread_for_images: ClassVar[frozenset[str]] = frozenset({"draft_vocab_size"})
    starts_outside: ClassVar[bool] = True

    def shape(self, target: TargetShape) -> MedusaShape:
        return MedusaShape(target.hidden_size, self.num_heads, self.num_layers)

    def taps_for(self, shape: TargetShape, *, training: bool) -> Taps:
        return Taps(feature=True)

    def build(self, target: Target, *, count_tokens: CountTokens | None = None) -> MedusaHead:
        """An LM head of their own begins with the target's rows."""
        ids = drafted_ids(self.draft_vocab_size, target, count_tokens)
        head = MedusaHead(self.shape(target.shape), target.shape.vocab_size, ids)
        head.begin_as(target)
        return head

    def sizes(self, module: nn.Module) -> JsonObject:
        head = cast(MedusaHead, module)
        vocabulary = {} if head.draft_ids is None else {"draft_vocab_size": len(head.draft_ids)}
        return {"model_type": "medusa", **asdict(head.shape), **vocabulary}

    def training_objective(self, module: nn.Module, target: Target, settings: HeadObjective | None = None) -> nn.Module:
        training = MedusaImageTraining if target.shape.draws_images else MedusaTraining
        return training(cast(MedusaHead, module), target, self.loss)

    def drafter(self, module: nn.Module, target: Target, options: DraftingOptions = PLAIN) -> Drafter:
        head = cast(MedusaHead, module)
        if head.draft_ids is None:
            return MedusaProposal(head, target.guided)
        return MedusaProposal(head, lambda rows, _: head.draft_scores(rows[0], target.scores, target.embedding.dtype))

    def exports(self, engine: str) -> list[str]:
        return [] if engine == "vllm" else ["vLLM 0.32 alone has Medusa"]


@dataclass(frozen=True)
class MedusaShape:
    hidden_size: int
    num_heads: int
    num_layers: int


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), zero at first: a fresh head predicts what the target's own head does."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        """[...,D] -> [...,D]."""
        return states + F.silu(self.linear(states))


class MedusaHead(DraftVocabulary):
    """[...,D] -> [L,...,D]: features whose scores the target's LM head gives, or one over `draft_ids` [V']."""

    def __init__(self, shape: MedusaShape, vocab_size: int, draft_ids: Tensor | None = None):
        super().__init__()
        self.shape = shape
        self.score_ids(shape.hidden_size, vocab_size, draft_ids)
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(shape.hidden_size) for _ in range(shape.num_layers)))
            for _ in range(shape.num_heads)
        )

    def forward(self, features: Tensor) -> Tensor:
        """Map features [...,D] to one feature for each level, [L,...,D]."""
        return torch.stack([head(features) for head in self.heads])


class MedusaTraining(BesideTarget):
    """Over language: level i at index t scores token t + 2 + i, where the answer goes as far. Index t counts where
    token t + 1 is supervised: only there a cycle's root can stand.
    """

    part, metrics = "heads", ("top1", "top3", "token_loss")

    def __init__(self, head: MedusaHead, target: Target, config: MedusaLoss, chunk: int = 256):
        super().__init__(head, target)
        self.config = config
        self.lm, self.ids = head.lm_head_of(target.scores, chunk, target.embedding.dtype), head.draft_ids
        self.goal_scores = GoalScores(target, head)

    def forward(self, batch: Batch, states: TargetStates) -> StepLoss:
        """Sums over supervised tokens; top1 and top3 are hits of the first level on the target's best token.

        The loop divides all sums by the supervised tokens. An answer of n of them has n - 1 predictions of the first
        level, because the token of the target's own head comes before it: val_top1 is at most (n - 1) / n. It compares
        Medusa heads with one another, not with heads that predict n times.
        """
        assert states.feature is not None
        loss_mask, count = batch.on_host("loss_mask"), batch.ids.shape[1]
        predicted = self.head(states.feature.to(next(self.head.parameters()).dtype))  # [L,B,T,D]
        total, sums = None, None
        keep = loss_mask[:, 1:]
        for level, outputs in enumerate(predicted):
            length = max(0, count - 2 - level)  # indices whose token t + 2 + level is there
            keep = keep[:, :length] & loss_mask[:, 2 + level :][:, :length]  # one answer up to there
            places = places_of(keep, outputs.device)
            goal, labels = at_places(states.feature, places, 1 + level), at_places(batch.ids, places, 2 + level)
            compare = functools.partial(self._compare, goal, labels)
            loss, counts = self.lm(at_places(outputs, places), compare)
            total = self.config.decay**level * loss + (0 if total is None else total)
            sums = counts if sums is None else sums
        assert total is not None and sums is not None
        return StepLoss(total, batch.loss_mask[:, 1:].sum(), dict(zip(self.metrics, sums, strict=True)))

    def _compare(self, goal: Tensor, labels: Tensor, piece: slice, ours: Tensor) -> tuple[Tensor, Tensor]:
        """The loss summed over a piece of what features `goal` [S,D] score, with the level's scores [C,V] there, and
        the metrics' sums [3]. With a part of the vocabulary the target's distribution is the one over its ids, and
        tokens outside (the label, or the target's likeliest) count nothing, as in EAGLE-3.
        """
        goals, answer = self.goal_scores(goal[piece]).at(None, ours), labels[piece]
        theirs, best, best_known = goals.scores, goals.scores.argmax(-1), goals.known
        answer_known = best_known  # with all ids both are
        if self.ids is not None:
            answer, answer_known = entries(self.ids, answer)
        if self.config.token_divergence == "ce":
            loss = F.cross_entropy(ours, answer.masked_fill(~answer_known, -100), reduction="sum", ignore_index=-100)
        else:
            loss = (divergence(self.config.token_divergence, theirs, ours) * best_known).sum()
        right = (ours.topk(min(3, ours.shape[-1]), dim=-1).indices == best[:, None]) & best_known[:, None]
        return loss, torch.stack([right[:, 0].sum(), right.any(-1).sum(), loss.detach()]).float()


class MedusaImageTraining(BesideTarget):
    """Over image codes."""

    part = "heads"

    def __init__(self, head: MedusaHead, target: Target, config: MedusaLoss):
        super().__init__(head, target)
        self.config = config

    def forward(self, batch: CodeBatch, states: TargetStates) -> StepLoss:
        """Sums over the positions whose next code is known, as EAGLE's are counted; level i has i fewer of them. top1
        and top3 are those of the first level, which is the one that EAGLE's accuracy compares with.
        """
        assert states.feature is not None and states.ids is not None
        count = states.num_generated
        # Feature at place j of these has generated tokens j, j + 1, ... after it: level i scores token j + i + 1.
        rows = uploaded(batch.on_host("real").nonzero()[:, 0], states.feature.device)
        features, ids = states.feature[rows, -count - 1 : -1], states.ids[rows, -count:]
        predicted = self.head(features.to(next(self.head.parameters()).dtype))
        total = features.new_zeros((), dtype=torch.float32)
        metrics: dict[str, Tensor] = {}
        for level, outputs in enumerate(predicted):
            # Level 0 is for the token after the one that the target's own head gives.
            length = count - 1 - level
            if length < 1:
                break
            scores = self.target.scores(outputs[:, :length].to(features.dtype))
            goal_ids = ids[:, level + 1 : level + 1 + length]
            if self.config.token_divergence == "ce":
                loss = F.cross_entropy(scores.flatten(0, 1), goal_ids.flatten(), reduction="sum")
            else:
                with torch.no_grad():
                    goal = self.target.scores(features[:, level + 1 : level + 1 + length])
                loss = divergence(self.config.token_divergence, goal, scores).sum()
            total = total + self.config.decay**level * loss
            if level == 0:
                with torch.no_grad():
                    best = self.target.scores(features[:, 1:]).argmax(-1, keepdim=True)
                right = scores.topk(min(3, scores.shape[-1]), dim=-1).indices == best
                metrics = {"top1": right[..., 0].sum(), "top3": right.any(-1).sum(), "token_loss": loss.detach()}
        return StepLoss(total, torch.full((), len(features) * (count - 1), device=total.device), metrics)


class MedusaProposal:
    """Scores every level at once from the last committed feature; `expand` answers by level."""

    taps = Taps(feature=True)

    def __init__(self, head: MedusaHead, guided: Callable[[Tensor, Sequence[int]], Tensor]):
        self.head, self.guided = head.eval(), guided
        self.max_levels: int | None = head.shape.num_heads

    def start(self, request: object, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        assert prefill.feature is not None
        self._warp, self._feature, self._emitted = warp, prefill.feature[:, -1:], 0

    def begin(self, first: int) -> None:
        self._emitted = 1

    @torch.inference_mode()
    def root(self) -> Tensor:
        """Score all levels from the last committed feature; return q [V] of the first one."""
        dtype = next(self.head.parameters()).dtype
        predicted = self.head(self._feature.to(dtype))[:, :, 0].transpose(0, 1)  # [R,L,D]
        steps = [self._emitted + level for level in range(len(predicted[0]))]
        self._levels = self._warp.apply_temperature(self.guided(predicted.to(self._feature), steps))  # [L,V]
        self._expansions = Expansions()
        return self._levels[0]

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        return self._levels[self._expansions.take(parents)]

    def accept(self, verified: Verified) -> None:
        """The feature whose own head gave the bonus token is that of the last accepted one."""
        assert verified.step is not None and verified.step.feature is not None
        self._feature = verified.step.feature[:, -1:]
        self._emitted += len(verified.path) + 1
