"""Models to measure the latency of: published shapes or smaller ones, with random weights.

Pairs come from the pinned configs. Captioners: BLIP's shape is transformers' default, BLIP-2's is that with OPT-2.7b,
and Florence-2-large's gives 770 million parameters, as published; a parameter count checks no epsilons and no ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
import torch
from draftsmith.models.drafters.captioners import Blip2Captions, BlipCaptions, Florence2Captions
from draftsmith.models.drafters.lvlm import LvlmConfig, drafter_config
from draftsmith.models.hub import read_config
from draftsmith.models.parts import TokenIds
from draftsmith.models.targets.llava.model import assemble, llava_config
from draftsmith.scripts.timing import Action
from transformers import (
    Blip2ForConditionalGeneration,
    BlipForConditionalGeneration,
    CLIPVisionConfig,
    Florence2ForConditionalGeneration,
    LlamaConfig,
    PreTrainedModel,
)

Model = TypeVar("Model", bound=PreTrainedModel)

# Keys of transformers' configs, by what they count.
WIDTHS = {
    "hidden_size", "intermediate_size", "encoder_hidden_size", "projection_dim", "embed_dim", "d_model", "ffn_dim",
    "encoder_ffn_dim", "decoder_ffn_dim", "word_embed_proj_dim",
}  # fmt: skip
HEADS = {
    "num_attention_heads", "num_key_value_heads", "encoder_attention_heads", "decoder_attention_heads", "num_heads",
    "num_groups",
}  # fmt: skip
LAYERS = {"num_hidden_layers", "encoder_layers", "decoder_layers", "depths"}


# Shapes


@dataclass(frozen=True)
class Shape:
    """How far from the published shapes."""

    narrower: int = 1  # widths, heads and the vocabulary of target and drafts are divided by this
    smaller_sides: int = 1  # sides of pictures
    most_layers: int | None = None

    @property
    def published(self) -> bool:
        """Whether nothing is made smaller than published."""
        return self == Shape()

    def label(self, name: str) -> str:
        """`name`, followed by "/" and the factor `narrower` unless the shape is the published one."""
        return name if self.published else f"{name}/{self.narrower}"

    def config(self, config: Any) -> Any:
        """The config in this shape; its vocabulary stays."""
        values = self._walk(config.to_dict())
        vision = values.get("vision_config", values)
        if "image_size" in vision:
            patch = vision["patch_size"]
            vision["image_size"] = max(patch, vision["image_size"] // self.smaller_sides // patch * patch)
        return read_config(values, key="shape")

    def _walk(self, values: dict[str, Any]) -> dict[str, Any]:
        # The width of a head follows from the rest.
        return {key: self._change(key, value) for key, value in values.items() if key != "head_dim"}

    def _change(self, key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return self._walk(value)
        if key not in WIDTHS | HEADS | LAYERS or value is None:
            return value
        if isinstance(value, (list, tuple)):
            return tuple(self._change(key, v) for v in value)
        if key in LAYERS:
            return min(value, self.most_layers or value)
        return max(1, value // self.narrower)


def target_config(name: str, shape: Shape) -> Any:
    """A LLaVA-1.5 by the name of its pinned config."""
    pinned: Any = read_config(name, key=name, network=False)
    vocab, image = pinned.text_config.vocab_size // shape.narrower, pinned.image_token_index // shape.narrower
    ids = TokenIds(vocab, image, bos=1, eos=2, pad=vocab - 1)
    return llava_config(shape.config(pinned.text_config), shape.config(pinned.vision_config), ids)


def draft_config(name: str, target: Any, shape: Shape) -> Any:
    """A draft as recipes assemble it: the target's vision tower and ids around a small language model."""
    text = shape.config(read_config(name, key=name, network=False)).to_dict()
    vocab = target.text_config.vocab_size
    ids = TokenIds(vocab, target.image_token_index, bos=1, eos=2, pad=vocab - 1)
    drafter = LvlmConfig(kind="lvlm", language_model=text, vision_tower="target")
    return drafter_config(drafter, target, ids, network=False)


# Random weights


def random_model(build: Callable[[], Model], *, dtype: torch.dtype, device: torch.device, seed: int) -> Model:
    """A model with random weights, drawn where they are to stay."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(seed)
    try:
        with device:
            model = build()
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def random_llava(
    text: tuple[int, int, int, int],
    tower: tuple[int, int, int, int],
    ids: TokenIds,
    *,
    side: int,
    patch: int,
    seed: int = 0,
    **settings: Any,
) -> Any:
    """A LLaVA with random weights.

    Args:
        text, tower: (width, inner width, layers, heads) of the language model and of the vision tower.
        side, patch: of pictures, in pixels.
        settings: other keys of the language model's config.
    """
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    settings = {"max_position_embeddings": 2048, "initializer_range": 0.03} | settings
    language: Any = {"vocab_size": ids.vocab_size, **dict(zip(keys, text, strict=True)), **settings}
    vision: Any = {"image_size": side, "patch_size": patch, **dict(zip(keys, tower, strict=True))}
    torch.manual_seed(seed)
    return assemble(llava_config(LlamaConfig(**language), CLIPVisionConfig(**vision), ids)).eval()


# Memory


def free_bytes(device: torch.device) -> int:
    """Free bytes of a CUDA device after its unused cached memory is released; else the machine's available bytes."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


# Captioners

BLIP = {"model_type": "blip"}
BLIP_2 = {
    "model_type": "blip-2", "use_decoder_only_language_model": True, "num_query_tokens": 32, "image_token_index": 50265,
    "vision_config": {}, "qformer_config": {},
    "text_config": {
        "model_type": "opt", "hidden_size": 2560, "ffn_dim": 10240, "num_hidden_layers": 32, "num_attention_heads": 32,
        "vocab_size": 50304, "max_position_embeddings": 2048, "word_embed_proj_dim": 2560,
    },
}  # fmt: skip
FLORENCE_2 = {
    "model_type": "florence2", "image_token_id": 51289,
    "vision_config": {
        "embed_dim": (256, 512, 1024, 2048), "num_heads": (8, 16, 32, 64), "num_groups": (8, 16, 32, 64),
        "projection_dim": 1024,
    },
    "text_config": {"model_type": "bart", "vocab_size": 51290, "d_model": 1024},
}  # fmt: skip
FLORENCE_SIDE, FLORENCE_STRIDE = 768, 32  # pixels
FLORENCE_TASK = 9  # tokens of "What does the image describe?", with the special ones


@dataclass(frozen=True)
class CaptionerShape:
    """A captioner by its config and class; `num_beams` is what drafting mode C searches with."""

    published: dict[str, Any]
    cls: type[PreTrainedModel]
    num_beams: int

    def build(self, shape: Shape) -> PreTrainedModel:
        """The captioner in `shape`, with newly initialised weights."""
        return self.cls(shape.config(read_config(self.published, key="captioner")))

    def captioning(self, model: Any, shape: Shape, num_tokens: int) -> Callable[[int], Action]:
        """Number of images -> what captions them in one batch, with exactly `num_tokens` tokens each."""
        exactly = {"min_new_tokens": num_tokens, "max_new_tokens": num_tokens}
        florence = self.cls is Florence2ForConditionalGeneration
        side = FLORENCE_SIDE // shape.smaller_sides if florence else model.config.vision_config.image_size

        def of(count: int) -> Action:
            pixels = torch.randn(count, 3, side, side).to(model.device, model.dtype)
            inputs = {"pixel_values": pixels}
            if florence:
                num_image = (side // FLORENCE_STRIDE) ** 2 + 1
                ids = torch.full((count, num_image + FLORENCE_TASK), FLORENCE_TASK, device=model.device)
                ids[:, :num_image] = model.config.image_token_id
                inputs["input_ids"] = ids
            return lambda: model.generate(**inputs, **exactly, num_beams=self.num_beams, do_sample=False)

        return of


CAPTIONERS = {
    "BLIP": CaptionerShape(BLIP, BlipForConditionalGeneration, BlipCaptions(kind="blip").num_beams),
    "BLIP-2": CaptionerShape(BLIP_2, Blip2ForConditionalGeneration, Blip2Captions(kind="blip2").num_beams),
    "Florence-2": CaptionerShape(
        FLORENCE_2, Florence2ForConditionalGeneration, Florence2Captions(kind="florence2").num_beams
    ),
}
