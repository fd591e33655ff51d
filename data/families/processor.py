"""Tokenizer and image processor of a target. Drafts use their target's tokenizer, never their own.

A draft that tokenizes differently from its target proposes noise, silently. The processor is saved
with every draft so that plain `AutoProcessor` loads it, and its hash is compared before decoding.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import transformers
from transformers import LlavaNextProcessor, LlavaProcessor, PreTrainedTokenizerFast

from ..pictures.tiles import next_resolutions, onevision_resolutions

Family = Literal[
    "llava", "llava_next", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "pixtral", "gemma4",
    "causal_lm",
]  # fmt: skip
FAMILIES: dict[str, Family] = {
    "LlavaProcessor": "llava",
    "LlavaNextProcessor": "llava_next",
    "LlavaOnevisionProcessor": "llava_onevision",
    "Qwen2VLProcessor": "qwen2_vl",
    "Qwen2_5_VLProcessor": "qwen2_5_vl",
    "Qwen3VLProcessor": "qwen3_vl",
    "InternVLProcessor": "internvl",
    "PixtralProcessor": "pixtral",  # of Mistral 3, too
    "Gemma4Processor": "gemma4",
}
QWEN: tuple[Family, ...] = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
# What stands for pictures in prompts, and what surrounds them; a text-only tokenizer has none of it.
GEMMA_MARKS = ("<|image|>", "<|image>", "<image|>")
INTERNVL_MARKS = ("<IMG_CONTEXT>", "<img>", "</img>")
INTERNVL_TILES = 12  # that a picture is cut into at most, of the published files
PIXTRAL_MARKS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
QWEN_MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
NO_TOKEN = -1


def pil(name: str) -> Any:
    """An image processor's PIL backend: no torchvision on the main path, and the two differ in the last bits."""
    return getattr(transformers, f"{name}ImageProcessorPil", None) or getattr(transformers, f"{name}ImageProcessor")


@dataclass(frozen=True)
class Processor:
    """What turns text and pictures into a target's inputs.

    `image_processor` makes one tile of one picture, whatever the LLaVA or InternVL: cutting pictures is done by
    `tiles`. Qwen-VL's holds the settings that `patches` works by; a text-only model has none.
    """

    tokenizer: PreTrainedTokenizerFast
    image_processor: Any
    image_token_id: int  # NO_TOKEN: the model reads text alone
    patch_size: int
    image_size: int  # side of the square input in pixels; where pictures are read whole, of what becomes one token
    pad_id: int
    bos_id: int | None  # None: a prompt begins with nothing (Qwen)
    eos_id: int  # the tokenizer's, one of those that end answers
    newline_id: int
    family: Family = "llava"  # whose processor files are written
    video_token_id: int | None = None  # None: a clip's tokens are the image's
    # Of the family's tiled pictures, where its files list them; empty: its usual ones, in multiples of a tile.
    resolutions: tuple[tuple[int, int], ...] = ()
    # What surrounds each run of picture tokens (Qwen-VL, InternVL, Gemma 4).
    vision_start_id: int | None = None
    vision_end_id: int | None = None
    generation_ends: tuple[int, ...] = ()  # that the target's generation config names; `end_tokens` has all

    @property
    def reads_pictures(self) -> bool:
        """False for a text-only model."""
        return self.family != "causal_lm"

    @property
    def reads_whole(self) -> bool:
        """Pictures in as many patches as they have, and not in tiles."""
        return self.family in (*QWEN, "pixtral", "gemma4")

    @property
    def sizes_decide(self) -> bool:
        """Whether the number of a picture's tokens follows from its size, whatever the data section's aspect."""
        return self.reads_whole or self.family == "internvl"

    @property
    def patches(self) -> int:
        """Along a side of a tile."""
        return self.image_size // self.patch_size

    @property
    def num_image_tokens(self) -> int:
        """Tokens of one tile: towers hand over every patch and drop CLS where they have one. At least so many of a
        picture that is read whole.
        """
        return 1 if self.reads_whole else self.patches**2

    @property
    def num_token_ids(self) -> int:
        """One more than the last id that has a token, added ones included (32,002 of LLaVA-1.5's 32,064 rows)."""
        return 1 + max(self.tokenizer.get_vocab().values())

    @property
    def tokenizer_hash(self) -> str:
        """Hash of the tokenizer; drafts are checked against their target's."""
        return tokenizer_hash(self.tokenizer)

    def of_family(self, family: Family) -> Processor:
        """The same, written as another family's files: a draft's may not be its target's."""
        return self if family == self.family else replace(self, family=family, resolutions=())

    def save(self, folder: Path) -> None:
        """Write files that `load_processor` reads.

        Of LLaVA and LLaVA-NeXT, `AutoProcessor.from_pretrained(folder)` makes the family's processor, too. Those of
        the other families need torchvision: their files are written, and what loads them is ours.
        """
        if self.family not in ("llava", "llava_next"):
            self._save_apart(folder)
            return
        of_tile = self.image_processor
        images = of_tile
        if self.family == "llava_next":
            images = pil("LlavaNext")(**image_settings(of_tile), image_grid_pinpoints=self._pinpoints())
        (LlavaProcessor if self.family == "llava" else LlavaNextProcessor)(
            image_processor=images,
            tokenizer=self.tokenizer,
            patch_size=self.patch_size,
            vision_feature_select_strategy="default",
            image_token="<image>",
            num_additional_image_tokens=1,  # CLS, which the "default" strategy subtracts again
        ).save_pretrained(folder)

    def _save_apart(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)
        if not self.reads_pictures:
            return
        images = self.image_processor
        about: dict[str, Any] = {"processor_class": {family: name for name, family in FAMILIES.items()}[self.family]}
        if self.family == "llava_onevision":
            side, own = {"height": self.image_size, "width": self.image_size}, image_settings(images)
            statistics = {name: own.get(name) for name in ("image_mean", "image_std", "resample")}
            images = pil("LlavaOnevision")(size=side, **statistics, image_grid_pinpoints=self._pinpoints())
            about |= {"num_image_tokens": self.num_image_tokens, "vision_feature_select_strategy": "full"}
            about |= {"patch_size": self.patch_size}
        elif self.family == "internvl":
            about |= {"image_seq_length": self.num_image_tokens}
        elif self.family == "pixtral":
            about |= {"patch_size": self.patch_size, "spatial_merge_size": self.image_size // self.patch_size}
        images.save_pretrained(folder)
        (folder / "processor_config.json").write_text(json.dumps(about, indent=1))

    def _pinpoints(self) -> list[list[int]]:
        usual = next_resolutions if self.family == "llava_next" else onevision_resolutions
        return [list(pair) for pair in self.resolutions or usual(self.image_size)]


def image_settings(images: Any) -> dict[str, Any]:
    """Settings that another family's image processor copies, from one that makes a single tile or from a file's."""
    names = ("size", "crop_size", "image_mean", "image_std", "resample")
    return {name: value for name in names if (value := getattr(images, name, None)) is not None}


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256 over the backend's whole definition: pieces, merges, normalizer, added tokens."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    definition.pop("truncation", None)
    definition.pop("padding", None)
    return hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()
