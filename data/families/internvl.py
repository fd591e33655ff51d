"""InternVL 3: every picture is cut into tiles by its own rule, and a tile of the whole picture follows several.

Each frame of a clip is a tile, whose tokens are neither pooled nor end with a newline.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from PIL import Image

from ...core.errors import UserError
from ...core.json_types import JsonObject
from ...core.pictures import IMAGE_MARK, VIDEO, VIDEO_MARK, Picture
from ..pictures.tiles import Size, cells
from ..pictures.videos import VideoSettings
from .processor import Files, PictureFamily, Processor, Resizing, add_marks, mark_ids, pil, text_processor
from .prompt_templates import CHATML

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

_MARKS = ("<IMG_CONTEXT>", "<img>", "</img>")
MAX_TILES = 12  # that a picture is cut into at most, of the published files


@dataclass(frozen=True)
class InternVLFamily(PictureFamily):
    """An InternVL, whose limits of pixels are limits of tiles."""

    def grid(self, size: Size, processor: Processor, resizing: Resizing) -> tuple[int, int]:
        """Tiles across and down of a picture. Raises `UserError`: the fewest are more than the most."""
        images, area, limits = processor.image_processor, processor.image_size**2, resizing.limits
        least = images.min_patches if limits[0] is None else -(-limits[0] // area)
        most = images.max_patches if limits[1] is None else max(1, limits[1] // area)
        if least > most:
            hint = "set min_pixels and max_pixels so that a number of tiles lies between them"
            raise UserError(f"a picture has at least {least} and at most {most} tiles of {area:,} pixels", hint=hint)
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

        return get_optimal_tiled_canvas(size[::-1], (processor.image_size,) * 2, least, most)

    def layouts(self, sizes: Sequence[Size], processor: Processor, resizing: Resizing) -> tuple[Picture, ...]:
        counts = [math.prod(self.grid(size, processor, resizing)) for size in sizes]
        return tuple(Picture(processor.patches, count + (count > 1)) for count in counts)

    def tiles(self, images: Sequence[Image.Image], processor: Processor, resizing: Resizing) -> list[Image.Image]:
        side, resample = processor.image_size, processor.image_processor.resample
        grids = [self.grid(image.size, processor, resizing) for image in images]
        return [tile for image, grid in zip(images, grids, strict=True) for tile in _cut(image, grid, side, resample)]

    def video(self, settings: VideoSettings) -> VideoSettings:
        return settings.model_copy(update={"newline": "none", "pooling": "none"})

    def counted(self, config: PreTrainedConfig, tower: PreTrainedConfig) -> tuple[int, int, Any]:
        """Return what the base class does; the patch is that of a token, which 2 x 2 of a tile become."""
        patch = round(tower.patch_size[0] / config.downsample_ratio)
        return tower.image_size[0], patch, SimpleNamespace(min_patches=1, max_patches=MAX_TILES)

    def most_tiles(self, processor: Processor, resizing: Resizing) -> int:
        area = processor.image_size**2
        return 1 + max(1, (resizing.limits[1] or MAX_TILES * area) // area)

    def marks(self, pictures: Sequence[Picture]) -> list[str]:
        """An image's run, or one of each frame of a clip, which are numbered."""
        return [
            "\n".join(f"Frame{number}: <img>{VIDEO_MARK}</img>" for number in range(1, picture.num_tiles + 1))
            if picture.modality == VIDEO
            else f"<img>{IMAGE_MARK}</img>"
            for picture in pictures
        ]

    def runs(self, picture: Picture) -> list[int]:
        if picture.modality == VIDEO:
            return [picture.patches**2] * picture.num_tiles
        return [picture.num_tokens]

    def read(self, files: Files) -> Processor:
        num_tokens = int(files.settings.get("image_seq_length") or 256)
        return self.processor(files.tokenizer, files.images("GotOcr2"), num_tokens, files.key)

    def processor(self, tokenizer: PreTrainedTokenizerFast, images: Any, num_tokens: int, key: str) -> Processor:
        """The family's processor: `num_tokens` of a tile. Raises `UserError` where the files `key` do not fit."""
        image, start, end = mark_ids(tokenizer, _MARKS, key, "an InternVL's")
        side, patches = int(images.size["height"]), math.isqrt(num_tokens)
        if patches**2 != num_tokens or side % patches or images.size["width"] != side:
            raise UserError(f"{key}: tiles of {images.size} pixels are no square of {num_tokens} tokens",
                            hint="use the files of an InternVL: image_seq_length and size go together")  # fmt: skip
        images.crop_to_patches = False  # `_cut` cuts
        return replace(
            text_processor(tokenizer, key), image_processor=images, image_token_id=image, patch_size=side // patches,
            image_size=side, picture_family=self, vision_start_id=start, vision_end_id=end,
        )  # fmt: skip

    def about(self, processor: Processor) -> JsonObject:
        return {"image_seq_length": processor.num_image_tokens}

    def new(
        self, tokenizer: PreTrainedTokenizerFast, kind: str = "", *, image_size: int,
        patch_size: int, max_tiles: int = MAX_TILES, **statistics: Any,
    ) -> Processor:  # fmt: skip
        """2 x 2 patches of the tower become one token; a picture is cut into at most `max_tiles`."""
        add_marks(tokenizer, *_MARKS, "<|im_start|>", "<|im_end|>")
        tokenizer.eos_token = "<|im_end|>"
        side = {"height": image_size, "width": image_size}
        images = pil("GotOcr2")(size=side, max_patches=max_tiles, **statistics)
        return self.processor(tokenizer, images, (image_size // patch_size // 2) ** 2, "a new processor")


INTERNVL = InternVLFamily(
    "internvl", "InternVLProcessor", sizes_decide=True, written=re.compile("<IMG_CONTEXT>|<video>"),
    templates=(replace(CHATML, name="internvl", system="", surrounds=True, keeps_breaks=True),),
)  # fmt: skip


def _cut(image: Image.Image, grid: tuple[int, int], side: int, resample: Image.Resampling | None) -> list[Image.Image]:
    """The tiles of a grid, row by row, of the picture squeezed into it; after several, the whole picture."""
    wide, high = grid
    tiles = cells(image.resize((wide * side, high * side), resample), side)
    return tiles if len(tiles) == 1 else [*tiles, image.resize((side, side), resample)]
