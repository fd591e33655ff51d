"""EAGLE-1/2, and MSD and ViSpec, which share its layout: heads with the target's LM head, for three readers and back.

`bias` is fc's in EAGLE's own code, and the attention's in vLLM's and SGLang's Llama: only EAGLE's layout has the key.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...core.errors import UserError
from ...core.json_types import JsonObject
from ...core.pretrained import read_safetensors
from ..drafters.base import TargetIdentity
from ..drafters.eagle import EagleConfig
from ..drafters.head_config import DirectHeadConfig, HeadConfig
from ..drafters.head_files import manifest_of
from ..drafters.vispec import VispecHead
from ..folders import WEIGHTS, State, check_shapes, shapes_of
from ..layer import LLAMA_LIKE, QKV_BIASED
from ..targets.base import TargetShape
from .eagle3 import TAPS
from .expressible import Engine
from .plugin import plugins_name, served_by_plugin
from .source import Files, Source, llama_values

LAYER = "layers.0."
_TARGET_NORM = "target_norm.weight"


def from_ours(engine: Engine, source: Source, copied: Tensor | None, *, pictures: bool = False) -> Files:
    """`config.json` and tensors.

    Args:
        copied: of the target: its embedding [V,D] for EAGLE's own layout, its final norm [D] for our plugin's "middle".
        pictures: prompts may have some; in vLLM a class of our plugin's then runs what is no EAGLE head.
    """
    head, text, config = source.head, source.target.text, cast(HeadConfig, source.config)
    state, shape = dict(head.state_dict()), head.shape
    values = {"architectures": ["LlamaForCausalLM"], **llama_values(shape, text), "torch_dtype": source.dtype}
    class_name = plugins_name(config) if engine == "vllm" and pictures else None
    if class_name is not None:  # what enters the layer at pictures has no bias: fc's stays where it is
        more = {} if class_name == "msd" else {"input_norm": shape.input_norm}
        if class_name == "vispec":
            held = head.num_queries - 1 if config.visual(training=False) == "compressed" else 0
            more |= {"num_queries": head.num_queries, "num_held": held}
        if class_name == "middle":
            assert copied is not None
            between = cast(DirectHeadConfig, config).visual_layer(source.target.shape, training=False)
            values[TAPS] = [between, source.target.shape.num_layers]  # the last one before the final norm
            state[_TARGET_NORM] = copied.to(head.dtype)
        values = served_by_plugin(values, class_name, fc_bias="fc.bias" in state, **more)
        values["attention_bias"] = shape.qkv_bias
    elif engine == "vllm":
        if "fc.bias" in state:
            state = fold_fc_bias(state)
            values["attention_bias"] = True
        elif shape.qkv_bias:
            values["qkv_bias"] = True
    elif engine == "sglang":
        # Its fc always has a bias, which stays as it was drawn where the file has none.
        state.setdefault("fc.bias", torch.zeros(shape.hidden_size, dtype=head.dtype))
        if shape.qkv_bias:
            values |= {"architectures": [f"{LLAMA_LIKE[QKV_BIASED]}ForCausalLMEagle"], "model_type": QKV_BIASED}
        else:
            values["architectures"] = ["LlamaForCausalLMEagle"]
    else:
        assert copied is not None
        values |= {"bias": head.fc.bias is not None, "qkv_bias": shape.qkv_bias}
        if head.num_queries:
            values["num_q"] = head.num_queries
        state["embed_tokens.weight"] = copied.to(head.dtype)
    return values, state


def from_export(folder: Path, config: Any, target: TargetShape) -> nn.Module:
    """The head of an export for vLLM, in float32. Raises `UserError` for tensors of another one."""
    head: nn.Module = config.module(config.layer(target), None)
    state = {name: value.float() for name, value in read_safetensors(folder / WEIGHTS).items()}
    state.pop(_TARGET_NORM, None)
    if config.fc_bias and "fc.bias" not in state:
        state = unfold_fc_bias(state)
    check_shapes(shapes_of(state), shapes_of(head.state_dict()), where=str(folder / WEIGHTS))
    head.load_state_dict(state)
    return head.eval()


def to_ours(state: State, kind: str, where: str) -> tuple[JsonObject, State]:
    """The settings that the weights show, and the weights. Raises `UserError`: the attention's output has a bias, and
    it is not fc's.
    """
    if f"{LAYER}self_attn.o_proj.bias" in state:
        if "fc.bias" in state or f"{LAYER}input_layernorm.weight" in state:
            raise UserError("the attention's output has a bias of its own", where=where, hint="such heads are not read")
        state = unfold_fc_bias(state)
    settings: JsonObject = {"fc_bias": "fc.bias" in state, "input_norm": f"{LAYER}input_layernorm.weight" in state}
    if kind == "vispec" and "imadpt.q" in state:
        settings["num_queries"] = len(state["imadpt.q"])
    return settings, state


_ATTENTION = f"{LAYER}self_attn."
_PROJECTED = tuple(f"{_ATTENTION}{part}_proj" for part in "qkv")


def fold_fc_bias(state: State) -> State:
    """The same head without a bias in fc, which vLLM's EAGLE-1 lacks: the attention takes it over.

    W (x + b) = W x + W b, and x + b + o = x + (o + b): exact, because nothing norms the layer's input. Computed in
    float32, rounded once.
    """
    bias = state["fc.bias"].float()
    folded = {name: value for name, value in state.items() if name != "fc.bias"}
    for name in _PROJECTED:
        weight = state[f"{name}.weight"]
        moved = weight.float() @ bias
        if f"{name}.bias" in state:
            moved = moved + state[f"{name}.bias"].float()
        folded[f"{name}.bias"] = moved.to(weight.dtype)
    folded[f"{_ATTENTION}o_proj.bias"] = state["fc.bias"]
    return folded


def unfold_fc_bias(state: State) -> State:
    """Back to a bias in fc. Biases of the attention that are nothing beside it but rounding are left out again."""
    bias = state[f"{_ATTENTION}o_proj.bias"]
    whole = {name: value for name, value in state.items() if name != f"{_ATTENTION}o_proj.bias"} | {"fc.bias": bias}
    is_rounding = True
    for name in _PROJECTED:
        weight = state[f"{name}.weight"]
        rest = state[f"{name}.bias"].float() - weight.float() @ bias.float()
        whole[f"{name}.bias"] = rest.to(weight.dtype)
        most = 4 * torch.finfo(weight.dtype).eps * (weight.float().abs() @ bias.float().abs())
        is_rounding &= bool((rest.abs() <= most).all())
    biases = {f"{name}.bias" for name in _PROJECTED} if is_rounding else set()
    return {name: value for name, value in whole.items() if name not in biases}


# Settings that an EAGLE head has, too; its fc always has a bias here.
_SHARED = ("input_norm", "kv_heads", "qkv_bias", "intermediate_size", "norm_eps", "rope", "rope_theta", "positions")


def without_pictures(source: Source) -> Source:
    """The EAGLE head that equals this ViSpec head on prompts without pictures, computed in float32.

    Before the first picture the global vector is zero, so that `img_fc` is one linear map of the state, and goes into
    fc: fc [E ; W f + b] = [fc_E, fc_f W] [E ; f] + (fc_b + fc_f b).
    """
    head: VispecHead = source.head
    settings = {name: dict(source.config)[name] for name in _SHARED}
    config = EagleConfig(kind="eagle", fc_bias=True, image="placeholder", **settings)
    width, state = head.shape.hidden_size, {name: value.float() for name, value in head.state_dict().items()}
    weights = {name: value for name, value in state.items() if not name.startswith(("imadpt.", "img_fc."))}
    of_state = state["fc.weight"][:, width:]
    weights["fc.weight"] = weights["fc.weight"].clone()
    weights["fc.weight"][:, width:] = of_state @ state["img_fc.weight"][:, :width]
    weights["fc.bias"] = state.get("fc.bias", 0.0) + of_state @ state["img_fc.bias"]
    made = config.module(config.layer(source.target.shape), None)
    made.load_state_dict(weights)
    about = source.manifest
    identity = TargetIdentity(about.get("target") or {}, about.get("tokenizer_sha256"))
    written = manifest_of(config, source.target.shape, identity, drafter=config.model_dump(mode="json"))
    return replace(source, config=config, head=made.to(head.dtype).eval(), manifest=about | written)
