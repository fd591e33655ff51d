"""Processors of published files, and of models that the project makes itself.

A family's part is here: which marks its tokenizer has, what its image processor is made of, and what its files say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..core.errors import UserError
from ..core.files import read_json
from ..core.generation_config import generation_ends
from ..core.pretrained import RESTORE, reading_pretrained
from .families.processor import (
    FAMILIES,
    GEMMA_MARKS,
    INTERNVL_MARKS,
    INTERNVL_TILES,
    NO_TOKEN,
    PIXTRAL_MARKS,
    QWEN,
    QWEN_MARKS,
    Family,
    Processor,
    image_settings,
    pil,
)
from .published_settings import Published, published_settings

# Of these a file that says how pictures are read has some.
_IMAGE_KEYS = {"image_mean", "size", "crop_size", "image_processor_type", "feature_extractor_type"}
_TURN_ENDS = "<turn|>"  # of Gemma 4
_CURE = "check the name and the network, or give a directory"


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
    images = pil("CLIP")(size={"shortest_edge": image_size}, crop_size=side, image_mean=image_mean, image_std=image_std)
    return _processor(tokenizer, images, patch_size=patch_size, where="build_processor")


def build_qwen_processor(
    tokenizer: PreTrainedTokenizerFast,
    family: str,
    *,
    patch_size: int,
    merge: int = 2,
    min_pixels: int,
    max_pixels: int,
    image_mean: tuple[float, float, float],
    image_std: tuple[float, float, float],
) -> Processor:
    """A processor for a Qwen-VL that the project makes itself; the tokenizer gets the marks that it lacks."""
    kind = next(known for known in QWEN if known == family)
    lacking = [mark for mark in (*QWEN_MARKS, "<|im_start|>", "<|im_end|>") if mark not in tokenizer.get_vocab()]
    tokenizer.add_special_tokens({"additional_special_tokens": lacking})
    tokenizer.eos_token = "<|im_end|>"
    # Processors of transformers and vLLM expand this token; where it says another, they silently expand none.
    tokenizer.image_token = QWEN_MARKS[0]
    images = pil("Qwen2VL")(
        patch_size=patch_size,
        merge_size=merge,
        size={"shortest_edge": min_pixels, "longest_edge": max_pixels},
        image_mean=image_mean,
        image_std=image_std,
    )
    return _qwen(tokenizer, images, kind, "build_qwen_processor")


def build_internvl_processor(
    tokenizer: PreTrainedTokenizerFast,
    *,
    image_size: int,
    patch_size: int,
    max_tiles: int = INTERNVL_TILES,
    image_mean: tuple[float, float, float],
    image_std: tuple[float, float, float],
) -> Processor:
    """A processor for an InternVL that the project makes itself; the tokenizer gets the marks that it lacks.

    Args:
        patch_size: pixels along a patch of the tower, of which 2 x 2 become one token.
        max_tiles: that a picture is cut into, at most.
    """
    lacking = [mark for mark in (*INTERNVL_MARKS, "<|im_start|>", "<|im_end|>") if mark not in tokenizer.get_vocab()]
    tokenizer.add_special_tokens({"additional_special_tokens": lacking})
    tokenizer.eos_token = "<|im_end|>"
    side = {"height": image_size, "width": image_size}
    images = pil("GotOcr2")(size=side, max_patches=max_tiles, image_mean=image_mean, image_std=image_std)
    return _internvl(tokenizer, images, (image_size // patch_size // 2) ** 2, "build_internvl_processor")


def build_pixtral_processor(
    tokenizer: PreTrainedTokenizerFast,
    *,
    patch_size: int,
    merge: int,
    longest_edge: int,
    image_mean: tuple[float, float, float],
    image_std: tuple[float, float, float],
) -> Processor:
    """A processor for a Pixtral or Mistral 3 that the project makes itself; the tokenizer gets the marks that it lacks.

    Args:
        merge: patches along a side of what becomes one token: 1 of Pixtral, 2 of Mistral 3.
        longest_edge: most pixels along a side of a picture.
    """
    marks = (*PIXTRAL_MARKS, "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
    lacking = [mark for mark in marks if mark not in tokenizer.get_vocab()]
    tokenizer.add_special_tokens({"additional_special_tokens": lacking})
    size, patch = {"longest_edge": longest_edge}, {"height": patch_size, "width": patch_size}
    images = pil("Pixtral")(size=size, patch_size=patch, image_mean=image_mean, image_std=image_std)
    return _pixtral(tokenizer, images, patch_size, merge, "build_pixtral_processor")


def build_gemma_processor(
    tokenizer: PreTrainedTokenizerFast, *, patch_size: int, pooling: int = 3, max_tokens: int = 70
) -> Processor:
    """A processor for a Gemma 4 that the project makes itself; the tokenizer gets the marks that it lacks.

    Args:
        pooling: patches along a side of what becomes one token.
        max_tokens: of a picture: 70, 140, 280, 560 or 1120.
    """
    lacking = [mark for mark in (*GEMMA_MARKS, "<|turn>", _TURN_ENDS) if mark not in tokenizer.get_vocab()]
    tokenizer.add_special_tokens({"additional_special_tokens": lacking})
    images = pil("Gemma4")(patch_size=patch_size, pooling_kernel_size=pooling, max_soft_tokens=max_tokens)
    return _gemma(tokenizer, images, "build_gemma_processor")


def load_processor(source: str | Path, *, revision: str | None = None, text_only: bool = False) -> Processor:
    """The processor of a published or saved LLaVA, NeXT, OneVision, Qwen-VL, InternVL, Pixtral, Mistral 3 or Gemma 4.

    Args:
        text_only: the source is a language model's, which has a tokenizer alone.

    Raises:
        UserError: files are missing or do not fit.
    """
    with reading_pretrained(source, "cannot load processor", hint=_CURE, weights=False):
        processor = _loaded(source, revision, text_only=text_only)
    return replace(processor, generation_ends=generation_ends(source, revision))


def _loaded(source: str | Path, revision: str | None, *, text_only: bool) -> Processor:
    key = f"processor {str(source)!r}"
    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
    if not tokenizer.chat_template:
        tokenizer.chat_template = _processors_template(source, revision)
    if text_only:
        return _text_only(tokenizer, key)
    settings = _settings_of(source, revision)
    known = {str(name): kind for kind, name in FAMILIES.items()}
    published = None if _IMAGE_KEYS & set(settings) else published_settings(source, revision, known)
    settings = {**(published.about if published else {}), **settings}
    if (family := FAMILIES.get(str(settings.get("processor_class")))) in QWEN:
        made = pil("Qwen2VL")
        own = made(**published.images) if published else made.from_pretrained(source, revision=revision)
        return _qwen(tokenizer, own, family, key)
    if family == "internvl":
        own = pil("GotOcr2").from_pretrained(source, revision=revision)
        return _internvl(tokenizer, own, int(settings.get("image_seq_length") or 256), key)
    if family == "pixtral":
        own = pil("Pixtral").from_pretrained(source, revision=revision)
        patch, merge = int(settings.get("patch_size") or 16), int(settings.get("spatial_merge_size") or 1)
        return _pixtral(tokenizer, own, patch, merge, key)
    if family == "gemma4":
        return _gemma(tokenizer, pil("Gemma4").from_pretrained(source, revision=revision), key)
    images = _load_images(source, revision, settings, published)
    # Old processor files lack the patch size; every CLIP-L/14 and SigLIP-so400m/14 LLaVA has 14.
    return _processor(
        tokenizer,
        images,
        patch_size=int(settings.get("patch_size") or 14),
        where=key,
        family=FAMILIES.get(str(settings.get("processor_class")), "llava"),
        resolutions=tuple((int(a), int(b)) for a, b in settings.get("image_grid_pinpoints") or ()),
    )


def _qwen(tokenizer: Any, images: Any, family: Family, where: str) -> Processor:
    _check_fast(tokenizer, where)
    marks = _marks(tokenizer, QWEN_MARKS, where, "a Qwen-VL's")
    if images.temporal_patch_size != 2:
        raise UserError(f"{where}: {images.temporal_patch_size} frames make a patch, expected 2", hint="report this")
    image, video, start, end = marks
    return replace(
        _text_only(tokenizer, where),
        image_processor=images,
        image_token_id=image,
        patch_size=images.patch_size,
        image_size=images.patch_size * images.merge_size,
        family=family,
        video_token_id=video,
        vision_start_id=start,
        vision_end_id=end,
    )


def _internvl(tokenizer: Any, images: Any, num_tokens: int, where: str) -> Processor:
    """Args:
    num_tokens: of a tile, after the tower's patches were merged.
    """
    _check_fast(tokenizer, where)
    image, start, end = _marks(tokenizer, INTERNVL_MARKS, where, "an InternVL's")
    side, patches = int(images.size["height"]), math.isqrt(num_tokens)
    if patches**2 != num_tokens or side % patches or images.size["width"] != side:
        raise UserError(f"{where}: tiles of {images.size} pixels are no square of {num_tokens} tokens",
                        hint="use the files of an InternVL: image_seq_length and size go together")  # fmt: skip
    images.crop_to_patches = False  # `tiles` cuts
    return replace(
        _text_only(tokenizer, where), image_processor=images, image_token_id=image, patch_size=side // patches,
        image_size=side, family="internvl", vision_start_id=start, vision_end_id=end,
    )  # fmt: skip


def _pixtral(tokenizer: Any, images: Any, patch: int, merge: int, where: str) -> Processor:
    """Args:
    merge: patches along a side of what becomes one token.
    """
    _check_fast(tokenizer, where)
    image, _, _ = _marks(tokenizer, PIXTRAL_MARKS, where, "a Pixtral's or Mistral 3's")
    if tokenizer.bos_token_id is None:
        raise UserError(f"{where}: the tokenizer has no bos token", hint="use a Pixtral's or Mistral 3's files")
    return replace(
        _text_only(tokenizer, where), image_processor=images, image_token_id=image, patch_size=patch,
        image_size=patch * merge, family="pixtral", bos_id=tokenizer.bos_token_id,  # its template writes it
    )  # fmt: skip


def _gemma(tokenizer: Any, images: Any, where: str) -> Processor:
    _check_fast(tokenizer, where)
    image, start, end = _marks(tokenizer, GEMMA_MARKS, where, "a Gemma 4's")
    _marks(tokenizer, ("<|turn>", _TURN_ENDS), where, "an instruction-tuned Gemma 4's")
    if tokenizer.bos_token_id is None:
        raise UserError(f"{where}: the tokenizer has no bos token", hint="use a Gemma 4's files")
    tokenizer.eos_token = _TURN_ENDS  # base models' files name the end of a text
    unit = images.patch_size * images.pooling_kernel_size
    return replace(
        _text_only(tokenizer, where), image_processor=images, image_token_id=image, patch_size=images.patch_size,
        image_size=unit, family="gemma4", bos_id=tokenizer.bos_token_id, vision_start_id=start, vision_end_id=end,
    )  # fmt: skip


def _marks(tokenizer: Any, marks: Sequence[str], where: str, whose: str) -> list[int]:
    """Ids of these tokens. Raises `UserError` where the tokenizer lacks one."""
    ids = [tokenizer.convert_tokens_to_ids(mark) for mark in marks]
    if None in ids or tokenizer.unk_token_id in ids:
        raise UserError(f"{where}: the tokenizer lacks one of {', '.join(marks)}", hint=f"use {whose} files")
    return ids


def _text_only(tokenizer: Any, where: str) -> Processor:
    """Llama's and Qwen's: what begins a text may be missing, and padding is then the end token."""
    _check_fast(tokenizer, where)
    if tokenizer.eos_token_id is None:
        raise UserError(f"{where}: the tokenizer has no eos token", hint="use the files of an instruction-tuned model")
    return Processor(
        tokenizer=tokenizer,
        image_processor=None,
        image_token_id=NO_TOKEN,
        patch_size=1,
        image_size=1,
        pad_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        # Qwen2's tokenizer writes none, whatever its configs name.
        bos_id=tokenizer.bos_token_id if tokenizer("a").input_ids[0] == tokenizer.bos_token_id else None,
        eos_id=tokenizer.eos_token_id,
        newline_id=tokenizer("\n", add_special_tokens=False).input_ids[-1],
        family="causal_lm",
    )


def _check_fast(tokenizer: Any, where: str) -> None:
    if not tokenizer.is_fast:
        raise UserError(f"{where}: label masks need character offsets", hint="use a repository with tokenizer.json")


def with_own_image_processor(
    processor: Processor, tower: str | None, *, image_size: int, patch_size: int, family: Family, revision: str | None
) -> Processor:
    """The target's tokenizer beside the image processor of a draft's own tower.

    Args:
        tower: Hub id or directory with its image processor's files; None: the target's statistics at the given size.
    """
    if tower is None:
        old = processor.image_processor
        side = {"height": image_size, "width": image_size}
        is_cropped = "crop_size" in image_settings(old)
        size = {"size": {"shortest_edge": image_size}, "crop_size": side} if is_cropped else {"size": side}
        images = type(old)(**(image_settings(old) | size))
    else:
        with reading_pretrained(tower, "cannot load image processor", hint=_CURE, weights=False):
            images = _load_images(tower, revision, _settings_of(tower, revision))
    return replace(
        processor,
        image_processor=images,
        image_size=_side(images),
        patch_size=patch_size,
        family=family,
        resolutions=(),
    )


def _settings_of(source: str | Path, revision: str | None) -> dict[str, Any]:
    """What the processor's files say, the image processor's part included; the first file that names a thing wins."""
    from transformers.utils import cached_file

    settings: dict[str, Any] = {}
    for file in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        path = cached_file(source, file, revision=revision, _raise_exceptions_for_missing_entries=False)
        if path:
            values = read_json(Path(path), dict[str, Any], hint=RESTORE)
            settings = {**(values.get("image_processor") or {}), **values} | settings
    return settings


def _processors_template(source: str | Path, revision: str | None) -> str | None:
    """The chat template that older files of processors have in a file of its own, which tokenizers do not read."""
    from transformers.utils import cached_file

    path = cached_file(source, "chat_template.json", revision=revision, _raise_exceptions_for_missing_entries=False)
    return read_json(Path(path), dict[str, Any], hint=RESTORE).get("chat_template") if path else None


def _load_images(
    source: str | Path, revision: str | None, settings: Mapping[str, Any], published: Published | None = None
) -> Any:
    """What makes one tile: CLIP's cuts the middle out of the picture, SigLIP's squeezes it.

    Args:
        published: settings that stand for a missing file.
    """
    if published is not None:
        return pil("CLIP" if "crop_size" in published.images else "Siglip")(**published.images)
    maker = pil("CLIP" if settings.get("crop_size") else "Siglip")
    images = maker.from_pretrained(source, revision=revision)
    # Files of tiled families say more, of what is done to several tiles.
    return maker(**image_settings(images)) if settings.get("image_grid_pinpoints") else images


def _side(images: Any) -> int:
    """Side of a tile in pixels."""
    settings = image_settings(images)
    return int((settings.get("crop_size") or settings["size"])["height"])


def _processor(
    tokenizer: Any,
    images: Any,
    *,
    patch_size: int,
    where: str,
    family: Family = "llava",
    resolutions: tuple[tuple[int, int], ...] = (),
) -> Processor:
    _check_fast(tokenizer, where)
    image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    if image_token_id is None or image_token_id == tokenizer.unk_token_id:
        raise UserError(f"{where}: the tokenizer has no <image> token", hint="use the files of a LLaVA target")
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    # Qwen's has no token that begins a text; what it pads with is another end token.
    needed = ("eos", "pad") if family == "llava_onevision" else ("bos", "eos", "pad")
    missing = [name for name in needed if ids[name] is None]
    if missing:
        raise UserError(
            f"{where}: the tokenizer has no {', '.join(missing)} token", hint="use the files of a LLaVA target"
        )
    video = tokenizer.convert_tokens_to_ids("<video>")
    return Processor(
        tokenizer=tokenizer,
        image_processor=images,
        image_token_id=image_token_id,
        patch_size=patch_size,
        image_size=_side(images),
        pad_id=ids["pad"],
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        newline_id=tokenizer("\n", add_special_tokens=False).input_ids[-1],
        family=family,
        video_token_id=None if video == tokenizer.unk_token_id else video,
        resolutions=resolutions,
    )
