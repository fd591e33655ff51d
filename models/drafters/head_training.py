"""The training forward of hidden-state heads, in its order: which inputs the layer has, what each one holds, the pass
over true states and those over the head's own outputs (EAGLE-3's training-time test), and the loss.

Input j pairs token j + 1 with the state at index j. Kinds of heads differ in what a visual input holds. Rows hold only
the inputs that they keep, in order and padded on the right, so dropped inputs cost nothing. A batch without pictures
or without a supervised token makes the same module calls as any other, so that ranks stay together under ZeRO.
Letters: B rows, T tokens, N inputs that a row keeps, M of a packed row, D width, J joined states, R rows of positions,
S trained inputs, C of a piece, W passes, V vocabulary (the draft's own, in EAGLE-3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.batch import Batch, StepLoss
from ...core.pictures import TEXT
from ...core.states import OnDevice, TargetStates, at_places, places_of, uploaded
from ..losses import divergence_of_logs, list_mle, log_probs, soft_cross_entropy
from ..packed_row import PackedRow, runs_samples
from ..targets.base import Target
from ..training_passes import TrainingPasses
from .base import HeadObjective
from .draft_vocabulary import BesideTarget, GoalScores
from .head_draws import add_noise, gaps_of, row_uniforms, visual_mask
from .head_module import StateHead
from .head_settings import HeadSettings, Reads, Visual


@dataclass(frozen=True)
class Layout(OnDevice):
    """The inputs of each row."""

    index: Tensor  # [B,N] int64 number of the input; 0 where `real` is False
    real: Tensor  # [B,N] bool
    visual: Tensor  # [B,N] bool: its token is visual
    runs: tuple[tuple[int, int, int], ...]  # row, first place and end of each picture: a stretch of one modality

    def pick(self, values: Tensor, shift: int = 0) -> Tensor:
        """[B,T,...] at the inputs' places, or `shift` after them: [B,N,...]."""
        places = (self.index + shift).clamp(max=values.shape[1] - 1)
        return torch.gather(values, 1, places.view(*places.shape, *[1] * (values.dim() - 2)).expand(
            *places.shape, *values.shape[2:]))  # fmt: skip

    def follows(self, *, text: bool) -> Tensor:
        """[B,N] bool: the previous input of the sequence was kept too, and under `text` it is text."""
        before = torch.zeros_like(self.real)
        before[:, 1:] = (self.index[:, 1:] == self.index[:, :-1] + 1) & self.real[:, 1:]
        if text:
            before[:, 1:] &= ~self.visual[:, :-1]
        return before


def layout_of(
    visual: Visual, modality: Tensor, mask: Tensor, *, num_vectors: int = 0, keep: Tensor | None = None,
    device: torch.device | None = None,
) -> Layout:  # fmt: skip
    """
    Args:
        modality, mask: [B,T], best on the CPU: what follows depends on their values.
        num_vectors: of `compressed`: inputs that a picture keeps, its last ones.
        keep: [B,T] bool: visual tokens whose inputs stay, of those that the kind has; None: all.
        device: of the layout; None: where `modality` is.
    """
    modality_, mask_ = modality.cpu(), mask.cpu()
    runs: list[tuple[int, int, int]] = []
    for row, kinds in enumerate(torch.where(mask_, modality_, TEXT).int()):
        values, lengths = torch.unique_consecutive(kinds, return_counts=True)
        stretches = zip(values.tolist(), lengths.tolist(), lengths.cumsum(0).tolist(), strict=True)
        runs += [(row, end - length, end) for kind, length, end in stretches if kind != TEXT]
    of_pictures = modality_[:, 1:] != TEXT  # [B,T-1] of inputs
    stays = ~of_pictures if visual in ("none", "compressed") else torch.ones_like(of_pictures)
    if visual == "compressed":
        for row, first, end in runs:
            stays[row, max(end - 1 - num_vectors, first - 1, 0) : end - 1] = True
    if keep is not None:
        stays = stays & (~of_pictures | keep[:, 1:].cpu())
    stays = stays & mask_[:, 1:]
    counts = stays.sum(1)
    real = torch.arange(max(1, int(counts.max()))) < counts[:, None]
    # A stable sort of "dropped" puts what is kept in front, in order.
    order = torch.sort((~stays).to(torch.int8), dim=1, stable=True).indices[:, : real.shape[1]]
    index = torch.where(real, order, 0)
    is_visual = torch.gather(of_pictures, 1, index) & real
    return Layout(index, real, is_visual, tuple(runs)).to(modality.device if device is None else device)


@dataclass(frozen=True)
class Filled:
    """The layer's inputs by a layout, without positions. Pairs are a mask of inputs [B,N] bool, and what
    they hold [B,N,D].
    """

    layout: Layout
    embeds: Tensor  # [B,N,D]
    states: Tensor  # [B,N,J*D] true ones, not fused yet
    middle: tuple[Tensor, Tensor] | None  # state halves that are no true states
    direct: tuple[Tensor, Tensor] | None  # as of `FusedHead.forward`
    image: Tensor | None  # [B,N,D], as of `FusedHead.forward`

    def each(self, change: Callable[[Tensor], Tensor]) -> Filled:
        """The same of what `change` makes of each tensor [B,N,...]; the layout stays."""
        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                changed[name] = change(value)
            elif isinstance(value, tuple):
                changed[name] = tuple(map(change, value))
        return replace(self, **changed)

    def fused(self, head: StateHead, states: Tensor | None = None) -> Tensor:
        """[B,N,D] state halves of a first pass; `states` in place of the true ones (with noise)."""
        fused = head.fuse((self.states if states is None else states).to(head.dtype))
        return fused if self.middle is None else torch.where(self.middle[0].unsqueeze(-1), self.middle[1], fused)


def fill(
    head: StateHead, visual: Visual, reads: Reads, layout: Layout, ids: Tensor, states: TargetStates, embedding: Tensor
) -> Filled:
    """Gather the content of each input, of ids [B,T] and states of the places [B,T or T-1,D]: of the last place the
    state is read where some input's goal is. `embedding` [V,D] is the target's.
    """
    dtype = head.dtype
    embeds = head.embed(layout.pick(ids, 1), embedding)
    if reads.image is not None:
        projected = layout.pick(states.layers[reads.image], 1).to(dtype)
        embeds = torch.where(layout.visual.unsqueeze(-1), projected, embeds)
    if reads.state:
        true = torch.cat([layout.pick(states.layers[layer]) for layer in reads.state], dim=-1)
    else:
        assert states.feature is not None
        true = layout.pick(states.feature)
    middle = direct = image = None
    if head.num_queries:
        direct, image = head.pictured(visual, layout, states.layers)
    if reads.visual is not None and visual in ("direct", "middle"):
        held = layout.visual, layout.pick(states.layers[reads.visual], 1).to(dtype)
        direct, middle = (held, None) if visual == "direct" else (None, held)
    return Filled(layout, embeds, true, middle, direct, image)


def base_positions(kind: str, layout: Layout, positions: Tensor, *, visual_held: bool) -> Tensor:
    """[B,N], or [3,B,N] of the target's `positions` [R,B,T] under M-RoPE, before any gap is drawn. `compact` counts
    inputs; in a row with visual inputs that only training holds (`visual_held` is False) it has no meaning, and `flat`
    stands for it.
    """
    if kind == "mrope":
        return torch.stack([layout.pick(rows) for rows in positions])
    if kind == "flat":
        return layout.index
    counted = torch.arange(layout.index.shape[1], device=layout.index.device).expand_as(layout.index)
    return counted if visual_held else torch.where(layout.visual.any(1, keepdim=True), layout.index, counted)


def with_gaps(positions: Tensor, layout: Layout, gaps: Sequence[int | None]) -> Tensor:
    """Positions [B,N] or [3,B,N] where text after a row's last picture stands `gap` places after the text before that
    picture; None leaves a row.
    """
    moved = positions.clone()
    real, visual, index = (layout.on_host(name) for name in ("real", "visual", "index"))
    last = {row: (first, end) for row, first, end in layout.runs}  # in the order of their places
    for row, gap in enumerate(gaps):
        if gap is None or row not in last:
            continue
        first, end = last[row]
        before = (real[row] & ~visual[row] & (index[row] < first - 1)).nonzero()[:, 0]
        text_after = real[row] & (index[row] >= end - 1)
        if not bool(text_after.any()):
            continue
        here = positions[..., row, :]
        device = here.device
        ends_at = here[..., uploaded(before, device)].amax(-1) if len(before) else torch.full_like(here[..., 0], -1)
        starts_at = here[..., uploaded(text_after.nonzero()[:, 0], device)].amin(-1)
        shifted = here + (gap - (starts_at - ends_at - 1))[..., None]
        moved[..., row, :] = torch.where(uploaded(text_after, device), shifted, here)
    return moved


class HeadTraining(BesideTarget):
    """`engine(batch, states)` gives the loss, by the stage's `objective` or else the config's. Of the frozen target
    only its embedding and LM head are used.
    """

    def __init__(self, head: StateHead, target: Target, config: HeadSettings, objective: HeadObjective | None = None):
        super().__init__(head, target)
        self.head: StateHead = head
        self.config, self.objective = config, objective or config.terms
        self.goal_scores, self.embedding = GoalScores(target, head), target.embedding.detach()
        self.visual, self.reads = config.visual(training=True), config.reads(target.shape, training=True)
        self.held = config.visual(training=False) == self.visual
        steps = self.objective.mtp_steps
        self.num_passes = 1 + (config.mtp_steps if steps is None else steps)
        decay, count = self.objective.decay, self.num_passes
        self.weights = [1 / count] * count if decay is None else [decay**step for step in range(count)]
        chunk = self.objective.chunk * self.num_passes
        self.lm = head.lm_head_of(target.scores, chunk, target.embedding.dtype)

    def forward(self, batch: Batch, states: TargetStates) -> StepLoss:
        """Return sums over trained inputs.

        An input holds token j + 1 and state j. It is trained where token j + 1 is supervised and not visual; its goal
        is state j + 1, which scores token j + 2.

        Metrics are sums as well: hits of the target's best token by the first pass (top1, top3) and the last one
        (top1_last), and alpha of the first, the chance that a drafted token is accepted. For a draft with its own
        vocabulary, alpha is the chance under the target's distribution over the draft's ids alone.
        """
        filled, positions = self.fill(batch, states)
        layout, device = filled.layout, filled.embeds.device
        real = layout.on_host("real")
        trained = torch.gather(batch.on_host("loss_mask"), 1, layout.on_host("index") + 1)  # [B,N]
        trained = trained & real & ~layout.on_host("visual")
        places = places_of(trained, device)  # [2,S]
        row = PackedRow.of(real, device) if batch.packed else None
        skipped = self._skipped(trained) if row is None else 0
        passes = torch.stack(self.passes(filled, positions, batch, row, skipped=skipped), dim=2)
        in_row = places if row is None else places_of(trained[real][None], device)
        outputs = at_places(passes, in_row, -skipped)  # [S,W,D]
        assert states.feature is not None
        goal = at_places(layout.pick(states.feature, 1), places)  # [S,D]
        terms = TokenTerms(self.objective, goal, self.weights, self.goal_scores)
        loss, sums = self.lm(self.head.hidden(outputs).flatten(0, 1), terms)
        if self.objective.feature:
            true = goal.float()[:, None].expand_as(outputs)
            away = F.smooth_l1_loss(outputs.float(), true, reduction="none").mean(-1)
            weights = uploaded(torch.tensor(self.weights, dtype=away.dtype), away.device)
            loss = loss + self.objective.feature * (away * weights).sum()
        count = torch.full((), places.shape[1], device=loss.device)
        return StepLoss(loss, count, dict(zip(TokenTerms.metrics, sums, strict=True)))

    def fill(self, batch: Batch, states: TargetStates) -> tuple[Filled, Tensor]:
        """The inputs of the layer, and their positions [B,N] or [3,B,N]."""
        config, visual = self.config, self.visual
        share = config.visual_fraction(training=True) if visual == "direct" else 1.0
        draws = bool(config.blind_share) or share not in (0.0, 1.0)
        keep = visual_mask(batch, share, config.blind_share) if draws else None
        layout = layout_of(
            visual, batch.on_host("modality"), batch.on_host("attention_mask"),
            num_vectors=max(0, self.head.num_queries - 1), keep=keep, device=batch.ids.device,
        )  # fmt: skip
        filled = fill(self.head, visual, self.reads, layout, batch.ids, states, self.embedding)
        assert states.positions is not None
        positions = base_positions(config.positions, layout, states.positions, visual_held=self.held)
        if self.training and config.gap_share:
            assert len(batch.seeds) == len(batch.ids), "gaps are drawn from each row's seed"
            positions = with_gaps(positions, layout, gaps_of(batch.seeds, config.gap_share, config.gap))
        return filled, positions

    def _skipped(self, trained: Tensor) -> int:
        """The number of inputs that no later pass has to run, given [B,N] which ones are trained: under `ttt` later
        passes are read by their own chains alone, so what stands more than a chain before the first trained input
        counts nothing.
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
        config, layout, head, true = self.config, filled.layout, self.head, filled.states
        if self.training and self.objective.noise:
            uniforms = row_uniforms(true, [0] * len(true), batch.seeds, layout.on_host("real").sum(1).tolist())
            true = add_noise(true, uniforms, batch.attention_mask.sum(1), self.objective.noise)
        filled = replace(filled, states=filled.fused(head, true), middle=None)
        # [B,N,1]: where later passes read the output before an input in place of its true state.
        follows = layout.follows(text=config.replace == "after_text")
        replaced = (layout.real & ~layout.visual & follows)[..., None]
        # Padding comes after a row's inputs, so causal attention suffices and no [N,N] mask is needed.
        mask = segments = None
        if row is not None:
            filled, replaced, segments = filled.each(row.pack), row.pack(replaced), row.numbers[None]
            positions = row.pack(positions) if positions.dim() == 2 else torch.stack([*map(row.pack, positions)])
            if config.mtp_attention != "ttt":
                # A GPU without a kernel of samples in a row (flash attention, of 16 bits) would launch one for each.
                mask = row.bounds if runs_samples(filled.states) else row.mask[None, None]
        keys: TrainingPasses | None = None
        if config.mtp_attention == "ttt":
            keys = TrainingPasses(self.num_passes, segments, skipped, head.shape.sliding_window)
        outputs: list[Tensor] = []
        for step in range(self.num_passes):
            states = filled.states
            if step == 1:
                unreplaced, taken = states.masked_fill(replaced, 0), replaced.to(states)
            if step:
                # In a packed row a sample's first input is not replaced: the input before it is another sample's.
                before = F.pad(outputs[-1], (0, 0, 1, -1))
                # A choice by a mask of one column takes a CPU several times as long; in float16 an output that nobody
                # reads may be infinite.
                choose = states.dtype == torch.float16
                states = torch.where(replaced, before, states) if choose else torch.addcmul(unreplaced, before, taken)
            depths = torch.full(states.shape[:2], step, device=states.device) if head.num_steps else None
            outputs.append(head(
                filled.embeds, states, positions, mask, keys, direct=filled.direct, image=filled.image, depths=depths,
            ))  # fmt: skip
            if skipped and not step:
                filled, positions = filled.each(lambda values: values[:, skipped:]), positions[..., skipped:]
                replaced = replaced[:, skipped:]
        return outputs


class TokenTerms:
    """What is compared at each input, between the target's scores of the true states `goal` [S,D] and those of every
    pass. With a vocabulary of the draft's own the target's distribution is the one over its ids, and inputs whose
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
