"""Tiny heads beside tiny targets as folders, and what each engine's layer computes, by transformers' own modules."""

import json
from unittest import mock

import torch
from draftsmith.models.drafters import captioners
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.models.drafters.dflash_files import dflash_manifest
from draftsmith.models.drafters.draft_vocabulary import likeliest_ids
from draftsmith.models.drafters.head_files import manifest_of
from draftsmith.models.lite0 import EfficientNetLite0Config
from draftsmith.models.targets.base import language_shape
from heads_tiny import config_of, head_of, text_config
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
)
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen2 import modeling_qwen2 as qwen2

VOCAB, WIDTH = 44, 32


# Of `llama_long`: positions stretched as Llama 3.1's.
LONG = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}  # fmt: skip


def target_config(family: str = "llava"):
    text = text_config(qwen=family.startswith("qwen"))
    if family in ("llama", "llama_long"):
        config = text
        if family == "llama_long":
            config = LlamaConfig(**text.to_dict() | {"rope_parameters": {"rope_theta": 10000.0, **LONG}})
        config.architectures = ["LlamaForCausalLM"]
    elif family == "qwen2_5_vl":
        config = Qwen2_5_VLConfig(text_config=text.to_dict(), image_token_id=40)
        config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    elif family == "qwen3_vl":
        sizes = {name: getattr(text, name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads",
                 "intermediate_size", "vocab_size", "num_hidden_layers", "rms_norm_eps")}  # fmt: skip
        vision = {"deepstack_visual_indexes": [1, 2, 3]}
        config = Qwen3VLConfig(text_config=sizes | {"head_dim": 8}, vision_config=vision, image_token_id=40)
        config.architectures = ["Qwen3VLForConditionalGeneration"]
    elif family == "emoji":
        rows = [[3, 1, 1, 8, 1], [3, 2, 2, 8, 1], [3, 2, 2, 8, 1], [3, 2, 2, 8, 1], [3, 2, 2, 8, 1]]
        tower = EfficientNetLite0Config(image_size=32, patch_size=16, stem_channels=8, rows=rows, head_channels=8)
        config = LlavaConfig(text_config=text.to_dict(), vision_config=tower, image_token_index=40)
        config.architectures = ["LlavaForConditionalGeneration"]
    else:
        vision = CLIPVisionConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                                  image_size=16, patch_size=8)  # fmt: skip
        config = LlavaConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), image_token_index=40)
        config.architectures = ["LlavaForConditionalGeneration"]
    return config


def target_folder(folder, family: str = "llava", *, weights: bool = False):
    config = target_config(family)
    if weights:
        torch.manual_seed(5)
        maker = LlamaForCausalLM if family == "llama" else LlavaForConditionalGeneration
        maker(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    return folder


def head_folder(folder, target, *, dtype=torch.float32, **settings):
    """A head with loud random weights, as a stage leaves it; `target` is the folder of its target."""
    config, result = config_of(**settings), AutoConfig.from_pretrained(target)
    text = result.get_text_config()
    torch.manual_seed(0)
    size = getattr(config, "draft_vocab_size", None)
    ids = likeliest_ids(torch.arange(VOCAB).float().roll(7), size) if size else None
    head = head_of(config, language_shape(text), ids)
    for name, parameter in head.named_parameters():
        scale = 0.3 if name.endswith("bias") else parameter.shape[-1] ** -0.5
        noise = torch.randn_like(parameter) * scale
        parameter.data = noise + 1 if parameter.dim() == 1 and not name.endswith("bias") else noise
    manifest = manifest_of(
        config, language_shape(text), identity_of(result, target), drafter=config.model_dump(mode="json")
    )
    config.save(head.to(dtype), folder, manifest)
    return head


def block_folder(folder, target, **settings):
    """A block draft with fresh weights, as a stage leaves it; `target` is the folder of its target."""
    config, result = config_of(**settings), AutoConfig.from_pretrained(target)
    shape = language_shape(result.get_text_config())
    torch.manual_seed(0)
    ids = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size) * 2
    head = config.head_class(config.shape(shape), ids)
    identity = identity_of(result, target)
    config.save(head, folder, dflash_manifest(config, shape, identity, drafter=config.model_dump(mode="json")))
    return head


def identity_of(config, target) -> TargetIdentity:
    kind = config.model_type if config.model_type in ("qwen2_5_vl", "qwen3_vl", "llava") else "causal_lm"
    return TargetIdentity({"kind": kind, "path": str(target)})


def exported(folder):
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def published(folder, values, state):
    """A checkpoint of somebody else's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file({name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors")
    return folder


def inputs(seed=1, count=6, width=WIDTH):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 1, count, width, generator=generator)


def ours(head, embeds, states):
    count = embeds.shape[1]
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    with torch.no_grad():
        return head(embeds, states, torch.arange(count), mask)


def _llama_part(values, state, prefix):
    """transformers' layer with the exported config and weights; a key that does not fit is an error here."""
    bias = "qkv_bias" in values or values["model_type"] == "qwen2"
    config = (Qwen2Config if bias else LlamaConfig)(
        **{k: v for k, v in values.items() if k not in ("architectures", "model_type")} | {"rope_scaling": None}
    )
    config._attn_implementation = "sdpa"
    layer = (qwen2.Qwen2DecoderLayer if bias else llama.LlamaDecoderLayer)(config, 0)
    rotary = (qwen2.Qwen2RotaryEmbedding if bias else llama.LlamaRotaryEmbedding)(config)
    weights = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    return config, layer, rotary, weights


def _attend(module, x, rotary):
    count = x.shape[1]
    mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
    cos_sin = rotary(x, torch.arange(count)[None])
    return module(hidden_states=x, position_embeddings=cos_sin, attention_mask=mask)


@torch.no_grad()
def eagle1_of_engines(values, state, embeds, states):
    """fc, and a Llama layer without its first norm."""
    _, layer, rotary, weights = _llama_part(values, state, "layers.0.")
    layer.input_layernorm = nn.Identity()
    layer.load_state_dict(weights)
    fc = nn.Linear(2 * WIDTH, WIDTH, bias="fc.bias" in state)
    fc.load_state_dict({n.removeprefix("fc."): v for n, v in state.items() if n.startswith("fc.")})
    made = _attend(layer, fc(torch.cat([embeds, states], -1)), rotary)
    return made[0] if isinstance(made, tuple) else made


@torch.no_grad()
def eagle3_of_engines(values, state, embeds, states, prefix="midlayer."):
    """Attention over [norm(embedding); norm(state)], the state as the residual; what comes out is not normed."""
    config, layer, rotary, weights = _llama_part(values, state, prefix)
    for part in "qkv":
        name = f"{part}_proj"
        setattr(layer.self_attn, name, nn.Linear(2 * WIDTH, getattr(layer.self_attn, name).out_features, bias=False))
    hidden_norm = llama.LlamaRMSNorm(WIDTH, config.rms_norm_eps)
    hidden_norm.load_state_dict({"weight": weights.pop("hidden_norm.weight")})
    layer.load_state_dict(weights)
    joined = torch.cat([layer.input_layernorm(embeds), hidden_norm(states)], -1)
    states = states + _attend(layer.self_attn, joined, rotary)[0]
    return states + layer.mlp(layer.post_attention_layernorm(states))


def load_captioner(folder):
    """A published captioner's loader, here of a class that is small."""
    section = captioners.BlipCaptions(kind="blip", path=str(folder), dtype="float32")
    with mock.patch.object(captioners.BlipCaptions, "model_class", "LlamaForCausalLM"):
        return captioners._load(section, torch.device("cpu"))
