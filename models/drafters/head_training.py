"""The training forward of hidden-state heads: one pass over the true states, then passes over its own.

A batch without pictures or without a supervised slot makes the same module calls as any other, so that ranks stay
together under ZeRO. Letters: B rows, T places, N slots, S trained slots, W passes, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.loss import StepLoss
from ...core.nouns import Batch
from ...core.pictures import TEXT
from ...core.states import TargetStates
from ..targets.base import Target
from .head_inputs import Filled, Sequences, base_positions, fill, lay_out, with_gaps
from .head_losses import HeadObjective, TokenTerms, pass_weights
from .head_module import StateHead
from .noise import add_noise, row_uniforms

if TYPE_CHECKING:
    from .head_config import HeadConfig


class HeadTraining(nn.Module):
    """`engine(batch, states)` gives the loss. Of the frozen target only its embedding and LM head are used.

    Args:
        objective: of the stage; None: the config's.
    """

    def __init__(self, head: StateHead, target: Target, config: HeadConfig, objective: HeadObjective | None = None):
        super().__init__()
        self.head, self.config, self.objective = head, config, objective or config.terms
        self.target = target  # no module: neither the optimizer nor a checkpoint sees it
        steps = self.objective.mtp_steps
        self.num_passes = 1 + (config.mtp_steps if steps is None else steps)
        self.weights = pass_weights(self.objective, self.num_passes)
        chunk = self.objective.chunk * self.num_passes
        self.lm = head.lm_head_of(target.scores, chunk, target.embedding.dtype)

    def parts(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        return {"head": [(name, p) for name, p in self.head.named_parameters() if p.requires_grad]}

    def forward(self, batch: Batch, states: TargetStates) -> StepLoss:
        """Sums over trained slots: those whose token is supervised.

        Metrics are sums as well: hits of the target's best token by the first pass (top1, top3) and the last one
        (top1_last), and alpha of the first, the chance that a drafted token is accepted.
        """
        filled, positions = self.fill(batch, states)
        keep = filled.layout.pick(batch.loss_mask, 1) & filled.layout.real & ~filled.layout.visual
        outputs = torch.stack(self.passes(filled, positions, batch), dim=2)[keep]  # [S,W,D]
        assert states.feature is not None
        goal = filled.layout.pick(states.feature, 1)[keep]
        terms = TokenTerms(self.objective, goal, self.weights, self.target_scores, self.head.draft_ids)
        loss, sums = self.lm(self.head.hidden(outputs).flatten(0, 1), terms)
        if self.objective.feature:
            away = F.smooth_l1_loss(
                outputs.float(), goal.float()[:, None].expand_as(outputs), reduction="none"
            ).mean(-1)  # fmt: skip
            loss = loss + self.objective.feature * (away * away.new_tensor(self.weights)).sum()
        return StepLoss(loss, keep.sum(), dict(zip(TokenTerms.metrics, sums, strict=True)))

    def fill(self, batch: Batch, states: TargetStates) -> tuple[Filled, Tensor]:
        """What stands in the slots, and their positions."""
        config, target = self.config, self.target
        visual, reads = config.visual(training=True), config.reads(target.shape, training=True)
        share, keep = config.trained_visual_share, None
        if visual == "direct" and 0 < share < 1:
            keep = _drawn(batch, share)
        vectors = self.head.num_queries - 1 if self.head.num_queries else 0
        layout = lay_out(visual, batch.modality, batch.attention_mask, num_vectors=vectors, keep=keep)
        assert states.positions is not None
        sequences = Sequences(
            batch.ids, batch.attention_mask, batch.modality, states.positions, states.feature, states.layers
        )
        filled = fill(self.head, visual, reads, layout, sequences, target.embedding.detach())
        held = config.visual(training=False) == visual
        positions = base_positions(config.positions, layout, sequences, visual_held=held)
        if self.training and config.gap_share:
            assert len(batch.seeds) == len(batch.ids), "gaps are drawn from each row's seed"
            positions = with_gaps(positions, layout, _gaps(batch.seeds, config.gap_share, config.gap))
        return filled, positions

    def passes(self, filled: Filled, positions: Tensor, batch: Batch) -> list[Tensor]:
        """Outputs [B,N,D] of every pass, all with a gradient."""
        config, layout, head = self.config, filled.layout, self.head
        states = filled.states
        if self.training and self.objective.noise:
            lengths = batch.attention_mask.sum(1)
            uniforms = row_uniforms(states, [0] * len(states), batch.seeds, layout.real.sum(1).tolist())
            states = add_noise(states, uniforms, lengths, self.objective.noise)
        true = filled.fused(head, states)
        text = layout.real & ~layout.visual
        replaced = (text & (layout.follows_text if config.replace == "after_text" else layout.follows))[..., None]
        count, ttt = true.shape[1], config.mtp_attention == "ttt"
        keys = _Keys()
        outputs: list[Tensor] = []
        for step in range(self.num_passes):
            states = true if step == 0 else torch.where(replaced, F.pad(outputs[-1], (0, 0, 1, 0))[:, :-1], true)
            depths = torch.full_like(layout.index, step)
            # Padding stands behind a row's slots: causal is enough, and needs no [N,N].
            mask = diagonals(count, step, true.device) if ttt and step else None
            outputs.append(
                head(
                    filled.embeds, states, positions, mask, keys if ttt else None,
                    direct=filled.direct, image=filled.image, depths=depths,
                )
            )  # fmt: skip
        return outputs

    def target_scores(self, states: Tensor) -> Tensor:
        """[...,D] -> [...,V] float32."""
        target = self.target
        return target.scores(states.to(target.embedding.dtype))


def diagonals(count: int, step: int, device: torch.device) -> Tensor:
    """[N,(step+1)N] bool, over the keys of all passes so far: what a slot drafted `step` steps behind a true one sees.

    Slot i of pass s stands behind true states up to slot i - s, and behind its own drafts: slot i - s + r of pass r.
    """
    slot = torch.arange(count, device=device)
    blocks = [slot[None] <= slot[:, None] - step]
    blocks += [slot[None] == slot[:, None] - step + number for number in range(1, step + 1)]
    return torch.cat(blocks, dim=1)


class _Keys:
    """Stands in for a cache of one layer: keys and values [B,H,N,E] of all passes beside each other, with gradients."""

    def __init__(self) -> None:
        self.own_layers = [self]
        self.held: tuple[Tensor, Tensor] | None = None

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.held is not None:
            keys, values = torch.cat([self.held[0], keys], 2), torch.cat([self.held[1], values], 2)
        self.held = keys, values
        return keys, values


def _gaps(seeds: Sequence[int], share: float, most: int) -> list[int | None]:
    """Each row's gap in places, or None, from its seed."""
    found: list[int | None] = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        drawn = float(torch.rand((), generator=generator)) < share
        gap = int(torch.randint(most + 1, (), generator=generator))
        found.append(gap if drawn else None)
    return found


def _drawn(batch: Batch, share: float) -> Tensor:
    """[B,T] bool: visual places that this epoch keeps, drawn from each row's seed."""
    keep = torch.zeros(batch.ids.shape, dtype=torch.bool)
    for row, seed in enumerate(batch.seeds):
        places = ((batch.modality[row] != TEXT) & batch.attention_mask[row]).nonzero()[:, 0].cpu()
        order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
        keep[row, places[order[: round(share * len(places))]]] = True
    return keep
