"""Tokenizer and image processor of a target, as one thing: drafts never bring their own.

A draft that tokenizes differently from its target proposes noise, silently. The processor is saved
with every draft so that plain `AutoProcessor` loads it, and its hash is compared before decoding.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer, LlavaProcessor, PreTrainedTokenizerFast

from ..core.errors import UserError


def _image_processor_class() -> Any:
    """The PIL backend: no torchvision on the main path, and the two backends differ in the last bits."""
    return getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor


@dataclass(frozen=True)
class Processor:
    """What turns text and pictures into a target's inputs."""

    tokenizer: PreTrainedTokenizerFast
    image_processor: Any
    image_token_id: int
    patch_size: int
    image_size: int  # side of the square input in pixels
    pad_id: int
    bos_id: int
    eos_id: int
    newline_id: int

    @property
    def num_image_tokens(self) -> int:
        """Tokens of one image: a LLaVA-1.5 tower hands over every patch and drops CLS."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def tokenizer_hash(self) -> str:
        return tokenizer_hash(self.tokenizer)

    def save(self, folder: Path) -> None:
        """Write files from which `AutoProcessor.from_pretrained(folder)` makes a `LlavaProcessor`."""
        LlavaProcessor(
            image_processor=self.image_processor,
            tokenizer=self.tokenizer,
            patch_size=self.patch_size,
            vision_feature_select_strategy="default",
            image_token="<image>",
            num_additional_image_tokens=1,  # CLS, which the "default" strategy subtracts again
        ).save_pretrained(folder)


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256 over the backend's whole definition: pieces, merges, normalizer, added tokens."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    definition.pop("truncation", None)
    definition.pop("padding", None)
    return hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()


def build_processor(
    tokenizer: PreTrainedTokenizerFast,
    *,
    image_size: int,
    patch_size: int,
    image_mean: tuple[float, float, float],
    image_std: tuple[float, float, float],
) -> Processor:
    """A processor for a model that the project makes itself; mean and deviation per channel of pixels in [0, 1]."""
    side = {"height": image_size, "width": image_size}
    images = _image_processor_class()(
        size={"shortest_edge": image_size}, crop_size=side, image_mean=image_mean, image_std=image_std
    )
    return _processor(tokenizer, images, patch_size=patch_size, where="build_processor")


def load_processor(source: str | Path, *, revision: str | None = None) -> Processor:
    """The processor of a published or saved LLaVA. Raises `UserError` where files are missing or do not fit."""
    key = f"processor {str(source)!r}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
        images = _image_processor_class().from_pretrained(source, revision=revision)
        patch_size = _processor_value(source, revision, "patch_size")
    except (OSError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"cannot load {key}: {first}", cure="check the name and the network, or give a directory"
        ) from error
    # Old processor files lack the patch size; every CLIP-L/14 LLaVA has 14.
    return _processor(tokenizer, images, patch_size=patch_size or 14, where=key)


def _processor_value(source: str | Path, revision: str | None, name: str) -> int | None:
    from transformers.utils import cached_file

    for file in ("processor_config.json", "preprocessor_config.json"):
        path = cached_file(source, file, revision=revision, _raise_exceptions_for_missing_entries=False)
        if path and (value := json.loads(Path(path).read_text()).get(name)) is not None:
            return int(value)
    return None


def _processor(tokenizer: Any, images: Any, *, patch_size: int, where: str) -> Processor:
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"{where}: label masks need character offsets", cure="use a repository with tokenizer.json")
    image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    if image_token_id is None or image_token_id == tokenizer.unk_token_id:
        raise UserError(f"{where}: the tokenizer has no <image> token", cure="use the files of a LLaVA target")
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    missing = [name for name, value in ids.items() if value is None]
    if missing:
        raise UserError(
            f"{where}: the tokenizer has no {', '.join(missing)} token", cure="use the files of a LLaVA target"
        )
    crop = images.crop_size
    return Processor(
        tokenizer=tokenizer,
        image_processor=images,
        image_token_id=image_token_id,
        patch_size=patch_size,
        image_size=int(crop["height"]),
        pad_id=ids["pad"],
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        newline_id=tokenizer("\n", add_special_tokens=False).input_ids[-1],
    )
