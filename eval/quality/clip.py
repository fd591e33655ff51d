"""CLIP and the two judges built on it, all on transformers' CLIPModel: CLIP score, HPS v2.1, LAION's aesthetic score.

HPS v2.1 is published as a state of open_clip's ViT-H-14; `transformers_names` renames it, so that neither open_clip,
which wants torchvision, nor the `hpsv2` package, a fork of open_clip 2.16, is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.finite import check_module
from ...core.json_types import JsonObject
from ...core.pretrained import check_quantised, reading_pretrained
from .extractors import Extractor, Picture, crop_bicubic, crop_lanczos, pad_bicubic, standardize
from .metric_weights import SOURCES, WeightName, load_state, read_state, unfit

if TYPE_CHECKING:
    import transformers
    from transformers import PreTrainedTokenizerBase

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of all CLIP models here
CROP = 256  # LANTERN crops as for FID first

# open_clip's ViT-H-14.
VIT_H: JsonObject = {
    "projection_dim": 1024,
    "text_config": {
        "vocab_size": 49408, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "max_position_embeddings": 77, "hidden_act": "gelu", "projection_dim": 1024,
        "bos_token_id": 49406, "eos_token_id": 49407,
    },
    "vision_config": {
        "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16,
        "image_size": 224, "patch_size": 14, "hidden_act": "gelu", "projection_dim": 1024,
    },
}  # fmt: skip


def clip_pair(folder: Path, device: torch.device | str) -> Extractor:
    """CLIP for the CLIP score; the result names the folder. Raises `UserError` where it holds no CLIP model."""
    model = _load_clip(folder, "clip", device)
    tokenizer, side = _load_tokenizer(folder, model), _side(model)

    def prepare(picture: Picture) -> Picture:
        return crop_bicubic(crop_lanczos(picture, CROP), side)

    return Extractor(folder.name, prepare, partial(embed_images, model), partial(embed_texts, model, tokenizer))


def hps_pair(path: Path, clip_folder: Path, device: torch.device | str, config: JsonObject = VIT_H) -> Extractor:
    """HPS v2.1 (Wu et al. 2023): a CLIP ViT-H/14 tuned on human choices, with the tokenizer of any CLIP model in
    `clip_folder`; `config` is for another size. Raises `UserError` where the file is not that model.
    """
    import transformers
    from transformers import CLIPConfig

    with torch.device(device):
        model = transformers.CLIPModel(CLIPConfig(**config)).eval()
    load_state(model, transformers_names(read_state(path, "hpsv2")), path, "hpsv2")
    tokenizer = _load_tokenizer(clip_folder, model)
    return Extractor(
        path.stem,
        partial(pad_bicubic, side=_side(model)),
        partial(embed_images, model),
        partial(embed_texts, model, tokenizer),
    )


def aesthetic_scores(path: Path, clip_folder: Path, device: torch.device | str) -> Extractor:
    """LAION's predictor: linear layers, with nothing between them, on CLIP ViT-L/14's unit embedding; about 1 to 10.
    Both published generations load: one layer (2022-06) and the five of `...-linearMSE.pth`. Raises `UserError` for
    others, among them those with a ReLU.
    """
    model = _load_clip(clip_folder, "clip_large", device)
    state = read_state(path, "aesthetic")
    keys = sorted(key.removesuffix("weight") for key in state if key.endswith("weight"))
    # The numbers between are of dropouts; with ReLUs between, they would be others.
    if keys not in ([""], [f"layers.{n}." for n in (0, 2, 4, 6, 7)]):
        raise unfit(path, "aesthetic", f"holds other layers than a linear predictor: {sorted(state)}")
    layers = [(state[f"{key}weight"].float().to(device), state[f"{key}bias"].float().to(device)) for key in keys]
    width = model.config.projection_dim
    if layers[0][0].shape[1] != width:
        raise unfit(path, "aesthetic", f"judges embeddings of {layers[0][0].shape[1]} numbers, and CLIP gives {width}")

    def scores(images: Tensor) -> Tensor:
        values = embed_images(model, images)
        for weight, bias in layers:
            values = F.linear(values, weight, bias)
        return values

    return Extractor(f"{path.stem} on {clip_folder.name}", partial(crop_bicubic, side=_side(model)), scores)


def embed_images(model: transformers.CLIPModel, images: Tensor) -> Tensor:
    """uint8 [B,3,S,S] of the model's size to unit embeddings [B,D]."""
    pooled = model.vision_model(pixel_values=standardize(images, MEAN, STD)).pooler_output
    return F.normalize(model.visual_projection(pooled), dim=-1)


def embed_texts(model: transformers.CLIPModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Tensor:
    """B texts, cut to the model's positions, to unit embeddings [B,D]."""
    text_config: Any = model.config.text_config
    length = text_config.max_position_embeddings
    tokens = tokenizer(list(texts), padding=True, truncation=True, max_length=length, return_tensors="pt")
    tokens = tokens.to(model.device)
    pooled = model.text_model(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask).pooler_output
    return F.normalize(model.text_projection(pooled), dim=-1)


# open_clip's names and transformers' for the same tensors, tried in order.
NAMES = (
    (r"^visual\.class_embedding$", "vision_model.embeddings.class_embedding"),
    (r"^visual\.conv1\.", "vision_model.embeddings.patch_embedding."),
    (r"^visual\.positional_embedding$", "vision_model.embeddings.position_embedding.weight"),
    (r"^visual\.ln_pre\.", "vision_model.pre_layrnorm."),
    (r"^visual\.ln_post\.", "vision_model.post_layernorm."),
    (r"^visual\.proj$", "visual_projection.weight"),
    (r"^visual\.transformer\.resblocks\.", "vision_model.encoder.layers."),
    (r"^token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"^positional_embedding$", "text_model.embeddings.position_embedding.weight"),
    (r"^ln_final\.", "text_model.final_layer_norm."),
    (r"^text_projection$", "text_projection.weight"),
    (r"^transformer\.resblocks\.", "text_model.encoder.layers."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ln_([12])\.", r".layer_norm\1."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
)


def transformers_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """open_clip's state of a CLIP under transformers' names: projections turned, joint q, k and v parted; float32."""
    renamed: dict[str, Tensor] = {}
    for name, value in state.items():
        value = value.float()
        if name in ("visual.proj", "text_projection"):
            value = value.T.contiguous()
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        joint = re.fullmatch(r"(.*\.self_attn)\.in_proj_(weight|bias)", name)
        if joint:
            for letter, part in zip("qkv", value.chunk(3), strict=True):
                renamed[f"{joint[1]}.{letter}_proj.{joint[2]}"] = part
        else:
            renamed[name] = value
    return renamed


def _side(model: transformers.CLIPModel) -> int:
    vision_config: Any = model.config.vision_config
    return vision_config.image_size


def _load_clip(folder: Path, name: WeightName, device: torch.device | str) -> transformers.CLIPModel:
    import transformers

    key, hint = f"weights.{name}", f"use {' from '.join(SOURCES[name])}"
    with reading_pretrained(folder, "cannot read", key=key, hint=hint):
        loaded: Any = transformers.CLIPModel.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, weights_only=True, output_loading_info=True
        )
    model, report = loaded
    check_quantised(model, report, folder)
    # transformers fills what it does not find with random numbers.
    if report["missing_keys"]:
        raise unfit(folder, name, f"holds another model: {sorted(report['missing_keys'])[0]} is missing")
    check_module(model.eval().to(device), folder)
    return model


def _load_tokenizer(folder: Path, model: transformers.CLIPModel) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    hint = f"use {' from '.join(SOURCES['clip'])}"
    with reading_pretrained(folder, "cannot read a tokenizer", key="weights.clip", hint=hint):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text_config: Any = model.config.text_config
    # Where the tokenizer's files are missing, transformers makes an empty one.
    if len(tokenizer) != text_config.vocab_size:
        raise unfit(folder, "clip", f"has a tokenizer of {len(tokenizer)} tokens, expected {text_config.vocab_size}")
    return tokenizer
