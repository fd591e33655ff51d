"""ViSpec: a few vectors stand for each image, and one more joins the states of all text after it.

Letters: P tokens of an image, Q queries, N inputs, B rows, D width.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.json_types import JsonObject
from ..layer import LayerShape
from ..targets.base import TargetShape
from .head_config import VISUAL_STAGE, FusedHeadConfig, exports_as_eagle
from .head_inputs import Visual
from .head_module import FusedHead, StateHead
from .head_objective import HeadObjective


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
    own_loss: ClassVar[HeadObjective] = VISUAL_STAGE

    def visual(self, *, training: bool) -> Visual:
        """Return "none" with one query (the global vector alone) or in decoding under `vata`; else "compressed"."""
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
