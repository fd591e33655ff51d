"""Training steps of ours, and how they are compared with another implementation's: loss, gradients, then time in turn.
Its code is made importable without what it depends on: a clone of SpecForge and an unpacked speculators.

The target's states are there before a step begins, on both sides, as in cached training.
"""

from __future__ import annotations

import argparse
import random
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, cast
from unittest.mock import patch

import torch
from draftsmith.core.batch import Batch
from draftsmith.core.errors import UserError
from draftsmith.core.pictures import TEXT
from draftsmith.core.states import Taps, TargetStates
from draftsmith.models.drafters import dflash_training
from draftsmith.models.drafters.dflash import DflashConfig
from draftsmith.models.drafters.dspark import DsparkConfig
from draftsmith.models.drafters.eagle3 import Eagle3Config
from draftsmith.models.targets.causal.section import CausalTarget
from draftsmith.scripts.bench import moment, spread
from torch import Tensor, nn, optim
from transformers import Qwen3Config

LENGTHS = (64, 256, 512, 1024)  # tokens of a sample
TOLERANCE = 2e-5  # of losses and gradients, relative
# Of TVD's gradients, which jump where the two distributions cross: rounding alone turns 3 of 7 million signs.
CROSSINGS = 2e-4
TOKENS_OF_A_BLOCK = 8  # of a sample: DeepSpec draws 512 blocks of up to 4,096 tokens
TAPS = (2, 3, 4, 5, 6)
BLOCKS: dict[str, Any] = {"num_layers": len(TAPS), "taps": TAPS, "mask_token_id": 3}
# What is compared of blocks: our section's keys, and the peers' loss.
KINDS: dict[str, tuple[Any, dict[str, float]]] = {
    "DFlash": (DflashConfig(kind="dflash", block_size=16, **BLOCKS), {"ce": 1.0}),
    "DFlash by KL": (
        DflashConfig(kind="dflash", block_size=16, loss={"token_divergence": "kl"}, **BLOCKS), {"kl_div": 1.0}
    ),
    "DSpark": (DsparkConfig(kind="dspark", confidence={}, **BLOCKS), {"ce": 0.1, "tv": 1.8}),
}  # fmt: skip
HEADING = ("tokens of a sample", "step: ours / theirs [quartiles]", "losses, gradients apart", "pairs")
Sample = Sequence[Any]


class Trained(Protocol):
    """One of the two sides."""

    @property
    def trained(self) -> Mapping[str, nn.Parameter]: ...
    @property
    def optimizer(self) -> optim.Optimizer: ...

    def loss(self, *sample: Any) -> Tensor: ...


def importable(peers: Path, name: str) -> Path:
    """The folder of a peer, from which modules are now imported first.

    Raises:
        UserError: there is none.
    """
    folder = peers / name
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder", where="--peers", hint="see the head of scripts/peers/measure.py")
    sys.path.insert(0, str(folder))
    return folder


def empty_module(name: str, folder: Path | None = None, **names: Any) -> None:
    """Stand a module in the place of one whose file is not read: a package over `folder`, with these names."""
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update(names)
    if folder is not None:
        module.__path__ = [str(folder)]


def specforge(peers: Path, method: str) -> None:
    """Makes one folder of SpecForge's `algorithms` importable: the package itself registers every method."""
    folder = importable(peers, "SpecForge") / "specforge" / "algorithms"
    empty_module("specforge.algorithms", folder)
    empty_module(f"specforge.algorithms.{method}", folder / method)


def speculators(peers: Path) -> None:
    """Makes speculators importable without the parts that read datasets and ask serving engines."""
    importable(peers, "speculators")
    empty_module("speculators.train", peers)
    empty_module("speculators.train.data", BatchType=dict)


def replaced(owner: Any, name: str, same: Any) -> AbstractContextManager:
    """Within it, what a drawing function answers is `same`: both sides draw, and then take the same places."""
    draw: Callable = getattr(owner, name)

    def drawn(*arguments: Any) -> Any:
        draw(*arguments)
        return same

    return patch.dict(vars(owner), {name: drawn})


class OurHead:
    """A step of EAGLE-3's head: the mean over supervised tokens, weighted by pass."""

    def __init__(self, target: CausalTarget):
        # What is scored: every fourth id, as published heads score 32,000 of 128,256.
        counts = (torch.arange(target.vocab_size) % 4 == 0).long()
        self.settings = Eagle3Config(kind="eagle3", draft_vocab_size=target.vocab_size // 4)
        self.target = target
        self.head = self.settings.build(target, count_tokens=lambda: counts)
        self.training = self.settings.training_objective(self.head, target).train()
        self.trained = dict(self.head.named_parameters())
        self.optimizer = optim.AdamW(self.trained.values(), lr=0.0)

    def loss(self, *sample: Any) -> Tensor:
        """Of what `HeadSamples` gives."""
        batch, states, _ = sample
        result = self.training(batch, states)
        return result.loss_sum / result.num_tokens


class OurBlocks:
    """A step of a DFlash or DSpark draft: the mean over the blocks after given anchors [A]."""

    def __init__(self, target: CausalTarget, settings: Any):
        self.target, self.settings = target, settings
        self.head = settings.build(target)
        if self.head.walks:  # the Markov head begins as no bias
            nn.init.normal_(self.head.markov_head.markov_w2.weight, std=0.02)
        self.training = settings.training_objective(self.head, target).train()
        self.trained = dict(self.head.named_parameters())
        self.optimizer = optim.AdamW(self.trained.values(), lr=0.0)

    def loss(self, batch: Batch, states: TargetStates, anchors: Tensor) -> Tensor:
        supervised = batch.loss_mask[:, 1:].sum(1)
        blocks = dflash_training.Blocks(
            anchors[None], torch.full((1, len(anchors)), self.head.shape.num_drafts), supervised / len(anchors)
        )
        with replaced(dflash_training, "draw_blocks", blocks):
            result = self.training(batch, states)
        return result.loss_sum / result.num_tokens


def layers_config(kind: type, layer: Any, target: Any, count: int = 1, **more: Any) -> Any:
    """`count` layers of a head of ours, as a config of transformers that peers' drafts read."""
    base = target.decoder.model.config
    return kind(
        hidden_size=layer.hidden_size, intermediate_size=layer.intermediate_size, head_dim=layer.head_dim,
        num_attention_heads=layer.num_heads, num_key_value_heads=layer.num_kv_heads, vocab_size=layer.vocab_size,
        num_hidden_layers=count, rms_norm_eps=layer.norm_eps, pad_token_id=None, attention_bias=False,
        max_position_embeddings=base.max_position_embeddings, rope_parameters=dict(base.rope_parameters), **more,
    )  # fmt: skip


def blocks_config(ours: OurBlocks) -> Qwen3Config:
    """A draft's layers, as a config that published drafts have."""
    shape = ours.head.shape
    return layers_config(Qwen3Config, shape.layer, ours.target, shape.num_layers, attn_implementation="sdpa")


def batch_of(ids: Tensor, supervised: Tensor) -> Batch:
    """A sample [1,T] as our loop reads it."""
    return Batch(
        ids, torch.ones_like(ids, dtype=torch.bool), supervised, torch.full_like(ids, TEXT, dtype=torch.int8),
        torch.arange(ids.shape[1])[None], None, ("1",), seeds=(0,),
    )  # fmt: skip


def prompt(length: int, vocab_size: int) -> Tensor:
    """[1,T] random ids."""
    return torch.randint(8, vocab_size, (1, length), generator=torch.Generator().manual_seed(0))


class HeadSamples:
    """A sample with its states, supervised after its first quarter where the target's likeliest token is one of the
    draft's: peers compare every token over the draft's ids, we count none whose likeliest id lies outside.
    """

    def __init__(self, ours: OurHead, length: int):
        target = ours.target
        ids, supervised = prompt(length, target.vocab_size), (torch.arange(length) >= length // 4)[None]
        taps = ours.settings.taps_for(target.shape, training=True)
        with torch.no_grad():
            self.states = target.states(
                batch_of(ids, supervised), Taps((*taps.layers, target.shape.num_layers), feature=True, everywhere=True)
            )
            scores, drafted = target.scores(cast(torch.Tensor, self.states.feature)[0]), ours.head.draft_ids
            assert drafted is not None, "OurHead has a vocabulary of its own"
            self.batch = batch_of(ids, supervised & torch.isin(scores.argmax(-1), drafted))
            p = scores[:, drafted].log_softmax(-1)
            entropies = -(p.exp() * p).sum(-1)[self.batch.loss_mask[0]]
        self.entropy = float(entropies.mean()) * sum(cast(Any, ours.training).weights)

    def __call__(self, number: int) -> Sample:
        """What a step reads: a batch, its states, and the target's entropy; no random draw is in it."""
        return self.batch, self.states, self.entropy


class BlockSamples:
    """A greedy answer of the target, as in training: its likeliest token, which peers' cross-entropy asks for, is the
    answer's own. Its states, and other anchors for each number, each with a whole block behind it.
    """

    def __init__(self, target: CausalTarget, block_size: int, length: int):
        self.first, self.last = length // 4, length - block_size  # of the anchors, and behind them
        ids = prompt(self.first, target.vocab_size)
        with torch.inference_mode():
            ids = target.decoder.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=length - self.first, do_sample=False,
                pad_token_id=0,
            ).clone()  # fmt: skip
        self.batch = batch_of(ids, (torch.arange(length) >= self.first)[None])
        with torch.no_grad():
            self.states = target.states(self.batch, Taps((*TAPS, TAPS[-1] + 1), feature=True, everywhere=True))

    def __call__(self, number: int) -> Sample:
        """What a step reads: the answer, its states and the anchors."""
        count = self.batch.ids.shape[1] // TOKENS_OF_A_BLOCK
        drawn = random.Random(number).sample(range(self.first, self.last), count)
        return self.batch, self.states, torch.tensor(sorted(drawn))


def check_equal(what: str, ours: Trained, theirs: Trained, sample: Sample, tolerance: float) -> tuple[float, float]:
    """The largest relative differences of the loss and of a weight's gradient.

    Raises:
        SystemExit: the loss's is above `TOLERANCE`, or a gradient's above `tolerance`.
    """
    losses = []
    for side in (ours, theirs):
        side.optimizer.zero_grad()
        loss = side.loss(*sample)
        loss.backward()
        losses.append(float(loss.detach()))
    assert ours.trained.keys() == theirs.trained.keys(), ours.trained.keys() ^ theirs.trained.keys()
    apart = 0.0
    for name, parameter in ours.trained.items():
        mine, other = parameter.grad, theirs.trained[name].grad
        assert mine is not None and other is not None, name
        apart = max(apart, float((mine - other).norm() / other.norm()))
    difference = abs(losses[0] / losses[1] - 1)
    if difference > TOLERANCE or apart > tolerance:
        raise SystemExit(f"{what}: losses {losses}, gradients {apart:.1e} apart")
    return difference, apart


def compare(
    what: str, ours: Trained, theirs: Trained, samples: Callable[[int], Sample], pairs: int, tolerance: float
) -> None:
    """Print a row: neighbouring steps of both sides, in changing order; the first pair warms up."""
    apart = check_equal(what, ours, theirs, samples(0), tolerance)
    ratios = []
    for number in range(pairs + 1):
        times = {}
        for side in (ours, theirs) if number % 2 else (theirs, ours):
            begin = moment()
            side.optimizer.zero_grad()
            side.loss(*samples(number)).backward()
            side.optimizer.step()
            times[side] = moment() - begin
        ratios.append(times[ours] / times[theirs])
    print(f"| {what} | {spread(ratios[1:], 3)} | {apart[0]:.0e}, {apart[1]:.0e} | {pairs} |", flush=True)


def over_heads(
    arguments: argparse.Namespace, targets: Mapping[str, CausalTarget],
    theirs_of: Callable[[argparse.Namespace, OurHead], Trained],
) -> None:  # fmt: skip
    """Compares EAGLE-3's step at each size and length."""
    for size, target in targets.items():
        ours = OurHead(target)
        theirs = theirs_of(arguments, ours)
        for length in arguments.lengths or LENGTHS:
            samples = HeadSamples(ours, length)
            compare(f"EAGLE-3, {length}, {size}", ours, theirs, samples, arguments.pairs, TOLERANCE)


def over_blocks(
    arguments: argparse.Namespace, targets: Mapping[str, CausalTarget], kinds: Iterable[str],
    theirs_of: Callable[[argparse.Namespace, OurBlocks, dict[str, float]], Trained],
) -> None:  # fmt: skip
    """Compares the steps of drafts of blocks at each size and length."""
    for size, target in targets.items():
        for kind in kinds:
            settings, losses = KINDS[kind]
            ours = OurBlocks(target, settings)
            theirs = theirs_of(arguments, ours, losses)
            tolerance = CROSSINGS if "tv" in losses else TOLERANCE
            for length in arguments.lengths or LENGTHS:
                samples = BlockSamples(target, settings.block_size, length)
                compare(f"{kind}, {length}, {size}", ours, theirs, samples, arguments.pairs, tolerance)
