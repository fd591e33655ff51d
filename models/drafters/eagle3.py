"""EAGLE-3: three layers' states joined, a vocabulary of its own, and a training-time test of seven passes.

The loss is cross-entropy against the target's distribution over the draft's vocabulary, weighted 0.8^s for pass s
(EAGLE-3, section 3). Its arithmetic is `HeadTraining` in head_training.py, with `mtp_attention: ttt` and `EAGLE3_LOSS`.
Letters: B rows, N inputs, D width, V' draft vocabulary, V the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.errors import UserError
from ..decoding.cache import Cache
from ..decoding.head_layer import GatedFeedForward, HeadAttention, RMSNorm, Rotary, Rotation, through
from ..layer import LayerShape
from ..targets.base import Target, TargetShape
from ..training_passes import TrainingPasses
from .base import HeadObjective
from .draft_vocabulary import CountTokens, drafted_ids
from .head_config import HeadConfig
from .head_module import StateHead
from .head_settings import Image, Reads, Visual

EAGLE3_LOSS = HeadObjective(token=1.0, decay=0.8, noise=0.0)
# What a head of EAGLE-3 may have beside the paper's parts.
OPTIONS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "own_embedding")
_ITS_OWN = "objective.feature compares states, and this head's are its own"


class Eagle3Config(HeadConfig):
    """An EAGLE-3 head."""

    kind: Literal["eagle3"]
    # Passes after the first of the training-time test: 6 are EAGLE-3's seven.
    mtp_steps: int = Field(6, ge=0, le=64)
    mtp_attention: Literal["full", "ttt"] = "ttt"
    # Layers whose states are joined; null: 2, half, and all but 3 of the target's.
    taps: tuple[int, int, int] | None = None
    # At visual tokens: none is a text-only window; middle keeps the middle tap alone, so that cached states do not grow
    # fourfold; read joins all three, as servers do, and needs them at every token.
    visual_slots: Literal["none", "middle", "read"] = "none"
    # What their embedding half is.
    image: Image = "placeholder"
    # Text-only window in decoding, independent of what training had at visual tokens.
    vata: bool = False
    # EAGLE-3.1: each joined state is normed by a norm of its own before the projection.
    fc_norm: bool = False
    # EAGLE-3.1: the head's own state is normed before the next pass reads it.
    norm_output: bool = False
    # The three joined states are normed together by one norm before the projection (gpt-oss; speculators' default).
    norm_before_fc: bool = False
    # The layer's residual is the state after `hidden_norm`, and not the state itself (speculators' default).
    norm_before_residual: bool = False
    # Queries and keys are normed over the width of each head, as in Qwen3's layer (speculators' P-EAGLE).
    qk_norm: bool = False
    # Number of true inputs up to its last one that an input attends to, beside the drafts that it stands on; null: all.
    # Shorter ones cost less at long contexts, and answers that lie before them are drafted worse.
    sliding_window: int | None = Field(None, ge=1)
    # Tokens are read through a table of the head's own, which begins as the target's embedding and is trained, as in
    # speculators' P-EAGLE; false: through the target's.
    own_embedding: bool = False

    decoding_settings: ClassVar[frozenset[str]] = frozenset({"positions", "vata"})
    beside_states: ClassVar[frozenset[str]] = HeadConfig.beside_states | {"vata", "sliding_window", "qk_norm", *OPTIONS}
    default_objective: ClassVar[HeadObjective] = EAGLE3_LOSS
    is_eagle3: ClassVar[bool] = True

    @model_validator(mode="after")
    def _no_feature_loss(self) -> Eagle3Config:
        if self.objective is not None and self.objective.feature:
            raise ValueError(f"{_ITS_OWN}; give token, l1 or listmle")
        if self.taps is not None and list(self.taps) != sorted(set(self.taps)):
            raise ValueError("taps are three layers in ascending order")
        if self.sliding_window is not None and self.mtp_attention != "ttt":
            raise ValueError("a sliding_window is trained with mtp_attention: ttt, as it is decoded")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm both norm what is projected; give one of them")
        return self

    def visual(self, *, training: bool) -> Visual:
        return "none" if self.vata and not training else self.visual_slots

    def image_input(self, *, training: bool = True) -> Image | None:
        return self.image if self.visual(training=training) != "none" else None

    def reads(self, shape: TargetShape, *, training: bool) -> Reads:
        """Join three layers; the second of them alone stands at visual tokens where `visual` is "middle"."""
        layers, held = self.layers_of(shape), self.visual(training=training)
        image = 0 if held != "none" and self.image_input() == "projected" else None
        return Reads(layers, layers[1] if held == "middle" else None, image)

    def layers_of(self, shape: TargetShape) -> tuple[int, int, int]:
        """The layers whose states are joined. Raises `UserError` if the target has fewer layers."""
        layers = self.taps or (2, shape.num_layers // 2, shape.num_layers - 3)
        if not 0 < layers[0] < layers[1] < layers[2] <= shape.num_layers:
            raise UserError(
                f"EAGLE-3 joins the states after three different layers, and {layers} of a target of "
                f"{shape.num_layers} are not",
                hint="name them: drafter.taps: [1, 2, 3]",
            )
        return layers

    def layer(self, shape: TargetShape) -> LayerShape:
        """Mirror a layer without what only Qwen has; its attention reads embedding and state, 2 * D wide."""
        layer = self.mirrored(shape.text, input_norm=True, qkv_bias=self.qkv_bias, like_llama=True)
        return replace(layer, qk_rms_norm=self.qk_norm, sliding_window=self.sliding_window)

    @property
    def options(self) -> dict[str, bool]:
        """What a module has beside the paper's, as its constructor takes it."""
        return {name: dict(self)[name] for name in OPTIONS}

    def module(self, layer: LayerShape, draft_ids: Tensor | None) -> StateHead:
        ids = torch.arange(layer.vocab_size) if draft_ids is None else draft_ids
        return Eagle3Head(layer, ids, **self.options)

    def build(self, target: Target, *, count_tokens: CountTokens | None = None) -> StateHead:
        ids = drafted_ids(self.draft_vocab_size, target, count_tokens)
        head = cast(Eagle3Head, self.module(self.layer(target.shape), ids))
        if head.embed_tokens is not None:
            head.embed_tokens.weight.data.copy_(target.embedding[: target.shape.vocab_size])
        return head

    def exports(self, engine: str) -> list[str]:
        return []  # the settings decide

    def training_objective(self, module: nn.Module, target: Target, settings: HeadObjective | None = None) -> nn.Module:
        if settings is not None and settings.feature:
            raise UserError(_ITS_OWN, key="objective.feature", hint="give token, l1 or listmle")
        return super().training_objective(module, target, settings)


class Eagle3Head(StateHead):
    """EAGLE-3: its own final norm, and an LM head over `draft_ids`, [V'] int64 ascending, of the target's ids.
    EAGLE-3.1 norms each joined state (`fc_norm`), and its own state before the next pass reads it (`norm_output`).
    speculators' heads norm the three joined states as one vector (`norm_before_fc`), and their residual is the normed
    state (`norm_before_residual`): speculators 0.9, models/eagle3/core.py and model_definitions.py.
    """

    model_type = "eagle3"
    takes_rotations = True

    def __init__(
        self, shape: LayerShape, draft_ids: Tensor, *, fc_norm: bool = False, norm_output: bool = False,
        norm_before_fc: bool = False, norm_before_residual: bool = False, own_embedding: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.shape = shape
        width, device = shape.hidden_size, draft_ids.device
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.midlayer = JoinedLayer(shape, norm_before_residual=norm_before_residual)
        self.norm = RMSNorm(width, shape.norm_eps)
        self.score_ids(width, shape.vocab_size, draft_ids)
        known = torch.zeros(shape.vocab_size, dtype=torch.bool, device=device)
        known[draft_ids] = True
        self.register_buffer("t2d", known)
        self.rotary = Rotary(shape)
        self.embed_tokens = nn.Embedding(shape.vocab_size, width) if own_embedding else None
        self.norm_output, self.norm_before_residual = norm_output, norm_before_residual
        self.input_norm = RMSNorm(3 * width, shape.norm_eps) if norm_before_fc else None
        self.fc_norm: nn.ModuleList | None = None
        if fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, shape.norm_eps) for _ in range(3))

    def embed(self, ids: Tensor, embedding: Tensor) -> Tensor:
        return super().embed(ids, embedding) if self.embed_tokens is None else self.embed_tokens(ids).to(self.dtype)

    def fuse(self, states: Tensor) -> Tensor:
        """[B,N,3*D] -> [B,N,D]."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = zip(self.fc_norm, states.chunk(3, dim=-1), strict=True)
            states = torch.cat([norm(part) for norm, part in parts], dim=-1)
        return self.fc(states)

    def forward(
        self, embeds: Tensor, states: Tensor, positions: Tensor | Rotation, mask: Tensor | None,
        cache: Cache | object | None = None, *, direct: None = None, image: None = None, depths: None = None,
    ) -> Tensor:  # fmt: skip
        """Predict features as `FusedHead.forward` does; they are normed under `norm_output` alone."""
        assert direct is None and image is None, "no input of EAGLE-3 bypasses its layer"
        rope: Tensor | Rotation | None
        if isinstance(positions, Rotation):
            rope = positions
        else:  # later passes of training turn as the first one
            rope = None if isinstance(cache, TrainingPasses) and cache.step else self.rotary(positions)
        outputs = self.midlayer(embeds, states, rope, mask, cache)
        return self.norm(outputs) if self.norm_output else outputs

    def hidden(self, outputs: Tensor) -> Tensor:
        """Apply the head's final norm to outputs [...,D] that are not normed."""
        return outputs if self.norm_output else self.norm(outputs)

    def draft_scores(self, outputs: Tensor, scores: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        """Score outputs [N,D] with the head's own LM head: [N,V], minus infinity for ids that are not the draft's."""
        return super().draft_scores(self.hidden(outputs), scores, dtype)


class JoinedLayer(nn.Module):
    """A decoder layer whose attention reads [norm(embedding); norm(state)] and whose residual is the state, or with
    `norm_before_residual` the normed state.
    """

    def __init__(self, shape: LayerShape, *, norm_before_residual: bool = False):
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = HeadAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = GatedFeedForward(shape)

    def forward(
        self, embeds: Tensor, states: Tensor, rope: Tensor | Rotation | None, mask: Tensor | None, cache: Any
    ) -> Tensor:
        """Return [B,N,D] from embeddings and states [B,N,D]; `rope` comes from `Rotary`, `mask` is [N,K] or [B,N,K]."""
        if isinstance(cache, TrainingPasses):
            return self._in_pass(embeds, states, rope, cache)
        assert rope is not None
        normed = self.hidden_norm(states)
        joined = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        return through(self, normed if self.norm_before_residual else states, joined, rope, mask, cache)

    def _in_pass(self, embeds: Tensor, states: Tensor, rope: Tensor | Rotation | None, cache: TrainingPasses) -> Tensor:
        """`forward` in a pass of training. The embedding is the same in all passes, so its half of the queries, keys
        and values is made in the first one, which alone is given `rope`.
        """
        attention, width, count = self.self_attn, states.shape[-1], states.shape[1]
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        if cache.shared is None:
            weight = torch.cat([part.weight for part in projections])  # [(H+2G)*E,2*D]
            bias = torch.cat([part.bias for part in projections]) if attention.shape.qkv_bias else None
            half = F.linear(self.input_layernorm(embeds), weight[:, :width], bias)
            cache.shared = half, weight[:, width:], rope
        half, weight, rope = cache.shared
        normed = self.hidden_norm(states)
        projected = half[:, -count:] + F.linear(normed, weight)
        q, k, v = projected.split([part.out_features for part in projections], dim=-1)
        mixed = attention.mixed(q, k, v, cast(Tensor, rope)[:, -count:], None, cache)
        residual = normed if self.norm_before_residual else states
        outputs = residual[:, -mixed.shape[1] :] + attention.o_proj(mixed)
        return outputs + self.mlp(self.post_attention_layernorm(outputs))
