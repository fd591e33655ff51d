"""SafeAILab/EAGLE's EAGLE-3 training step (`eagle/traineagle3`): the same target, head, samples and AdamW.

Each step runs the frozen target over one sample, then seven passes of the head, backward and AdamW, without DeepSpeed
on either side and without their gradient checkpointing, which runs each pass twice. Their loss mask stands at the token
before the one that ours names, and their loss is a mean over all places: both are made alike here, not in their files.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import types
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from draftsmith.core.batch import Batch
from draftsmith.core.pictures import TEXT
from draftsmith.models.drafters.eagle3 import Eagle3Config
from draftsmith.models.targets.causal.section import CausalTarget
from draftsmith.scripts.timing import in_turn, ratios, row, spread, table
from metering import Meter, watched
from peers.clones import EAGLE, clone
from peers.official_eagle import plain_config
from peers.ours import SIZES, prompt, target_config
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM

BAR = 0.8  # of their step
LENGTHS = (64, 256, 512, 1024)
TOLERANCE = 2e-5  # of losses and gradients, relative
TARGET, HEAD, BACKWARD, ADAMW = PARTS = ("the target's pass", "the head's passes and losses", "backward", "AdamW")


class Ours:
    """A step of ours: the target's states, then the head's objective."""

    def __init__(self, model: LlamaForCausalLM):
        target = CausalTarget(model, num_token_ids=model.config.vocab_size)
        # What is scored: every fourth id, as published heads score 32,000 of 128,256.
        counts = (torch.arange(target.vocab_size) % 4 == 0).long()
        self.settings = Eagle3Config(kind="eagle3", draft_vocab_size=target.vocab_size // 4)
        self.target = target
        self.frozen = (target, "states")
        self.head = self.settings.build(target, count_tokens=lambda: counts)
        self.training = self.settings.training_objective(self.head, target).train()
        self.taps = self.settings.taps_for(target.shape, training=True)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=0.0)

    def loss(self, ids: Tensor, supervised: Tensor) -> Tensor:
        """Mean over the supervised tokens of the sample [1,T], weighted by pass."""
        positions = torch.arange(ids.shape[1])[None, None]
        batch = Batch(
            ids, torch.ones_like(ids, dtype=torch.bool), supervised, torch.full_like(ids, TEXT, dtype=torch.int8),
            positions[0], None, ("1",), seeds=(0,),
        )  # fmt: skip
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
        self.frozen = (self.model, "dataprepare")
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=0.0)

    def loss(self, ids: Tensor, supervised: Tensor) -> Tensor:
        """As `Ours.loss`."""
        before = torch.cat([supervised[:, 1:], torch.zeros_like(supervised[:, :1])], dim=1).long()
        losses, _, _ = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), loss_mask=before)
        return sum(0.8**number * loss for number, loss in enumerate(losses)) * ids.shape[1] / before.sum()


def sample(number: int, length: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Ids and supervised places [1,T]: all after the first quarter, as an answer after its prompt."""
    return prompt(number, length, vocab_size)[None], (torch.arange(length) >= length // 4)[None]


def step(side: Any, number: int, length: int, vocab_size: int) -> None:
    """One step of either."""
    side.optimizer.zero_grad()
    side.loss(*sample(number, length, vocab_size)).backward()
    side.optimizer.step()


def parts(side: Any, number: int, length: int, vocab_size: int) -> dict[str, float]:
    """Seconds of each of `PARTS` in one step of either."""
    meter = Meter()
    meter.part(ADAMW)(side.optimizer.zero_grad)()
    with watched([side.frozen], meter.part(TARGET)):
        loss = meter.part(HEAD)(side.loss)(*sample(number, length, vocab_size))
    meter.part(BACKWARD)(loss.backward)()
    meter.part(ADAMW)(side.optimizer.step)()
    return {part: meter.seconds[part] for part in PARTS}


def check_equal(ours: Ours, theirs: Theirs, length: int, vocab_size: int) -> tuple[float, float]:
    """The largest relative differences of the loss and of a weight's gradient.

    Raises:
        SystemExit: they are above `TOLERANCE`.
    """
    losses = []
    for side in (ours, theirs):
        side.optimizer.zero_grad()
        loss = side.loss(*sample(0, length, vocab_size))
        loss.backward()
        losses.append(float(loss.detach()))
    apart = 0.0
    for name, parameter in ours.head.named_parameters():
        mine, other = parameter.grad, theirs.trained[name].grad
        assert mine is not None and other is not None
        apart = max(apart, float((mine - other).norm() / other.norm()))
    difference = abs(losses[0] / losses[1] - 1)
    if max(difference, apart) > TOLERANCE:
        raise SystemExit(f"training at {length} tokens: losses {losses}, gradients {apart:.1e} apart")
    return difference, apart


PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "flash_attention_for_cpu")


def products_share(side: Any, length: int, vocab_size: int) -> float:
    """The share of a step in matrix products and attention kernels, which the profiler makes smaller than it is: what
    it takes itself counts among the rest.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(side, 0, length, vocab_size)
    seconds = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
    within = sum(time for name, time in seconds.items() if any(product in name for product in PRODUCTS))
    return within / sum(seconds.values())


def of_their_step(ours: Any, theirs: Any, length: int, vocab_size: int, count: int) -> list[str]:
    """Each of `PARTS` of ours and of theirs, as a share of their step: medians of `count` steps in turn."""
    shares: list[Sequence[float]] = []
    for number in range(count):
        sides = (ours, theirs) if number % 2 else (theirs, ours)
        found = [parts(side, number, length, vocab_size) for side in sides]
        mine, other = found if number % 2 else found[::-1]
        whole = sum(other.values())
        shares.append([seconds / whole for part in PARTS for seconds in (mine[part], other[part])])
    middle = [statistics.median(column) for column in zip(*shares, strict=True)]
    return [f"{mine:.2f}, {other:.2f}" for mine, other in zip(middle[::2], middle[1::2], strict=True)]


def training(arguments: argparse.Namespace) -> None:
    """Prints a table: every size and length; and one of where missed steps go."""
    missed: dict[str, list[str]] = {}
    print()
    table(
        "tokens of a sample", "step: ours / theirs [quartiles]", f"at most {BAR}", "our matrix products / their step",
        "losses, gradients apart", "pairs",
    )  # fmt: skip
    for size in arguments.sizes:
        torch.manual_seed(arguments.seed)
        model = LlamaForCausalLM(target_config(size, 7)).eval()
        ours = Ours(model)
        theirs, vocab_size = Theirs(arguments, ours, model), SIZES[size]["vocab_size"]
        for length in arguments.lengths:
            apart = check_equal(ours, theirs, length, vocab_size)
            times: dict[str, list[float]] = {"ours": [], "theirs": []}
            for number in range(arguments.pairs + 1):
                actions = {
                    name: partial(step, side, number, length, vocab_size)
                    for name, side in (("ours", ours), ("theirs", theirs))
                }
                for name, seconds in in_turn(actions, number, time.thread_time).items():
                    if number:  # the first warms up
                        times[name].append(seconds)
            found = ratios(times["ours"], times["theirs"])
            middle, share = statistics.median(found), products_share(ours, length, vocab_size)
            if middle > BAR:
                missed[f"{length}, {size}"] = of_their_step(ours, theirs, length, vocab_size, arguments.pairs)
            row(
                f"{length}, {size}", spread(found), "met" if middle <= BAR else "missed",
                f"{share * middle:.2f} ({share:.0%} of ours)", "{:.0e}, {:.0e}".format(*apart), len(found),
            )  # fmt: skip
    if missed:
        print()
        table("shares of their step: ours, theirs", *PARTS)
        for what, shares in missed.items():
            row(what, *shares)
