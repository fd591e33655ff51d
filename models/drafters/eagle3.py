"""EAGLE-3: three layers' states joined, a vocabulary of its own, and a training-time test of seven passes.

The loss is cross-entropy against the target's distribution over the draft's vocabulary, weighted 0.8^s for pass s
(EAGLE-3, section 3). Its arithmetic is `HeadTraining` in head_training.py, with `mtp_attention: ttt` and `EAGLE3_LOSS`.
Letters: B rows, N inputs, D width, V' draft vocabulary, V the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ...core.errors import UserError
from ..decoding.cache import Cache
from ..decoding.head_layer import GatedFeedForward, HeadAttention, RMSNorm, Rotary, Rotation, through
from ..layer import LayerShape
from ..targets.base import Target, TargetShape
from ..training_passes import Keys, TrainingPasses
from .base import CountTokens
from .draft_vocabulary import drafted_ids
from .head_config import HeadConfig
from .head_inputs import Image, Reads, Visual
from .head_module import StateHead
from .head_objective import HeadObjective
from .mirrored import mirrored_layer

EAGLE3_LOSS = HeadObjective(token=1.0, decay=0.8, noise=0.0)


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

    decoding_settings: ClassVar[frozenset[str]] = frozenset({"positions", "vata"})
    beside_states: ClassVar[frozenset[str]] = HeadConfig.beside_states | {"vata"}
    own_loss: ClassVar[HeadObjective] = EAGLE3_LOSS
    is_eagle3: ClassVar[bool] = True

    @model_validator(mode="after")
    def _no_feature_loss(self) -> Eagle3Config:
        if self.objective is not None and self.objective.feature:
            raise ValueError(
                "objective.feature compares states, and this head's are its own; give token, l1 or listmle"
            )
        if self.taps is not None and list(self.taps) != sorted(set(self.taps)):
            raise ValueError("taps are three layers in ascending order")
        return self

    def visual(self, *, training: bool) -> Visual:
        """Return `visual_slots`; "none" in decoding under `vata`."""
        return "none" if self.vata and not training else self.visual_slots

    def image_input(self, *, training: bool = True) -> Image | None:
        """Return the setting `image`; None where no input stands at a visual token."""
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
        return mirrored_layer(self, shape.text, input_norm=True, like_llama=True)

    def module(self, layer: LayerShape, draft_ids: Tensor | None) -> StateHead:
        """Make an `Eagle3Head`; without `draft_ids` [V'] it scores the whole vocabulary."""
        ids = torch.arange(layer.vocab_size) if draft_ids is None else draft_ids
        return Eagle3Head(layer, ids, fc_norm=self.fc_norm, norm_output=self.norm_output)

    def build(self, target: Target, *, count_tokens: CountTokens | None = None) -> StateHead:
        """A reduced vocabulary takes the ids that the training data has most often: `count_tokens` says how often."""
        ids = drafted_ids(self.draft_vocab_size, target, count_tokens)
        return self.module(self.layer(target.shape), ids)

    def exports(self, engine: str) -> list[str]:
        """Return no reason for any engine: the settings decide."""
        return []

    def training_objective(self, module: nn.Module, target: Target, settings: HeadObjective | None = None) -> nn.Module:
        """Raise `UserError` for settings with a `feature` term: this head's states are its own."""
        if settings is not None and settings.feature:
            raise UserError(
                "objective.feature compares states, and this head's are its own", key="objective.feature",
                hint="give token, l1 or listmle",
            )  # fmt: skip
        return super().training_objective(module, target, settings)


class Eagle3Head(StateHead):
    """EAGLE-3: its own final norm and LM head over a part of the vocabulary.

    Args:
        draft_ids: [V] int64 ascending, the target's ids of the draft's vocabulary.
        fc_norm: whether each joined state has a norm of its own (EAGLE-3.1).
        norm_output: whether its own state is normed before the next pass reads it (EAGLE-3.1).
    """

    model_type = "eagle3"
    takes_rotations = True

    def __init__(self, shape: LayerShape, draft_ids: Tensor, *, fc_norm: bool = False, norm_output: bool = False):
        super().__init__()
        self.shape = shape
        width, device = shape.hidden_size, draft_ids.device
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.midlayer = JoinedLayer(shape)
        self.norm = RMSNorm(width, shape.norm_eps)
        self.score_ids(width, shape.vocab_size, draft_ids)
        known = torch.zeros(shape.vocab_size, dtype=torch.bool, device=device)
        known[draft_ids] = True
        self.register_buffer("t2d", known)
        self.rotary = Rotary(shape)
        self.norm_output = norm_output
        self.fc_norm: nn.ModuleList | None = None
        if fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, shape.norm_eps) for _ in range(3))

    def fuse(self, states: Tensor) -> Tensor:
        """[B,N,3*D] -> [B,N,D]."""
        if self.fc_norm is not None:
            parts = zip(self.fc_norm, states.chunk(3, dim=-1), strict=True)
            states = torch.cat([norm(part) for norm, part in parts], dim=-1)
        return self.fc(states)

    def forward(
        self,
        embeds: Tensor,
        states: Tensor,
        positions: Tensor | Rotation,
        mask: Tensor | None,
        cache: Cache | object | None = None,
        *,
        direct: tuple[Tensor, Tensor] | None = None,
        image: Tensor | None = None,
        depths: Tensor | None = None,
    ) -> Tensor:
        """Predict features as `FusedHead.forward` does; they are normed under `norm_output` alone."""
        assert direct is None and image is None, "no input of EAGLE-3 bypasses its layer"
        rope: Any
        if isinstance(positions, Rotation):
            rope = positions
        else:  # later passes of training turn as the first one
            rope = None if isinstance(cache, TrainingPasses) and cache.step else self.rotary(positions)
        outputs = self.midlayer(embeds, states, rope, mask, cache)
        return self.norm(outputs) if self.norm_output else outputs

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights, read from `fc`: here, so that a reader of a step finds it in this file."""
        return self.fc.weight.dtype

    def hidden(self, outputs: Tensor) -> Tensor:
        """Apply the head's final norm to outputs [...,D] that are not normed."""
        return outputs if self.norm_output else self.norm(outputs)

    def draft_scores(self, outputs: Tensor, scores: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        """Score outputs [N,D] with the head's own LM head: [N,V], minus infinity for ids that are not the draft's."""
        return super().draft_scores(self.hidden(outputs), scores, dtype)


class JoinedLayer(nn.Module):
    """A decoder layer whose attention reads [norm(embedding); norm(state)] and whose residual is the state."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = HeadAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = GatedFeedForward(shape)

    def forward(
        self, embeds: Tensor, states: Tensor, rope: Tensor | Rotation, mask: Tensor | None, cache: Any
    ) -> Tensor:
        """Return [B,N,D] from embeddings and states [B,N,D]; `rope` comes from `Rotary`, `mask` is [N,K] or [B,N,K]."""
        if isinstance(cache, TrainingPasses):
            step, cache.step = cache.step, cache.step + 1
            if cache.layer is None:
                shared = _Shared(self, embeds, rope, cache)
                outputs, link = _Pass.apply(shared, step, cache.skipped, states, shared.half, *shared.weights)
            else:
                shared, link = cache.layer
                outputs, link = _Pass.apply(shared, step, 0, states, link)
            cache.layer = shared, link
            return outputs
        joined = torch.cat([self.input_layernorm(embeds), self.hidden_norm(states)], dim=-1)
        return through(self, states, joined, rope, mask, cache)


class _Weights(NamedTuple):
    before: Tensor  # [D], of the norm of states
    qkv: Tensor  # [(H+2G)*E,D], what reads states
    out: Tensor
    behind: Tensor  # [D], of the norm behind the attention
    gate: Tensor
    up: Tensor
    down: Tensor


class _Shared:
    """What the passes of training share of a layer, and gradients while they are summed over passes."""

    def __init__(self, layer: JoinedLayer, embeds: Tensor, rope: Any, passes: TrainingPasses):
        attention, mlp, shape = layer.self_attn, layer.mlp, layer.self_attn.shape
        assert shape.rope == "half" and not (shape.qk_norm or shape.qk_rms_norm), "EAGLE-3's layer is Llama's"
        self.num_heads, self.head_dim, self.eps = shape.num_heads, attention.head_dim, shape.norm_eps
        self.turned, self.passes = shape.num_heads + shape.num_kv_heads, (passes.count - 1, passes.segments)
        parts, width = (attention.q_proj, attention.k_proj, attention.v_proj), shape.hidden_size
        joined = torch.cat([part.weight for part in parts])  # [(H+2G)*E,2*D]
        bias = torch.cat([part.bias for part in parts]) if shape.qkv_bias else None
        # The embedding is the same in all passes, so its half of the products is made once: [B,N,(H+2G)*E].
        self.half = F.linear(layer.input_layernorm(embeds), joined[:, :width], bias)
        self.weights = _Weights(
            layer.hidden_norm.weight, joined[:, width:], attention.o_proj.weight,
            layer.post_attention_layernorm.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight,
        )  # fmt: skip
        cos, sin = rope.unsqueeze(-3).unbind(-1)
        self.cos, self.sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)  # [B,N,1,E]
        self.keys: Any = None
        self.sums: dict[str, Tensor] = {}  # of weights, by name
        self.inner: tuple[Tensor, Tensor, Tensor] | None = None  # of `half`, true keys and values, and later ones

    def add(self, name: str, gradient: Tensor, inputs: Tensor) -> None:
        """Add to the gradient of a linear layer's weight [O,I] that of its outputs [S,O] at `inputs` [S,I]."""
        if name in self.sums:
            self.sums[name].addmm_(gradient.T, inputs)
        else:
            self.sums[name] = gradient.T @ inputs

    def normed(self, states: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """States [S,D] as of `RMSNorm`, and what they were multiplied by [S,1]."""
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(states) * weight, scale

    def normed_backward(self, name: str, weight: Tensor, gradient: Tensor, states: Tensor, scale: Tensor) -> Tensor:
        """The gradient of `states` from that of what `normed` returned; that of the weight is added."""
        unit, weight, wide = states * scale, weight.to(scale), gradient.to(scale)
        along = wide * unit
        part = along.sum(0)
        self.sums[name] = self.sums[name].add_(part) if name in self.sums else part
        mean = (along @ weight).unsqueeze(-1)
        return torch.addcmul(wide * weight, unit, mean, value=-1 / len(weight)).mul_(scale).to(states)


class _Pass(torch.autograd.Function):
    """`JoinedLayer` in a pass of training, with its backward pass written out: most of a small model's step is calls,
    and autograd makes twice as many. `through`, pass by pass and over joined inputs, gives the same.

    Gradients of weights are summed over passes in place. The first pass returns them: its backward comes last, since
    each pass gives the next one a link.
    """

    @staticmethod
    def forward(
        ctx: Any, shared: _Shared, step: int, skipped: int, states: Tensor, link: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        of, (rows, count, _) = shared.weights, states.shape
        x = states.flatten(0, 1)
        normed, scale = shared.normed(x, of.before)
        heads = torch.addmm(shared.half[:, -count:].flatten(0, 1), normed, of.qkv.T)
        heads = heads.view(rows, count, -1, shared.head_dim)
        cos, sin = shared.cos[:, -count:], shared.sin[:, -count:]
        qk = heads[:, :, : shared.turned].to(cos)
        qk = torch.addcmul(qk * cos, qk.roll(shared.head_dim // 2, -1), sin).to(heads).transpose(1, 2)
        q, k = qk[:, : shared.num_heads, skipped:], qk[:, shared.num_heads :]
        v = heads[:, :, shared.turned :].transpose(1, 2)
        if step:
            shared.keys.put(k, v, step)
        else:
            shared.keys = Keys(torch.stack([k, v]), *shared.passes)
        seen, whole, ctx.kernels, rests = shared.keys.attend(q, step)
        mixed = seen.transpose(1, 2).flatten(2).flatten(0, 1)
        y = torch.addmm(states[:, skipped:].flatten(0, 1), mixed, of.out.T)
        inner, inner_scale = shared.normed(y, of.behind)
        opening, lifted = inner @ of.gate.T, inner @ of.up.T
        opened = F.silu(opening)
        product = opened * lifted
        ctx.shared, ctx.step, ctx.skipped = shared, step, skipped
        ctx.save_for_backward(
            x, scale, normed, q, seen, whole, mixed, y, inner, inner_scale, opening, opened, lifted, product, *rests
        )
        return torch.addmm(y, product, of.down.T).view(rows, count - skipped, -1), states.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> Any:  # type: ignore[override]
        shared, step, skipped, of = ctx.shared, ctx.step, ctx.skipped, ctx.shared.weights
        x, scale, normed, q, seen, whole, mixed, y, inner, inner_scale, opening, opened, lifted, product, *rests = (
            ctx.saved_tensors
        )
        keys, (rows, _, count, _) = shared.keys, q.shape
        g = torch.zeros_like(y) if gradient is None else gradient.flatten(0, 1)
        shared.add("down", g, product)
        d_product = g @ of.down
        d_lifted = d_product * opened
        d_opening = torch.ops.aten.silu_backward(d_product.mul_(lifted), opening)
        shared.add("gate", d_opening, inner)
        shared.add("up", d_lifted, inner)
        d_inner = (d_opening @ of.gate).addmm_(d_lifted, of.up)
        g = shared.normed_backward("behind", of.behind, d_inner, y, inner_scale).add_(g)
        shared.add("out", g, mixed)
        d_seen = (g @ of.out).view(rows, count, shared.num_heads, -1).transpose(1, 2)
        if shared.inner is None:
            true, held = (torch.zeros_like(one, dtype=keys.wide) for one in (keys.true, keys.held))
            shared.inner = torch.zeros_like(shared.half), true, held
        d_half, d_true, d_held = shared.inner
        dq = keys.attend_backward(
            d_seen, q, seen, whole, ctx.kernels, rests, step, d_true, d_held if step else None
        )  # fmt: skip
        dk, dv = (keys.own(d_held, step, count) if step else d_true).unbind(0)
        if skipped:  # inputs of which only keys and values were made
            dq, g = F.pad(dq, (0, 0, skipped, 0)), F.pad(g.view(rows, count, -1), (0, 0, skipped, 0)).flatten(0, 1)
            count += skipped
        cos, sin = shared.cos[:, -count:], shared.sin[:, -count:]
        qk = torch.cat([dq.to(cos), dk.to(cos)], dim=1).transpose(1, 2)
        qk = torch.addcmul(qk * cos, qk.roll(shared.head_dim // 2, -1), sin, value=-1)
        heads = torch.cat([qk.to(x), dv.transpose(1, 2).to(x)], dim=2).flatten(2)
        d_half[:, -count:] += heads
        heads = heads.flatten(0, 1)
        shared.add("qkv", heads, normed)
        g = shared.normed_backward("before", of.before, heads @ of.qkv, x, scale).add_(g).view(rows, count, -1)
        if step:
            return None, None, None, g, None
        shared.inner = None
        return None, None, None, g, d_half, *(shared.sums.pop(name).to(w) for name, w in of._asdict().items())
