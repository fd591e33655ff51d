"""DFlash 2: DFlash's block with short convolutions and a path through each place's likeliest tokens (Inco, 2026,
inco.ai/blog/dflash2).

Before and after each attention and MLP, a place is mixed with the one before it: two taps for each channel, of which a
correction, shared by groups of channels, follows from the state. Taps never reach out of a block. A selector then
scores pairs of a token and the one before it among a place's likeliest, and a walk draws from the softmax over these
candidates: that is q, and other tokens are never drafted. An untrained one drafts as the DFlash that it starts from:
convolutions change nothing, and pairs score 0.
Letters: R rows, F nodes, B rows, Q places of blocks, P places of a block, S trained places, G groups, D width, N rank,
k candidates, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.errors import UserError
from ...core.json_types import JsonObject
from ..targets.base import Target, TargetShape
from .base import HeadObjective
from .dflash import DflashConfig
from .dflash_module import Before, BlockLayer, DflashHead, DflashShape, Reduce, Turn
from .dflash_training import DflashImageTraining, DflashTraining, Places

BEFORE, AFTER = 0, 1  # a sublayer


@dataclass(frozen=True)
class Dflash2Shape(DflashShape):
    """A block's shape with its convolutions' and its selector's."""

    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16

    def to_dict(self) -> JsonObject:
        values = super().to_dict()
        return values | {"dflash_config": values["dflash_config"] | self.of_kind | {"conv_kernel_size": 2}}


class GroupedConvolution(nn.Module):
    """k0 x(t) + k1 x(t-1) within blocks, before and after a sublayer; it begins as the identity."""

    def __init__(self, width: int, group: int, block: int):
        super().__init__()
        self.block, self.group = block, group
        taps = torch.stack([torch.ones(width), torch.zeros(width)])
        self.base_kernel = nn.Parameter(torch.stack([taps, taps]))  # [2 sides,2 taps,D]
        self.kernel_projection = nn.Linear(width, 4 * (width // group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, states: Tensor, corrections: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mixes a sublayer's input [B,Q,D], and returns corrections [B,Q,2,2,G]; given these, mixes its output."""
        side = BEFORE if corrections is None else AFTER
        if corrections is None:
            corrections = self.kernel_projection(states).unflatten(-1, (2, 2, -1))
        kernel = self.base_kernel[side] + corrections[:, :, side].repeat_interleave(self.group, dim=-1)  # [B,Q,2,D]
        blocks = states.view(len(states), states.shape[1] // self.block, self.block, states.shape[2])
        earlier = F.pad(blocks[:, :, :-1], (0, 0, 1, 0)).view_as(states)
        return kernel[:, :, 0] * states + kernel[:, :, 1] * earlier, corrections


class ConvolvedLayer(BlockLayer):
    """DFlash's layer with a convolution on both sides of attention and MLP."""

    def __init__(self, shape: Dflash2Shape):
        super().__init__(shape.layer)
        sizes = shape.layer.hidden_size, shape.conv_group_size, shape.block_size
        self.attention_conv, self.mlp_conv = GroupedConvolution(*sizes), GroupedConvolution(*sizes)

    def forward(self, blocks: Tensor, context: Tensor, turn: Turn, attend: object) -> Tensor:
        """Return blocks [B,Q,D] after the layer; arguments as of `BlockLayer.forward`."""
        mixed, corrections = self.attention_conv(self.input_layernorm(blocks))
        blocks = blocks + self.attention_conv(self.self_attn(mixed, context, turn, attend), corrections)[0]
        mixed, corrections = self.mlp_conv(self.post_attention_layernorm(blocks))
        return blocks + self.mlp_conv(self.mlp(mixed), corrections)[0]


class PathSelector(nn.Module):
    """<A(a) * H h, B(b)> of a token a, the state h after it and a candidate b; parameter names are the published ones.
    It begins as 0.
    """

    def __init__(self, width: int, rows: int, rank: int):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(rows, rank) * rank**-0.5)
        self.successor_codebook = nn.Parameter(torch.zeros(rows, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def forward(self, outputs: Tensor, tokens: Tensor, candidates: Tensor) -> Tensor:
        """[...,D], the token before [...] and candidates [...,k] -> [...,k] float32."""
        gated = F.embedding(tokens, self.predecessor_codebook) * self.hidden_projection(outputs)
        return torch.einsum("...r,...kr->...k", gated, F.embedding(candidates, self.successor_codebook)).float()


class Dflash2Head(DflashHead):
    """DFlash's draft with convolutions and a selector."""

    shape: Dflash2Shape
    walks = True

    def __init__(self, shape: Dflash2Shape, draft_ids: Tensor | None = None):
        super().__init__(shape, draft_ids)
        layer = shape.layer
        self.num_candidates = min(shape.selector_top_k, layer.vocab_size if draft_ids is None else len(draft_ids))
        self.candidate_selector = PathSelector(layer.hidden_size, layer.vocab_size, shape.selector_rank)

    def made_layer(self) -> nn.Module:
        """Return a layer with convolutions."""
        return ConvolvedLayer(self.shape)

    def conditioned(
        self, scores: Tensor, outputs: Tensor, before: Before, state: Tensor | None, reduce: Reduce
    ) -> tuple[Tensor, Tensor | None]:
        """Scores of the candidates with their pairs', and minus infinity elsewhere."""
        best = scores.topk(self.num_candidates, dim=-1)
        rows = len(outputs)
        pairs = self.candidate_selector(
            outputs.to(self.dtype), before.tokens.expand(rows, -1), best.indices.expand(rows, -1, -1)
        )  # fmt: skip
        nowhere = torch.full_like(scores, float("-inf"))
        return nowhere.scatter(-1, best.indices, best.values + reduce(pairs)), None


class Dflash2Training(DflashTraining):
    """DFlash's loss, and a cross-entropy of the selector among the candidates given the true token before."""

    config: Dflash2Config  # type: ignore[assignment]

    def __init__(self, head: DflashHead, target: Target, config: Any):
        super().__init__(head, target, config)
        self.metrics = (*self.metrics, "selected")

    def further(self, outputs: Tensor, before: Before, compare: Places) -> tuple[Tensor | float, tuple[Tensor, ...]]:
        """Leave out places whose true token is no candidate; scores that read no pair get no gradient of it.

        `selected` is the share, by weight, of places whose true token it chooses.
        """
        head, parts = cast(Dflash2Head, self.head), zip(*compare.candidates, strict=True)
        scores, entries = (torch.cat(part) for part in parts)
        candidates = entries if compare.ids is None else compare.ids[entries]
        right = candidates == compare.labels[:, None]
        both = scores.detach() + head.candidate_selector(outputs, before.tokens, candidates)
        terms = F.cross_entropy(both, right.int().argmax(-1), reduction="none") * right.any(-1)
        with torch.no_grad():
            chosen = right.gather(1, both.argmax(-1, keepdim=True))[:, 0]
        return self.config.selector_weight * (terms * compare.weights).sum(), ((chosen * compare.weights).sum(),)


class Dflash2ImageTraining(Dflash2Training, DflashImageTraining):
    """The same over image codes."""


class Dflash2Config(DflashConfig):
    """A DFlash 2 draft, for a language model or an image generator."""

    kind: Literal["dflash2"]  # type: ignore[assignment]
    # Channels that share a correction of their convolution's taps; it divides the target's width.
    conv_group_size: int = Field(16, ge=1)
    # Rank of what a pair of a token and the one before it scores.
    selector_rank: int = Field(256, ge=1)
    # Likeliest tokens of a place that the path is chosen from; others are never drafted.
    selector_top_k: int = Field(16, ge=1)
    # Weight of the selector's cross-entropy beside the draft's own loss.
    selector_weight: float = Field(1.0, gt=0)

    head_class: ClassVar[type[DflashHead]] = Dflash2Head
    # The label of a confidence head would not be the walk's acceptance.
    unread_for_language: ClassVar[frozenset[str]] = frozenset({"confidence", "cut_below"})

    def shape(self, target: TargetShape) -> Dflash2Shape:
        base = super().shape(target)
        if base.layer.hidden_size % self.conv_group_size:
            raise UserError(
                f"groups of {self.conv_group_size} channels do not divide the target's width of "
                f"{base.layer.hidden_size}", key="drafter.conv_group_size", hint="take a divisor of the width",
            )  # fmt: skip
        return Dflash2Shape(
            **vars(base), conv_group_size=self.conv_group_size,
            selector_rank=self.selector_rank, selector_top_k=self.selector_top_k,
        )  # fmt: skip

    def training_objective(self, module: nn.Module, target: Target, settings: HeadObjective | None = None) -> nn.Module:
        training = Dflash2ImageTraining if target.shape.draws_images else Dflash2Training
        return training(cast(DflashHead, module), target, self)
