"""A head's layer under the keys of a Llama's `config.json`, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import UserError
from ...core.json_types import JsonObject
from ..folders import CONFIG
from ..hub import config_value, rope_of
from ..layer import LayerShape, stretched, written_rope

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def llama_values(shape: LayerShape, text: PreTrainedConfig) -> JsonObject:
    """A one-layer Llama of the head's shape, for readers of transformers 4 and 5."""
    scaling = None if shape.rope_scaling is None else dict(shape.rope_scaling)
    rope: JsonObject = {"rope_type": "default", "rope_theta": shape.rope_theta} | (scaling or {})
    if shape.mrope_section:
        scaling = {"rope_type": "default", "mrope_section": list(shape.mrope_section)}
        rope |= {"mrope_section": list(shape.mrope_section)}
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": rope,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": text.max_position_embeddings,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        # Qwen3-VL's text config has none of them.
        **{name: config_value(text, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }


def layer_settings(values: JsonObject, text: PreTrainedConfig, where: str) -> tuple[JsonObject, tuple[int, ...]]:
    """What a layer's config says of norms and rotation that is not the target's anyway, and M-RoPE's sections, none
    where there is one position. Raises `UserError`: the head stretches its positions otherwise than the target, or its
    config has what `written_rope` refuses.
    """
    rope, targets = written_rope(values, Path(where) / CONFIG), rope_of(text)
    own, theirs = stretched(rope, values.get("max_position_embeddings")), stretched(targets)
    if own not in (None, theirs):
        raise UserError(f"the head's positions are stretched ({own['rope_type']}), the target's otherwise or not",
                        where=where, hint="name the target that it was trained for")  # fmt: skip
    said = {
        "norm_eps": float(values.get("rms_norm_eps", 1e-6)),
        # EAGLE's code takes 10,000 where a config says nothing, whatever its target has.
        "rope_theta": float(rope.get("rope_theta") or 10000.0),
        "rope": "target" if own == theirs else "plain",
    }
    same = {"norm_eps": text.rms_norm_eps, "rope_theta": float(targets.get("rope_theta") or 10000.0), "rope": "target"}
    return {name: value for name, value in said.items() if value != same[name]}, tuple(rope.get("mrope_section") or ())
