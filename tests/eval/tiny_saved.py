"""Tiny targets in folders, as published weights are, of sizes that two ranks can share."""

from pathlib import Path

import tiny
import tiny_qwen
import torch
from draftsmith.models.parts import TokenIds
from draftsmith.models.targets.llava.model import assemble, llava_config
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, SiglipVisionConfig

SIZES = tiny.Sizes(vocab=102, heads=4, kv_heads=2, side=3)
# Kind -> ids that have a token.
ALL = {"causal_lm": 98, "llava": 98, "llava_onevision": 98, **dict.fromkeys(tiny_qwen.KINDS, tiny_qwen.TOKENS)}


def built(kind: str):
    if kind == "llava":
        return tiny.llava(0, sizes=SIZES)
    if kind.startswith("qwen"):
        return tiny_qwen.model(kind)
    torch.manual_seed(0)
    sizes = {
        "vocab_size": SIZES.vocab, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.25,
    }  # fmt: skip
    if kind == "causal_lm":
        return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8 * SIZES.side,
        patch_size=8, vision_use_head=False,
    )  # fmt: skip
    ids = TokenIds(SIZES.vocab, tiny.IMAGE_ID, 1, tiny.EOS, 3)
    return assemble(llava_config(Qwen2Config(**sizes), vision, ids, vision_feature_layer=-1, family="llava_onevision"))


def saved(kind: str, folder: Path) -> None:
    built(kind).save_pretrained(folder / kind)
