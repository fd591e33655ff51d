"""Tokenizer and image processor of a target, as one thing: drafts never bring their own.

A draft that tokenizes differently from its target proposes noise, silently. The processor is saved
with every draft so that plain `AutoProcessor` loads it, and its hash is compared before decoding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import transformers
from transformers import AutoTokenizer, LlavaNextProcessor, LlavaProcessor, PreTrainedTokenizerFast

from ..core.errors import UserError, first_line
from .tiles import next_resolutions, onevision_resolutions

Family = Literal["llava", "llava_next", "llava_onevision"]
_FAMILIES: dict[str, Family] = {
    "LlavaProcessor": "llava",
    "LlavaNextProcessor": "llava_next",
    "LlavaOnevisionProcessor": "llava_onevision",
}


def _pil(name: str) -> Any:
    """An image processor's PIL backend: no torchvision on the main path, and the two differ in the last bits."""
    return getattr(transformers, f"{name}ImageProcessorPil", None) or getattr(transformers, f"{name}ImageProcessor")


@dataclass(frozen=True)
class Processor:
    """What turns text and pictures into a target's inputs.

    `image_processor` makes one tile of one picture, whatever the family: cutting pictures is done by `tiles`.
    """

    tokenizer: PreTrainedTokenizerFast
    image_processor: Any
    image_token_id: int
    patch_size: int
    image_size: int  # side of the square input in pixels
    pad_id: int
    bos_id: int | None  # None: a prompt begins with nothing (Qwen)
    eos_id: int
    newline_id: int
    family: Family = "llava"  # whose processor files are written
    video_token_id: int | None = None  # None: a clip's tokens are the image's
    # Of the family's tiled pictures, where its files list them; empty: its usual ones, in multiples of a tile.
    resolutions: tuple[tuple[int, int], ...] = ()

    @property
    def patches(self) -> int:
        """Along a side of a tile."""
        return self.image_size // self.patch_size

    @property
    def num_image_tokens(self) -> int:
        """Tokens of one tile: towers hand over every patch and drop CLS where they have one."""
        return self.patches**2

    @property
    def tokenizer_hash(self) -> str:
        return tokenizer_hash(self.tokenizer)

    def of_family(self, family: Family) -> Processor:
        """The same, written as another family's files: a draft's may not be its target's."""
        return self if family == self.family else replace(self, family=family, resolutions=())

    def save(self, folder: Path) -> None:
        """Write files that `load_processor` reads.

        Of LLaVA and LLaVA-NeXT, `AutoProcessor.from_pretrained(folder)` makes the family's processor, too. That of
        OneVision needs torchvision: its files are written, and what loads them is ours.
        """
        if self.family == "llava_onevision":
            self._save_onevision(folder)
            return
        of_tile = self.image_processor
        images = of_tile
        if self.family == "llava_next":
            images = _pil("LlavaNext")(**_settings(of_tile), image_grid_pinpoints=self._pinpoints())
        (LlavaProcessor if self.family == "llava" else LlavaNextProcessor)(
            image_processor=images,
            tokenizer=self.tokenizer,
            patch_size=self.patch_size,
            vision_feature_select_strategy="default",
            image_token="<image>",
            num_additional_image_tokens=1,  # CLS, which the "default" strategy subtracts again
        ).save_pretrained(folder)

    def _save_onevision(self, folder: Path) -> None:
        side = {"height": self.image_size, "width": self.image_size}
        statistics = {name: getattr(self.image_processor, name) for name in ("image_mean", "image_std", "resample")}
        images = _pil("LlavaOnevision")(size=side, **statistics, image_grid_pinpoints=self._pinpoints())
        images.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        about = {
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": self.num_image_tokens,
            "vision_feature_select_strategy": "full",
            "patch_size": self.patch_size,
        }
        (folder / "processor_config.json").write_text(json.dumps(about, indent=1))

    def _pinpoints(self) -> list[list[int]]:
        usual = next_resolutions if self.family == "llava_next" else onevision_resolutions
        return [list(pair) for pair in self.resolutions or usual(self.image_size)]


def _settings(images: Any) -> dict[str, Any]:
    """What another family's image processor takes over from one that makes a tile."""
    names = ("size", "crop_size", "image_mean", "image_std", "resample")
    return {name: value for name in names if (value := getattr(images, name, None)) is not None}


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
    images = _pil("CLIP")(
        size={"shortest_edge": image_size}, crop_size=side, image_mean=image_mean, image_std=image_std
    )
    return _processor(tokenizer, images, patch_size=patch_size, where="build_processor")


def load_processor(source: str | Path, *, revision: str | None = None) -> Processor:
    """The processor of a published or saved LLaVA, NeXT or OneVision.

    Raises:
        UserError: files are missing or do not fit.
    """
    key = f"processor {str(source)!r}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
        found = _settings_of(source, revision)
        images = _load_images(source, revision, found)
    except (OSError, ValueError) as error:
        raise _cannot_load(key, error) from error
    # Old processor files lack the patch size; every CLIP-L/14 and SigLIP-so400m/14 LLaVA has 14.
    return _processor(
        tokenizer,
        images,
        patch_size=int(found.get("patch_size") or 14),
        where=key,
        family=_FAMILIES.get(str(found.get("processor_class")), "llava"),
        resolutions=tuple((int(a), int(b)) for a, b in found.get("image_grid_pinpoints") or ()),
    )


def with_own_eyes(
    processor: Processor, tower: str | None, *, image_size: int, patch_size: int, family: Family, revision: str | None
) -> Processor:
    """The target's tokenizer beside the image processor of a draft's own tower.

    Args:
        tower: Hub id or directory with its image processor's files; None: the target's statistics at the given size.
    """
    if tower is None:
        old = processor.image_processor
        side = {"height": image_size, "width": image_size}
        is_cropped = getattr(old, "crop_size", None) is not None
        size = {"size": {"shortest_edge": image_size}, "crop_size": side} if is_cropped else {"size": side}
        images = type(old)(**(_settings(old) | size))
    else:
        try:
            images = _load_images(tower, revision, _settings_of(tower, revision))
        except (OSError, ValueError) as error:
            raise _cannot_load(f"image processor {tower!r}", error) from error
    return replace(
        processor,
        image_processor=images,
        image_size=_side(images),
        patch_size=patch_size,
        family=family,
        resolutions=(),
    )


def _cannot_load(key: str, error: Exception) -> UserError:
    return UserError(
        f"cannot load {key}: {first_line(error)}", cure="check the name and the network, or give a directory"
    )


def _settings_of(source: str | Path, revision: str | None) -> dict[str, Any]:
    """What the processor's files say, the image processor's part included; the first file that names a thing wins."""
    from transformers.utils import cached_file

    found: dict[str, Any] = {}
    for file in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        path = cached_file(source, file, revision=revision, _raise_exceptions_for_missing_entries=False)
        if path:
            said = json.loads(Path(path).read_text())
            found = {**(said.get("image_processor") or {}), **said} | found
    return found


def _load_images(source: str | Path, revision: str | None, found: Mapping[str, Any]) -> Any:
    """What makes one tile: CLIP's cuts the middle out of the picture, SigLIP's squeezes it."""
    maker = _pil("CLIP" if found.get("crop_size") else "Siglip")
    images = maker.from_pretrained(source, revision=revision)
    # Files of tiled families say more, of what is done to several tiles.
    return maker(**_settings(images)) if found.get("image_grid_pinpoints") else images


def _side(images: Any) -> int:
    """Side of a tile in pixels."""
    return int((getattr(images, "crop_size", None) or images.size)["height"])


def _processor(
    tokenizer: Any,
    images: Any,
    *,
    patch_size: int,
    where: str,
    family: Family = "llava",
    resolutions: tuple[tuple[int, int], ...] = (),
) -> Processor:
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"{where}: label masks need character offsets", cure="use a repository with tokenizer.json")
    image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    if image_token_id is None or image_token_id == tokenizer.unk_token_id:
        raise UserError(f"{where}: the tokenizer has no <image> token", cure="use the files of a LLaVA target")
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    # Qwen's has no token that begins a text; what it pads with is another end token.
    needed = ("eos", "pad") if family == "llava_onevision" else ("bos", "eos", "pad")
    missing = [name for name in needed if ids[name] is None]
    if missing:
        raise UserError(
            f"{where}: the tokenizer has no {', '.join(missing)} token", cure="use the files of a LLaVA target"
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
