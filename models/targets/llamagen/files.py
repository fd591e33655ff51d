"""LlamaGen and its tokenizer on disk: saved and loaded as directories, ours or LANTERN's (jadohu/LlamaGen-T2I).

Ours is `config.json` beside `model.safetensors` under the official names. LANTERN's renames the weights like
transformers' Llama, for a private class of the same name; its config tells it. What is read is checked in full, names
and shapes, before a model is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor

from ....core.errors import UserError, did_you_mean
from ....core.files import checked
from ....core.json_types import JsonMapping, JsonObject
from ....core.pretrained import CPU
from ....core.section import Section
from ...folders import CONFIG, Shapes, State, find_folder, read_values, read_weights, shapes_of, write_folder
from .transformer import LlamaGen, LlamaGenConfig, rope_table
from .vq import VqConfig, VqTokenizer

LLAMAGEN, VQ = "llamagen", "llamagen_vq"
C = TypeVar("C", bound=Section)

# Parts of our weights' names, behind "model.", and what LANTERN calls them; `wqkv` is three weights there.
_NAMES = {
    "model.tok_embeddings.": "model.embed_tokens.",
    "model.output.": "lm_head.",
    "attention.wqkv.": "self_attn.q_proj.",
    "attention.wo.": "self_attn.o_proj.",
    "feed_forward.w1.": "mlp.gate_proj.",
    "feed_forward.w3.": "mlp.up_proj.",
    "feed_forward.w2.": "mlp.down_proj.",
    "attention_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
}
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


def save_model(model: LlamaGen | VqTokenizer, folder: Path) -> None:
    """Write `config.json` and `model.safetensors`. The weights keep their type."""
    write_folder(folder, values_of(model.config), model.state_dict())


def load_llamagen(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> LlamaGen:
    """A LlamaGen in eval mode. Raises `UserError`: a file or key that is missing, unknown, unreadable or of another
    shape. `source`: our directory, one of LANTERN's layout, or the Hub id of either. `device`: where its weights go,
    straight from the file.
    """
    state, config = read_llamagen(source, revision=revision, dtype=dtype, device=device)
    with torch.device("meta"):
        model = LlamaGen(config)
    model.load_state_dict(state, assign=True)
    model._rope = rope_table(config.grid, config.head_dim, config.rope_base, zeros_before=config.num_condition_tokens)
    return model.eval()


def read_llamagen(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device = CPU,
) -> tuple[State, LlamaGenConfig]:
    """Weights under the official names, and the config, of either layout. `dtype` None keeps what is stored."""
    folder = find_folder(source, revision)
    values = read_values(folder)
    config = config_in(folder, values)
    if is_lantern(values):
        expected = shapes_of(to_lantern(_meta_state(config), config)[0])
        return from_lantern(read_weights(folder, expected, dtype, device), config), config
    return read_weights(folder, shapes_for(config), dtype, device), config


def config_in(folder: Path, values: JsonMapping) -> LlamaGenConfig:
    """The config that a folder's `config.json` (`values`) says in either layout. Raises `UserError` as above."""
    if is_lantern(values):
        return lantern_config(values, where=str(folder / CONFIG))
    return _config(LlamaGenConfig, LLAMAGEN, values, folder / CONFIG)


def load_vq(source: str | Path, device: torch.device = CPU) -> VqTokenizer:
    """A tokenizer in eval mode, from our directory or the Hub id of one. Raises `UserError` as above."""
    folder = find_folder(source, None)
    config = vq_config(folder)
    state = read_weights(folder, shapes_for(config), torch.float32, device)
    with torch.device("meta"):
        model = VqTokenizer(config)
    model.load_state_dict(state, assign=True)
    return model.eval()


def vq_config(folder: Path) -> VqConfig:
    """What a tokenizer's directory says of it. Raises `UserError` as above."""
    return _config(VqConfig, VQ, read_values(folder), folder / CONFIG)


def values_of(config: LlamaGenConfig | VqConfig) -> JsonObject:
    """What `config.json` holds."""
    return {"model_type": VQ if isinstance(config, VqConfig) else LLAMAGEN, **config.model_dump(mode="json")}


def shapes_for(config: LlamaGenConfig | VqConfig) -> Shapes:
    """Shapes of the model's state dict, without allocating it."""
    return shapes_of(_meta_state(config))


def _meta_state(config: LlamaGenConfig | VqConfig) -> State:
    with torch.device("meta"):
        return (VqTokenizer(config) if isinstance(config, VqConfig) else LlamaGen(config)).state_dict()


def _config(schema: type[C], model_type: str, values: JsonMapping, path: Path) -> C:
    written = values.get("model_type")
    if written != model_type:
        raise UserError(
            f"model_type is {written!r}, expected {model_type!r}",
            where=f"{path}, key model_type",
            hint="give the other directory: transformer and tokenizer have one each"
            if written in (LLAMAGEN, VQ)
            else "`draftsmith convert` makes such a directory of a published file",
        )
    fields = {name: value for name, value in values.items() if name != "model_type"}
    return checked(fields, schema, where=str(path), hint="restore the file, or fix the key")


def is_lantern(values: JsonMapping) -> bool:
    """Whether a config is of LANTERN's layout: a Llama that says what its images are asked for by."""
    return values.get("model_type") == "llama" and "input_type" in values


def to_lantern(state: Mapping[str, Tensor], config: LlamaGenConfig) -> tuple[State, JsonObject]:
    """Weights and config in LANTERN's layout. Nothing is permuted: the rotation stays one of neighbouring pairs."""
    renamed: State = {}
    for name, tensor in state.items():
        names = _lantern_names(name)
        renamed |= dict(zip(names, tensor.chunk(len(names)), strict=True))
    return renamed, _lantern_values(config)


def from_lantern(state: Mapping[str, Tensor], config: LlamaGenConfig) -> State:
    """Weights of LANTERN's layout under the official names."""
    thirds = {name: [state[theirs] for theirs in _lantern_names(name)] for name in shapes_for(config)}
    return {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in thirds.items()}


def _lantern_names(name: str) -> list[str]:
    """LANTERN's names of one of our weights."""
    theirs = f"model.{name}"
    for part, other in _NAMES.items():
        theirs = theirs.replace(part, other)
    return [theirs.replace(".q_proj.", f".{one}_proj.") for one in "qkv"] if ".wqkv." in name else [theirs]


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
