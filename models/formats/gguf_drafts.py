"""Heads and draft models as one file in llama.cpp's layout (GGUF), which its server reads beside a GGUF of the target.

Keys and tensors are those that llama.cpp b11434 reads in src/models/eagle3.cpp, dflash.cpp, llama.cpp and qwen3.cpp,
and that its conversion/llama.py and qwen.py write. The tokenizer's keys come from the target's file, word for word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ...core.errors import UserError
from ...core.json_types import JsonMapping, JsonObject
from ..decoding.head_layer import frequencies
from ..drafters.dflash import CONFIDENCE
from ..drafters.eagle3 import Eagle3Config, Eagle3Head
from ..hub import rope_of, sees_window, usual_heads
from ..layer import stretched
from .expressible import GGUF_STRETCHED
from .gguf import open_gguf
from .source import Source, Target, llama_values

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DRAFT = "draft.gguf"
# What llama-server's --spec-type calls a method.
TYPES = {"eagle3": "draft-eagle3", "dflash": "draft-dflash", "dspark": "draft-dspark", "draft_model": "draft-simple"}
# Architectures of targets whose layers' inputs a head gets; with any other the server ends (llama.cpp has `t_layer_inp`
# for some more, of models that no head of ours was compared with).
_HANDS = ("llama", "qwen3")
_DRAFT_MODELS = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # model_type -> architecture
# Architectures that turn neighbouring numbers of a head together; ours, and the others', are its two halves.
_NEIGHBOURS = ("eagle3", "llama")
_KEYS = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "vocab_size": "vocab_size", "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.value_length": "head_dim", "rope.dimension_count": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip
_REAL = ("rope.freq_base", "attention.layer_norm_rms_epsilon")
_TOP = {
    "fc": "fc", "norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd",
    "input_norm": "enc.output_norm", "hidden_norm": "enc.output_norm",
    "markov_head.markov_w1": "markov_w1", "markov_head.markov_w2": "markov_w2",
}  # fmt: skip
_LAYER = {
    "input_layernorm": "attn_norm", "hidden_norm": "attn_norm_2", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_ARCHITECTURE = "general.architecture"
_MASK, _TEMPLATE = "tokenizer.ggml.mask_token_id", "tokenizer.chat_template"


@dataclass(frozen=True)
class Draft:
    """What a file holds beside the tokenizer: keys without the architecture's name, and tensors under llama.cpp's."""

    architecture: str
    keys: JsonMapping
    tensors: Mapping[str, Tensor]
    mask_token_id: int | None = None


def open_target(file: Path | None, target: Target, *, hands: bool) -> Any:
    """A reader of the target's GGUF. `hands`: a head will read its layers. Raises `UserError`: none is named, or it is
    another model's or of an architecture whose layers' inputs llama.cpp hands to no head.
    """
    if file is None:
        raise UserError("llama.cpp reads a drafter beside its target's GGUF, and none is named",
                        hint="name it: --target-gguf FILE (llama.cpp's convert_hf_to_gguf.py writes one)")  # fmt: skip
    reader: Any = open_gguf(file)
    kept = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    architecture, text = str(kept[_ARCHITECTURE]), target.text
    rows = reader.fields.get("tokenizer.ggml.tokens")
    found = {
        "layers": kept.get(f"{architecture}.block_count"), "width": kept.get(f"{architecture}.embedding_length"),
        "tokens": None if rows is None else len(rows.data),
    }  # fmt: skip
    wanted = {"layers": text.num_hidden_layers, "width": text.hidden_size, "tokens": text.vocab_size}
    if other := [f"{value} {name}, not {wanted[name]}" for name, value in found.items() if value != wanted[name]]:
        raise UserError(f"this GGUF is of another model than the target {target.place}: {', '.join(other)}",
                        where=str(file), hint="convert the target that the drafter was trained for")  # fmt: skip
    if hands and architecture not in _HANDS:
        raise UserError(f"llama.cpp's {architecture} is not known to hand layers to a head: its server ends there",
                        where=str(file), hint=f"known are {' and '.join(_HANDS)}")  # fmt: skip
    return reader


def from_head(source: Source) -> Draft:
    """A head or block draft that `check_expressible` has let through."""
    head, shape, text = source.head, source.head.shape, source.target.text
    state = {name: value for name, value in head.state_dict().items() if not name.startswith(CONFIDENCE)}
    state.pop("t2d", None)
    if "d2t" in state:  # of a part of the vocabulary: ids themselves, where ours are offsets
        ids = cast(Tensor, head.draft_ids)
        state |= {"d2t": ids.cpu()}
        if len(ids) == text.vocab_size:
            del state["d2t"]
    if source.layout == "eagle3":
        config, head = cast(Eagle3Config, source.config), cast(Eagle3Head, head)
        keys: JsonObject = _keys(llama_values(shape, text)) | {
            "target_layers": list(config.layers_of(source.target.shape)), "target_hidden_size": text.hidden_size,
            "norm_before_residual": config.norm_before_residual, "norm_before_fc": config.norm_before_fc,
        }  # fmt: skip
        return Draft("eagle3", keys, _named("eagle3", state, keys) | _factors(*frequencies(shape), shape.rope_theta))
    layer = shape.layer
    keys = _keys(llama_values(layer, text) | {"num_hidden_layers": shape.num_layers}) | {
        "target_layers": list(shape.taps), "block_size": shape.block_size, "attention.causal": shape.causal,
    }  # fmt: skip
    if shape.sliding_window is not None:
        window = {"sliding_window": shape.sliding_window, "sliding_window_pattern": [True] * shape.num_layers}
        keys |= {f"attention.{name}": value for name, value in window.items()}
    if source.config.kind == "dspark":
        keys |= {"sample_from_anchor": shape.sample_from_anchor, "has_confidence_head": False}
    tensors = _named("dflash", state, keys) | _factors(*frequencies(layer), layer.rope_theta)
    return Draft("dflash", keys, tensors, shape.mask_token_id)


def from_model(model: PreTrainedModel, where: str) -> Draft:
    """A language model that drafts. `where`: its folder, for errors. Raises `UserError`: llama.cpp runs it otherwise,
    or nobody has read here how.
    """
    config: Any = model.config
    architecture, rope = _DRAFT_MODELS.get(config.model_type), rope_of(config)
    kind = (stretched(rope) or {}).get("rope_type")
    reasons = [
        *([f"how llama.cpp runs a {config.model_type} was not read here"] if architecture is None else []),
        *([f"its positions are stretched ({kind})"] if kind not in (None, *GGUF_STRETCHED) else []),
        *(["its layers see a window of positions alone"] if sees_window(config.to_dict()) else []),
    ]  # fmt: skip
    if architecture is None or reasons:
        raise UserError(f"llama.cpp would not run this draft model as it is: {'; '.join(reasons)}", where=where,
                        hint="draft with a Llama, Qwen2 or Qwen3, or with a head")  # fmt: skip
    kv_heads, head_dim = usual_heads(config)
    theta = float(rope["rope_theta"])
    values = config.to_dict() | {"num_key_value_heads": kv_heads, "head_dim": head_dim, "rope_theta": theta}
    state = {name: value for name, value in model.state_dict().items() if "rotary" not in name}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    base: Any = model.base_model
    keys = _keys(values)
    return Draft(architecture, keys, _named(architecture, state, keys) | _factors(base.rotary_emb.inv_freq, 1.0, theta))


def write(draft: Draft, target: Any, path: Path) -> None:
    """Write the file. `target`: a reader of `open_target`, whose tokenizer is copied. Matrices keep their type, vectors
    are float32, which is what llama.cpp adds and multiplies them in.
    """
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType

    types: dict[torch.dtype, tuple[Any, Any]] = {
        torch.float32: (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
        torch.float16: (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
        torch.bfloat16: (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    }
    matrix = next(tensor for tensor in draft.tensors.values() if tensor.dim() == 2)
    writer: Any = GGUFWriter(path, draft.architecture)
    writer.add_file_type(types[matrix.dtype][1])
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32,
             list: GGUFValueType.ARRAY}  # fmt: skip
    for key, value in draft.keys.items():
        writer.add_key_value(f"{draft.architecture}.{key}", value, kinds[type(value)])
    if draft.mask_token_id is not None:
        writer.add_uint32(_MASK, draft.mask_token_id)
    for name, field in target.fields.items():
        if name.startswith("tokenizer.") and name not in (_MASK, _TEMPLATE):
            _copy(writer, field)
    for name, tensor in draft.tensors.items():
        held = tensor.detach().cpu().contiguous()
        if held.dtype == torch.int64:
            writer.add_tensor(name, held.numpy())
        elif held.dim() == 1:
            writer.add_tensor(name, held.float().numpy())
        elif held.dtype == torch.bfloat16:  # numpy has no such type: its bytes
            writer.add_tensor(name, held.view(torch.uint8).numpy(), raw_dtype=types[held.dtype][0])
        else:
            writer.add_tensor(name, held.numpy())
    _finish(writer)


def write_wide(file: Path, path: Path) -> None:
    """Write a draft's file again with every number in float32: llama.cpp rounds what it multiplies by shorter types to
    them, too, so that chains of such a file are near to those of float32, and not the same.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, dequantize

    reader: Any = open_gguf(file)
    writer: Any = GGUFWriter(path, str(reader.fields[_ARCHITECTURE].contents()))
    for name, field in reader.fields.items():
        if name != _ARCHITECTURE and not name.startswith("GGUF."):
            _copy(writer, field)
    for tensor in reader.tensors:
        is_ids = tensor.tensor_type == GGMLQuantizationType.I64
        writer.add_tensor(tensor.name, tensor.data if is_ids else dequantize(tensor.data, tensor.tensor_type))
    _finish(writer)


def _copy(writer: Any, field: Any) -> None:
    """A key of another file; without an empty list, which has no type."""
    if len(field.data):
        kind, *inner = field.types
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner[-1] if inner else None)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _keys(values: JsonMapping) -> JsonObject:
    """llama.cpp's keys of a config in transformers' words."""
    return {key: float(values[name]) if key in _REAL else int(values[name]) for key, name in _KEYS.items()}


def _factors(inverse: Tensor, gain: float, theta: float) -> dict[str, Tensor]:
    """What each frequency is divided by [E/2] where positions are stretched; none where they are not."""
    assert gain == 1.0, "YaRN is refused before"
    plain = theta ** (-torch.arange(len(inverse), dtype=torch.float64) / len(inverse))
    factors = (plain / inverse.double().cpu()).float()
    return {} if torch.allclose(factors, torch.ones_like(factors), atol=1e-5) else {"rope_freqs.weight": factors}


def _named(architecture: str, state: Mapping[str, Tensor], keys: JsonMapping) -> dict[str, Tensor]:
    """Tensors under llama.cpp's names, in its order of rows."""
    tensors = {}
    for name, tensor in state.items():
        stem, _, part = name.removeprefix("model.").replace("midlayer.", "layers.0.").rpartition(".")
        if not stem:  # d2t
            tensors[name] = tensor
        elif stem.startswith("layers."):
            _, number, rest = stem.split(".", 2)
            heads = {"self_attn.q_proj": "head_count", "self_attn.k_proj": "head_count_kv"}.get(rest)
            if heads is not None and architecture in _NEIGHBOURS:
                tensor = _neighbours(tensor, int(keys[f"attention.{heads}"]))
            tensors[f"blk.{number}.{_LAYER[rest]}.{part}"] = tensor
        else:
            tensors[f"{_TOP[stem]}.{part}"] = tensor
    return tensors


def _neighbours(tensor: Tensor, heads: int) -> Tensor:
    """Rows [H*E,...] whose two halves of each head turn together, so that pairs lie side by side."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
