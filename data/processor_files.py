"""Processors of published files, by the family that the files name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..core.errors import UserError, page
from ..core.json_types import JsonMapping, JsonObject
from ..core.pictures import IMAGE_MARK
from ..core.pretrained import Checkpoint, reading_pretrained
from .families.processor import (
    SIGLIP_STATISTICS,
    Files,
    PictureFamily,
    Processor,
    add_marks,
    image_settings,
    text_processor,
    tile_images,
    tile_side,
)
from .families.table import PICTURE_FAMILIES, USUAL, picture_family_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Of these a file that says how pictures are read has some.
_IMAGE_KEYS = {"image_mean", "size", "crop_size", "image_processor_type", "feature_extractor_type"}
_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
# Of towers, whose preprocessor_config.json lies as it is in some LLaVAs' folders.
_TOWERS = {"CLIPProcessor", "SiglipProcessor"}
_CURE = "check the name and the network, or give a directory"


def load_processor(
    source: str | Path, *, revision: str | None = None, text_only: bool = False, family: PictureFamily | None = None
) -> Processor:
    """The processor of a published or saved target, by `family` or else the one that the files name (LLaVA where they
    name none). Raises `UserError`: files are missing, do not fit, or name a class that no family reads.
    """
    with reading_pretrained(source, "cannot load processor", hint=_CURE, weights=False):
        processor = _loaded(source, revision, family, text_only=text_only)
    return replace(processor, generation_ends=Checkpoint(source, revision).generation_ends())


def _loaded(source: str | Path, revision: str | None, family: PictureFamily | None, *, text_only: bool) -> Processor:
    from transformers import AutoTokenizer

    key = f"processor {str(source)!r}"
    tokenizer = cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(source, revision=revision))
    if not tokenizer.chat_template:
        # Older files of processors have it in a file of its own, which tokenizers do not read.
        tokenizer.chat_template = Checkpoint(source, revision).values("chat_template.json").get("chat_template")
    if text_only:
        return text_processor(tokenizer, key)
    settings, images = _settings_of(source, revision), None
    if not _IMAGE_KEYS & set(settings):
        images, about = _published(source, revision)
        settings = {**about, **settings}
    if settings.get("patch_size") is None:  # processors' files do not say it before transformers 4.45
        settings["patch_size"] = _patch_size(source, revision)
    family = family or _family_of(settings, source, revision)
    return family.read(Files(tokenizer, settings, images, source, revision, key))


def processor_of_halves(language_model: str, tower: str, family: PictureFamily) -> Processor:
    """The processor of a model that is made of a pretrained language model and a tower: the one's tokenizer with the
    tokens that it lacks (<image>, and one that pads and ends nothing), the other's images. Raises `UserError` where the
    files are missing or do not fit.
    """
    from transformers import AutoConfig, AutoTokenizer

    key = "target.language_model"
    with reading_pretrained(language_model, "cannot load the tokenizer of", key=key, hint=_CURE, weights=False):
        tokenizer = cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(language_model))
        ends = Checkpoint(language_model).generation_ends()
    add_marks(tokenizer, IMAGE_MARK)
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
    key = "target.vision_tower"
    with reading_pretrained(tower, "cannot load the image processor of", key=key, hint=_CURE, weights=False):
        vision = AutoConfig.from_pretrained(tower).to_dict()
        vision = vision.get("vision_config") or vision
        settings = _settings_of(tower, None) | {"patch_size": vision.get("patch_size")}
        return replace(family.read(Files(tokenizer, settings, None, tower, None, key)), generation_ends=ends)


def with_own_image_processor(
    processor: Processor, tower: str | None, *, image_size: int, patch_size: int, family: str, revision: str | None
) -> Processor:
    """The target's tokenizer beside a draft's own image processor: a tower's, or of the target's statistics."""
    if tower is None:
        old = processor.image_processor
        side = {"height": image_size, "width": image_size}
        is_cropped = "crop_size" in image_settings(old)
        size = {"size": {"shortest_edge": image_size}, "crop_size": side} if is_cropped else {"size": side}
        images = type(old)(**(image_settings(old) | size))
    else:
        with reading_pretrained(tower, "cannot load image processor", hint=_CURE, weights=False):
            settings = _settings_of(tower, revision)
            images = tile_images(Files(processor.tokenizer, settings, None, tower, revision, tower))
    return replace(
        processor,
        image_processor=images,
        image_size=tile_side(images),
        patch_size=patch_size,
        picture_family=PICTURE_FAMILIES[family],
        resolutions=(),
    )


def _patch_size(source: str | Path, revision: str | None) -> int | None:
    """The patch size of the processor's model, as transformers reads its config; None: it has no tower."""
    from transformers import AutoConfig

    vision = Checkpoint(source, revision).values().get("vision_config") or {}
    if vision and "patch_size" not in vision:  # its class has it
        vision = AutoConfig.from_pretrained(source, revision=revision).vision_config.to_dict()
    return vision.get("patch_size")


def _settings_of(source: str | Path, revision: str | None) -> JsonObject:
    """The processor's settings by its files, the image processor's included; the first file that has a key wins."""
    settings: JsonObject = {}
    for file in _FILES:
        values = Checkpoint(source, revision).values(file)
        settings = {**(values.get("image_processor") or {}), **values} | settings
    return settings


def _family_of(settings: JsonObject, source: str | Path, revision: str | None) -> PictureFamily:
    """The family whose processor class the files name; the usual one where they name none, or a tower's."""
    name = settings.get("processor_class")
    by_class = {known.processor_class: known for known in PICTURE_FAMILIES.values()}
    if name is None or name in _TOWERS:
        return USUAL
    if name in by_class:
        return by_class[name]
    files = Checkpoint(source, revision)
    file = next((file for file in _FILES if files.values(file).get("processor_class") == name), _FILES[0])
    raise UserError(
        f"processor_class is {name}, and no family here reads its files",
        where=f"{Path(source) / file}, key processor_class",
        hint=f"use a target whose class is one of {', '.join(sorted(by_class))}, or a section of your own with a "
        f"picture_family ({page('adding-a-target.md')})",
    )


def _published(source: str | Path, revision: str | None) -> tuple[JsonMapping | None, JsonObject]:
    """Settings of image processor and processor that stand for missing files, by the model's `config.json`; (None,
    nothing) where that names no tower. Raises `UserError` with the file to write, where it does not tell them.
    """
    config = Checkpoint(source, revision).values()
    vision = config.get("vision_config")
    if not vision:
        return None, {}
    model_type, tower = str(config.get("model_type")), vision.get("model_type")
    family = picture_family_of(model_type, tower)
    images = family.published(vision) if family else None
    if family is None or images is None:
        side = vision.get("image_size") or "SIDE"
        wanted = SIGLIP_STATISTICS | {
            "size": {"height": side, "width": side}, "image_processor_type": "SiglipImageProcessor"
        }  # fmt: skip
        raise UserError(
            f"{source} has no preprocessor_config.json, and none is published for a {model_type} with tower {tower}",
            where=str(source),
            hint=f"write {Path(source) / 'preprocessor_config.json'} with the model's own numbers, in this form: "
            + json.dumps(wanted),
        )
    about = {"processor_class": family.processor_class, "image_grid_pinpoints": config.get("image_grid_pinpoints")}
    return images, about
