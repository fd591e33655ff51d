"""The training steps of vllm-project/speculators 0.9: DFlash and DSpark, over the same states, weights and anchors.

speculators trains on states that a serving engine wrote, so for both sides the target's states are there before a step
begins. The answers are the target's own greedy ones, as in training: then the target's likeliest token, which their
cross-entropy asks for, is the answer's own, which ours asks for. Each side draws its anchors, and both then take the
same ones, each with a whole block behind it. Their loss is divided by places and ours by the places' weights: a factor.
On a CPU they attend with SDPA (flex attention has no backward there) and compare without their Triton kernels.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from draftsmith.core.batch import Batch
from draftsmith.core.pictures import TEXT
from draftsmith.core.states import Taps, TargetStates
from draftsmith.models.drafters import dflash_training
from draftsmith.models.drafters.dflash import DflashConfig
from draftsmith.models.drafters.dspark import DsparkConfig
from draftsmith.models.targets.causal.section import CausalTarget
from peers import clones, step_pairs
from peers.ours import SIZES, layers_config, prompt, target_config
from peers.pairs import watched
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Qwen3Config

BAR = 0.65  # of their step
TOKENS_OF_A_BLOCK = 8  # of a sample: DeepSpec draws 512 blocks of up to 4,096 tokens
# Of TVD's gradients, which jump where the two distributions cross: rounding alone turns 3 of 7 million signs.
CROSSINGS = 2e-4
TAPS, MASK = (2, 3, 4, 5, 6), 3
MASKS, PASS, SCORES = "anchors and masks", "the draft's pass", "LM heads and losses"
BLOCKS: dict[str, Any] = {"num_layers": len(TAPS), "taps": TAPS, "mask_token_id": MASK}
# What is compared: our section's keys, and their loss.
KINDS: dict[str, tuple[Any, dict[str, float]]] = {
    "DFlash": (DflashConfig(kind="dflash", block_size=16, **BLOCKS), {"ce": 1.0}),
    "DFlash by KL": (
        DflashConfig(kind="dflash", block_size=16, loss={"token_divergence": "kl"}, **BLOCKS), {"kl_div": 1.0}
    ),
    "DSpark": (DsparkConfig(kind="dspark", confidence={}, **BLOCKS), {"ce": 0.1, "tv": 1.8}),
}  # fmt: skip


class Ours:
    """A step of ours."""

    def __init__(self, target: CausalTarget, settings: Any):
        self.target, self.settings = target, settings
        self.head = with_bias(settings.build(target))
        self.training = settings.training_objective(self.head, target).train()
        self.trained = dict(self.head.named_parameters())
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=0.0)
        self.watched = {
            MASKS: [(dflash_training, "draw_blocks"), (dflash_training, "block_mask")],
            PASS: [(self.head, "forward"), (self.head, "context"), (self.head, "blocks")],
            SCORES: [(self.training.lm, "forward"), (self.training, "further")],
        }

    def loss(self, batch: Batch, states: TargetStates, anchors: Tensor) -> Tensor:
        """Mean over the blocks after `anchors` [A]."""
        supervised = batch.loss_mask[:, 1:].sum(1)
        blocks = dflash_training.Blocks(
            anchors[None], torch.full((1, len(anchors)), self.head.shape.num_drafts), supervised / len(anchors)
        )
        with watched([(dflash_training, "draw_blocks")], partial(drawn, blocks)):
            found = self.training(batch, states)
        return found.loss_sum / found.num_tokens


class Theirs:
    """A step of theirs, over the same draft."""

    def __init__(self, arguments: argparse.Namespace, ours: Ours, losses: dict[str, float]):
        clones.speculators(arguments.peers)
        from speculators.losses.utils import resolve_loss_config  # type: ignore[import-not-found]
        from speculators.models.dflash import core as dflash  # type: ignore[import-not-found]
        from speculators.models.dspark import core as dspark  # type: ignore[import-not-found]

        shape, target = ours.head.shape, ours.target
        self.core, self.own = dflash, dspark if shape.sample_from_anchor else dflash
        made = dspark.DSparkDraftModel if shape.sample_from_anchor else dflash.DFlashDraftModel
        self.model = made(made.config_class(
            transformer_layer_config=draft_config(ours.head, target), draft_vocab_size=target.vocab_size,
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
        gamma = 4.0 if shape.block_size <= 8 else 7.0
        self.options = {"loss_config": config, "gamma": gamma}
        if shape.sample_from_anchor:
            self.options["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]
        self.watched = {
            MASKS: [(self.model, "_build_attention_mask")],
            PASS: [(module, "forward") for module in (self.model.fc, *self.model.layers)],
            SCORES: [
                (self.model.lm_head, "forward"), (self.model.verifier_lm_head, "forward"), (self.own, "compute_metrics")
            ],
        }  # fmt: skip

    def loss(self, batch: Batch, states: TargetStates, anchors: Tensor) -> Tensor:
        """Return the loss as `Ours.loss` does."""
        joined = torch.cat([states.layers[tap] for tap in TAPS], dim=-1)
        with watched([(self.core, "select_anchors")], partial(drawn, (anchors, torch.ones_like(anchors).bool()))):
            _, loss, _ = self.model(
                joined, batch.ids, batch.loss_mask, states.layers[TAPS[-1] + 1], torch.zeros_like(batch.ids),
                max_anchors=len(anchors), **self.options,
            )  # fmt: skip
        return loss * self.factor


def drawn(same: Any, draw: Callable) -> Callable:
    """`draw`, whose answer is replaced."""

    def replaced(*arguments: Any) -> Any:
        draw(*arguments)
        return same

    return replaced


def with_bias(head: Any) -> Any:
    """The draft, whose Markov head begins as no bias, with one."""
    if head.walks:
        nn.init.normal_(head.markov_head.markov_w2.weight, std=0.02)
    return head


def draft_config(head: Any, target: CausalTarget) -> Qwen3Config:
    """The draft's layers, as a config that published drafts have."""
    return layers_config(Qwen3Config, head.shape.layer, target, head.shape.num_layers, attn_implementation="sdpa")


class Samples:
    """One answer of the target of each length, its states, and other anchors for each number."""

    def __init__(self, target: CausalTarget, model: Any, block_size: int, length: int):
        self.first, self.last = length // 4, length - block_size  # of the anchors, and behind them
        ids = prompt(0, self.first, target.vocab_size)[None]
        with torch.inference_mode():
            ids = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=length - self.first, do_sample=False,
                pad_token_id=0,
            ).clone()  # fmt: skip
        kept = torch.ones_like(ids, dtype=torch.bool)
        self.batch = Batch(
            ids, kept, (torch.arange(length) >= self.first)[None], torch.full_like(ids, TEXT, dtype=torch.int8),
            torch.arange(length)[None, None], None, ("1",), seeds=(0,),
        )  # fmt: skip
        with torch.no_grad():
            self.states = target.states(self.batch, Taps((*TAPS, TAPS[-1] + 1), feature=True, everywhere=True))

    def __call__(self, number: int) -> tuple[Batch, TargetStates, Tensor]:
        """What a step reads: the answer, its states and the anchors."""
        count = self.batch.ids.shape[1] // TOKENS_OF_A_BLOCK
        drawn = random.Random(number).sample(range(self.first, self.last), count)
        return self.batch, self.states, torch.tensor(sorted(drawn))


def over_blocks(
    arguments: argparse.Namespace, what: str, kinds: Iterable[str],
    theirs_of: Callable[[argparse.Namespace, Ours, dict[str, float]], step_pairs.Trained],
) -> None:  # fmt: skip
    """Prints the tables of `step_pairs.over`: every kind at every size and length."""

    def sides(size: str) -> Iterator[step_pairs.Sides]:
        model = LlamaForCausalLM(target_config(size, TAPS[-1] + 1)).eval()
        target = CausalTarget(model, num_token_ids=SIZES[size]["vocab_size"])
        for kind in kinds:
            settings, losses = KINDS[kind]
            ours = Ours(target, settings)
            theirs, samples = theirs_of(arguments, ours, losses), partial(Samples, target, model, settings.block_size)
            yield f"{kind}, ", ours, theirs, samples, CROSSINGS if "tv" in losses else step_pairs.TOLERANCE

    step_pairs.over(arguments, what, BAR, sides)


def speculators(arguments: argparse.Namespace) -> None:
    """Prints the tables of `over_blocks`."""
    over_blocks(arguments, "speculators' step, tokens of a sample", KINDS, Theirs)
