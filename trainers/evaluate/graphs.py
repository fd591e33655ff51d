"""Which passes of an evaluation are CUDA graphs, and what its report says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ...models.attention import GROUPED
from ...models.decoding.cache import Cache
from ...models.decoding.decoder import CachedDecoder
from ...models.decoding.tapped import is_cut
from ...models.drafters.beside import members_in
from ...models.drafters.head_proposal import Recursive
from ...models.drafters.independent import IndependentProposal
from ...models.fast.cuda_graphs import Graphs
from ...models.hub import has_windows, num_experts, recurrent_layers, rope_of
from ...models.targets.language import GROWING_ROTATIONS, LanguageTarget
from .drafters import Drafting


def capture(wanted: bool, target: LanguageTarget, drafting: Sequence[Drafting], capacity: int) -> None:
    """Let the passes of the target, of heads and of draft LVLMs be graphs, where they can be. A request takes
    `capacity` positions without a cycle's tree.
    """
    most = capacity + max((one.policy.max_nodes for one in drafting), default=0)
    for _, part in _parts(target, drafting):
        is_head = isinstance(part, Recursive)
        can_be = target.device.type == "cuda" if is_head else why_not(part) is None
        device, new_cache = (target.device, partial(Cache, 1)) if is_head else (part.device, part.new_cache)
        part.graphs = Graphs(device, most, new_cache) if wanted and can_be else None


def why_not(decoder: CachedDecoder) -> str | None:
    """Why a decoder's passes cannot be CUDA graphs; None: they can."""
    config, held = decoder.language_model.config, list(decoder.model.parameters())
    rope = rope_of(config)
    reasons = {
        "the model is on no GPU": decoder.device.type != "cuda",
        "the model lies on several devices": len({parameter.device for parameter in held}) > 1,
        "several ranks hold the model together": any(map(is_cut, held)),
        "rotations grow with positions": (rope.get("rope_type") or rope.get("type")) in GROWING_ROTATIONS,
        "the shapes of a mixture of experts depend on its tokens": bool(num_experts(config)),
        "recurrent layers keep what a tree wrote in tensors of its own size": bool(recurrent_layers(config)),
        "layers see a window of positions": has_windows(config),
        "attention takes no mask": config._attn_implementation not in ("sdpa", GROUPED, "eager"),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def about_graphs(target: LanguageTarget, drafting: Sequence[Drafting]) -> dict[str, str]:
    """The report's line of an evaluation on a GPU."""
    if target.device.type != "cuda":
        return {}
    said = [f"{name}: {part.graphs.summary if part.graphs else 'off'}" for name, part in _parts(target, drafting)]
    return {"CUDA graphs": "; ".join(said)}


def _parts(target: LanguageTarget, drafting: Sequence[Drafting]) -> Iterator[tuple[str, Any]]:
    """What has passes over few positions: the target's decoder, and of each method a head or a draft's decoder."""
    yield "the target", target.decoder
    for one in drafting:
        yield from ((one.title, part) for part in _drafting(one.drafter))


def _drafting(drafter: object) -> Iterator[Any]:
    if isinstance(drafter, Recursive) and drafter.captures:
        yield drafter
    elif isinstance(drafter, IndependentProposal):
        yield drafter.decoder
    for member in members_in(drafter):
        yield from _drafting(member)
