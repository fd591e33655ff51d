"""The head for several next tokens (multi-token prediction) that Qwen3.5 ships as `mtp.*`, fine-tuned as FastMTP does
(arXiv 2509.18362).

One layer of the target's own kind reads the norms of token x_{t+1}'s embedding and of the target's feature f_t, as vLLM
hands it over (behind the final norm). Its normed output takes the place of f_{t+1}, for the target's LM head and for
the next step of the same head. Training runs it K times over, step s with weight 0.6^s as in FastMTP; the loss compares
with the target's distribution, FastMTP's with its tokens. Parameters have the names of the target's folder.
Letters: B rows, N inputs, K places, D width, H heads, E head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ...core.errors import Refused, UserError
from ...core.json_types import JsonMapping, text_at
from ...core.placement import without_storage
from ...core.pretrained import Checkpoint
from ..decoding.cache import Cache
from ..decoding.head_layer import GatedFeedForward, HeadAttention, Rotary, Rotation, rotate_halves
from ..folders import opened_target, write_folder
from ..hub import config_value, rope_of, usual_heads
from ..layer import LayerShape
from ..targets.base import Target, TargetShape
from ..targets.table import text_of
from ..training_passes import TrainingPasses
from .base import HeadObjective, TargetIdentity
from .head_config import HeadConfig
from .head_files import check_manifest, take_weights
from .head_module import StateHead
from .head_settings import Image, Reads, Visual
from .manifest import MANIFEST, write_manifest

PREFIX = "mtp."
MTP_LOSS = HeadObjective(token=1.0, decay=0.6, noise=0.0)
# The layer is the target's own, and scores are its LM head's.
_GIVEN = (
    "kv_heads", "qkv_bias", "intermediate_size", "norm_eps", "rope_theta", "rope", "positions", "draft_vocab_size",
)  # fmt: skip


@dataclass(frozen=True)
class MtpShape(LayerShape):
    """The layer of the head."""

    turned: int = 0  # entries of an attention head that turn by positions


class MtpConfig(HeadConfig):
    """A target's own head for several next tokens; `path: null` is the one in the target's folder."""

    kind: Literal["mtp"]
    # Passes after the first, each on the head's own output: 2 are FastMTP's three tokens.
    mtp_steps: int = Field(2, ge=0, le=64)
    mtp_attention: Literal["full", "ttt"] = "ttt"
    replace: Literal["after_text", "all"] = "all"
    # Not set: the target's own.
    positions: Literal["compact", "flat", "mrope"] = "mrope"

    decoding_settings: ClassVar[frozenset[str]] = frozenset()
    default_objective: ClassVar[HeadObjective] = MTP_LOSS
    embeds_images: ClassVar[Image | None] = "projected"

    @model_validator(mode="after")
    def _as_shipped(self) -> MtpConfig:
        for name in sorted(self.model_fields_set.intersection(_GIVEN)):
            if dict(self)[name] != type(self).model_fields[name].default:
                problem = "the head is one of the target's own layers, with its positions and its LM head"
                raise Refused(name, problem, "leave it out, or train another head: eagle3")
        return self

    @property
    def display_name(self) -> str:
        return self.path or "the target's own MTP head"

    def visual(self, *, training: bool) -> Visual:
        """Pictures are read as in the target's own training: projected embeddings, and its features."""
        return "read"

    def reads(self, shape: TargetShape, *, training: bool) -> Reads:
        return Reads((), None, 0)

    def layer(self, shape: TargetShape) -> MtpShape:
        """Raises `UserError` for a target without such a head."""
        text, rope, problem = shape.text, rope_of(shape.text), None
        num = config_value(text, "mtp_num_hidden_layers", 1)
        dedicated = config_value(text, "mtp_use_dedicated_embeddings", False)
        if not text_of(text).ships_mtp:
            problem = f"this target ({text.model_type}) ships no head for several tokens that is known here"
        elif config_value(text, "num_experts"):
            problem = "the head of this target has experts, which are not built here"
        elif num != 1 or dedicated:
            problem = (
                f"the target says mtp_num_hidden_layers {num}, mtp_use_dedicated_embeddings {dedicated}, and one layer "
                "over the target's own table is built here"
            )
        if problem:
            raise UserError(problem, key="drafter.kind", hint="take a dense Qwen3.5, or train eagle3")
        groups, head_dim = usual_heads(text)
        return MtpShape(
            vocab_size=text.vocab_size, hidden_size=text.hidden_size, intermediate_size=text.intermediate_size,
            num_heads=text.num_attention_heads, num_kv_heads=groups, norm_eps=text.rms_norm_eps,
            rope_theta=float(rope["rope_theta"]), input_norm=True, qkv_bias=bool(config_value(text, "attention_bias")),
            qk_rms_norm=True, own_head_dim=head_dim, mrope_section=tuple(rope["mrope_section"]), mrope_interleaved=True,
            turned=int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        )  # fmt: skip

    def module(self, layer: LayerShape, draft_ids: Tensor | None) -> StateHead:
        return MtpHead(cast(MtpShape, layer))

    def provides(self) -> set[str]:
        return {"drafter"}

    def _loaded(
        self, folder: Path | None, target: Target, dtype: torch.dtype | None, identity: TargetIdentity | None
    ) -> nn.Module:
        """From a stage's folder, from `path`, or from the target's own."""
        layer = self.layer(target.shape)
        section: JsonMapping = identity.section if identity else {}
        source = str(folder) if folder else self.path or text_at(section, "path")
        if source in (None, "inline"):
            raise UserError(
                "the target comes from no folder, so no head came with it", key="drafter.path",
                hint="name a folder that has one, or train it: from: scratch",
            )  # fmt: skip
        source = opened_target(str(source), key="target.path")
        revision = None if folder else self.revision if self.path else section.get("revision")
        if Path(source, MANIFEST).is_file():
            check_manifest(self, Path(source), target.shape, identity)
        state = Checkpoint(source, revision, key="drafter").under(PREFIX)
        if not state:
            raise UserError(
                "its weights hold no head for several tokens (mtp.*): transformers drops it where it saves a model",
                where=source, hint="name the model that it was trained from (drafter.path), or from: scratch",
            )  # fmt: skip
        with without_storage(target.device):
            head = MtpHead(layer)
        take_weights(
            head, state, Path(source), target.device, dtype or target.embedding.dtype,
            hint="name the model that this target was trained from",
        )  # fmt: skip
        return head

    def read(self, folder: Path, target: Target, dtype: torch.dtype, identity: TargetIdentity | None) -> StateHead:
        return cast(StateHead, self._loaded(folder, target, dtype, identity))

    def save(self, module: nn.Module, folder: Path, manifest: JsonMapping) -> None:
        head = cast(MtpHead, module)
        state = {PREFIX + name: value for name, value in head.state_dict().items()}
        write_folder(folder, {"model_type": head.model_type, **head.shape.to_dict()}, state)
        write_manifest(folder, manifest)

    def exports(self, engine: str) -> list[str]:
        return [] if engine == "vllm" else ["it is a part of the target's folder, which --to vllm writes"]


class MtpHead(StateHead):
    """The head; its output is normed, and is both the state of its next step and what the LM head reads."""

    model_type = "mtp"

    def __init__(self, shape: MtpShape):
        super().__init__()
        self.shape: MtpShape = shape
        width, eps = shape.hidden_size, shape.norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = CentredNorm(width, eps), CentredNorm(width, eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([GatedLayer(shape)])
        self.norm = CentredNorm(width, eps)
        self.score_ids(width, shape.vocab_size, None)
        self.rotary = Rotary(replace(shape, own_head_dim=shape.turned))

    def forward(
        self, embeds: Tensor, states: Tensor, positions: Tensor, mask: Tensor | None,
        cache: Cache | object | None = None, *, direct: None = None, image: None = None, depths: None = None,
    ) -> Tensor:  # fmt: skip
        """Predict features as `FusedHead.forward` does; `states` [B,N,D] are features, which the head norms itself."""
        assert direct is None and image is None, "pictures are ordinary inputs of this head"
        joined = torch.cat([self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(states)], dim=-1)
        return self.norm(self.layers[0](self.fc(joined), self.rotary(positions), mask, cache))


class CentredNorm(nn.Module):
    """Root mean square norm whose weight counts from 1, multiplied in float32 (Qwen3.5)."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """[...,D] -> [...,D]."""
        wide = states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).to(states)


class GatedAttention(HeadAttention):
    """Each head's values are gated by the input, and a part of its width turns (Qwen3.5's attention)."""

    def __init__(self, shape: MtpShape):
        super().__init__(shape)
        bias, inner = shape.qkv_bias, shape.num_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, 2 * inner, bias=bias)  # of each head: query, gate
        self.o_proj = nn.Linear(inner, shape.hidden_size, bias=bias)
        self.q_norm, self.k_norm = (CentredNorm(shape.head_dim, shape.norm_eps) for _ in range(2))

    def turn(self, heads: Tensor, rope: Tensor | Rotation) -> Tensor:
        """The first entries of heads [R,N,H,E], twice as many as `rope` [...,2] has angles."""
        assert isinstance(rope, Tensor), "this head takes positions"
        width = 2 * rope.shape[-2]
        return torch.cat([rotate_halves(heads[..., :width], rope), heads[..., width:]], dim=-1)

    def forward(
        self, states: Tensor, rope: Tensor | Rotation, mask: Tensor | None, cache: Cache | TrainingPasses | None
    ) -> Tensor:
        both, keys, values = self.q_proj(states), self.k_proj(states), self.v_proj(states)
        read, gate = both.unflatten(-1, (self.shape.num_heads, 2 * self.head_dim)).chunk(2, dim=-1)
        mixed = self.mixed(read.flatten(-2), keys, values, rope, mask, cache)
        return self.o_proj(mixed * gate.flatten(-2)[:, -mixed.shape[1] :].sigmoid())


class GatedLayer(nn.Module):
    """The target's attending layer."""

    def __init__(self, shape: MtpShape):
        super().__init__()
        self.input_layernorm = CentredNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = GatedAttention(shape)
        self.post_attention_layernorm = CentredNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = GatedFeedForward(shape)

    def forward(
        self, states: Tensor, rope: Tensor, mask: Tensor | None, cache: Cache | TrainingPasses | None
    ) -> Tensor:
        """[R,N,D] -> [R,N,D]; arguments as of `DecoderLayer.forward`."""
        mixed = self.self_attn(self.input_layernorm(states), rope, mask, cache)
        states = states[:, -mixed.shape[1] :] + mixed
        return states + self.mlp(self.post_attention_layernorm(states))
