"""DFlash's training forward: many blocks of each sample in one pass (Chen et al. 2026, arXiv 2602.06036, section 4.2).

A block stands where a cycle of decoding could: after an anchor, a token of the answer. It sees the target's states
before its anchor and itself, never another block nor a state from its anchor on, which decoding does not have yet.
Letters: B rows, T tokens, A blocks of a row, K places of a block that answer, Q places of all blocks, S trained
places, C places of a piece, D width, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.batch import Batch, CodeBatch, StepLoss
from ...core.pictures import TEXT
from ...core.states import OnDevice, TargetStates, uploaded
from .. import fast
from ..attention import attend
from ..fast import causal_blocks
from ..losses import Divergence, divergence
from ..targets.base import Target
from .dflash_module import Before, DflashHead, DflashShape, within_grid
from .dflash_settings import DflashSettings
from .draft_vocabulary import BesideTarget, Goals, GoalScores, entries
from .head_draws import is_blind


@dataclass(frozen=True)
class Blocks(OnDevice):
    """The places of a batch's blocks; drawn on the CPU."""

    anchors: Tensor  # [B,A] int64 index of each block's first token; 0 where there is no block
    lengths: Tensor  # [B,A] int64 places that have a label: the answer goes on so far, K at most; 0: no block
    share: Tensor  # [B] float32: supervised tokens that each block of a row stands for

    def sources(self, trained: Tensor) -> Tensor:
        """[S,2] row and token of the states that score the tokens at the places `trained` [B,A,K], all on the CPU."""
        row, block, place = trained.nonzero().T
        return torch.stack([row, self.anchors[row, block] + place], dim=1)


def draw_blocks(loss_mask: Tensor, seeds: Sequence[int], most: int, num_drafts: int) -> Blocks:
    """At most `most` anchors of each row, drawn from its seed: supervised tokens after which another one stands. Fewer
    are eligible in short answers, and then all are taken. `loss_mask` [B,T] bool is on the CPU.
    """
    count = loss_mask.shape[1]
    index = torch.arange(count)
    # The first unsupervised index from each one on, and so how many labels stand after an anchor.
    ends = torch.where(loss_mask, count, index).flip(1).cummin(1).values.flip(1)
    behind = F.pad(ends, (0, 1), value=count)[:, 1:] - (index + 1)
    eligible = loss_mask & (behind > 0)
    eligible[:, 0] = False  # nothing stands before it
    rows: list[Tensor] = []
    for row, places in enumerate(eligible):
        candidates = places.nonzero()[:, 0]
        if len(candidates) > most:
            assert len(seeds) == len(loss_mask), "anchors are drawn from each row's seed"
            drawn = random.Random(f"anchors/{seeds[row]}").sample(range(len(candidates)), most)
            candidates = candidates[torch.tensor(sorted(drawn))]
        rows.append(candidates)
    # One block at least: ranks without any make the same module calls.
    width = max(1, *(len(candidates) for candidates in rows))
    anchors = torch.stack([F.pad(candidates, (0, width - len(candidates))) for candidates in rows])
    real = torch.arange(width) < torch.tensor([len(candidates) for candidates in rows])[:, None]
    lengths = torch.where(real, behind.gather(1, anchors).clamp(max=num_drafts), 0)
    supervised, drawn_blocks = loss_mask[:, 1:].sum(1), real.sum(1)
    return Blocks(anchors, lengths, supervised / drawn_blocks.clamp(min=1))


@dataclass(frozen=True)
class Sequences:
    """The sequences that the blocks of a batch are cut from."""

    ids: Tensor  # [B,T] int64
    loss_mask: Tensor  # [B,T] bool on the CPU: this token is supervised
    visible: Tensor  # [B,T] bool: tokens whose states the blocks may see
    positions: Tensor  # [B,T] int64 of the tokens; a block goes on from its anchor's
    seeds: tuple[int, ...]  # B, that anchors are drawn from
    above: Tensor | None = None  # [B,T] int64 of pictures: the code above the one that follows each, -1: none

    def before(self, anchors: Tensor, count: int) -> Before:
        """The tokens before each of the `count` places of blocks after `anchors` [B,A]: [B,A,K] each."""
        places = anchors[..., None] + torch.arange(count, device=anchors.device)
        # Places behind the answer are not trained.
        flat = places.clamp(max=self.ids.shape[1] - 1).flatten(1)
        tokens, above = (None if x is None else x.gather(1, flat).view_as(places) for x in (self.ids, self.above))
        assert tokens is not None
        return Before(tokens, above)


class DflashTraining(BesideTarget):
    """`engine(batch, states)` gives the loss. Of the frozen target its embedding and its LM head are used."""

    metrics: tuple[str, ...] = ("top1", "top3", "accepted")

    def __init__(self, head: DflashHead, target: Target, config: DflashSettings):
        super().__init__(head, target)
        self.head: DflashHead = head
        self.config, self.loss = config, config.loss
        self.lm = head.lm_head_of(target.scores, self.loss.chunk, target.embedding.dtype)
        self.goal_scores = GoalScores(target, head)
        self.weights = self.loss.weights(head.shape.block_size, head.shape.num_drafts)
        if config.confidence is not None:
            self.metrics = (*self.metrics, "confidence_error")

    def forward(self, batch: Batch, states: TargetStates) -> StepLoss:
        """Sums over blocks. Each block of a row counts for as many supervised tokens as there are for each block, so
        that what the loop divides by them is a mean over blocks, however many were drawn. Metrics: hits of the first
        mask (top1, top3), and how many masks in a row hit from the first on (accepted), what a chain is accepted at
        temperature 0. A hit is the answer's token for `ce`, else the target's likeliest. With a confidence head also
        how far its chances are off, in the mean over a block's places by their weights. With `dpace` the mean is over a
        row's places, each cross-entropy times its weight.
        """
        rows = self.sequences(batch, states)
        shape, device = self.head.shape, rows.ids.device
        drawn = draw_blocks(rows.loss_mask, rows.seeds, self.loss.num_anchors, shape.num_drafts)
        blocks = drawn.to(device)
        outputs = self.outputs(rows, states, blocks).unflatten(1, (-1, shape.block_size))[:, :, shape.first :]
        before = rows.before(blocks.anchors, shape.num_drafts)
        trained = torch.arange(shape.num_drafts) < drawn.lengths[..., None]  # [B,A,K]
        chosen = trained.nonzero().T.contiguous()
        row, block, mask = at = tuple(uploaded(chosen, device))  # of each: [S]
        places = blocks.anchors[row, block] + mask  # of the states that score them
        assert states.feature is not None
        labels = rows.ids[row, places + 1]
        weights = uploaded(torch.tensor(self.weights), device)[mask] * blocks.share[row]
        compare = Places(
            self.loss.token_divergence, self.goal_scores, states.feature, drawn.sources(trained), labels, weights,
            first=chosen[2] == 0, keeps_acceptance=self.config.confidence is not None, share=self.loss.shares(),
            num_candidates=self.head.num_candidates, pace=self.pace(blocks, at),
        )  # fmt: skip
        read = self.head.for_loss(outputs, before)[at]
        # A block is compared whole where its places' weights depend on one another.
        ends = None if self.loss.dpace is None else drawn.lengths.flatten().cumsum(0).tolist()
        loss, _ = self.lm(read, compare, ends)
        further, errors = self.further(read[:, : outputs.shape[-1]], before.at(at), compare)
        loss, sums = loss + further, (*compare.hits(trained.shape, at, blocks.share), *errors)
        count = uploaded(rows.loss_mask[:, 1:].sum(), device)
        return StepLoss(loss, count, dict(zip(self.metrics, sums, strict=True)))

    def pace(self, blocks: Blocks, at: tuple[Tensor, ...]) -> Pace | None:
        """D-PACE's weights of places `at` row, block and place; None: the loss has gamma's."""
        if self.loss.dpace is None:
            return None
        (row, block, place), real = at, blocks.lengths > 0
        number = real.flatten().cumsum(0).view_as(real)[row, block]
        mean = blocks.share * real.sum(1) / blocks.lengths.sum(1).clamp(min=1)
        return Pace(self.loss.dpace, number, place, mean[row], self.head.shape.num_drafts)

    def further(self, outputs: Tensor, before: Before, compare: Places) -> tuple[Tensor | float, tuple[Tensor, ...]]:
        """The loss of what is trained beside the draft at S places with `outputs` [S,D], and metrics of it; `compare`
        has been called.
        """
        settings = self.config.confidence
        if settings is None:
            return 0.0, ()
        logits = self.head.confidence(outputs.detach() if settings.detached else outputs, before)
        loss, error = confidence_loss(logits, torch.cat(compare.acceptances), compare.weights)
        return settings.weight * loss, (error,)

    def sequences(self, batch: Batch, states: TargetStates) -> Sequences:
        """The rows of a batch of texts and pictures."""
        visible = uploaded(self.visible(batch), batch.ids.device)
        if self.config.positions == "flat":
            positions = torch.arange(visible.shape[1], device=visible.device).expand_as(visible)
        else:
            positions = visible.cumsum(1) - visible.long()  # states that are held before a token
        return Sequences(batch.ids, batch.on_host("loss_mask"), visible, positions, batch.seeds)

    def outputs(self, rows: Sequences, states: TargetStates, blocks: Blocks) -> Tensor:
        """[B,Q,D] after the final norm, of the blocks of each row one after the other."""
        head, shape, visible = self.head, self.head.shape, rows.visible
        within = torch.arange(shape.block_size, device=visible.device)
        starts = rows.positions.gather(1, blocks.anchors)[..., None]
        positions = within_grid(torch.cat([rows.positions, (starts + within).flatten(1)], dim=1), shape.layer)
        context = head.context(torch.cat([states.layers[tap] for tap in shape.taps], dim=-1))
        first = head.blocks(rows.ids.gather(1, blocks.anchors), self.target.embedding)
        if not fast.enabled():
            mask = block_mask(visible, blocks.anchors, shape, visible.shape[1])
            return head(first, context, positions, lambda number, q, k, v: attend(q, k, v, mask))
        in_pieces = causal_blocks.attention(
            lambda some, reach: block_mask(visible, blocks.anchors[:, some], shape, reach),
            blocks.on_host("anchors"), visible.shape[1], attend, visible.device,
        )  # fmt: skip
        return head(first, context, positions, in_pieces)

    def visible(self, batch: Batch) -> Tensor:
        """[B,T] bool on the CPU: tokens whose states the blocks may see."""
        mask, visual = batch.on_host("attention_mask"), batch.on_host("modality") != TEXT
        if self.config.visual(training=True) == "none":
            return mask & ~visual
        share = self.config.blind_share
        if not share:
            return mask
        assert len(batch.seeds) == len(batch.ids), "blind samples are drawn from each row's seed"
        return mask & ~(visual & torch.tensor([is_blind(seed, share) for seed in batch.seeds])[:, None])


def block_mask(visible: Tensor, anchors: Tensor, shape: DflashShape, reach: int) -> Tensor:
    """[B,1,N,R+N] bool: what the N places of blocks after `anchors` [B,A] see of the first R = `reach` states of the
    row, and of each other: `visible` [B,T] states before the anchor, and the block itself, or of a causal one its
    places up to each.
    """
    index = torch.arange(reach, device=visible.device)
    context = (visible[:, None, :reach] & (index < anchors[..., None]))[:, :, None].expand(-1, -1, shape.block_size, -1)
    if shape.sliding_window is not None:  # states before a place, itself included
        before = visible.cumsum(1) - visible.long()  # [B,T]
        places = before.gather(1, anchors)[..., None] + torch.arange(shape.block_size, device=visible.device)
        context = context & (places[..., None] - before[:, None, None, :reach] < shape.sliding_window)
    index = torch.arange(anchors.shape[1] * shape.block_size, device=visible.device)
    same_block = index[:, None] // shape.block_size == index // shape.block_size
    if shape.causal:
        same_block = same_block & (index[:, None] >= index)
    return torch.cat([context.flatten(1, 2), same_block.expand(len(visible), -1, -1)], dim=-1)[:, None]


@dataclass(frozen=True)
class Pace:
    """D-PACE's weights of trained places (arXiv 2605.18810). With smoothed chances c(i) = (1 - a) q(i) + a of a block's
    places, place j counts sum over m >= j of c(1) ... c(m): how many places from it on are expected to be accepted. The
    weights have no gradient.
    """

    smoothing: float  # a
    blocks: Tensor  # [S] int64, the number of each place's block, counted up by one
    places: Tensor  # [S] int64 within its block, from 0
    share: Tensor  # [S] what a place counts for in the mean over its row's
    num_places: int  # of a whole block, K

    def weights(self, piece: slice, chances: Tensor) -> Tensor:
        """[C] of a piece of whole blocks, from chances q [C] of the right tokens."""
        blocks, places = self.blocks[piece], self.places[piece]
        at = blocks - blocks[:1], places
        # 0 behind the end of an answer, where nothing can be accepted.
        smoothed = chances.new_zeros(len(chances), self.num_places)
        smoothed[at] = (1 - self.smoothing) * chances.detach() + self.smoothing
        reached = smoothed.cumprod(-1)
        return reached.flip(-1).cumsum(-1).flip(-1)[at] * self.share[piece]


class Places:
    """What is compared at each trained place of blocks; `ranks` gathers how many tokens score above each right one:
    exact at the first place of a block, 0 or more elsewhere.

    Args:
        name: of a divergence from the target's distribution, or ce.
        scores: of the target, over the draft's vocabulary.
        feature: [B,T,D] of the target.
        sources: [S,2] as of `Blocks.sources`: what scores the tokens `labels` [S].
        weights: [S].
        first: [S] bool on the CPU: a block's first place. Counting at all costs a CPU a third of their product.
        keeps_acceptance: `acceptances` gathers how likely each place's draft is accepted at temperature 1.
        share: weights of the comparison itself, and of a cross-entropy with `labels` beside it.
        num_candidates: `candidates` gathers so many of each place's likeliest entries: scores and entries, [C,k] each.
        pace: in place of `weights` for `ce`, of pieces of whole blocks.
    """

    def __init__(
        self, name: Literal["ce"] | Divergence, scores: GoalScores, feature: Tensor, sources: Tensor, labels: Tensor,
        weights: Tensor, *, first: Tensor, keeps_acceptance: bool = False, share: tuple[float, float] = (1.0, 0.0),
        num_candidates: int = 0, pace: Pace | None = None,
    ):  # fmt: skip
        self.name, self.scores, self.ids = name, scores, scores.draft.draft_ids
        self.feature, self.sources, self.labels, self.weights = feature, sources, labels, weights
        self.first, self.ranks = first, list[Tensor]()
        self.keeps_acceptance, self.acceptances = keeps_acceptance, list[Tensor]()
        self.pace = pace
        self.share, self.num_candidates, self.candidates = share, num_candidates, list[tuple[Tensor, Tensor]]()

    def hits(self, shape: torch.Size, at: tuple[Tensor, Tensor, Tensor], share: Tensor) -> tuple[Tensor, ...]:
        """Sums over blocks, after the comparison: the first place hit, was among three, and how many hit in a row. `at`
        gives row, block and place in a `shape` [B,A,K] of each trained place; `share` [B] is what each block of a row
        counts for.
        """
        ranks, first = torch.cat(self.ranks), (at[2] == 0) * share[at[0]]
        hits = torch.zeros(shape, device=share.device).index_put(at, (ranks == 0).float())
        run = (hits.cumprod(-1).sum((1, 2)) * share).sum()
        return (first * (ranks == 0)).sum(), (first * (ranks < 3)).sum(), run

    def __call__(self, piece: slice, ours: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted sum over a piece, with the scores [C,V] there; no further sums. With a part of the vocabulary
        the target's distribution is the one over its ids, and places whose right token lies outside count nothing.
        """
        labels, theirs = self.labels[piece], None
        of_terms = self.name == "tvd" and self.ids is None  # which is 1 less what is accepted
        keeps = self.keeps_acceptance and not of_terms
        if self.name != "ce" or keeps:
            theirs = self.goals(self.sources[piece], ours, sums=keeps)
            if keeps:
                self.acceptances.append(acceptance(theirs, ours))
        entries, inside = self.entries(labels)
        weights, (weight, beside) = self.weights[piece], self.share
        if self.name == "ce" or theirs is None:
            self.rank(piece, ours, entries, inside)
            apart = F.cross_entropy(ours, entries, reduction="none")
            if self.pace is not None:  # a token that the draft does not have is never accepted
                weights = self.pace.weights(piece, torch.exp(-apart) * inside)
            terms = (weight + beside) * apart * inside
        else:
            self.rank(piece, ours, theirs.scores.argmax(-1), theirs.known)
            apart = divergence(self.name, theirs.scores, ours)
            if self.keeps_acceptance and of_terms:
                self.acceptances.append(1 - apart.detach())
            terms = weight * apart * theirs.known
            if beside:
                terms = terms + beside * F.cross_entropy(ours, entries, reduction="none") * inside
        return (terms * weights).sum(), torch.zeros((), device=ours.device)

    @torch.no_grad()
    def rank(self, piece: slice, ours: Tensor, right: Tensor, known: Tensor) -> None:
        """Note how many of the scores [C,V] stand above those of the entries `right` [C], and the likeliest."""
        score = ours.gather(1, right[:, None])
        better = torch.where(ours.amax(-1) > score[:, 0], 3, 0)
        rows = uploaded(self.first[piece].nonzero()[:, 0], ours.device)
        better[rows] = (ours[rows] > score[rows]).sum(-1)
        self.ranks.append(torch.where(known, better, ours.shape[-1]))
        if self.num_candidates:
            values, entries_of = ours.topk(self.num_candidates, dim=-1)
            self.candidates.append((values, entries_of))

    def goals(self, sources: Tensor, ours: Tensor, *, sums: bool) -> Goals:
        """Return the target's scores at `sources` [C,2] (row, token). Blocks overlap: a repeated state is read once."""
        distinct, back = sources.unique(dim=0, return_inverse=True)
        fewer = len(distinct) < len(sources)
        row, token = uploaded((distinct if fewer else sources).T.contiguous(), self.feature.device)
        goals = self.scores(self.feature[row, token], sums=sums)
        return goals.at(uploaded(back, goals.scores.device) if fewer else None, ours)

    def entries(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Entries of the target's tokens [C] in the draft's vocabulary, and whether they are in it."""
        if self.ids is None:
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        return entries(self.ids, tokens)


@torch.no_grad()
def acceptance(goals: Goals, draft_scores: Tensor) -> Tensor:
    """The chance [S] float32 that a token drawn from the draft's scores [S,V'] is accepted at temperature 1; `goals`
    are the target's, of the ids that the draft scores, as it never proposes another one.
    """
    p = goals.scores.float()
    p = p.softmax(-1) if goals.log_sum is None else (p - goals.log_sum[:, None]).exp_()
    return torch.minimum(p, draft_scores.float().softmax(-1)).sum(-1)


def confidence_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """[S] each -> the weighted sum of binary cross-entropies, and that of |chance - label|."""
    loss = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    with torch.no_grad():
        error = (logits.sigmoid() - labels).abs()
    return (loss * weights).sum(), (error * weights).sum()


def above_next(ids: Tensor, codes: Tensor, grid: int) -> Tensor:
    """[B,T] the code above the one that follows each of `ids` [B,T], in rows of `grid`; -1 where that lies outside the
    picture. `codes` [T] bool on the CPU says which are codes.
    """
    index = torch.arange(1, len(codes) + 1) - grid
    inside = (index >= 0) & codes[index.clamp(min=0)]
    return torch.where(uploaded(inside, ids.device), ids[:, uploaded(index.clamp(min=0), ids.device)], -1)


class DflashImageTraining(DflashTraining):
    """Blocks after drawn codes of each picture; its condition, or none, stands before the codes."""

    def sequences(self, batch: CodeBatch, states: TargetStates) -> Sequences:  # type: ignore[override]
        """The pictures with their conditions; every code is supervised."""
        ids, mask = states.ids, states.mask
        assert ids is not None and mask is not None and states.positions is not None
        codes = torch.arange(ids.shape[1]) >= ids.shape[1] - states.num_generated
        loss_mask = batch.on_host("real")[:, None] & codes
        return Sequences(
            ids, loss_mask, mask, states.positions[0], batch.seeds, above_next(ids, codes, self.target.shape.grid)
        )
