"""llama.cpp's one-file layout (GGUF): a target's file as a folder that recipes read, and drafters as files beside it.

Of a target transformers reads the file and spells quantised weights out; tokenizer, chat template and end tokens come
from it, too. Heads and draft models get the keys and tensors that llama.cpp b11434 reads in src/models (eagle3.cpp,
dflash.cpp, and each draft model's own) and that its conversion/ writes, and the tokenizer's keys of the target's file,
word for word.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig

from ...core.errors import UserError
from ...core.finite import check_module
from ...core.json_types import JsonMapping, JsonObject
from ...core.pretrained import check_all_read, check_config, name_accelerator, reading_pretrained
from ..decoding.head_layer import frequencies
from ..drafters.dflash import CONFIDENCE
from ..drafters.eagle3 import Eagle3Config
from ..hub import rope_of, sees_window, usual_heads
from ..layer import LLAMA_LIKE, NORMS_HEADS, QKV_BIASED, stretched
from .source import Source, Target, llama_values

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MAGIC = b"GGUF"
# Keys of the file under which ids stand that end an answer: of the text, of a turn, of a message.
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def check_file(source: Path) -> None:
    """Raises `UserError`: it is no GGUF, or the package that reads one is missing."""
    if not source.is_file() or source.open("rb").read(len(_MAGIC)) != _MAGIC:
        raise UserError("the file is no GGUF", where=str(source), hint="name a .gguf file of a language model")
    if importlib.util.find_spec("gguf") is None:
        problem, hint = "the package that reads a GGUF is not installed", 'pip install "draftsmith[gguf]", or gguf'
        raise UserError(problem, where=str(source), hint=hint)


def to_ours(source: Path, folder: Path, *, dtype: torch.dtype = torch.float32) -> tuple[str, ...]:
    """Write the model, its tokenizer, chat template and generation config to `folder`. Returns notes. `dtype`: to
    store. What is spelt out of a quantised file is exact in float32 alone. Raises `UserError`: it is no GGUF, the
    package that reads it is missing, or its architecture, type of weights or tokenizer is none that transformers reads.
    """
    check_file(source)
    from gguf import GGUFReader

    name_accelerator()
    with tempfile.TemporaryDirectory() as alone:  # transformers would read a config.json that lies beside the file
        (Path(alone) / source.name).symlink_to(source.resolve())
        reading: dict[str, Any] = {"gguf_file": source.name}
        hint = "use a file that transformers' list of GGUF architectures has, or the model's own repository"
        with reading_pretrained(f"{source.name} (GGUF)", "transformers cannot read", hint=hint, where=str(source)):
            tokenizer = AutoTokenizer.from_pretrained(alone, **reading)
            read: Any = AutoModelForCausalLM.from_pretrained(
                alone, dtype=torch.float32, output_loading_info=True, **reading
            )
            reader: Any = GGUFReader(source)
            keys = [key for key in (f"tokenizer.ggml.{name}" for name in _ENDS) if key in reader.fields]
            ends = list(dict.fromkeys(int(reader.fields[key].contents()) for key in keys))
    if not ends:
        raise UserError("names no token that ends an answer", where=str(source), hint="use another file of this model")
    model, info = read
    check_all_read(info, source)
    check_config(model.config.to_dict(), source)
    held = {str(one.name): int(one.n_elements) for one in reader.tensors if not str(one.name).startswith("rope_")}
    taken = sum(p.numel() for p in model.parameters())
    if sum(held.values()) > taken:  # transformers passes over what its model of the header has no place for
        raise UserError(
            f"holds {sum(held.values()):,} numbers, and the model that its header describes has {taken:,}, of "
            f"{model.config.num_hidden_layers} layers (the file's last tensor: {[*held][-1]})",
            where=str(source), hint="block_count or the architecture is not these weights': use another file",
        )  # fmt: skip
    check_module(model, source)
    # Without a sign of its file: transformers refuses to save what it has read of one.
    config: PreTrainedConfig = model.config
    del config.quantization_config
    config.name_or_path, config.dtype = "", dtype
    with torch.device("meta"):
        written = type(model)(config)
    written.load_state_dict({name: tensor.to(dtype) for name, tensor in model.state_dict().items()}, assign=True)
    written.tie_weights()
    written.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    written.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    notes = [f"{sum(p.numel() for p in written.parameters()):,} parameters, stored as {str(dtype).split('.')[1]}"]
    words = tokenizer.convert_ids_to_tokens(ends)
    notes.append(f"answers end at {' or '.join(words)}")
    if not tokenizer.chat_template:
        notes.append("the file has no chat template: name a recipe's format.template")
    return tuple(notes)


# ---- Drafters.

DRAFT = "draft.gguf"
# Architectures of targets whose layers' inputs a head gets; with most others the server ends.
_HANDS = ("llama", NORMS_HEADS)
# Architectures that turn neighbouring numbers of a head together; ours, and the others', are its two halves.
_NEIGHBOURS = ("eagle3", "llama")
_KEYS = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "vocab_size": "vocab_size", "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.value_length": "head_dim", "rope.dimension_count": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip
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
_MASK, _TEMPLATE = "tokenizer.ggml.mask_token_id", "tokenizer.chat_template"


@dataclass(frozen=True)
class Draft:
    """What a file holds beside the target's tokenizer, under llama.cpp's names."""

    architecture: str
    keys: JsonMapping
    tensors: Mapping[str, Tensor]


def open_target(file: Path | None, target: Target, *, hands: bool) -> Any:
    """A reader of the target's GGUF. `hands`: a head will read its layers. Raises `UserError`: none is named, or it is
    damaged, another model's, or of an architecture whose layers' inputs llama.cpp hands to no head.
    """
    if file is None:
        raise UserError("llama.cpp reads a drafter beside its target's GGUF, and none is named",
                        hint="name it: --target-gguf FILE (llama.cpp's convert_hf_to_gguf.py writes one)")  # fmt: skip
    check_file(file)
    from gguf import GGUFReader

    with reading_pretrained(file.name, "the package gguf cannot read", hint="convert it again", where=str(file)):
        reader: Any = GGUFReader(file)
        architecture = str(reader.fields["general.architecture"].contents())
    keys = (f"{architecture}.block_count", f"{architecture}.embedding_length", "tokenizer.ggml.tokens")
    values = [reader.fields[key].contents() if key in reader.fields else None for key in keys]
    found = [len(value) if isinstance(value, list) else value for value in values]
    if found != (wanted := [target.text.num_hidden_layers, target.text.hidden_size, target.text.vocab_size]):
        problem = f"this GGUF has {found} layers, width and tokens, and the target {target.place} {wanted}"
        raise UserError(problem, where=str(file), hint="convert the target that the drafter was trained for")
    if hands and architecture not in _HANDS:
        raise UserError(f"llama.cpp's {architecture} is not known to hand layers to a head: its server ends there",
                        where=str(file), hint=f"known are {' and '.join(_HANDS)}")  # fmt: skip
    return reader


def from_head(source: Source) -> Draft:
    """A head or block draft that `check_expressible` has let through, without a block draft's confidence head."""
    head, shape, text = source.head, source.head.shape, source.target.text
    state = {name: value for name, value in head.state_dict().items() if not name.startswith((CONFIDENCE, "t2d"))}
    if state.pop("d2t", None) is not None and len(head.draft_ids) < text.vocab_size:
        state["d2t"] = head.draft_ids  # ids themselves, where ours are offsets
    if source.layout == "eagle3":
        config = cast(Eagle3Config, source.config)
        more: JsonObject = {
            "eagle3.target_layers": list(config.layers_of(source.target.shape)),
            "eagle3.target_hidden_size": text.hidden_size,
            "eagle3.norm_before_residual": config.norm_before_residual, "eagle3.norm_before_fc": config.norm_before_fc,
        }  # fmt: skip
        return _draft("eagle3", llama_values(shape, text), more, state, frequencies(shape)[0])
    more = {
        "dflash.target_layers": list(shape.taps), "dflash.block_size": shape.block_size,
        "dflash.attention.causal": shape.causal, _MASK: shape.mask_token_id,
    }  # fmt: skip
    if shape.sliding_window is not None:
        more["dflash.attention.sliding_window"] = shape.sliding_window
        more["dflash.attention.sliding_window_pattern"] = [True] * shape.num_layers
    if source.config.kind == "dspark":
        more |= {"dflash.sample_from_anchor": shape.sample_from_anchor, "dflash.has_confidence_head": False}
    values = llama_values(shape.layer, text) | {"num_hidden_layers": shape.num_layers}
    return _draft("dflash", values, more, state, frequencies(shape.layer)[0])


def from_model(model: PreTrainedModel, where: str) -> Draft:
    """A language model that drafts. `where`: its folder, for errors. Raises `UserError`: llama.cpp runs it otherwise,
    or nobody has read here how.
    """
    config: Any = model.config
    if config.model_type not in LLAMA_LIKE or sees_window(config.to_dict()):
        raise UserError(f"how llama.cpp runs a {config.model_type}, or its window, was not read here", where=where,
                        hint=f"draft with one of {', '.join(LLAMA_LIKE)} without a window")  # fmt: skip
    architecture = config.model_type if config.model_type in (QKV_BIASED, NORMS_HEADS) else "llama"
    kv_heads, head_dim = usual_heads(config)
    values = config.to_dict() | {"num_key_value_heads": kv_heads, "head_dim": head_dim} | rope_of(config)
    state, base = dict(model.state_dict()), cast(Any, model.base_model)
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return _draft(architecture, values, {}, state, base.rotary_emb.inv_freq)


def _draft(
    architecture: str, values: JsonMapping, more: JsonMapping, state: Mapping[str, Tensor], inverse: Tensor
) -> Draft:
    """`values`: the config in transformers' words. `more`: llama.cpp's own keys. `inverse`: [E/2], what positions are
    multiplied by. Raises `UserError`: they are stretched as no file says.
    """
    kind = (stretched(values.get("rope_parameters") or {}) or {}).get("rope_type", "plain")
    if kind not in ("plain", "linear", "llama3"):
        raise UserError(f"its positions are stretched ({kind}), and a GGUF holds linear and llama3 alone",
                        hint="train it with drafter.rope: plain, or serve it in vLLM")  # fmt: skip
    keys = {f"{architecture}.{key}": values[name] for key, name in _KEYS.items()}
    for name in (f"{architecture}.rope.freq_base", f"{architecture}.attention.layer_norm_rms_epsilon"):
        keys[name] = float(keys[name])
    tensors = {}
    for name, tensor in state.items():
        stem, _, part = name.removeprefix("model.").replace("midlayer.", "layers.0.").rpartition(".")
        if not stem:  # d2t
            tensors[name] = tensor
        elif stem.startswith("layers."):
            _, number, rest = stem.split(".", 2)
            heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}.get(rest)
            if heads is not None and architecture in _NEIGHBOURS:  # pairs that turn together lie side by side
                halves = tensor.unflatten(0, (values[heads], 2, -1))
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
            tensors[f"blk.{number}.{_LAYER[rest]}.{part}"] = tensor
        else:
            tensors[f"{_TOP[stem]}.{part}"] = tensor
    plain = values["rope_theta"] ** (-torch.arange(len(inverse), dtype=torch.float64) / len(inverse))
    factors = (plain / inverse.double().cpu()).float()  # what llama.cpp divides each frequency by
    if not torch.allclose(factors, torch.ones_like(factors), atol=1e-5):
        tensors["rope_freqs.weight"] = factors
    return Draft(architecture, {**keys, **more}, tensors)


def write(draft: Draft, target: Any, path: Path) -> None:
    """Write the file; the tokenizer is that of `target`, a reader of `open_target`. Numbers are float32: to shorter
    types llama.cpp rounds what it multiplies, too, and drafts otherwise.
    """
    from gguf import GGUFWriter

    writer: Any = GGUFWriter(path, draft.architecture)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in draft.keys.items():
        add[type(value)](key, value)
    for name, field in target.fields.items():
        if name.startswith("tokenizer.") and name not in (_MASK, _TEMPLATE) and len(field.data):
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, sub_type=inner[-1] if inner else None)
    for name, tensor in draft.tensors.items():
        held = tensor.float() if tensor.is_floating_point() else tensor
        writer.add_tensor(name, held.detach().cpu().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
