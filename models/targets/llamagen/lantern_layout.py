"""LANTERN's layout of LlamaGen (jadohu/LlamaGen-T2I): its names for the weights and its config, to ours and back.

It renames the weights like transformers' Llama, for a private class of the same name; it is recognised by its config.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ....core.errors import UserError, did_you_mean
from ....core.files import checked
from ....core.json_types import JsonMapping, JsonObject
from ...folders import State
from .transformer import LlamaGenConfig

_TO_LANTERN = {
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_FROM_LANTERN = {theirs: ours for ours, theirs in _TO_LANTERN.items()}
_QKV = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")
# Keys of LANTERN's config that are fields of ours: those that must be there, and those that may be missing.
_NEEDED = {
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "hidden_size": "dim",
    "intermediate_size": "ffn_hidden",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
}
_OPTIONAL = {
    "num_classes": "num_classes",
    "caption_dim": "caption_dim",
    "rope_base": "rope_base",
    "initializer_range": "init_std",
    "token_dropout_p": "dropout",
}
# A layer's weight under either layout's name: its number, and the rest.
LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.+)")


def is_lantern(values: JsonMapping) -> bool:
    """Whether a config is of LANTERN's layout: a Llama that says what its images are asked for by."""
    return values.get("model_type") == "llama" and "input_type" in values


def to_lantern(state: Mapping[str, Tensor], config: LlamaGenConfig) -> tuple[State, JsonObject]:
    """Weights and config in LANTERN's layout. Nothing is permuted: the rotation stays one of neighbouring pairs."""
    renamed: State = {}
    for name, tensor in state.items():
        layer = LAYER.fullmatch(name)
        if layer is None:
            top = {"tok_embeddings.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
            renamed[top.get(name, f"model.{name}")] = tensor
            continue
        prefix, part = f"model.layers.{layer[1]}.", layer[2]
        if part == "attention.wqkv.weight":
            renamed |= {prefix + name: third for name, third in zip(_QKV, tensor.chunk(3), strict=True)}
        else:
            renamed[prefix + _TO_LANTERN[part]] = tensor
    return renamed, _lantern_values(config)


def from_lantern(state: Mapping[str, Tensor]) -> State:
    """Weights of LANTERN's layout under the official names."""
    renamed: State = {}
    for name, tensor in state.items():
        layer = LAYER.fullmatch(name)
        if layer is None:
            top = {"model.embed_tokens.weight": "tok_embeddings.weight", "lm_head.weight": "output.weight"}
            renamed[top.get(name, name.removeprefix("model."))] = tensor
            continue
        prefix, part = f"layers.{layer[1]}.", layer[2]
        if part == _QKV[0]:
            thirds = [state[f"model.{prefix}{third}"] for third in _QKV]
            renamed[f"{prefix}attention.wqkv.weight"] = torch.cat(thirds)
        elif part not in _QKV:
            renamed[prefix + _FROM_LANTERN[part]] = tensor
    return renamed


def _lantern_values(config: LlamaGenConfig) -> JsonObject:
    """Fields of transformers' Llama, and those that LANTERN's class reads besides."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: dict(config)[ours] for theirs, ours in (_NEEDED | _OPTIONAL).items()},
        "intermediate_size": config.hidden,
        "num_key_value_heads": config.num_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "input_type": "c2i" if config.condition == "class" else "t2i",
        "block_size": config.num_codes,
        "cls_token_num": config.num_condition_tokens,
        "attn_dropout_p": 0.0,
        "resid_dropout_p": config.dropout,
        "ffn_dropout_p": config.dropout,
        # Above zero: their label table has a row for the unconditional class only then.
        "class_dropout_p": 0.1,
    }


def lantern_config(values: JsonMapping, *, where: str) -> LlamaGenConfig:
    """Our config of theirs. Of their dropouts, which act in training alone, the tokens' is taken for all."""
    for key in (*_NEEDED, "input_type", "block_size"):
        if key not in values:
            hint = "a directory with input_type but without block_size is a LANTERN drafter, not a target"
            raise UserError(f"{key} is missing", where=where, hint=hint if key == "block_size" else "restore the file")
    grid = round(values["block_size"] ** 0.5)
    if grid * grid != values["block_size"]:
        raise UserError(f"block_size {values['block_size']} is not a square", where=where, hint="restore the file")
    kinds: dict[str, Literal["class", "text"]] = {"c2i": "class", "t2i": "text", "t2i2": "text"}
    if values["input_type"] not in kinds:
        hint = did_you_mean(str(values["input_type"]), kinds)
        raise UserError(f"input_type is {values['input_type']!r}", where=f"{where}, key input_type", hint=hint)
    condition = kinds[values["input_type"]]
    known = {ours: values[theirs] for theirs, ours in (_NEEDED | _OPTIONAL).items() if theirs in values}
    if condition == "text" and "cls_token_num" in values:
        known["caption_slots"] = values["cls_token_num"]
    return checked(known | {"grid": grid, "condition": condition}, LlamaGenConfig, where=where, hint="restore the file")
