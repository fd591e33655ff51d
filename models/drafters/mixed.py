"""An ensemble of any drafters: each proposes, and what is drawn and verified is the mixture of their distributions.

TABED mixes the modes of one draft LVLM as rows of one batch (`ensemble.py`). Here the members are drafters of their own
(a draft LVLM with an EAGLE-3 head, two heads, ...), which cost one pass each; weights are TABED's rules (section 5).
Letters: M members, F nodes, P positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from ...core.batch import Request
from ...core.states import Taps
from ..decoding.warp import Warp
from ..targets.base import Target, TargetStep, Verified
from .base import PLAIN, Drafter, DrafterConfig, DraftingOptions
from .beside import may_pass
from .weights import FixedWeights, Weights, WeightsConfig, check_weights, mixture, reached, weights_of


class MembersConfig(DrafterConfig):
    """Drafters that propose together. A member is the name of a stage that trained one, or a drafter's section."""

    for_images: ClassVar[bool] = True

    members: tuple[Any, ...]

    def provides(self) -> set[str]:
        return {"drafter"}


class MixedConfig(MembersConfig):
    """Several drafters at once."""

    kind: Literal["ensemble"]

    # Two or more: names of stages that trained one, or drafters' sections.
    members: tuple[Any, ...] = Field(min_length=2)
    # How much each member counts.
    weights: WeightsConfig = FixedWeights(kind="fixed")

    @model_validator(mode="after")
    def _fits(self) -> MixedConfig:
        check_weights(self.weights, len(self.members))
        return self

    def drafter(self, module: Any, target: Target, options: DraftingOptions = PLAIN) -> Drafter:
        """`module` holds the members' proposals: an evaluation opens them one by one, and there is nothing to load."""
        return MixedProposal(module, weights_of(self.weights, len(self.members)), target.vocab_size)


class MixedProposal:
    """Proposes the mixture of its members, which nobody else uses; `weights` take in the outcome of each cycle."""

    def __init__(self, members: Sequence[Drafter], weights: Weights, vocab_size: int):
        self.members, self.weights, self.vocab_size = list(members), weights, vocab_size
        self.taps = _all_taps([member.taps for member in members])
        self.max_levels: int | None = None  # what all members can propose, as each says in its `root`
        self._drafted: list[Tensor] = []  # [M,F,V] of the root and of each expansion
        self._may_pass = any(map(may_pass, members))

    @torch.inference_mode()
    def start(self, request: Request, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        self._warp = warp
        self.weights.start(prefill.logits.device)
        self._drafted = []
        for member in self.members:
            member.start(request, prefill, warp, capacity=capacity)

    def begin(self, first: int) -> None:
        for member in self.members:
            member.begin(first)

    def root(self) -> Tensor:
        self._drafted = []
        each = [member.root()[None] for member in self.members]
        levels = [m.max_levels for m in self.members if m.max_levels != 0]  # 0: it has nothing to say in this cycle
        self.max_levels = min((most for most in levels if most is not None), default=None) if levels else 0
        return self._mixed(each)[0]

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        return self._mixed([member.expand(parents, tokens) for member in self.members])

    @torch.inference_mode()
    def accept(self, verified: Verified) -> None:
        """Update the weights by p and q at the positions that were reached (TABED, section 5), and tell the members."""
        if self.weights.adaptive and (numbers := reached(verified)):
            assert verified.step is not None
            p = self._warp.apply_temperature(verified.step.logits[: len(numbers)])
            self.weights.observe(p, torch.cat(self._drafted, dim=1)[:, numbers])
        for member in self.members:
            member.accept(verified)

    def _mixed(self, each: Sequence[Tensor]) -> Tensor:
        """[F,V] of the members' [F,V]. Drafts may have fewer rows of the vocabulary than the target, or more."""
        weights = self.weights.current
        is_on_cpu = all(part.device.type == "cpu" for part in each)  # of drafters that look their tokens up
        device = torch.device("cpu") if is_on_cpu else weights.device
        cut = [part[:, : self.vocab_size].to(device) for part in each]
        q = torch.stack([F.pad(part, (0, self.vocab_size - part.shape[-1])) for part in cut])
        if self.weights.adaptive:
            self._drafted.append(q.to(weights.device))
        mixed = mixture(weights.to(device), q)
        if not self._may_pass:
            return mixed
        # The others share the weight of a member with nothing to say, equally where they have none.
        total, equal = mixed.sum(-1, keepdim=True), q.mean(0)
        equal = equal / equal.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
        return torch.where(total > 0, mixed / total.where(total > 0, 1.0), equal)


def _all_taps(taps: Sequence[Taps]) -> Taps:
    """The union of the members' taps in decoding."""
    attention = [tap for tap in taps if tap.prefill_attention]
    if len({tap.attention_queries for tap in attention}) > 1:
        raise ValueError("members want the target's attention averaged over different queries; leave one of them out")
    return Taps(
        text_layers=tuple(sorted({layer for tap in taps for layer in tap.layers})),
        feature=any(tap.feature for tap in taps),
        prefill_attention=tuple(sorted({layer for tap in attention for layer in tap.prefill_attention})),
        attention_queries=attention[0].attention_queries if attention else "suffix",
    )
