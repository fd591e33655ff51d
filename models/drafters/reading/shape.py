"""What a head takes from its target: the shape of its layer, and which states it reads in training and in decoding.

Layers are numbered as in `core/states.py`: after so many decoder layers, 0 is the embedding. EAGLE-3's published ids
mean the same (the input of layer k is the state after k layers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....core.errors import UserError
from ....core.states import StatesWanted
from ...targets.base import Taps
from ..layer import STRETCHED, LayerShape, stretched
from .config import AnyReading, Eagle3Config, SparrowConfig, VispecConfig, _DirectReading, image_of


@dataclass(frozen=True)
class Reads:
    """Which of the target's layers hold what a head is fed; None: it is not fed that."""

    state: tuple[int, ...]  # joined as the state half; none: the feature
    visual: int | None  # what stands in visual slots, or what their vectors are made of
    image: int | None  # 0 where the projected picture takes an embedding's place


def reads(config: AnyReading, text: Any, *, training: bool) -> Reads:
    """`text` is the target's own text config."""
    layers, held = text.num_hidden_layers, config.visual(training=training)
    image = 0 if held != "none" and image_of(config) == "projected" else None
    if isinstance(config, Eagle3Config):
        taps = eagle3_taps(config, text)
        return Reads(taps, taps[1] if held == "middle" else None, image)
    state = () if config.state == "feature" else (layers - 1,)
    visual = None
    if isinstance(config, VispecConfig):
        visual = 0  # also where no vector stands in a slot: the global one is made of it
    elif held == "direct":
        visual = middle_layer(config, text) if isinstance(config, SparrowConfig) and config.ivsb else 0
    return Reads(state, visual, image)


def middle_layer(config: SparrowConfig, text: Any) -> int:
    layer, layers = config.middle_layer or text.num_hidden_layers // 2, text.num_hidden_layers
    if not 1 <= layer <= layers:
        raise UserError(
            f"drafter.middle_layer is {layer}, and the target has {layers} layers",
            cure="leave it null for half of them",
        )
    return layer


def eagle3_taps(config: Eagle3Config, text: Any) -> tuple[int, int, int]:
    layers = text.num_hidden_layers
    taps = config.taps or (2, layers // 2, layers - 3)
    if not 0 < taps[0] < taps[1] < taps[2] <= layers:
        raise UserError(
            f"EAGLE-3 joins the states after three different layers, and {taps} of a target of {layers} are not",
            cure="name them: drafter.taps: [1, 2, 3]",
        )
    return taps


def wanted(config: AnyReading, text: Any) -> StatesWanted:
    """What training reads; a source of states computes and a cache keeps this."""
    found = reads(config, text, training=True)
    visual = {layer for layer in (found.visual, found.image) if layer is not None}
    everywhere = config.visual(training=True) == "read"
    return StatesWanted(text_layers=found.state, visual_layers=tuple(sorted(visual)), everywhere=everywhere)


def taps_of(config: AnyReading, text: Any) -> Taps:
    """What decoding reads."""
    found = reads(config, text, training=False)
    layers = {*found.state, *(layer for layer in (found.visual, found.image) if layer is not None)}
    attention = attention_layers(config, text)
    queries = config.share_by if isinstance(config, _DirectReading) else "last"
    return Taps(tuple(sorted(layers)), not found.state, attention, queries)


def attention_layers(config: AnyReading, text: Any) -> tuple[int, ...]:
    """The layer that says which visual slots are kept, where some are."""
    if not isinstance(config, _DirectReading) or config.vata or config.visual_share in (0.0, 1.0):
        return ()
    layer = text.num_hidden_layers // 2 if config.share_layer is None else config.share_layer
    if layer >= text.num_hidden_layers:
        raise UserError(
            f"drafter.share_layer is {layer}, and the target's layers are 0 to {text.num_hidden_layers - 1}",
            cure="leave it null for half of them",
        )
    return (layer,)


def reading_shape(config: AnyReading, text: Any) -> LayerShape:
    """The layer that mirrors one of the target's.

    Raises:
        UserError: `positions: mrope` for a target without M-RoPE, or a rotation that a layer does not know.
    """
    heads = text.num_attention_heads
    rope = dict(getattr(text, "rope_parameters", None) or {})
    section: tuple[int, ...] = ()
    if config.positions == "mrope":
        section = tuple(rope.get("mrope_section") or _SECTIONS.get(text.model_type, ()))
        if not section:
            raise UserError(
                f"drafter.positions: mrope, and the target ({text.model_type}) has no M-RoPE",
                cure="use compact or flat",
            )
    scaling = stretched(rope) if config.rope == "target" else None
    if scaling is not None and scaling["rope_type"] not in STRETCHED:
        raise UserError(
            f"the target ({text.model_type}) stretches its positions by {scaling['rope_type']}, unknown to heads",
            cure="set drafter.rope: plain, for a head that turns by the base alone",
        )
    qwen = text.model_type.startswith("qwen")
    joined = isinstance(config, Eagle3Config)  # servers know it as a layer of Llama's
    bias = not joined and (text.model_type.startswith("qwen2") or bool(getattr(text, "attention_bias", False)))
    norm = getattr(config, "input_norm", True)
    own = getattr(text, "head_dim", None)
    return LayerShape(
        vocab_size=text.vocab_size, hidden_size=text.hidden_size, num_heads=heads,
        num_kv_heads=heads if config.kv_heads == "mha" else text.num_key_value_heads,
        intermediate_size=config.intermediate_size or text.intermediate_size,
        norm_eps=config.norm_eps or text.rms_norm_eps,
        rope_theta=float(config.rope_theta or rope.get("rope_theta") or getattr(text, "rope_theta", 10000.0)),
        input_norm=qwen if norm is None else norm, qkv_bias=bias if config.qkv_bias is None else config.qkv_bias,
        qk_rms_norm=text.model_type.startswith("qwen3") and not joined,
        own_head_dim=own if own and own * heads != text.hidden_size else None,
        attention_input=2 * text.hidden_size if joined else None,
        mrope_section=section, mrope_interleaved=bool(section) and text.model_type.startswith("qwen3"),
        rope_scaling=scaling,
    )  # fmt: skip


# What transformers takes where a config says nothing.
_SECTIONS = {
    "qwen2_vl_text": (16, 24, 24),
    "qwen2_5_vl_text": (16, 24, 24),
    "qwen3_vl_text": (24, 20, 20),
    "qwen3_vl_moe_text": (24, 20, 20),
}
