"""Image generators of a recipe: a target with what its prompts become and how its codes become pictures.

LlamaGen takes a class label or T5 features and draws with its VQ tokenizer; Anole takes text ids and draws with a
VQ-GAN. Here the families meet, so that stages need not tell them apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from transformers import AutoTokenizer, ChameleonConfig, T5Config, T5EncoderModel

from ..core.batch import ImageRequest
from ..core.errors import UserError
from ..core.section import Section
from .decoding.rows import Guidance, GuidanceScale
from .llamagen.captions import TextFeatures
from .llamagen.files import load_llamagen, load_vq
from .llamagen.training import to_model, to_pixels
from .llamagen.transformer import LlamaGen, LlamaGenConfig, published
from .llamagen.vq import VqConfig
from .targets.anole import AnoleTarget, AnoleTargetConfig, anole_config, load_anole
from .targets.llamagen import LlamaGenTarget
from .vqgan import encode_images, load_encoder, load_vqgan

Size = Literal["B", "L", "XL", "XXL", "XXXL", "1B", "3B", "7B"]
# What a recipe says of a LlamaGen's shape, held against its weights; a head's manifest repeats it.
NAMED_SHAPE = ("num_layers", "num_heads", "dim", "vocab_size", "grid", "condition")
TEXT_ENCODER = "text_encoder"  # folder beside the weights of a target that was trained with its own


class LlamaGenTargetConfig(Section):
    """A LlamaGen: published weights, or a tiny one that a recipe spells out and trains itself."""

    draws_images: ClassVar[bool] = True

    kind: Literal["llamagen"]
    # Hub id or directory of the weights, as `scripts/convert_llamagen.py` writes them or in LANTERN's layout.
    path: str | None = None
    revision: str | None = None
    # A published size; or `shape`, spelt out.
    size: Size | None = None
    shape: LlamaGenConfig | None = None
    condition: Literal["class", "text"] = "text"
    # Side of the pictures: 256, 384 or 512 for the published models.
    image_size: int = Field(256, ge=8)
    # Directory of the image tokenizer, or its shape where a stage trains it.
    vq: str | VqConfig
    # Text-conditional: Hub id or directory of the T5 encoder, or an inline config that is trained with the model.
    text_encoder: str | dict[str, Any] | None = None
    # Of an inline text encoder: Hub id or directory of the captions' tokenizer; null: that of a synthetic dataset.
    tokenizer: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    # Guidance; the official samplers' by default: 7.5 for text, 4.0 for classes (1.5 to 2.0 where FID is measured).
    cfg_scale: GuidanceScale = 7.5
    # Guide only tokens 0 to cfg_interval + 1; -1: all.
    cfg_interval: int = Field(-1, ge=-1)

    @model_validator(mode="before")
    @classmethod
    def _guidance_of_classes(cls, values: Any) -> Any:
        asked_by_class = isinstance(values, dict) and values.get("condition") == "class"
        return {"cfg_scale": 4.0, **values} if asked_by_class else values

    @model_validator(mode="after")
    def _consistent(self) -> LlamaGenTargetConfig:
        if (self.size is None) == (self.shape is None):
            raise ValueError("give size (a published one) or shape (spelt out)")
        if self.condition == "text" and self.text_encoder is None:
            raise ValueError("condition: text needs text_encoder")
        if self.condition == "class" and self.text_encoder is not None:
            raise ValueError("text_encoder is given, and condition is class")
        if self.tokenizer is not None and not isinstance(self.text_encoder, dict):
            raise ValueError("tokenizer is given, and text_encoder is not spelt out: it brings its own")
        return self

    @property
    def factor(self) -> int:
        """Pixels along a side of one code."""
        return self.vq.factor if isinstance(self.vq, VqConfig) else 16

    def model_config_of(self) -> LlamaGenConfig:
        """The transformer's shape."""
        grid = self.image_size // self.factor
        if self.shape is not None:
            return LlamaGenConfig(**{**self.shape.model_dump(), "grid": grid, "condition": self.condition})
        assert self.size is not None
        return published(self.size, grid=grid, condition=self.condition)

    def provides(self) -> set[str]:
        """Things that need no stage: they come from outside."""
        things = {"target"} if self.path is not None else set()
        things |= {"vq"} if isinstance(self.vq, str) else set()
        # An inline text encoder is trained with the target.
        things |= set() if isinstance(self.text_encoder, dict) else {"text", "tokenizer"}
        return things | ({"tokenizer"} if self.tokenizer is not None else set())

    @property
    def num_codes(self) -> int:
        """Tokens of an image."""
        return (self.image_size // self.factor) ** 2

    @property
    def guidance(self) -> Guidance:
        """`cfg_scale` and `cfg_interval` as the rule that combines the scores of both rows."""
        return Guidance(self.cfg_scale, self.cfg_interval)


TargetConfig = LlamaGenTargetConfig | AnoleTargetConfig


@dataclass(frozen=True)
class Generator:
    """A frozen target with its two translators."""

    target: Any
    condition: Callable[[str, int | None], Tensor]  # caption, label -> what the target is asked by
    pictures: Callable[[Tensor], Tensor]  # codes [B,n] -> uint8 [B,3,S,S]
    codebook: Tensor  # [C,d] as stored: what codes are near one another by
    first_id: int = 0  # a token's id is its code plus this

    def request(self, caption: str, label: int | None, name: str) -> ImageRequest:
        """What the target is asked for: the condition made from the caption or the label, the caption, and `name`.

        Raises:
            UserError: the target is class-conditional, and the label is None or no class of it.
        """
        return ImageRequest(self.condition(caption, label), caption, name)


def load_generator(config: TargetConfig, folders: Mapping[str, Path], *, device: torch.device) -> Generator:
    """Everything that decoding pictures needs.

    Args:
        folders: thing (target, text, vq) -> folder of the stage that trained it; others come from the recipe.
    """
    target = load_target(config, folders, device=device)
    condition = condition_source(config, folders, device=device)
    if isinstance(config, AnoleTargetConfig):
        if config.vq_path is None:
            raise UserError("pictures are drawn and target.vq_path is null", hint="name the weights of the VQ-GAN")
        drawer = load_vqgan(config.vq_path, revision=config.vq_revision).to(device)
        rows = drawer.codebook.detach()
        return Generator(target, condition, lambda codes: to_pixels(drawer.decode(codes.to(device))).cpu(), rows, 4)
    vq, grid = load_vq(folders.get("vq") or str(config.vq)).to(device), target.grid

    def pictures(codes: Tensor) -> Tensor:
        return to_pixels(vq.decode(codes.to(device), (grid, grid))).cpu()

    return Generator(target, condition, pictures, vq.quantize.embedding.weight.detach())


def load_target(
    config: TargetConfig, folders: Mapping[str, Path], *, device: torch.device
) -> LlamaGenTarget | AnoleTarget:
    """The frozen target alone: what a head needs while it trains."""
    if isinstance(config, AnoleTargetConfig):
        return load_anole(
            config.path,
            revision=config.revision,
            dtype=getattr(torch, config.dtype),
            device_map=config.device_map,
            device=device,
            guidance=config.guidance,
        )
    return LlamaGenTarget(load_transformer(config, folders).to(device), config.guidance)


def model_config(config: TargetConfig) -> LlamaGenConfig | ChameleonConfig:
    """The shape of the target, without a network."""
    if isinstance(config, AnoleTargetConfig):
        return anole_config(config, network=False)
    return config.model_config_of()


def sample_condition(config: TargetConfig) -> Callable[[Any], Tensor]:
    """What a sample of shards (its `tensors` and `info`) was asked for by, as `condition_source` would make it."""
    if isinstance(config, AnoleTargetConfig):
        text = _TextIds(config)
        return lambda sample: text(sample.info["caption"], None)
    return functools.partial(_sample_label, _Label.of(config)) if config.condition == "class" else _sample_features


# At the module's level, since reading processes get them pickled.
def _sample_label(label: _Label, sample: Any) -> Tensor:
    return label(sample.info["caption"], sample.info["label"])


def _sample_features(sample: Any) -> Tensor:
    return sample.tensors["features"]


def picture_encoder(
    config: TargetConfig, folders: Mapping[str, Path], *, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """uint8 [B,3,S,S] -> codes [B,n] int64 on the CPU."""
    if isinstance(config, AnoleTargetConfig):
        if config.vq_path is None:
            raise UserError("pictures are encoded and target.vq_path is null", hint="name the weights of the VQ-GAN")
        encoder: Any = load_encoder(config.vq_path, revision=config.vq_revision)
        encoder.to(device)
        return lambda pixels: encode_images(encoder, to_model(pixels.to(device))).cpu()
    vq = load_vq(folders.get("vq") or str(config.vq)).to(device)
    return lambda pixels: vq.encode(to_model(pixels.to(device))).cpu()


def caption_encoder(
    config: TargetConfig, folders: Mapping[str, Path], *, device: torch.device
) -> Callable[[Sequence[str]], list[Tensor]] | None:
    """Captions to features [t,F], for targets that read any."""
    if isinstance(config, AnoleTargetConfig) or config.condition == "class":
        return None
    return text_features(config, folders, device=device).encode


class _TextIds:
    """Ids [t] of a caption in Anole's own tokenizer, without special ones."""

    def __init__(self, config: AnoleTargetConfig):
        self.tokenizer = AutoTokenizer.from_pretrained(config.path, revision=config.revision)

    def __call__(self, caption: str, label: int | None) -> Tensor:
        return torch.tensor(self.tokenizer(caption, add_special_tokens=False)["input_ids"], dtype=torch.int64)


def load_transformer(config: LlamaGenTargetConfig, folders: Mapping[str, Path]) -> LlamaGen:
    """The LlamaGen on the CPU in the recipe's precision, of a stage's folder or else of `path`.

    Raises:
        UserError: its files cannot be read, or its shape is not what the recipe names.
    """
    source = folders.get("target") or config.path
    assert source is not None, "the plan gives every target a source"
    model = load_llamagen(source, revision=config.revision, dtype=getattr(torch, config.dtype))
    wanted = config.model_config_of()
    for name in NAMED_SHAPE:
        if getattr(model.config, name) != getattr(wanted, name):
            raise UserError(
                f"the weights have {name} {getattr(model.config, name)}, the recipe {getattr(wanted, name)}",
                where=str(source), hint="name the size, condition and image_size of these weights",
            )  # fmt: skip
    return model


def condition_source(
    config: TargetConfig, folders: Mapping[str, Path], *, device: torch.device
) -> Callable[[str, int | None], Tensor]:
    """Caption and label to a label [], features [t,F] or text ids [t]."""
    if isinstance(config, AnoleTargetConfig):
        return _TextIds(config)
    encode = caption_encoder(config, folders, device=device)
    return _Label.of(config) if encode is None else lambda caption, label: encode([caption])[0]


def check_labels(config: TargetConfig, asked: Iterable[tuple[str, int | None]]) -> None:
    """Raises `UserError` where a class-conditional target has no class of these labels (each beside its caption)."""
    if isinstance(config, LlamaGenTargetConfig) and config.condition == "class":
        label_of = _Label.of(config)
        for caption, label in asked:
            label_of(caption, label)


def text_features(config: LlamaGenTargetConfig, folders: Mapping[str, Path], *, device: torch.device) -> TextFeatures:
    """The frozen T5 encoder on `device`: an inline one in float32 from its stage's folder, any other in bfloat16."""
    folder = folders.get("text")
    own = isinstance(config.text_encoder, dict)
    assert not own or folder is not None, "an inline text encoder is trained with its target"
    source = folder / TEXT_ENCODER if own and folder is not None else str(config.text_encoder)
    num_tokens = config.model_config_of().num_condition_tokens
    dtype = torch.float32 if own else torch.bfloat16
    return TextFeatures(source, max_length=num_tokens, dtype=dtype, device=device)


def build_transformer(config: LlamaGenTargetConfig, seed: int) -> LlamaGen:
    """A random one to train."""
    model = LlamaGen(config.model_config_of())
    model.reset_parameters(torch.Generator().manual_seed(seed))
    return model


def build_text_encoder(config: LlamaGenTargetConfig, *, vocab_size: int, pad_id: int) -> T5EncoderModel | None:
    """The inline one, random; None where it comes from outside (its features then lie in the shards)."""
    if not isinstance(config.text_encoder, dict):
        return None
    values = {k: v for k, v in config.text_encoder.items() if k != "model_type"}
    return T5EncoderModel(T5Config(**values, vocab_size=vocab_size, pad_token_id=pad_id))


@dataclass(frozen=True)
class _Label:
    """Labels [] of a class-conditional target. The row behind its last class stands for no class at all."""

    num_classes: int

    @classmethod
    def of(cls, config: LlamaGenTargetConfig) -> _Label:
        return cls(config.model_config_of().num_classes)

    def __call__(self, caption: str, label: int | None) -> Tensor:
        if label is None:
            hint = "use prompts or data with classes"
            raise UserError("a class-conditional model was asked without a label", hint=hint)
        if not 0 <= label < self.num_classes:
            raise UserError(
                f"label {label}, and the target has classes 0 to {self.num_classes - 1}", where=repr(caption),
                hint="use prompts or data of the target's own classes, or the target that has these",
            )  # fmt: skip
        return torch.tensor(label)
