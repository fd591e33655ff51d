"""The training steps of vllm-project/speculators 0.9: EAGLE-3, DFlash and DSpark, over the same states and weights.

On a CPU they attend with SDPA (flex attention has no backward pass there) and compare without their Triton kernels.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from draftsmith.core.batch import Batch
from draftsmith.core.states import TargetStates
from draftsmith.models.drafters.draft_vocabulary import lm_head_rows
from peers.steps import TAPS, OurBlocks, OurHead, blocks_config, layers_config, replaced, speculators
from torch import Tensor
from transformers import LlamaConfig


class Head:
    """EAGLE-3. Their loss is the KL divergence, our cross-entropy less the target's entropy, which the sample brings.

    Their LM head, which they hold still, is trained as ours is.
    """

    def __init__(self, arguments: argparse.Namespace, ours: OurHead):
        speculators(arguments.peers)
        from speculators.losses.utils import resolve_loss_config  # type: ignore[import-not-found]
        from speculators.models.eagle3 import core  # type: ignore[import-not-found]

        head, target = ours.head, ours.target
        self.taps = ours.settings.layers_of(target.shape)
        self.last = target.shape.num_layers
        settings = core.Eagle3SpeculatorConfig(
            transformer_layer_config=layers_config(LlamaConfig, head.shape, target, attn_implementation="sdpa"),
            draft_vocab_size=len(head.draft_ids), norm_before_residual=False,
            eagle_aux_hidden_state_layer_ids=list(self.taps),
        )  # fmt: skip
        self.model = core.Eagle3DraftModel(settings)
        weights = {name.replace("midlayer.", "layers.0."): value for name, value in head.state_dict().items()}
        frozen = {
            "embed_tokens.weight": target.embedding, "verifier_norm.weight": target.decoder.model.model.norm.weight,
            "verifier_lm_head.weight": lm_head_rows(target, head.draft_ids),
        }  # fmt: skip
        self.model.load_state_dict({**weights, **frozen})
        self.model.lm_head.weight.requires_grad_(True)
        self.model.train()
        self.trained = {
            name.replace("layers.0.", "midlayer."): p for name, p in self.model.named_parameters() if p.requires_grad
        }
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=0.0)
        self.loss_config = resolve_loss_config("kl_div", "eager")
        self.passes = ours.training.num_passes

    def loss(self, batch: Batch, states: TargetStates, entropy: float) -> Tensor:
        joined = torch.cat([states.layers[tap] for tap in self.taps], dim=-1)
        # Token, the state before it, the state that scores what follows, and whether that is supervised.
        _, loss, _ = self.model(
            joined[:, :-1], batch.ids[:, 1:], torch.zeros_like(batch.ids[:, 1:]), batch.loss_mask[:, 1:],
            verifier_last_hidden_states=states.layers[self.last][:, 1:], ttt_steps=self.passes,
            ttt_step_loss_decay=0.8, loss_config=self.loss_config,
        )  # fmt: skip
        return loss + entropy


class Blocks:
    """DFlash and DSpark. Their loss is divided by places and ours by the places' weights: a factor."""

    def __init__(self, arguments: argparse.Namespace, ours: OurBlocks, losses: dict[str, float]):
        speculators(arguments.peers)
        from speculators.losses.utils import resolve_loss_config
        from speculators.models.dflash import core as dflash  # type: ignore[import-not-found]
        from speculators.models.dspark import core as dspark  # type: ignore[import-not-found]

        shape, target = ours.head.shape, ours.target
        self.core = dflash
        kind = dspark.DSparkDraftModel if shape.sample_from_anchor else dflash.DFlashDraftModel
        self.model = kind(kind.config_class(
            transformer_layer_config=blocks_config(ours), draft_vocab_size=target.vocab_size,
            block_size=shape.block_size, aux_hidden_state_layer_ids=[tap - 1 for tap in shape.taps],
            mask_token_id=shape.mask_token_id, sample_from_anchor=shape.sample_from_anchor,
        ))  # fmt: skip
        scores, norm = target.decoder.model.lm_head.weight, target.decoder.model.model.norm.weight
        frozen = {
            "embed_tokens.weight": target.embedding, "lm_head.weight": scores, "verifier_lm_head.weight": scores,
            "verifier_norm.weight": norm,
        }  # fmt: skip
        self.model.load_state_dict({**ours.head.state_dict(), **frozen})
        self.model.train()
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=0.0)
        weights = ours.training.loss.weights(shape.block_size, shape.num_drafts)
        self.factor = weights[0] * shape.num_drafts  # our first weight of a place that they give 1
        config = {name: (resolve_loss_config(name, "eager")[name][0], weight) for name, weight in losses.items()}
        self.options: dict[str, Any] = {"loss_config": config, "gamma": 4.0 if shape.block_size <= 8 else 7.0}
        if shape.sample_from_anchor:
            self.options["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]

    def loss(self, batch: Batch, states: TargetStates, anchors: Tensor) -> Tensor:
        joined = torch.cat([states.layers[tap] for tap in TAPS], dim=-1)
        with replaced(self.core, "select_anchors", (anchors, torch.ones_like(anchors).bool())):
            _, loss, _ = self.model(
                joined, batch.ids, batch.loss_mask, states.layers[TAPS[-1] + 1], torch.zeros_like(batch.ids),
                max_anchors=len(anchors), **self.options,
            )  # fmt: skip
        return loss * self.factor
