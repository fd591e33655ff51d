"""The training steps of sgl-project/SpecForge, offline: EAGLE-3 and DFlash, over the same states and weights.

They attend by their backend "sdpa": flex attention has no backward pass on a CPU. What they compile is compiled
(TORCH_COMPILE_DISABLE=1: it is not).
"""

from __future__ import annotations

import argparse
import sys
import types
from typing import Any

import torch
from draftsmith.core.batch import Batch
from draftsmith.core.states import TargetStates
from peers.steps import (
    TAPS,
    OurBlocks,
    OurHead,
    blocks_config,
    empty_module,
    layers_config,
    replaced,
    specforge,
)
from torch import Tensor
from transformers import LlamaConfig

GAMMA = 7.0  # of all its published configs; our decay for blocks of 16


class Head:
    """EAGLE-3. Their step scores the target with its whole LM head; their loss is a mean over all places: a factor.

    That loss is a Triton kernel, and on a CPU the reference in the same file, compiled too, stands for it.
    """

    def __init__(self, arguments: argparse.Namespace, ours: OurHead):
        specforge(arguments.peers, "eagle3")
        torch.compile(len)  # torch looks for Triton now, and finds none
        empty_module("triton", jit=lambda kernel: kernel)  # of which no kernel is called
        empty_module("triton.language", constexpr=int)
        from specforge.core import loss  # type: ignore[import-not-found]

        del sys.modules["triton"], sys.modules["triton.language"]
        from specforge.algorithms.eagle3 import model as eagle3  # type: ignore[import-not-found]
        from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3  # type: ignore[import-not-found]

        eagle3.LogSoftmaxLoss = types.SimpleNamespace(apply=loss._compute_loss)
        head, target = ours.head, ours.target
        self.taps = ours.settings.layers_of(target.shape)
        config = layers_config(LlamaConfig, head.shape, target, pretraining_tp=1)
        config.draft_vocab_size = len(head.draft_ids)
        draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
        draft.load_state_dict({**head.state_dict(), "embed_tokens.weight": target.embedding})
        draft.freeze_embedding()
        self.target_head = target.decoder.model.lm_head.requires_grad_(False)
        self.model = eagle3.OnlineEagle3Model(draft, ours.training.num_passes, "sdpa").train()
        self.trained = {name: p for name, p in draft.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=0.0)

    def loss(self, batch: Batch, states: TargetStates, _: Any) -> Tensor:
        joined = torch.cat([states.layers[tap] for tap in self.taps], dim=-1)
        supervised, feature = batch.loss_mask[:, 1:], states.feature
        assert feature is not None
        # Token, the state before it, the state that scores what follows, and whether that is supervised.
        losses, *_ = self.model(
            batch.ids[:, 1:], torch.ones_like(supervised), self.target_head(feature[:, 1:]),
            supervised[..., None].long(), joined[:, :-1],
        )  # fmt: skip
        whole: Tensor = sum(0.8**number * loss for number, loss in enumerate(losses))
        return whole * supervised.shape[1] / supervised.sum()


class Blocks:
    """DFlash, with its defaults: the LM head runs in pieces of 128 blocks, and again in the backward pass.

    Its loss is divided by the places' weights, which of whole blocks is our mean: no factor.
    """

    def __init__(self, arguments: argparse.Namespace, ours: OurBlocks, _: Any):
        specforge(arguments.peers, "common")
        from specforge.algorithms.common import dflash_family_model as dflash  # type: ignore[import-not-found]

        shape, base = ours.head.shape, ours.target.decoder.model.requires_grad_(False)
        config: Any = blocks_config(ours)
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

    def loss(self, batch: Batch, states: TargetStates, anchors: Tensor) -> Tensor:
        joined = torch.cat([states.layers[tap] for tap in TAPS], dim=-1)
        same = anchors[None], torch.ones_like(anchors[None]).bool()
        with replaced(self.model, "_sample_anchor_positions", same):
            loss, _, _ = self.model(batch.ids, joined, batch.loss_mask.long())
        return loss
