"""Requests to a small visual target with a head: decoded by the loop, recorded, and replayed without it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from draftsmith.core.batch import CodeBatch, ImageRequest
from draftsmith.eval.loop import Decoding, Generation, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import RULES
from draftsmith.models.decoding.cache import Cache
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.eagle import EagleConfig
from draftsmith.models.drafters.eagle_images import ImageEagleHead, ImageEagleProposal
from draftsmith.models.llamagen.transformer import LlamaGen, LlamaGenConfig
from draftsmith.models.targets.llamagen import LlamaGenTarget
from metering import watched


@dataclass(frozen=True)
class Models:
    """The target and its head's proposal."""

    target: LlamaGenTarget
    proposal: ImageEagleProposal

    def request(self, seed: int) -> ImageRequest:
        """A random caption, drawn from `seed`."""
        config, generator = self.target.config, torch.Generator().manual_seed(seed)
        features = torch.randn(10, config.caption_dim, generator=generator)
        return ImageRequest(features.to(self.target.device), name=str(seed))


def build(config: LlamaGenConfig, guidance: Any, device: torch.device, *, seed: int, head_steps: int) -> Models:
    """A random target, and a head that agrees with it now and then: it has seen a few of its images."""
    model, generator = LlamaGen(config), torch.Generator().manual_seed(seed)
    model.reset_parameters(generator)
    torch.nn.init.normal_(model.output.weight, std=0.2, generator=generator)
    target = LlamaGenTarget(model.to(device), guidance)
    torch.manual_seed(seed)
    settings = EagleConfig(kind="eagle")
    head = settings.build(target).to(device)
    assert isinstance(head, ImageEagleHead)
    models = Models(target, ImageEagleProposal(head, target.guided))
    if head_steps:
        requests = [models.request(number) for number in range(8)]
        plain = sampled(Chain(1), target.num_codes)
        codes = [generate(target, None, r, plain, torch.Generator().manual_seed(0)).tokens for r in requests]
        batch = CodeBatch(
            torch.tensor(codes, device=device), tuple(r.condition for r in requests),
            torch.arange(8, device=device) == 0, torch.ones(8, dtype=torch.bool, device=device),
            tuple(r.name for r in requests), target.num_codes - 1,
        )  # fmt: skip
        taps = settings.taps_for(target.shape, training=True)
        training = settings.training_objective(head, target).train()
        optimizer = torch.optim.Adam((p for p in head.parameters() if p.requires_grad), lr=2e-3)
        for step in range(head_steps):
            optimizer.zero_grad()
            seeded = replace(batch, seeds=tuple(range(8 * step, 8 * step + 8)))
            loss = training(seeded, target.states(seeded, taps))
            (loss.loss_sum / loss.num_tokens).backward()
            optimizer.step()
    head.eval().requires_grad_(False)
    return models


def sampled(policy: Any, num_codes: int, *, rule: Any = RULES["sampling"], top_k: int = 0) -> Decoding:
    """Settings for sampling `num_codes` codes at temperature 1."""
    return Decoding(policy, rule, Draw("top-k"), Warp(1.0, top_k), num_codes, ())


def decode(models: Models, decoding: Decoding, number: int) -> Generation:
    """The same image each time: requests and uniforms follow from the number."""
    uniforms = torch.Generator().manual_seed(number)
    return generate(models.target, models.proposal, models.request(1000 + number), decoding, uniforms)


def forwards(models: Models) -> list[tuple[Any, str]]:
    """The methods in which the models' bare forwards run."""
    model = models.target.model
    return [(model, "decode"), (model.output, "forward"), (models.proposal.head, "forward")]


@dataclass(frozen=True)
class Call:
    """A forward as the loop made it."""

    function: Callable
    args: tuple
    named: dict[str, Any]
    cache: Cache | None
    length: int  # of the cache, after which the forward wrote


def record(models: Models, decoding: Decoding, number: int) -> tuple[list[Call], Generation]:
    """Decode a request and keep every forward that the loop made."""
    calls: list[Call] = []

    def watch(function: Callable) -> Callable:
        def recorded(*args: Any, **named: Any) -> Any:
            cache = next((a for a in args if isinstance(a, Cache)), None)
            calls.append(Call(function, args, named, cache, 0 if cache is None else cache.length))
            return function(*args, **named)

        return recorded

    with watched(forwards(models), watch):
        return calls, decode(models, decoding, number)


@torch.inference_mode()
def replay(calls: Sequence[Call], distribution: Callable[[torch.Tensor], Any] | None = None) -> None:
    """The forwards alone; with `distribution`, each LM head's call is that of its features instead."""
    for call in calls:
        if call.cache is not None:
            call.cache.crop_to(call.length)
        if distribution is not None and call.cache is None:
            distribution(call.args[0])
        else:
            call.function(*call.args, **call.named)
