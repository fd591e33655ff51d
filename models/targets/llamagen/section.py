"""LlamaGen in a recipe: its transformer, the T5 encoder or the classes that it is asked by, and its VQ tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ....core.errors import UserError
from ....core.fields import Dtype, Place, Revision
from ....core.json_types import JsonMapping, JsonObject, object_at, value_at
from ....core.section import torch_dtype
from ...decoding.rows import Guidance, GuidanceScale
from ...folders import CONFIG, TargetPlace, find_folder
from ...hub import is_somewhere
from ...inline import InlineT5
from ...parts import num_parameters
from ...stored import resolved_dtype
from ..base import TargetShape
from ..drawing import COUNTED_IDS, TEXT_ENCODER, Conditions, Drawer, Folders, ImageTargetSection, PerceptualConfig
from .captions import TextFeatures, ids_of_sample, load_text_encoder
from .files import LLAMAGEN, config_in, is_lantern, load_llamagen, load_vq, vq_config
from .target import LlamaGenTarget, llamagen_shape
from .training import LlamaGenTraining, PerceptualLoss, VqTraining, to_model, to_pixels
from .transformer import LlamaGen, LlamaGenConfig, published
from .vq import VqConfig, VqTokenizer

if TYPE_CHECKING:
    import transformers

Size = Literal["B", "L", "XL", "XXL", "XXXL", "1B", "3B", "7B"]
# What a recipe says of a LlamaGen's shape, held against its weights; a head's manifest repeats it.
NAMED_SHAPE = ("num_layers", "num_heads", "dim", "vocab_size", "grid", "condition")
# Keys of a section that its shape follows from: others, guidance and precision, are decoding's own matter.
_SHAPE_KEYS = ("kind", "size", "shape", "condition", "image_size", "vq", "text_encoder")


class LlamaGenTargetConfig(ImageTargetSection):
    """A LlamaGen: published weights, or a tiny one that a recipe spells out and trains itself."""

    is_trained_here: ClassVar[bool] = True
    adt_preset: ClassVar[str] = "adt-llamagen"
    adt_bound: ClassVar[tuple[int, float]] = (1000, 0.4)  # LANTERN, table 2
    adt_widths: ClassVar[JsonObject] = {"width_step": 10, "width_range": (3, 40)}
    is_named_by_path: ClassVar[bool] = False  # a head's own config has the shape

    kind: Literal["llamagen"]
    # Hub id or directory of the weights, as `draftsmith convert` writes them or in LANTERN's layout, or shipped:NAME.
    path: TargetPlace | None = None
    revision: Revision | None = None
    # A published size; or `shape`, spelt out.
    size: Size | None = None
    # The shape of a LlamaGen that is not published; then `size` is not given.
    shape: LlamaGenConfig | None = None
    # The condition of a picture.
    condition: Literal["class", "text"] = "text"
    # Side of the pictures: 256, 384 or 512 for the published models.
    image_size: int = Field(256, ge=8, le=1 << 16)
    # Directory of the image tokenizer (shipped:NAME, too), or its shape where a stage trains it.
    vq: VqConfig | TargetPlace
    # Text-conditional: Hub id or directory of the T5 encoder, or an inline config that is trained with the model. A
    # language model's will do for a small generator: its last states, of the width `shape.caption_dim`.
    text_encoder: Place | InlineT5 | None = None
    # Of a text encoder from outside: the layer whose states it gives, each scaled to a root mean square of 1; 0: its
    # table of tokens, from which a small generator learns more. Null: its last states, as they are.
    text_layer: int | None = Field(None, ge=0, exclude_if=lambda value: value is None)
    # Of an inline text encoder: Hub id or directory of the captions' tokenizer; null: that of a synthetic dataset.
    tokenizer: Place | None = None
    # auto: on a GPU as the weights are stored, on a CPU float32; a LlamaGen that is spelt out: float32.
    dtype: Dtype = "auto"
    # Guidance; the official samplers' by default: 7.5 for text, 4.0 for classes (1.5 to 2.0 where FID is measured).
    cfg_scale: GuidanceScale = 7.5
    # Guide only tokens 0 to cfg_interval + 1; -1: all.
    cfg_interval: int = Field(-1, ge=-1)

    @model_validator(mode="before")
    @classmethod
    def _guidance_of_classes(cls, values: Any) -> Any:
        return {"cfg_scale": 4.0, **values} if value_at(values, "condition") == "class" else values

    @model_validator(mode="after")
    def _consistent(self) -> LlamaGenTargetConfig:
        if (self.size is None) == (self.shape is None):
            raise ValueError("give size (a published one) or shape (spelt out)")
        if self.condition == "text" and self.text_encoder is None:
            raise ValueError("condition: text needs text_encoder")
        if self.condition == "class" and self.text_encoder is not None:
            raise ValueError("text_encoder is given, and condition is class")
        if self.tokenizer is not None and self.inline_text_encoder is None:
            raise ValueError("tokenizer is given, and text_encoder is not spelt out: it brings its own")
        if self.text_layer is not None and (self.text_encoder is None or self.inline_text_encoder is not None):
            raise ValueError("text_layer is of a text encoder that comes from outside, and there is none")
        return self

    @classmethod
    def mirrored_in(cls, folder: Path, values: JsonMapping) -> TargetShape | None:
        if values.get("model_type") == LLAMAGEN or is_lantern(values):  # of either layout
            return llamagen_shape(config_in(folder, values))
        return None

    @classmethod
    def named_shape(cls, section: JsonObject) -> JsonObject:
        made = cls.model_validate({name: section[name] for name in _SHAPE_KEYS if name in section})
        return made.model_config_of().model_dump(include=set(NAMED_SHAPE))

    @property
    def inline_vq(self) -> VqConfig | None:
        """The shape of an image tokenizer that a stage trains; None: it is published."""
        return self.vq if isinstance(self.vq, VqConfig) else None

    @property
    def inline_text_encoder(self) -> JsonObject | None:
        """The inline config of a text encoder that is trained with the model; None: it has none of its own."""
        return object_at(self.text_encoder)

    @property
    def factor(self) -> int:
        """Pixels along a side of one code: 16 of a tokenizer that is not here, as of all published ones."""
        if isinstance(self.vq, VqConfig):
            return self.vq.factor
        return vq_config(Path(self.vq)).factor if (Path(self.vq) / CONFIG).is_file() else 16

    def model_config_of(self) -> LlamaGenConfig:
        grid = self.image_size // self.factor
        if self.shape is not None:
            return LlamaGenConfig(**{**self.shape.model_dump(), "grid": grid, "condition": self.condition})
        assert self.size is not None
        return published(self.size, grid=grid, condition=self.condition)

    def provides(self) -> set[str]:
        things = {"target"} if self.path is not None else set()
        things |= {"vq"} if self.inline_vq is None else set()
        # An inline text encoder is trained with the target.
        things |= {"text", "tokenizer"} if self.inline_text_encoder is None else set()
        return things | ({"tokenizer"} if self.tokenizer is not None else set())

    @property
    def codebook_size(self) -> int:
        return self.model_config_of().vocab_size if self.inline_vq is None else self.inline_vq.codebook_size

    @property
    def prompt_places(self) -> int:
        """One of a class, or as many as a caption's features have."""
        return self.model_config_of().num_condition_tokens

    @property
    def guidance(self) -> Guidance:
        return Guidance(self.cfg_scale, self.cfg_interval)

    def mirrored(self) -> TargetShape:
        return llamagen_shape(self.model_config_of())

    def count(self) -> dict[str, int]:
        with torch.device("meta"):
            parts: dict[str, nn.Module] = {"transformer": LlamaGen(self.model_config_of())}
            if self.inline_vq is not None:
                parts["image tokenizer"] = VqTokenizer(self.inline_vq)
            text = build_text_encoder(self, vocab_size=COUNTED_IDS, pad_id=0)
            if text is not None:
                parts["text encoder"] = text
        return {name: num_parameters([part]) for name, part in parts.items()}

    def load(self, folders: Folders, *, device: torch.device) -> LlamaGenTarget:
        """Load the target from a stage's folder, or else from `path`."""
        return LlamaGenTarget(load_transformer(self, folders, device=device), self.guidance)

    def conditions(self, folders: Folders, *, device: torch.device) -> Conditions:
        """The label [], or the features [t,F] of the caption."""
        if self.condition == "class":
            return functools.partial(_label, self.model_config_of().num_classes)
        encode = text_features(self, folders, device=device).encode
        return lambda caption, label: encode([caption])[0]

    @property
    def trains_text_encoder(self) -> bool:
        return self.inline_text_encoder is not None

    def training(
        self, part: str, folder: Path | None, *, seed: int, words: Any, perceptual: PerceptualConfig | None = None,
        code_dropout: float = 0.0, **revival: Any,
    ) -> nn.Module:  # fmt: skip
        if part == "vq":
            if self.inline_vq is None:
                problem = "target.vq is a directory, and a stage trains vq"
                raise UserError(problem, key="target.vq", hint="spell out its shape in target.vq")
            tokenizer = VqTokenizer(self.inline_vq) if folder is None else load_vq(folder)
            if folder is None:
                tokenizer.reset_parameters(torch.Generator().manual_seed(seed))
            loss = None if perceptual is None else PerceptualLoss.load(perceptual)
            return VqTraining(tokenizer, perceptual=loss, **revival)
        transformer = load_llamagen(folder) if folder is not None else build_transformer(self, seed)
        encoder: Any = None
        if self.trains_text_encoder and folder is not None:
            encoder = load_text_encoder(folder / TEXT_ENCODER, dtype=torch.float32)
        elif self.trains_text_encoder:
            encoder = build_text_encoder(self, vocab_size=len(words), pad_id=words.pad_token_id)
        return LlamaGenTraining(transformer, encoder, code_dropout)

    def sample_condition(self, words: Any = None) -> Callable[[Any], Tensor]:
        """Its label, or the features that were written with its codes."""
        if words is not None:
            return functools.partial(ids_of_sample, words, self.model_config_of().num_condition_tokens)
        if self.condition == "text":
            return lambda sample: sample.tensors["features"]
        return functools.partial(_sample_label, self.model_config_of().num_classes)

    def drawer(self, folders: Folders, *, device: torch.device) -> Drawer:
        vq, grid = self._vq(folders, device), self.model_config_of().grid

        def pictures(codes: Tensor) -> Tensor:
            return to_pixels(vq.decode(codes.to(device), (grid, grid))).cpu()

        return Drawer(pictures, vq.quantize.embedding.weight.detach())

    def picture_encoder(self, folders: Folders, *, device: torch.device) -> Callable[[Tensor], Tensor]:
        vq = self._vq(folders, device)
        return lambda pixels: vq.encode(to_model(pixels.to(device))).cpu()

    def caption_encoder(
        self, folders: Folders, *, device: torch.device
    ) -> Callable[[Sequence[str]], list[Tensor]] | None:
        return text_features(self, folders, device=device).encode if self.condition == "text" else None

    def check_labels(self, prompts: Iterable[tuple[str, int | None]]) -> None:
        if self.condition != "class":
            super().check_labels(prompts)
            return
        for caption, label in prompts:
            _label(self.model_config_of().num_classes, caption, label)

    def placed(self, parts: Mapping[str, Path]) -> Any:
        """Return the section as it is: its parts are read from `parts`. Raises `UserError` where one lies nowhere."""
        places = {"target": self.path, "vq": str(self.vq) if self.inline_vq is None else None}
        if self.trains_text_encoder:
            places["text"] = None
        lacking = [thing for thing, place in places.items() if thing not in parts and not is_somewhere(place)]
        if lacking:
            raise UserError(
                f"where are the target's {', '.join(lacking)}? They were on the disk of whoever trained this head",
                hint="give target= a mapping of them to folders, as {'target': 'runs/x/target', 'vq': 'runs/x/vq'}",
            )
        return self

    def _vq(self, folders: Folders, device: torch.device) -> VqTokenizer:
        return load_vq(folders.get("vq") or str(self.vq), device)


def load_transformer(config: LlamaGenTargetConfig, folders: Folders, *, device: torch.device) -> LlamaGen:
    """The LlamaGen in the recipe's precision, of a stage's folder or else of `path`. Raises `UserError`: its files
    cannot be read, or its shape is not what the recipe names.
    """
    source = folders.get("target") or config.path
    assert source is not None, "the plan gives every target a source"
    source = find_folder(source, config.revision)
    dtype = torch_dtype(resolved_dtype(config, source, device, key="target"))
    model = load_llamagen(source, dtype=dtype, device=device)
    wanted = config.model_config_of()
    for name in NAMED_SHAPE:
        stored, named = dict(model.config)[name], dict(wanted)[name]
        if stored != named:
            raise UserError(
                f"the weights have {name} {stored}, the recipe {named}",
                where=str(source), hint="name the size, condition and image_size of these weights",
            )  # fmt: skip
    return model


def text_features(config: LlamaGenTargetConfig, folders: Folders, *, device: torch.device) -> TextFeatures:
    """The frozen T5 encoder on `device`: an inline one in float32 from its stage's folder, any other in bfloat16."""
    folder = folders.get("text")
    is_trained = config.trains_text_encoder
    assert not is_trained or folder is not None, "an inline text encoder is trained with its target"
    source = folder / TEXT_ENCODER if is_trained and folder is not None else str(config.text_encoder)
    num_tokens = config.model_config_of().num_condition_tokens
    dtype = torch.float32 if is_trained else torch.bfloat16
    return TextFeatures(source, max_length=num_tokens, dtype=dtype, device=device, layer=config.text_layer)


def build_transformer(config: LlamaGenTargetConfig, seed: int) -> LlamaGen:
    model = LlamaGen(config.model_config_of())
    model.reset_parameters(torch.Generator().manual_seed(seed))
    return model


def build_text_encoder(
    config: LlamaGenTargetConfig, *, vocab_size: int, pad_id: int
) -> transformers.T5EncoderModel | None:
    """The inline one, random; None where it comes from outside (its features then lie in the shards)."""
    import transformers

    if (given := config.inline_text_encoder) is None:
        return None
    values = {k: v for k, v in given.items() if k != "model_type"}
    shape = transformers.T5Config(**values, vocab_size=vocab_size, pad_token_id=pad_id)
    return transformers.T5EncoderModel(shape)


# At the module's level, since reading processes get them pickled.
def _sample_label(num_classes: int, sample: Any) -> Tensor:
    return _label(num_classes, sample.info["caption"], sample.info["label"])


def _label(num_classes: int, caption: str, label: int | None) -> Tensor:
    """A label [] of a class-conditional target. The row after its last class stands for no class at all."""
    if label is None:
        hint = "use prompts or data with classes"
        raise UserError("a class-conditional model was asked without a label", hint=hint)
    if not 0 <= label < num_classes:
        raise UserError(
            f"label {label}, and the target has classes 0 to {num_classes - 1}", where=repr(caption),
            hint="use prompts or data of the target's own classes, or the target that has these",
        )  # fmt: skip
    return torch.tensor(label)
