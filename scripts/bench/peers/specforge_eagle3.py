"""The EAGLE-3 training step of sgl-project/SpecForge, offline: over the same states and weights.

As in `speculators_eagle3`, the target's states are there before a step begins, and the few tokens whose likeliest id
lies outside of the draft's are supervised on neither side. Their step scores the target with its whole LM head, as
their offline training does by default, and attends by their backend "sdpa": flex attention has no backward pass on a
CPU. What they compile is compiled (TORCH_COMPILE_DISABLE=1: it is not). Their loss is a Triton kernel, and on a CPU the
reference in the same file, compiled too, stands for it. Theirs is a mean over all places, ours over the supervised
ones: a factor.
"""

from __future__ import annotations

import argparse
import sys
import types
from typing import Any

import torch
from draftsmith.core.batch import Batch
from draftsmith.core.states import TargetStates
from peers.clones import empty_module, specforge
from peers.ours import layers_config
from peers.speculators_eagle3 import DECAY, HEAD, SCORES, Ours, over_states
from torch import Tensor
from transformers import LlamaConfig


class Theirs:
    """A step of theirs, over the same head."""

    def __init__(self, arguments: argparse.Namespace, ours: Ours):
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
        self.watched = {
            HEAD: [(draft, "project_hidden_states"), (draft, "backbone")],
            SCORES: [(self.target_head, "forward"), (eagle3, "_compute_target_p_padded"), (draft, "compute_logits"),
                     (self.model, "_acc_and_loss")],
        }  # fmt: skip

    def loss(self, batch: Batch, states: TargetStates, _: Any) -> Tensor:
        """Return the loss as `Ours.loss` does."""
        joined = torch.cat([states.layers[tap] for tap in self.taps], dim=-1)
        supervised, feature = batch.loss_mask[:, 1:], states.feature
        assert feature is not None
        # Token, the state before it, the state that scores what follows, and whether that is supervised.
        losses, *_ = self.model(
            batch.ids[:, 1:], torch.ones_like(supervised), self.target_head(feature[:, 1:]),
            supervised[..., None].long(), joined[:, :-1],
        )  # fmt: skip
        whole: Tensor = sum(DECAY**number * loss for number, loss in enumerate(losses))
        return whole * supervised.shape[1] / supervised.sum()


def specforge_eagle3(arguments: argparse.Namespace) -> None:
    """Prints the tables of `over_states`."""
    over_states(arguments, "SpecForge's EAGLE-3 step, tokens of a sample", Theirs)
