"""What passes of target, drafter and captioner cost (TABED, section 3.1, appendices D.2, F, G and J.3).

Latency does not depend on the weights: models are random, at full size or smaller. All times are of one process, taken
in turn. T(B, S, gamma) is the time of one pass over gamma new positions after S others in each of B rows; verifying
gamma drafted tokens takes gamma + 1 positions. Letters: B rows, S positions in the cache, I images.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from draftsmith.core.batch import IMAGE, Request
from draftsmith.models.decoding.decoder import CachedDecoder
from draftsmith.models.decoding.tree import no_tree
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.graph import GraphedChain
from draftsmith.models.drafters.weights import Fixed
from draftsmith.models.targets.base import Taps
from draftsmith.models.targets.llava.model import selected_features
from draftsmith.models.targets.llava.section import LlavaTarget
from draftsmith.scripts.timing import Action, rounds
from torch import Tensor

ANY_TOKEN = 9


@dataclass(frozen=True)
class Measured:
    """Seconds of one thing in each round; entry i of all that were measured together is of the same round."""

    what: str
    at: Mapping[str, Any]
    seconds: Sequence[float]

    @property
    def median(self) -> float:
        """Median over the rounds, in seconds."""
        return statistics.median(self.seconds)

    def record(self) -> dict[str, Any]:
        """The fields as a mapping, for JSON."""
        return asdict(self)


# What is asked


def prompt(config: Any, num_images: int, num_text: int, *, seed: int, device: torch.device) -> Request:
    """A LLaVA prompt of `num_images` random images and `num_text` random text tokens. `config` is the model's."""
    generator, side = torch.Generator().manual_seed(seed), config.vision_config.image_size
    length = num_images * config.image_seq_length
    text = torch.randint(3, config.image_token_index, (num_text,), generator=generator)
    ids = torch.cat([torch.full((length,), config.image_token_index), text])
    modality = torch.zeros_like(ids, dtype=torch.int8)
    modality[:length] = IMAGE
    pixels = torch.randn(num_images, 3, side, side, generator=generator) if num_images else None
    return Request(ids, modality, pixels).to(device)


# Passes after a full cache (Table 6, Figs. 5 and 6)


class Passes:
    """Passes of a decoder with LM head and argmax, in `rows` rows after a cache of random states.

    None of them is committed: S stays what it is. `burst` passes, each fed by the one before, are one measurement.
    """

    @torch.inference_mode()
    def __init__(self, decoder: CachedDecoder, rows: int, capacity: int, *, burst: int, seed: int = 0):
        self.decoder, self.rows, self.burst = decoder, rows, burst
        self.cache = decoder.new_cache(capacity)
        self.run(0, 1)  # layers of the cache begin with their first states
        generator = torch.Generator(decoder.device).manual_seed(seed)
        layers: Sequence[Any] = self.cache.layers
        for layer in layers:
            layer.keys.normal_(generator=generator)
            layer.values.normal_(generator=generator)

    @torch.inference_mode()
    def run(self, length: int, count: int) -> None:
        """`count` positions in each row after `length` others, `burst` times."""
        self.cache.crop_to(length)
        ids = torch.full((self.rows, count), ANY_TOKEN, device=self.decoder.device)
        for _ in range(self.burst):
            positions = torch.arange(length, length + count, device=ids.device).expand(self.rows, -1)
            states = self.decoder.forward(self.decoder.embed(ids), self.cache, positions)
            ids = self.decoder.logits(states.feature).argmax(-1)


def grid_times(
    what: str,
    decoder: CachedDecoder,
    *,
    rows: Sequence[int],
    lengths: Sequence[int],
    gammas: Sequence[int],
    burst: int,
    num_rounds: int,
) -> list[Measured]:
    """T(B, S, gamma) at every point of the grid, all of them in turn."""
    capacity = max(lengths) + max(gammas)
    passes = {b: Passes(decoder, b, capacity, burst=burst) for b in rows}
    points = [(b, s, gamma) for b in rows for s in lengths for gamma in gammas]
    actions: dict[tuple[int, int, int], Action] = {
        (b, s, gamma): partial(passes[b].run, s, gamma) for b, s, gamma in points
    }
    times = rounds(actions, num_rounds)
    return [
        Measured(what, {"B": b, "S": s, "gamma": gamma}, [t / burst for t in times[b, s, gamma]])
        for b, s, gamma in points
    ]


def step_times(
    target: tuple[str, LlavaTarget],
    drafts: Mapping[str, CachedDecoder],
    *,
    length: int,
    gamma: int,
    graphs: bool,
    burst: int,
    num_rounds: int,
) -> list[Measured]:
    """T_p of a target and T_q of drafts: one token of one row after `length` positions.

    Args:
        graphs: also T_q of drafts whose chain of `gamma` tokens is one graph (captured on CUDA alone).
    """
    name, model = target
    actions: dict[str, Action] = {}
    tokens: dict[str, int] = {}
    for label, decoder in {name: model.decoder, **drafts}.items():
        passes = Passes(decoder, 1, length + 1, burst=burst)
        actions[label], tokens[label] = partial(passes.run, length, 1), burst
    if graphs:
        blind = prompt(model.decoder.model.config, 0, length, seed=0, device=model.device)
        _, step = model.prefill(blind, Taps(), capacity=1)
        for label, decoder in drafts.items():
            # Each chain commits one token; two more rounds of them warm up.
            more = num_rounds + gamma + 2
            chain = GraphedChain(
                decoder, ["T"], Fixed((1.0,)), newline_id=ANY_TOKEN, gamma=gamma, capacity=length + more
            )
            chain.start(blind, step, Warp(), capacity=more)
            actions[f"{label}, graph"], tokens[f"{label}, graph"] = partial(_draft, chain), gamma
    times = rounds(actions, num_rounds)
    return [
        Measured(k, {"target": name, "S": length}, [t / tokens[k] for t in seconds]) for k, seconds in times.items()
    ]


def _draft(chain: GraphedChain) -> None:
    chain.begin(ANY_TOKEN)
    chain.root()


def variation(measured: Sequence[Measured], over: str) -> dict[tuple[Any, ...], float]:
    """Delta T / T_min of the medians while `over` varies alone, by the values of all other parameters (Remarks 1-3)."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for m in measured:
        groups.setdefault(tuple(v for k, v in m.at.items() if k != over), []).append(m.median)
    return {key: max(medians) / min(medians) - 1 for key, medians in groups.items()}


# Stages of a request (Fig. 9), and captioners beside the prefill (Table 4)


def stage_times(
    target: LlavaTarget, *, images: Sequence[int], num_text: int, num_tokens: int, num_rounds: int
) -> list[Measured]:
    """Vision encoder with projector, the language model's prefill, and plain decoding of `num_tokens` tokens."""
    actions: dict[tuple[str, int], Action] = {}
    for count in images:
        seen = prompt(target.decoder.model.config, count, num_text, seed=count, device=target.device)
        # As many tokens, all of them text: the prefill without the vision encoder.
        blind = Request(torch.full_like(seen.ids, ANY_TOKEN), torch.zeros_like(seen.modality), None)
        assert seen.pixels is not None
        actions["vision encoder", count] = partial(_encode, target, seen.pixels)
        actions["prefill", count] = partial(target.prefill, blind, Taps(), capacity=num_tokens)
        actions["decoding", count] = _decoding(target, blind, num_tokens)
    times = rounds(actions, num_rounds)
    return [Measured(stage, {"images": count}, seconds) for (stage, count), seconds in times.items()]


@torch.inference_mode()
def _encode(target: LlavaTarget, pixels: Tensor) -> None:
    model: Any = target.decoder.model
    model.model.multi_modal_projector(selected_features(model, pixels))


def _decoding(target: LlavaTarget, request: Request, num_tokens: int) -> Action:
    session, _ = target.prefill(request, Taps(), capacity=num_tokens)
    length = session.cache.length

    def decode() -> None:
        session.cache.crop_to(length)
        token = ANY_TOKEN
        for _ in range(num_tokens):
            token = int(target.verify(session, token, no_tree()).logits[-1].argmax())
            target.commit(session, ())

    return decode


def caption_times(
    target: LlavaTarget,
    captioners: Mapping[str, Callable[[int], Action]],
    *,
    images: Sequence[int],
    num_text: int,
    num_rounds: int,
) -> list[Measured]:
    """The target's whole prefill, its vision encoder included, and each captioner on the same number of images.

    Args:
        captioners: number of images -> what captions them in one batch.
    """
    actions: dict[tuple[str, int], Action] = {}
    for count in images:
        request = prompt(target.decoder.model.config, count, num_text, seed=count, device=target.device)
        actions["prefill", count] = partial(target.prefill, request, Taps(), capacity=1)
        for name, caption in captioners.items():
            actions[name, count] = caption(count)
    times = rounds(actions, num_rounds)
    return [Measured(what, {"images": count}, seconds) for (what, count), seconds in times.items()]
