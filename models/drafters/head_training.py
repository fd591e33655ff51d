"""The training forward of hidden-state heads: one pass over the true states, then passes over its own, and their loss.

The terms compare the two LM heads' distributions a few entries at a time, at trained entries alone. A batch without
pictures or without a supervised token makes the same module calls as any other, so that ranks stay together under ZeRO.
Letters: B rows, T tokens, N input entries, S trained entries, W passes, C entries of a piece, D width, V vocabulary
(the draft's own, in EAGLE-3).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.batch import Batch, StepLoss
from ...core.pictures import TEXT
from ...core.states import TargetStates, at_places, places_of, uploaded
from ..losses import divergence_of_logs, list_mle, log_probs, soft_cross_entropy
from ..packed_row import PackedRow
from ..targets.base import Target
from ..training_passes import TrainingPasses
from .goal_scores import GoalScores
from .head_inputs import Filled, Inputs, Sequences, base_positions, fill, lay_out, with_gaps
from .head_module import StateHead
from .head_objective import HeadObjective
from .head_settings import HeadSettings


class HeadTraining(nn.Module):
    """`engine(batch, states)` gives the loss. Of the frozen target only its embedding and LM head are used.

    Args:
        objective: of the stage; None: the config's.
    """

    def __init__(self, head: StateHead, target: Target, config: HeadSettings, objective: HeadObjective | None = None):
        super().__init__()
        self.head, self.config, self.objective = head, config, objective or config.terms
        self.target = target  # no module: neither the optimizer nor a checkpoint sees it
        self.goal_scores, self.embedding = GoalScores(target, head), target.embedding.detach()
        self.visual, self.reads = config.visual(training=True), config.reads(target.shape, training=True)
        self.share, self.held = config.trained_visual_share, config.visual(training=False) == self.visual
        steps = self.objective.mtp_steps
        self.num_passes = 1 + (config.mtp_steps if steps is None else steps)
        decay, count = self.objective.decay, self.num_passes
        self.weights = [1 / count] * count if decay is None else [decay**step for step in range(count)]
        chunk = self.objective.chunk * self.num_passes
        self.lm = head.lm_head_of(target.scores, chunk, target.embedding.dtype)

    def parts(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Return the head's trainable parameters as one part, for the optimizer's groups."""
        return {"head": [(name, p) for name, p in self.head.named_parameters() if p.requires_grad]}

    def forward(self, batch: Batch, states: TargetStates) -> StepLoss:
        """Return sums over trained inputs.

        An input holds token j + 1 and state j. It is trained where token j + 1 is supervised and not visual; its goal
        is state j + 1, which scores token j + 2.

        Metrics are sums as well: hits of the target's best token by the first pass (top1, top3) and the last one
        (top1_last), and alpha of the first, the chance that a drafted token is accepted. For a draft with its own
        vocabulary, alpha is the chance under the target's distribution over the draft's ids alone.
        """
        filled, positions = self.fill(batch, states)
        kept = filled.layout.trained(batch.on_host("loss_mask"))
        places, real = places_of(kept, filled.embeds.device), filled.layout.on_host("real")
        row = PackedRow.of(real, filled.embeds.device) if batch.packed else None
        skipped = self._skipped(kept) if row is None else 0
        passes = torch.stack(self.passes(filled, positions, batch, row, skipped=skipped), dim=2)
        in_row = places if row is None else places_of(kept[real][None], filled.embeds.device)
        outputs = at_places(passes, in_row, -skipped)  # [S,W,D]
        assert states.feature is not None
        goal = at_places(filled.layout.pick(states.feature, 1), places)
        terms = TokenTerms(self.objective, goal, self.weights, self.goal_scores)
        loss, sums = self.lm(self.head.hidden(outputs).flatten(0, 1), terms)
        if self.objective.feature:
            away = F.smooth_l1_loss(
                outputs.float(), goal.float()[:, None].expand_as(outputs), reduction="none"
            ).mean(-1)  # fmt: skip
            weights = uploaded(torch.tensor(self.weights, dtype=away.dtype), away.device)
            loss = loss + self.objective.feature * (away * weights).sum()
        count = torch.full((), places.shape[1], device=loss.device)
        return StepLoss(loss, count, dict(zip(TokenTerms.metrics, sums, strict=True)))

    def fill(self, batch: Batch, states: TargetStates) -> tuple[Filled, Tensor]:
        """The inputs of the layer and their positions."""
        config, visual = self.config, self.visual
        vectors = self.head.num_queries - 1 if self.head.num_queries else 0
        keep = None  # [B,T] bool: visual tokens whose inputs this epoch keeps; None: all
        share = self.share if visual == "direct" else 1.0
        if config.blind_share or share not in (0.0, 1.0):
            assert len(batch.seeds) == len(batch.ids), "visual inputs are drawn from each row's seed"
            keep = torch.ones(batch.ids.shape, dtype=torch.bool) if share == 1 else _drawn(batch, share)
            keep[[is_blind(seed, config.blind_share) for seed in batch.seeds]] = False
        layout = lay_out(
            visual, batch.on_host("modality"), batch.on_host("attention_mask"), num_vectors=vectors,
            keep=keep, device=batch.ids.device,
        )  # fmt: skip
        assert states.positions is not None
        sequences = Sequences(
            batch.ids, batch.attention_mask, batch.modality, states.positions, states.feature, states.layers
        )
        filled = fill(self.head, visual, self.reads, layout, sequences, self.embedding)
        positions = base_positions(config.positions, layout, sequences, visual_held=self.held)
        if self.training and config.gap_share:
            assert len(batch.seeds) == len(batch.ids), "gaps are drawn from each row's seed"
            positions = with_gaps(positions, layout, _gaps(batch.seeds, config.gap_share, config.gap))
        return filled, positions

    def _skipped(self, trained: Tensor) -> int:
        """How many inputs of each row no later pass has to run, given [B,N] which ones are trained.

        Under `ttt` later passes are read by their own chains alone: what stands more than a chain before the first
        trained input counts nothing.
        """
        columns = trained.any(0).nonzero()
        if self.config.mtp_attention != "ttt" or not len(columns):
            return 0
        return max(0, int(columns[0]) - (self.num_passes - 1))

    def passes(
        self, filled: Filled, positions: Tensor, batch: Batch, row: PackedRow | None = None, *, skipped: int = 0
    ) -> list[Tensor]:
        """Outputs [B,N,D] of every pass, all with a gradient; of a packed `row` of all inputs [1,M,D].

        EAGLE-3's code shifts tokens and targets left at each step. Here they stay and states move: input i of pass
        s > 0 reads the output of pass s - 1 at i - 1, and every pass is compared with the same goal at i. What a pass
        attends to is in `models/training_passes.py`.

        Args:
            skipped: first inputs of each row that later passes leave out, and no outputs are returned of.
        """
        config, layout, head = self.config, filled.layout, self.head
        states = filled.states
        if self.training and self.objective.noise:
            lengths = batch.attention_mask.sum(1)
            uniforms = row_uniforms(states, [0] * len(states), batch.seeds, layout.on_host("real").sum(1).tolist())
            states = add_noise(states, uniforms, lengths, self.objective.noise)
        text = layout.real & ~layout.visual
        replaced = (text & layout.follows(text=config.replace == "after_text"))[..., None]
        inputs = Inputs(filled.embeds, filled.fused(head, states), positions, replaced, filled.direct, filled.image)
        # Padding comes after a row's inputs, so causal attention suffices and no [N,N] mask is needed.
        mask = segments = None
        if row is not None:
            inputs, segments = inputs.packed(row), row.numbers[None]
            mask = row.seen(inputs.states) if config.mtp_attention != "ttt" else None
        keys = TrainingPasses(self.num_passes, segments, skipped) if config.mtp_attention == "ttt" else None
        outputs: list[Tensor] = []
        for step in range(self.num_passes):
            states = inputs.states
            if step == 1:
                kept, replaced = states.masked_fill(inputs.replaced, 0), inputs.replaced.to(states)
            if step:
                # In a packed row a sample's first input is not replaced: the input before it is another sample's.
                before = F.pad(outputs[-1], (0, 0, 1, -1))
                # A choice by a mask of one column takes a CPU several times as long; in float16 an output that nobody
                # reads may be infinite.
                choose = states.dtype == torch.float16
                states = (
                    torch.where(inputs.replaced, before, states) if choose else torch.addcmul(kept, before, replaced)
                )
            out = head(
                inputs.embeds, states, inputs.positions, mask, keys, direct=inputs.direct, image=inputs.image,
                depths=torch.full(states.shape[:2], step, device=states.device) if head.num_steps else None,
            )  # fmt: skip
            if skipped and not step:
                inputs = inputs.behind(skipped)
            outputs.append(out)
        return outputs


def _gaps(seeds: Sequence[int], share: float, most: int) -> list[int | None]:
    """Each row's gap in places, or None, from its seed."""
    gaps: list[int | None] = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        drawn = float(torch.rand((), generator=generator)) < share
        gap = int(torch.randint(most + 1, (), generator=generator))
        gaps.append(gap if drawn else None)
    return gaps


def is_blind(seed: int, share: float) -> bool:
    """Whether the row of this seed is one of the `share` without visual inputs; apart from what else the seed draws."""
    return random.Random(f"blind/{seed}").random() < share


def _drawn(batch: Batch, share: float) -> Tensor:
    """[B,T] bool: visual tokens that this epoch keeps, drawn from each row's seed."""
    keep = torch.zeros(batch.ids.shape, dtype=torch.bool)
    modality, mask = batch.on_host("modality"), batch.on_host("attention_mask")
    for row, seed in enumerate(batch.seeds):
        places = ((modality[row] != TEXT) & mask[row]).nonzero()[:, 0]
        order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
        keep[row, places[order[: round(share * len(places))]]] = True
    return keep


class TokenTerms:
    """What is compared at each input, between the target's scores and those of every pass.

    Args:
        goal: [S,D] true states.
        scores: with a vocabulary of the draft's own the target's distribution is the one over its ids, and inputs whose
            likeliest token lies outside count nothing (EAGLE-3).
    """

    metrics = ("top1", "top3", "alpha", "top1_last")

    def __init__(self, objective: HeadObjective, goal: Tensor, weights: list[float], scores: GoalScores):
        self.objective, self.goal, self.scores = objective, goal, scores
        self.weights = uploaded(torch.tensor(weights, dtype=torch.float32), goal.device)

    def __call__(self, piece: slice, ours: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted sum over a piece of the [S*W] outputs, with the scores [C*W,V], and the metrics' sums."""
        passes = len(self.weights)
        ours = ours.unflatten(0, (-1, passes))  # [C,W,V]
        with torch.no_grad():
            goals = self.scores(self.goal[piece.start // passes : piece.stop // passes])
            theirs, known = goals.scores.to(ours.device, ours.dtype), goals.known.to(ours.device)  # [C,V], [C]
            best = theirs.argmax(-1)
            log_p = log_probs(theirs)
            never = theirs.isneginf()  # ids without a token have no score on either side
        terms = self._terms(log_p, theirs, ours, never) * known[:, None]
        loss = (terms * self.weights.to(terms)).sum()
        with torch.no_grad():
            first, last = (ours[:, number].masked_fill(never, float("-inf")) for number in (0, -1))
            ranked = first.topk(min(3, first.shape[-1]), dim=-1).indices == best[:, None]
            ranked &= known[:, None]
            alpha = (torch.minimum(log_p, log_probs(first)).exp().sum(-1) * known).sum()
            hits = (last.argmax(-1) == best) & known
            sums = torch.stack([ranked[:, 0].sum(), ranked.any(-1).sum(), alpha, hits.sum()]).float()
        return loss, sums

    def _terms(self, log_p: Tensor, theirs: Tensor, ours: Tensor, never: Tensor) -> Tensor:
        """[C,W], from the target's log-probabilities and scores [C,V] and those of all passes [C,W,V].

        A function of its own, so that its [C,W,V] temporaries are freed before the metrics are computed.
        """
        objective = self.objective
        if objective.token and objective.token_divergence == "soft_ce":
            total = objective.token * soft_cross_entropy(log_p.exp(), ours, never)
            if not (objective.l1 or objective.listmle):
                return total
        else:
            total = 0 * ours.amax(-1)  # part of the graph where no term is
        ours, log_p = ours.masked_fill(never[:, None], float("-inf")), log_p[:, None]
        log_q = log_probs(ours)
        if objective.token and objective.token_divergence != "soft_ce":
            total = total + objective.token * divergence_of_logs(objective.token_divergence, log_p, log_q)
        if objective.l1:
            total = total + 2 * objective.l1 * divergence_of_logs("tvd", log_p, log_q)
        if objective.listmle:
            lists = [list_mle(theirs, one, objective.top) for one in ours.unbind(1)]
            total = total + objective.listmle * torch.stack(lists, dim=1)
        return total


def add_noise(features: Tensor, uniforms: Tensor, lengths: Tensor, width: float) -> Tensor:
    """[B,N,D] with EAGLE's noise: of `width` at 512 places, more for the shorter of `lengths` [B].

    Args:
        uniforms: [B,N,D] in [0, 1).
    """
    widths = width * 512 / lengths.to(features.dtype)
    return features + (uniforms - 0.5) * widths[:, None, None]


def row_uniforms(
    like: Tensor, padding: Sequence[int], seeds: Sequence[int], lengths: Sequence[int] | None = None
) -> Tensor:
    """[B,N,D] in [0, 1), as `like`; 1/2 (no noise) in each row's `padding` places on the left and after its `lengths`.

    A row's draws follow from its seed and its own places: they do not depend on other rows or on the number of ranks.
    """
    assert len(seeds) == len(like), f"{len(like)} rows and {len(seeds)} seeds"
    uniforms = torch.full_like(like, 0.5)
    ends = lengths or [like.shape[1]] * len(like)
    for row, skipped, end, seed in zip(uniforms, padding, ends, seeds, strict=True):
        row[skipped:end].uniform_(generator=torch.Generator(like.device).manual_seed(seed))
    return uniforms
