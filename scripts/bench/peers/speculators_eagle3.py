"""The EAGLE-3 training step of vllm-project/speculators 0.9, over the same states and weights.

As in `speculators_step`, the target's states are there before a step begins, and they attend with SDPA. Their loss is
the KL divergence, which is our cross-entropy less the target's entropy: the sample brings that number, and gradients
are equal as they are. They compare every token over the draft's ids, we count none whose likeliest id lies outside: for
both sides only those inside are supervised. Their LM head, which they hold still, is trained as ours is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from draftsmith.core.batch import Batch
from draftsmith.core.states import Taps, TargetStates
from draftsmith.models.drafters.draft_vocabulary import lm_head_rows
from peers import step_pairs, training_step
from peers.clones import speculators
from peers.ours import layers_config, target_config
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

BAR = 0.65  # of their step
DECAY = 0.8
HEAD, SCORES = "the head's passes", "LM heads and losses"


class Ours(training_step.Ours):
    """A step of ours, over states that are there."""

    def __init__(self, model: LlamaForCausalLM):
        super().__init__(model)
        self.watched = {HEAD: [(self.training, "passes")], SCORES: [(self.training.lm, "forward")]}

    def loss(self, *sample: Any) -> Tensor:
        """Mean over the supervised tokens of what `Samples` gives, weighted by pass."""
        batch, states, _ = sample
        found = self.training(batch, states)
        return found.loss_sum / found.num_tokens


class Theirs:
    """A step of theirs, over the same head."""

    def __init__(self, arguments: argparse.Namespace, ours: Ours):
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
        own = {name.replace("midlayer.", "layers.0."): value for name, value in head.state_dict().items()}
        frozen = {
            "embed_tokens.weight": target.embedding, "verifier_norm.weight": target.decoder.model.model.norm.weight,
            "verifier_lm_head.weight": lm_head_rows(target, head.draft_ids),
        }  # fmt: skip
        self.model.load_state_dict({**own, **frozen})
        self.model.lm_head.weight.requires_grad_(True)
        self.model.train()
        self.trained = {
            name.replace("layers.0.", "midlayer."): p for name, p in self.model.named_parameters() if p.requires_grad
        }
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=0.0)
        self.loss_config = resolve_loss_config("kl_div", "eager")
        self.passes = ours.training.num_passes
        self.watched = {
            HEAD: [(module, "forward") for module in (self.model.fc, *self.model.layers)],
            SCORES: [(self.model.lm_head, "forward"), (self.model.verifier_lm_head, "forward"),
                     (self.model.norm, "forward"), (core, "compute_metrics")],
        }  # fmt: skip

    def loss(self, batch: Batch, states: TargetStates, entropy: float) -> Tensor:
        """Return the loss as `Ours.loss` does."""
        joined = torch.cat([states.layers[tap] for tap in self.taps], dim=-1)
        # Token, the state before it, the state that scores what follows, and whether that is supervised.
        _, loss, _ = self.model(
            joined[:, :-1], batch.ids[:, 1:], torch.zeros_like(batch.ids[:, 1:]), batch.loss_mask[:, 1:],
            verifier_last_hidden_states=states.layers[self.last][:, 1:], ttt_steps=self.passes,
            ttt_step_loss_decay=DECAY, loss_config=self.loss_config,
        )  # fmt: skip
        return loss + entropy


class Samples:
    """A sample with its states, supervised where the target's likeliest token is one of the draft's."""

    def __init__(self, ours: Ours, length: int):
        target = ours.target
        ids, supervised = training_step.sample(0, length, target.vocab_size)
        self.batch = training_step.batch_of(ids, supervised)
        layers = (*ours.taps.layers, target.shape.num_layers)
        with torch.no_grad():
            self.states = target.states(self.batch, Taps(layers, feature=True, everywhere=True))
            scores = target.scores(self.states.feature[0])
            inside = torch.isin(scores.argmax(-1), ours.head.draft_ids)
            self.batch = training_step.batch_of(ids, supervised & inside)
            p = scores[:, ours.head.draft_ids].log_softmax(-1)
            entropies = -(p.exp() * p).sum(-1)[self.batch.loss_mask[0]]
        self.entropy = float(entropies.mean()) * sum(ours.training.weights)

    def __call__(self, number: int) -> tuple[Batch, TargetStates, float]:
        """What a step reads, whatever its number: no random draw is in it."""
        return self.batch, self.states, self.entropy


def over_states(
    arguments: argparse.Namespace, what: str, theirs_of: Callable[[argparse.Namespace, Ours], step_pairs.Trained]
) -> None:
    """Prints the tables of `step_pairs.over`."""

    def sides(size: str) -> Iterator[step_pairs.Sides]:
        model = LlamaForCausalLM(target_config(size, 7)).eval()
        # The likeliest token of a real target is nearly always one that a draft has.
        model.lm_head.weight.data[::4] *= 4
        ours = Ours(model)
        yield "", ours, theirs_of(arguments, ours), partial(Samples, ours), step_pairs.TOLERANCE

    step_pairs.over(arguments, what, BAR, sides)


def speculators_eagle3(arguments: argparse.Namespace) -> None:
    """Prints the tables of `over_states`."""
    over_states(arguments, "speculators' EAGLE-3 step, tokens of a sample", Theirs)
