"""The modules of hidden-state heads: what all of them answer, and one decoder layer that predicts the target's next
feature (EAGLE-1's form). EAGLE-3's module stands in its own file.

A head holds neither the target's embedding nor its LM head. Parameter names are those of published checkpoints.
Letters: B rows, N inputs, D width, S joined states, K positions seen, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..decoding.cache import Cache
from ..decoding.head_layer import DecoderLayer, Rotary, Rotation
from ..layer import LayerShape
from .draft_vocabulary import DraftVocabulary


class StateHead(DraftVocabulary):
    """The interface of all heads to training and proposals; the LM head reads the output as it is.

    `forward` is that of `FusedHead`.
    """

    model_type = "eagle"  # in config.json: one layer, as EAGLE-1's
    # ViSpec's queries and HiViS' step vectors, which config.json names for every head; 0: none.
    num_queries: int = 0
    num_steps: int = 0
    norm_output: bool = False  # whether its own state is normed before the next pass reads it (EAGLE-3.1)
    norm_before_residual: bool = False  # whether its layer's residual is the normed state (speculators)
    takes_rotations = False  # in place of positions: found in a table, for all that a cycle reads

    shape: LayerShape
    fc: nn.Linear
    rotary: Rotary

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def embed(self, ids: Tensor, embedding: Tensor) -> Tensor:
        """[...] ids -> [...,D] in the head's precision; `embedding` [V,D] is the target's."""
        return F.embedding(ids, embedding).to(self.dtype)

    def fuse(self, states: Tensor) -> Tensor:
        """True states [B,N,S*D] -> the state half of the layer's input [B,N,D]."""
        return states

    def pictured(
        self, visual: str, layout: Any, layers: Mapping[int, Tensor]
    ) -> tuple[tuple[Tensor, Tensor] | None, Tensor]:
        """`direct` and `image` of `forward` at a layout's inputs, of a head with `num_queries`."""
        raise NotImplementedError

    def hidden(self, outputs: Tensor) -> Tensor:
        """Outputs [...,D] as the LM head reads them."""
        return outputs


class FusedHead(StateHead):
    """`fc` joins a token's embedding with the state before it: Sparrow, MSD and EAGLE; ViSpec and HiViS add to that."""

    takes_rotations = True

    def __init__(self, shape: LayerShape, draft_ids: Tensor | None = None, *, fc_bias: bool = True):
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=fc_bias)
        self.layers = nn.ModuleList([DecoderLayer(shape)])
        self.score_ids(shape.hidden_size, shape.vocab_size, draft_ids)
        self.rotary = Rotary(shape)

    def joined(self, embeds: Tensor, states: Tensor, image: Tensor | None, depths: Tensor | None) -> Tensor:
        """The layer's input [B,N,D]; arguments as of `forward`."""
        return self.fc(torch.cat([embeds, states], dim=-1))

    def forward(
        self, embeds: Tensor, states: Tensor, positions: Tensor | Rotation, mask: Tensor | None,
        cache: Cache | object | None = None, *, direct: tuple[Tensor, Tensor] | None = None,
        image: Tensor | None = None, depths: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Predicted features [B,N,D].

        Args:
            embeds: [B,N,D] of the tokens after the states.
            states: [B,N,D], fused where they are true.
            positions: [B,N], [N] or [3,B,N] int64, or the rotation of them where the head `takes_rotations`.
            mask: [N,K] or [B,N,K] bool; None: one input sees all, several are causal with nothing before them.
            direct: which inputs [B,N] take [B,N,D] in place of what fc makes.
            image: [B,N,D] global vectors (ViSpec), zeros before the first image.
            depths: [N] or [B,N] int64, steps since the last true state (HiViS).
        """
        inputs = self.joined(embeds, states, image, depths)
        if direct is not None:
            where, values = direct
            inputs = torch.where(where.unsqueeze(-1), values, inputs)
        rope = positions if isinstance(positions, Rotation) else self.rotary(positions)
        return self.layers[0](inputs, rope, mask, cache)
