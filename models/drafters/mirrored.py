"""The layer that mirrors one of the target's decoder layers: what a head or a DFlash draft is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ...core.errors import UserError
from ...core.json_types import JsonMapping
from ..hub import config_value, rope_of, usual_heads
from ..layer import STRETCHED, LayerShape, stretched
from ..targets.table import text_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Mirroring(Protocol):
    """What a section says of a layer that mirrors one of the target's."""

    @property
    def kv_heads(self) -> str: ...

    @property
    def qkv_bias(self) -> bool | None: ...

    @property
    def intermediate_size(self) -> int | None: ...

    @property
    def norm_eps(self) -> float | None: ...

    @property
    def rope_theta(self) -> float | None: ...

    @property
    def rope(self) -> str: ...

    @property
    def positions(self) -> str: ...


def mirrored_layer(
    config: Mirroring, text: PreTrainedConfig, *, input_norm: bool | None, like_llama: bool = False
) -> LayerShape:
    """The layer that mirrors one of the target's.

    Args:
        text: transformers' text config of the target.
        input_norm: None: as the family.
        like_llama: without the biases and norms that only some families have, as servers know EAGLE-3; its attention
            reads embedding and state beside each other.

    Raises:
        UserError: `positions: mrope` for a target without M-RoPE, or a rotation that a layer does not know.
    """
    heads = text.num_attention_heads
    rope = rope_of(text)
    scaling = stretched(rope) if config.rope == "target" else None
    if scaling is not None and scaling["rope_type"] not in STRETCHED:
        raise UserError(
            f"the target ({text.model_type}) stretches its positions by {scaling['rope_type']}, unknown to heads",
            hint="set drafter.rope: plain, for a head that turns by the base alone",
        )
    section = _mrope_section(config, text, rope)
    family = text_of(text)
    theta: Any = config.rope_theta or rope.get("rope_theta") or config_value(text, "rope_theta", 10000.0)
    bias = not like_llama and (family.qkv_bias or bool(config_value(text, "attention_bias")))
    groups, own = usual_heads(text)
    inner = config.intermediate_size or config_value(text, "intermediate_size")
    if inner is None:
        raise UserError(
            f"the target ({text.model_type}) has experts alone, and no MLP whose width a head could take",
            key="drafter.intermediate_size", hint="name a width, for example twice the target's hidden_size",
        )  # fmt: skip
    return LayerShape(
        vocab_size=text.vocab_size, hidden_size=text.hidden_size, num_heads=heads,
        num_kv_heads=heads if config.kv_heads == "mha" else groups,
        intermediate_size=inner,
        norm_eps=config.norm_eps or text.rms_norm_eps,
        rope_theta=float(theta),
        input_norm=family.norms_input if input_norm is None else input_norm,
        qkv_bias=bias if config.qkv_bias is None else config.qkv_bias,
        qk_rms_norm=family.norms_heads and not like_llama,
        own_head_dim=own if own * heads != text.hidden_size else None,
        attention_input=2 * text.hidden_size if like_llama else None,
        mrope_section=section, mrope_interleaved=bool(section) and family.mrope_interleaved,
        rope_scaling=scaling,
    )  # fmt: skip


def _mrope_section(config: Mirroring, text: PreTrainedConfig, rope: JsonMapping) -> tuple[int, ...]:
    if config.positions != "mrope":
        return ()
    section: tuple[int, ...] = tuple(rope.get("mrope_section") or text_of(text).mrope_section)
    if (share := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UserError(
            f"drafter.positions: mrope, and the target ({text.model_type}) turns {share:g} of each attention head: a "
            "head's layer turns all of it, and three positions would be shared out otherwise",
            key="drafter.positions",
            hint="use compact or flat",
        )
    if not section:
        raise UserError(
            f"drafter.positions: mrope, and the target ({text.model_type}) has no M-RoPE",
            key="drafter.positions",
            hint="use compact or flat",
        )
    return section
