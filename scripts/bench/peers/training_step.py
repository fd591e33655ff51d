"""SafeAILab/EAGLE's EAGLE-3 training step (`eagle/traineagle3`): the same target, head, samples and AdamW.

Each step runs the frozen target over one sample, then seven passes of the head, backward and AdamW, without DeepSpeed
on either side and without their gradient checkpointing, which runs each pass twice. Their loss mask stands at the token
before the one that ours names, and their loss is a mean over all places: both are made alike here, not in their files.
"""

from __future__ import annotations

import argparse
import copy
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from draftsmith.core.batch import Batch
from draftsmith.core.pictures import TEXT
from draftsmith.models.drafters.eagle3 import Eagle3Config
from draftsmith.models.targets.causal.section import CausalTarget
from peers import step_pairs
from peers.clones import EAGLE, clone
from peers.official_eagle import plain_config
from peers.ours import SIZES, prompt, target_config
from peers.pairs import TARGET
from torch import Tensor
from transformers import LlamaForCausalLM

BAR = 0.75  # of their step


class Ours:
    """A step of ours: the target's states, then the head's objective."""

    def __init__(self, model: LlamaForCausalLM):
        target = CausalTarget(model, num_token_ids=model.config.vocab_size)
        # What is scored: every fourth id, as published heads score 32,000 of 128,256.
        counts = (torch.arange(target.vocab_size) % 4 == 0).long()
        self.settings = Eagle3Config(kind="eagle3", draft_vocab_size=target.vocab_size // 4)
        self.target = target
        self.watched = {TARGET: [(target, "states")]}
        self.head = self.settings.build(target, count_tokens=lambda: counts)
        self.training = self.settings.training_objective(self.head, target).train()
        self.taps = self.settings.taps_for(target.shape, training=True)
        self.trained = dict(self.head.named_parameters())
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=0.0)

    def loss(self, ids: Tensor, supervised: Tensor) -> Tensor:
        """Mean over the supervised tokens of the sample [1,T], weighted by pass."""
        batch = batch_of(ids, supervised)
        found = self.training(batch, self.target.states(batch, self.taps))
        return found.loss_sum / found.num_tokens


class Theirs:
    """A step of theirs, over the same target and head."""

    def __init__(self, arguments: argparse.Namespace, ours: Ours, model: LlamaForCausalLM):
        clone(arguments.peers, EAGLE, "eagle/traineagle3")
        import cnets  # type: ignore[import-not-found]
        import modeling_llama_kv  # type: ignore[import-not-found]

        config = copy.deepcopy(model.config)
        config.pretraining_tp, config.rope_scaling, config.rope_theta = 1, None, 1e4
        config._attn_implementation = "eager"
        base: Any = modeling_llama_kv.LlamaForCausalLM(config)
        base.load_state_dict(model.state_dict(), strict=False)
        # Its constructor reads the target from a folder, in half precision.
        cnets.LlamaForCausalLM = types.SimpleNamespace(from_pretrained=lambda *_, **__: base)
        plain = plain_config(model.config)
        plain.draft_vocab_size = ours.target.vocab_size // 4
        self.model = cnets.Model(plain, None, types.SimpleNamespace(gradient_checkpointing=False), load_emb=False)
        for name in ("d2t", "t2d"):
            self.model.register_buffer(name, ours.head.state_dict()[name].clone())
        weights = {**ours.head.state_dict(), "embed_tokens.weight": ours.target.embedding}
        missing = [
            name for name in self.model.load_state_dict(weights, strict=False).missing_keys if "target" not in name
        ]
        assert not missing, missing
        self.model.train()
        self.model.target_model.eval()
        self.watched = {TARGET: [(self.model, "dataprepare")]}
        self.trained = {name: p for name, p in self.model.named_parameters() if name in ours.trained}
        assert {id(p) for p in self.trained.values()} == {id(p) for p in self.model.parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=0.0)

    def loss(self, ids: Tensor, supervised: Tensor) -> Tensor:
        """Return the loss as `Ours.loss` does."""
        before = torch.cat([supervised[:, 1:], torch.zeros_like(supervised[:, :1])], dim=1).long()
        losses, _, _ = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), loss_mask=before)
        return sum(0.8**number * loss for number, loss in enumerate(losses)) * ids.shape[1] / before.sum()


def batch_of(ids: Tensor, supervised: Tensor) -> Batch:
    """A sample [1,T] as our loop reads it."""
    return Batch(
        ids, torch.ones_like(ids, dtype=torch.bool), supervised, torch.full_like(ids, TEXT, dtype=torch.int8),
        torch.arange(ids.shape[1])[None], None, ("1",), seeds=(0,),
    )  # fmt: skip


def sample(number: int, length: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Ids and supervised places [1,T]: all after the first quarter, as an answer after its prompt."""
    return prompt(number, length, vocab_size)[None], (torch.arange(length) >= length // 4)[None]


def training(arguments: argparse.Namespace) -> None:
    """Prints the tables of `step_pairs.over`."""

    def sides(size: str) -> Iterator[step_pairs.Sides]:
        model = LlamaForCausalLM(target_config(size, 7)).eval()
        ours = Ours(model)
        samples = lambda length: partial(sample, length=length, vocab_size=SIZES[size]["vocab_size"])  # noqa: E731
        yield "", ours, Theirs(arguments, ours, model), samples, step_pairs.TOLERANCE

    step_pairs.over(arguments, "tokens of a sample", BAR, sides)
