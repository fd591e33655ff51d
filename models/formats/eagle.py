"""Config and tensors of a head as each engine reads them. Nothing of the target is copied but where a layout wants it.

Keys that engines read under one name and mean differently:
`bias` is fc's in EAGLE's code, and the attention's in vLLM's and SGLang's Llama: only EAGLE's layout has it.
Ids of tapped layers count what enters a layer in vLLM (as ours), and what leaves it in SGLang: one less.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ..drafters.eagle3 import Eagle3Config, Eagle3Head
from ..drafters.head_module import StateHead
from ..drafters.peagle import PeagleConfig
from ..hub import config_value
from ..layer import LayerShape
from .rules import Engine
from .source import HeadSource, Target

Files = tuple[dict[str, Any], dict[str, Tensor]]  # config.json, model.safetensors
# Drafted tokens that the speculators format names as its default.
CHAIN = 5


def lay_out(engine: Engine, source: HeadSource, embedding: Tensor | None = None) -> Files:
    """A head that `check_head` has let through.

    Args:
        embedding: the target's [V,D]; for EAGLE-1 in EAGLE's own layout, which holds a copy.
    """
    if source.config.is_eagle3:
        return _speculators(source) if engine == "speculators" else _eagle3(engine, source)
    return _eagle1(engine, source, embedding)


def llama_values(shape: LayerShape, text: Any) -> dict[str, Any]:
    """A one-layer Llama of the head's shape, for readers of transformers 4 and 5."""
    scaling = None if shape.rope_scaling is None else dict(shape.rope_scaling)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_theta} | (scaling or {})
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


def _dtype(head: StateHead) -> str:
    return str(head.dtype).removeprefix("torch.")


def _eagle3(engine: Engine, source: HeadSource) -> Files:
    head, text = source.head, source.target.text
    assert isinstance(head, Eagle3Head) and isinstance(source.config, Eagle3Config)
    taps, layers = source.config.layers_of(source.target.shape), text.num_hidden_layers
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **llama_values(head.shape, text),
        "draft_vocab_size": _draft_vocabulary(head),
        "target_hidden_size": text.hidden_size,
        "target_model_type": source.target.config.model_type,
        "norm_before_residual": False,
        "torch_dtype": _dtype(head),
    }
    if engine == "vllm":
        values["eagle_aux_hidden_state_layer_ids"] = list(taps)
        if isinstance(source.config, PeagleConfig):
            values["pard_token"] = source.config.mask_token_id
    elif engine == "sglang" and taps != (2, layers // 2, layers - 3):
        # Its default is the same layers, and needs no ids that another engine would read differently.
        values["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps]}
    state = dict(head.state_dict())
    return values, _without_table(state, head) if engine == "vllm" else state


def _draft_vocabulary(head: Eagle3Head) -> int:
    """Number of tokens that the head can propose."""
    return len(cast(Tensor, head.d2t))


def _without_table(state: dict[str, Tensor], head: Eagle3Head) -> dict[str, Tensor]:
    """vLLM has no place for the two tables of ids where the draft has all of the target's."""
    whole = _draft_vocabulary(head) == head.shape.vocab_size
    return {name: value for name, value in state.items() if not (whole and name in ("d2t", "t2d"))}


def _speculators(source: HeadSource) -> Files:
    """vLLM takes `norm_before_residual` for true where it is not written, and the package for false."""
    head, text, target = source.head, source.target.text, source.target
    assert isinstance(head, Eagle3Head) and isinstance(source.config, Eagle3Config)
    layer = llama_values(head.shape, text)
    del layer["rope_scaling"]
    config, kind = source.config, source.config.kind
    parallel = config.parallel_tokens if isinstance(config, PeagleConfig) else None
    values = {
        "architectures": ["PEagleSpeculator" if parallel else "Eagle3Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "draft_vocab_size": _draft_vocabulary(head),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(source.config.layers_of(source.target.shape)),
        "transformer_layer_config": layer,
        "tie_word_embeddings": False,
        "torch_dtype": _dtype(head),
        "speculators_config": proposals(kind, parallel or CHAIN, target),
    }
    if isinstance(config, PeagleConfig):
        values["mask_token_id"] = config.mask_token_id
    state = {name.replace("midlayer.", "layers.0."): value for name, value in head.state_dict().items()}
    return values, _without_table(state, head)


def proposals(algorithm: str, speculative_tokens: int, target: Target) -> dict[str, Any]:
    """The part of speculators' `config.json` that names the algorithm, its chain's length and the target."""
    return {
        "algorithm": algorithm,
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": speculative_tokens,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": target.name, "architectures": list(target.config.architectures or [])},
    }


def _eagle1(engine: Engine, source: HeadSource, embedding: Tensor | None) -> Files:
    head, text = source.head, source.target.text
    state, shape = dict(head.state_dict()), head.shape
    values = {"architectures": ["LlamaForCausalLM"], **llama_values(shape, text), "torch_dtype": _dtype(head)}
    if engine == "vllm":
        if "fc.bias" in state:
            state = fold_fc_bias(state)
            values["attention_bias"] = True
        elif shape.qkv_bias:
            values["qkv_bias"] = True
    elif engine == "sglang":
        # Its fc always has a bias, which stays as it was drawn where the file has none.
        state.setdefault("fc.bias", torch.zeros(shape.hidden_size, dtype=head.dtype))
        if shape.qkv_bias:
            values |= {"architectures": ["Qwen2ForCausalLMEagle"], "model_type": "qwen2"}
        else:
            values["architectures"] = ["LlamaForCausalLMEagle"]
    else:
        assert embedding is not None
        values |= {"bias": head.fc.bias is not None, "qkv_bias": shape.qkv_bias}
        if head.num_queries:
            values["num_q"] = head.num_queries
        state["embed_tokens.weight"] = embedding.to(head.dtype)
    return values, state


_PROJECTED = ("q", "k", "v")


def fold_fc_bias(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same head without a bias in fc, which vLLM's EAGLE-1 lacks: the attention takes it over.

    W (x + b) = W x + W b, and x + b + o = x + (o + b): exact, because nothing norms the layer's input. Computed in
    float32, rounded once.
    """
    bias = state["fc.bias"].float()
    folded = {name: value for name, value in state.items() if name != "fc.bias"}
    attention = "layers.0.self_attn."
    for part in _PROJECTED:
        name = f"{attention}{part}_proj"
        weight = state[f"{name}.weight"]
        moved = weight.float() @ bias
        if f"{name}.bias" in state:
            moved = moved + state[f"{name}.bias"].float()
        folded[f"{name}.bias"] = moved.to(weight.dtype)
    folded[f"{attention}o_proj.bias"] = state["fc.bias"]
    return folded


def unfold_fc_bias(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Back to a bias in fc. Biases of the attention that are nothing beside it but rounding are left out again."""
    attention = "layers.0.self_attn."
    bias = state[f"{attention}o_proj.bias"]
    whole = {name: value for name, value in state.items() if name != f"{attention}o_proj.bias"} | {"fc.bias": bias}
    is_rounding = True
    for part in _PROJECTED:
        name = f"{attention}{part}_proj"
        weight = state[f"{name}.weight"]
        rest = state[f"{name}.bias"].float() - weight.float() @ bias.float()
        whole[f"{name}.bias"] = rest.to(weight.dtype)
        most = 4 * torch.finfo(weight.dtype).eps * (weight.float().abs() @ bias.float().abs())
        is_rounding &= bool((rest.abs() <= most).all())
    if is_rounding:
        whole = {name: value for name, value in whole.items() if name not in _BIASES}
    return whole


_BIASES = {f"layers.0.self_attn.{part}_proj.bias" for part in _PROJECTED}
