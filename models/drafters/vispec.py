"""ViSpec: a few vectors stand for each image, and one more joins the states of all text after it.

Letters: P tokens of an image, Q queries, N inputs, B rows, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.json_types import JsonObject
from ...core.states import uploaded
from ..layer import LayerShape
from ..targets.base import TargetShape
from .base import HeadObjective
from .head_config import VISUAL_STAGE, FusedHeadConfig, exports_as_eagle
from .head_module import FusedHead, StateHead
from .head_settings import Visual
from .head_training import Layout


class VispecConfig(FusedHeadConfig):
    """A ViSpec head."""

    kind: Literal["vispec"]
    kv_heads: Literal["target", "mha"] = "mha"
    mtp_steps: int = Field(1, ge=0, le=64)
    replace: Literal["after_text", "all"] = "all"
    # Queries of the adaptor: all but one stand at an image's last tokens, the last one is the global vector.
    num_queries: int = Field(2, ge=1, le=4096)
    # Drops the vectors that stand at image tokens; the global one stays.
    vata: bool = False

    decoding_settings: ClassVar[frozenset[str]] = frozenset({"positions", "vata"})
    default_objective: ClassVar[HeadObjective] = VISUAL_STAGE

    def visual(self, *, training: bool) -> Visual:
        return "none" if (self.vata and not training) or self.num_queries == 1 else "compressed"

    def visual_layer(self, shape: TargetShape, *, training: bool) -> int | None:
        return 0  # also where no vector stands at an image: the global one is made of it

    def module(self, layer: LayerShape, draft_ids: Tensor | None) -> StateHead:
        return VispecHead(layer, draft_ids, fc_bias=self.fc_bias, num_queries=self.num_queries)

    def written_settings(self) -> JsonObject:
        return super().written_settings() | {"num_queries": self.num_queries}

    def exports(self, engine: str) -> list[str]:
        return exports_as_eagle(engine)


class VispecHead(FusedHead):
    """Joins each state with the global vector of the last image before it."""

    def __init__(
        self, shape: LayerShape, draft_ids: Tensor | None = None, *, fc_bias: bool = True, num_queries: int = 2
    ):
        super().__init__(shape, draft_ids, fc_bias=fc_bias)
        self.num_queries, width = num_queries, shape.hidden_size
        self.imadpt = ImageAdaptor(shape, num_queries)
        self.img_fc = nn.Linear(2 * width, width)
        with torch.no_grad():
            self.img_fc.weight.copy_(torch.eye(width, 2 * width))
            self.img_fc.bias.zero_()

    def joined(self, embeds: Tensor, states: Tensor, image: Tensor | None, depths: Tensor | None) -> Tensor:
        """Join the states with the global vectors `image` [B,N,D] by `img_fc` first."""
        assert image is not None
        return super().joined(embeds, self.img_fc(torch.cat([states, image], dim=-1)), image, depths)

    def pictured(
        self, visual: str, layout: Layout, layers: Mapping[int, Tensor]
    ) -> tuple[tuple[Tensor, Tensor] | None, Tensor]:
        """The vectors of each picture: at its last inputs under "compressed", and one for all text after it."""
        # Without a picture a zero one runs: ranks that call other modules hang in ZeRO's collectives.
        embeds = layers[0]
        parts = [embeds[row, first:end] for row, first, end in layout.runs] or [embeds.new_zeros(1, embeds.shape[-1])]
        features = nn.utils.rnn.pad_sequence(parts, batch_first=True).to(self.dtype)
        lengths = uploaded(torch.tensor([len(part) for part in parts]), features.device)
        vectors = self.imadpt(features, torch.arange(features.shape[1], device=features.device) < lengths[:, None])
        direct = (layout.visual, spread(layout, vectors[:, :-1])) if visual == "compressed" else None
        # [B,N,D]: at each input the last vector of the last picture that ended before its token; zeros before any.
        which = torch.zeros_like(layout.index)  # 0 is none
        for number, (row, _, end) in enumerate(layout.runs, 1):
            # Pictures are processed in order, so a later one replaces an earlier one.
            which[row] = torch.where(layout.index[row] >= end - 1, number, which[row])
        # The vector of the zero picture belongs to no input but still gets a gradient of zero.
        return direct, torch.cat([0 * vectors[:1, -1], vectors[: len(layout.runs), -1]])[which]


def spread(layout: Layout, vectors: Tensor) -> Tensor:
    """[B,N,D]: the inputs that a picture kept hold its vectors, the last ones where there are fewer inputs."""
    values = vectors.new_zeros(*layout.index.shape, vectors.shape[-1])
    visual, index = layout.on_host("visual"), layout.on_host("index")
    for number, (row, first, end) in enumerate(layout.runs):
        held = (visual[row] & (index[row] >= first - 1) & (index[row] < end - 1)).nonzero()[:, 0]
        held = uploaded(held, values.device)
        last = vectors[number, vectors.shape[1] - len(held) :]
        values = values.index_put((torch.full_like(held, row), held), last)
    return values


class ImageAdaptor(nn.Module):
    """ViSpec's: learned queries attend over the embeddings of one picture, without positions."""

    def __init__(self, shape: LayerShape, num_queries: int):
        super().__init__()
        heads, width = shape.num_heads, shape.head_dim
        self.q = nn.Parameter(torch.randn(num_queries, heads, width) * width**-0.5)
        self.k_proj = nn.Linear(shape.hidden_size, heads * width, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.hidden_size, heads * width, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(heads * width, shape.hidden_size, bias=False)

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        """[pictures,P,D] with a mask [pictures,P] of their places -> [pictures,Q,D]."""
        heads, width = self.q.shape[1:]
        keys, values = (
            project(features).unflatten(-1, (heads, width)).transpose(1, 2) for project in (self.k_proj, self.v_proj)
        )
        queries = self.q.transpose(0, 1).expand(len(features), -1, -1, -1)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask[:, None, None])
        return self.o_proj(mixed.transpose(1, 2).flatten(2))
