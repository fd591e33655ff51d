"""The DFlash training step of sgl-project/SpecForge, offline: over the same states, weights and anchors.

As in `speculators_step`, the target's states are there before a step begins, and each side draws its anchors and takes
the same ones. Theirs has its defaults (the LM head runs in pieces of 128 blocks, and again in the backward pass), the
decay 7 of all its published configs, which is ours for blocks of 16, and the backend "sdpa": flex attention has no
backward pass on a CPU. Its loss is divided by the places' weights, which of whole blocks is our mean: no factor.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from draftsmith.core.batch import Batch
from draftsmith.core.states import TargetStates
from peers.clones import specforge
from peers.pairs import watched
from peers.speculators_step import MASKS, PASS, SCORES, TAPS, Ours, draft_config, drawn, over_blocks
from torch import Tensor

GAMMA = 7.0


class Theirs:
    """A step of theirs, over the same draft."""

    def __init__(self, arguments: argparse.Namespace, ours: Ours, _: Any):
        specforge(arguments.peers, "common")
        from specforge.algorithms.common import dflash_family_model as dflash  # type: ignore[import-not-found]

        shape, base = ours.head.shape, ours.target.decoder.model.requires_grad_(False)
        config: Any = draft_config(ours.head, ours.target)
        config.num_target_layers, config.block_size = base.config.num_hidden_layers, shape.block_size
        config.dflash_config = {
            "target_layer_ids": [tap - 1 for tap in shape.taps], "mask_token_id": shape.mask_token_id,
        }  # fmt: skip
        draft = dflash.DFlashDraftModel(config)
        draft.load_state_dict(ours.head.state_dict())
        self.model = dflash.OnlineDFlashModel(
            draft, base.lm_head, base.model.embed_tokens, shape.mask_token_id, block_size=shape.block_size,
            attention_backend="sdpa", loss_decay_gamma=GAMMA,
        ).train()  # fmt: skip
        self.trained = dict(draft.named_parameters())
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=0.0)
        self.watched = {
            MASKS: [(self.model, "_sample_anchor_positions"), (dflash, "create_dflash_sdpa_mask")],
            PASS: [(draft, "forward")],
            SCORES: [(self.model, "_dflash_objective_chunk_terms")],  # in the backward pass, too
        }

    def loss(self, batch: Batch, states: TargetStates, anchors: Tensor) -> Tensor:
        """Return the loss as `Ours.loss` does."""
        joined = torch.cat([states.layers[tap] for tap in TAPS], dim=-1)
        same = anchors[None], torch.ones_like(anchors[None]).bool()
        with watched([(self.model, "_sample_anchor_positions")], partial(drawn, same)):
            loss, _, _ = self.model(batch.ids, joined, batch.loss_mask.long())
        return loss


def specforge_dflash(arguments: argparse.Namespace) -> None:
    """Prints the tables of `over_blocks`."""
    over_blocks(arguments, "SpecForge's DFlash step, tokens of a sample", ["DFlash"], Theirs)
