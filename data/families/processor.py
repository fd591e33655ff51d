"""Tokenizer and image processor of a target, and what a family of targets is. Drafts use their target's tokenizer.

A draft that tokenizes differently from its target proposes noise, silently. The processor is saved
with every draft so that plain `AutoProcessor` loads it, and its hash is compared before decoding.
Letters: I tiles or patches, C channels, S side of a tile.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from PIL import Image
from torch import Tensor

from ...core.errors import UserError
from ...core.json_types import JsonMapping, JsonObject
from ...core.pictures import Picture, mark_of
from ..pictures.tiles import Aspect, Convention, Size
from ..pictures.videos import Clip, FrameTokens, VideoSettings, tile_frames
from .prompt_templates import LLAMA3, Template

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

# The fewest and the most pixels of a picture whose size decides; None: as the processor's files say.
Limits = tuple[int | None, int | None]
NO_TOKEN = -1
# Of each channel, in CLIP's and SigLIP's published files.
CLIP_STATISTICS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
}
SIGLIP_STATISTICS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}


@dataclass(frozen=True)
class Resizing:
    """A data section's resizing of images. A family whose pictures' sizes decide has its own way."""

    aspect: Aspect = "pad"  # what is done to images that are not square, of LLaVA
    convention: Convention = "hf"  # of LLaVA's tiled images
    limits: Limits = (None, None)  # of pictures whose size decides


@dataclass(frozen=True)
class Files:
    """A processor's files, as a family reads them."""

    tokenizer: PreTrainedTokenizerFast
    settings: JsonMapping  # what they say, the image processor's part included
    published: JsonMapping | None  # the image processor's settings that stand for a missing file; None: there is one
    source: str | Path
    revision: str | None
    key: str  # names the files in messages

    def images(self, name: str) -> Any:
        """The image processor of this name."""
        if self.published is not None:
            return pil(name)(**self.published)
        return pil(name).from_pretrained(self.source, revision=self.revision)

    @property
    def patch_size(self) -> int:
        """Side in pixels of the tower's patches. Raises `UserError` where neither these files nor the model's say."""
        patch = self.settings.get("patch_size")
        if not isinstance(patch, int):
            problem = f"{self.key}: neither its files nor a config.json beside them say patch_size"
            hint = "write patch_size, the side in pixels of the tower's patches, into processor_config.json"
            raise UserError(problem, where=str(self.source), hint=hint)
        return patch


@dataclass(frozen=True)
class PictureFamily:
    """The picture side of a family of targets: each picture is one tile, where no derived class says otherwise."""

    name: str  # as processors and recipes have it
    processor_class: str = ""  # of transformers, as the family's files name it
    # That its conversations are written with, beside the one in its files; one that surrounds pictures is the only one.
    templates: tuple[Template, ...] = ()
    model_types: tuple[str, ...] = ()  # further ones whose pictures are read the same way
    # What its own chat template writes for a picture; None: the mark itself. Others stand between special tokens.
    written: re.Pattern[str] | None = None
    system: str | None = None  # the system sentence of the family, where it is not its template's
    reads_pictures: bool = True
    reads_whole: bool = False  # pictures in as many patches as they have, and not in tiles
    # The number of a picture's tokens follows from its size, whatever the data section's aspect.
    sizes_decide: bool = False
    loads_plainly: bool = True  # transformers' `AutoProcessor` loads the files without torchvision
    served_aspect: Aspect | None = None  # that a server's processor has, of pictures in one tile

    @property
    def template(self) -> str | None:
        """The template that writes the tokens between which the family's pictures stand; None: any that fits."""
        return next((template.name for template in self.templates if template.surrounds), None)

    def of_model(self, model_type: str, tower: str | None) -> bool:
        """Whether a model of these types reads pictures so."""
        return model_type in (self.name, *self.model_types)

    # What a picture becomes.

    def needs_sizes(self, aspect: Aspect, num_images: int) -> bool:
        """Whether the layouts of a sample's images depend on their sizes."""
        return self.sizes_decide

    def check_canvas(self, size: Size, processor: Processor, aspect: Aspect, num_images: int) -> None:
        """Raises `BadMedia` where too large a picture stands between one of `size` (width, height) and its tiles."""

    def layouts(self, sizes: Sequence[Size], processor: Processor, resizing: Resizing) -> tuple[Picture, ...]:
        """The tiles and tokens of one sample's images, from their sizes (width, height) alone."""
        return (Picture(processor.patches),) * len(sizes)

    def tiles(self, images: Sequence[Image.Image], processor: Processor, resizing: Resizing) -> list[Image.Image]:
        """The images of one sample cut as `layouts` counts them."""
        return list(images)

    def pixels(
        self, images: Sequence[Image.Image], layouts: Sequence[Picture], processor: Processor, resizing: Resizing
    ) -> list[Tensor]:
        """Normalised pixels [I,C,S,S] (patches [I,C*S*S] where they are read whole) float32 of each image."""
        tiles = tile_pixels(self.tiles(images, processor, resizing), processor)
        return list(tiles.split([picture.num_tiles for picture in layouts]))

    def video(self, settings: VideoSettings) -> VideoSettings:
        """The settings of clips as the family honours them."""
        return settings

    def clip_layout(self, clip: Clip, settings: VideoSettings, processor: Processor) -> tuple[Picture, ...]:
        """The layout of a clip: one picture, or several where something is written between its frames."""
        return (self.video(settings).picture(len(clip.numbers), processor.patches),)

    def clip_pixels(self, frames: Sequence[Image.Image], layout: Picture, processor: Processor) -> Tensor:
        """Normalised pixels of a clip's frames, as `pixels`. `layout` is the clip's first picture."""
        return tile_pixels(frames, processor)

    def frame_tokens(
        self, settings: VideoSettings, processor: Processor, sizes: Sequence[Size], num_frames: int
    ) -> FrameTokens:
        """The tokens of a clip of which `num_frames` are taken; `sizes` (width, height) are of the set's clips."""
        return tile_frames(self.video(settings), processor.patches)

    def most_tiles(self, processor: Processor, resizing: Resizing) -> int:
        """Tiles that an image becomes at most; 1 where it is read whole."""
        return 1

    def counted(self, config: PreTrainedConfig, tower: PreTrainedConfig) -> tuple[int, int, Any]:
        """Image size, patch size and image processor of a `Processor` that only counts, by a model's config."""
        return tower.image_size, tower.patch_size, None

    # How a conversation shows it.

    def marks(self, pictures: Sequence[Picture]) -> list[str]:
        """The text of each image and clip: a mark for each of its runs, between tokens of the family."""
        return [mark_of(picture) for picture in pictures]

    def runs(self, picture: Picture) -> list[int]:
        """Lengths of the runs of placeholders that a picture becomes, as `marks` writes them."""
        return [picture.num_tokens]

    # Its files.

    def published(self, vision: JsonMapping) -> JsonObject | None:
        """The published settings of the image processor, by the config of a tower; None: it does not tell them."""
        return None

    def read(self, files: Files) -> Processor:
        """The processor of these files. Raises `UserError` where they do not fit."""
        return text_processor(files.tokenizer, files.key)

    def save(self, processor: Processor, folder: Path) -> None:
        """Write files that `read` reads. transformers loads some of them with torchvision alone."""
        processor.tokenizer.save_pretrained(folder)
        if self.reads_pictures:
            self.saved_images(processor).save_pretrained(folder)
            about = {"processor_class": self.processor_class, **self.about(processor)}
            (folder / "processor_config.json").write_text(json.dumps(about, indent=1))

    def saved_images(self, processor: Processor) -> Any:
        """The image processor that the family's files have."""
        return processor.image_processor

    def about(self, processor: Processor) -> JsonObject:
        """The content of `processor_config.json` beside the class."""
        return {}

    def new(
        self, tokenizer: PreTrainedTokenizerFast, kind: str = "", *, image_size: int, patch_size: int, **statistics: Any
    ) -> Processor:
        """A processor for a model that the project makes itself, for pictures of `image_size` pixels with `image_mean`
        and `image_std` of pixels in [0, 1]. The tokenizer gets the marks that it lacks; `kind` is the target's.
        """
        raise NotImplementedError(f"the project makes no target of {self.name}")


CAUSAL_LM = PictureFamily("causal_lm", templates=(LLAMA3,), reads_pictures=False)


@dataclass(frozen=True)
class Processor:
    """Turns text and pictures into a target's inputs. `image_processor` makes one tile of one picture, whatever
    the LLaVA or InternVL: cutting pictures is done by the family. Where pictures are read whole, it holds the settings
    that the family works by; a text-only model has none.
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
    picture_family: PictureFamily  # whose processor files are written
    video_token_id: int | None = None  # None: a clip's tokens are the image's
    # Of the family's tiled pictures, where its files list them; empty: its usual ones, in multiples of a tile.
    resolutions: tuple[tuple[int, int], ...] = ()
    selects: str = "default"  # vision_feature_select_strategy of a LLaVA: default takes CLIP's class token away
    # What surrounds each run of picture tokens (Qwen-VL, InternVL, Gemma 4).
    vision_start_id: int | None = None
    vision_end_id: int | None = None
    generation_ends: tuple[int, ...] = ()  # that the target's generation config names; `end_tokens` has all

    @property
    def family(self) -> str:
        """Name of the family."""
        return self.picture_family.name

    @property
    def reads_pictures(self) -> bool:
        """False for a text-only model."""
        return self.picture_family.reads_pictures

    @property
    def reads_whole(self) -> bool:
        """Pictures in as many patches as they have, and not in tiles."""
        return self.picture_family.reads_whole

    @property
    def patches(self) -> int:
        """Along a side of a tile."""
        return self.image_size // self.patch_size

    @property
    def num_image_tokens(self) -> int:
        """Tokens of one tile, which are its patches without CLS; at least so many of a picture that is read whole."""
        return 1 if self.reads_whole else self.patches**2

    @property
    def num_token_ids(self) -> int:
        """One more than the last id that has a token, added ones included (32,002 of LLaVA-1.5's 32,064 rows)."""
        return 1 + max(self.tokenizer.get_vocab().values())

    @property
    def tokenizer_hash(self) -> str:
        """SHA-256 over pieces, merges, normalizer and added tokens; drafts are checked against their target's."""
        definition = json.loads(self.tokenizer.backend_tokenizer.to_str())
        definition.pop("truncation", None)
        definition.pop("padding", None)
        return hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()

    def of_family(self, family: PictureFamily) -> Processor:
        """The same, written as another family's files: a draft's may not be its target's."""
        return self if family == self.picture_family else replace(self, picture_family=family, resolutions=())

    def save(self, folder: Path) -> None:
        """Write files that `load_processor` reads."""
        self.picture_family.save(self, folder)


def pil(name: str) -> Any:
    """An image processor's PIL backend: no torchvision on the main path, and the two differ in the last bits."""
    import transformers

    return getattr(transformers, f"{name}ImageProcessorPil", None) or getattr(transformers, f"{name}ImageProcessor")


def tile_pixels(tiles: Sequence[Image.Image], processor: Processor) -> Tensor:
    """Normalised pixels [I,C,S,S] float32, as the tower's own image processor makes them."""
    made = processor.image_processor(images=list(tiles), return_tensors="np")
    return torch.from_numpy(made["pixel_values"]).float()


def image_settings(images: object) -> JsonObject:
    """Settings that another family's image processor copies, from one that makes a single tile or from a file's."""
    names = ("size", "crop_size", "image_mean", "image_std", "resample")
    return {name: value for name in names if (value := getattr(images, name, None)) is not None}


def tile_images(files: Files) -> object:
    """The image processor of one tile: CLIP's cuts the middle out of the picture, SigLIP's squeezes it."""
    known = files.settings if files.published is None else files.published
    made = files.images("CLIP" if known.get("crop_size") else "Siglip")
    # Files of tiled families say more, of what is done to several tiles.
    says_more = files.published is None and files.settings.get("image_grid_pinpoints")
    return type(made)(**image_settings(made)) if says_more else made


def tile_side(images: object) -> int:
    """Side of a tile in pixels."""
    settings = image_settings(images)
    return int((settings.get("crop_size") or settings["size"])["height"])


def text_processor(tokenizer: PreTrainedTokenizerFast, key: str) -> Processor:
    """Llama's and Qwen's. Raises `UserError`: the tokenizer has no end token or no offsets."""
    if not tokenizer.is_fast:
        raise UserError(f"{key}: label masks need character offsets", hint="use a repository with tokenizer.json")
    if tokenizer.eos_token_id is None:
        raise UserError(f"{key}: the tokenizer has no eos token", hint="use the files of an instruction-tuned model")
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
        picture_family=CAUSAL_LM,
    )


def mark_ids(tokenizer: PreTrainedTokenizerFast, marks: Sequence[str], key: str, whose: str) -> list[int]:
    """Ids of these tokens. Raises `UserError` where the tokenizer lacks one."""
    ids = [cast(int, tokenizer.convert_tokens_to_ids(mark)) for mark in marks]
    if None in ids or tokenizer.unk_token_id in ids:
        raise UserError(f"{key}: the tokenizer lacks one of {', '.join(marks)}", hint=f"use {whose} files")
    return ids


def add_marks(tokenizer: PreTrainedTokenizerFast, *marks: str) -> None:
    """Add the special tokens that a tokenizer lacks."""
    lacking = [mark for mark in marks if mark not in tokenizer.get_vocab()]
    tokenizer.add_special_tokens({"additional_special_tokens": lacking})
