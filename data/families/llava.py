"""LLaVA, LLaVA-NeXT and LLaVA-OneVision: pictures exactly as the official recipes, one square tile or several.

`square` is CLIP's own processing (shortest edge, centre crop; SigLIP's squeezes); `pad` first extends the picture to a
square with the mean colour, so that nothing is cut off (LLaVA-1.5, `image_aspect_ratio`). `anyres` (LLaVA-NeXT) cuts
every picture into tiles; `anyres_max_9` (LLaVA-OneVision) a picture that stands alone, and of several makes a padded
tile and a newline each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from PIL import Image

from ...core.errors import UserError
from ...core.json_types import JsonMapping, JsonObject
from ...core.pictures import Newline, Picture
from ..pictures.picture_files import MAX_CANVAS, check_area
from ..pictures.tiles import Aspect, Size, Tiling, cut, is_tiled, next_resolutions, onevision_resolutions, tiled_picture
from .processor import (
    CLIP_STATISTICS,
    SIGLIP_STATISTICS,
    Files,
    PictureFamily,
    Processor,
    Resizing,
    image_settings,
    pil,
    text_processor,
    tile_images,
    tile_side,
)
from .prompt_templates import CHATML, ROLES, SYSTEM, Pairs, Rendered, Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MAX_TILES = 9


def expand_to_square(image: Image.Image, mean: tuple[float, ...]) -> Image.Image:
    """The picture centred on a square canvas of its longer side, filled with the mean colour."""
    width, height = image.size
    if width == height:
        return image
    side = max(width, height)
    canvas = Image.new("RGB", (side, side), tuple(int(channel * 255) for channel in mean))
    canvas.paste(image, ((side - width) // 2, (side - height) // 2))
    return canvas


def tiling(processor: Processor, resizing: Resizing) -> Tiling:
    """The tiling of an aspect: the family's resolutions by the processor's files, or its usual ones."""
    tile = processor.image_size
    if resizing.aspect == "anyres":
        family, usual, cap = "llava_next", next_resolutions(tile), None
    else:
        family, usual, cap = "llava_onevision", onevision_resolutions(tile), _MAX_TILES
    listed = processor.resolutions if processor.family == family else ()
    return Tiling(tile, processor.patches, listed or usual, resizing.convention, cap)


class _Plain(Template):
    """LLaVA's alignment."""

    def render(self, pairs: Pairs, system: str, open_ended: bool, marks: re.Pattern[str]) -> Rendered:
        if len(pairs) != 2 - (open_ended and len(pairs) == 1) or (mark := marks.search(pairs[0][1])) is None:
            hint = "use template: v1 for this data"
            raise UserError("the plain template takes a question with <image> and one answer", hint=hint)
        if open_ended:
            return Rendered(mark[0], ())
        text = f"{mark[0]}{pairs[1][1]}\n"
        return Rendered(text, ((len(mark[0]), len(text)),))


class _Vicuna(Template):
    def around(self, role: str) -> tuple[str, str]:
        return {"system": ("", " "), "user": ("USER: ", " "), "assistant": ("ASSISTANT: ", self.end)}[role]

    def render(self, pairs: Pairs, system: str, open_ended: bool, marks: re.Pattern[str]) -> Rendered:
        text = f"{system} " if system else ""
        spans = []
        last = len(pairs) - 1
        for number, (role, value) in enumerate(pairs):
            text += f"{ROLES[role]}:"
            if open_ended and number == last and role == "gpt":
                break
            if not value:
                continue  # an empty turn is its role and nothing else, not even a blank
            if role == "human":
                text += f" {value} "
                continue
            start = len(text)
            text += f" {value}{self.end}"
            spans.append((start, len(text)))
        if open_ended and pairs[last][0] == "human":
            text += "ASSISTANT:"
        return Rendered(text, tuple(spans))


PLAIN = _Plain("plain")
V1 = _Vicuna("v1", end="</s>", system=SYSTEM)


@dataclass(frozen=True)
class LlavaFamily(PictureFamily):
    """A LLaVA."""

    # Resolutions that pictures are fitted into, by the side of a tile; None: a picture is one tile.
    usual: Callable[[int], tuple[tuple[int, int], ...]] | None = None
    needs: tuple[str, ...] = ("bos", "eos", "pad")  # special tokens that the tokenizer must have
    maker: str | None = None  # name of transformers' processor, which makes the files where it needs no torchvision

    def needs_sizes(self, aspect: Aspect, num_images: int) -> bool:
        return is_tiled(aspect, num_images)  # a single tile does not depend on the picture's size

    def check_canvas(self, size: Size, processor: Processor, aspect: Aspect, num_images: int) -> None:
        """Between a picture and its tile stands the picture itself, or the square of its longer side on which `pad`
        puts it; and CLIP's own way resizes the shorter side and leaves the other one long.
        """
        if is_tiled(aspect, num_images):
            return  # the sizes on the way are those of a list
        (width, height), edge = size, processor.image_processor.size.get("shortest_edge")
        if aspect != "square":
            side = max(size)
            check_area((side, side), MAX_CANVAS, f"the square around {width:,} x {height:,} pixels has")
            return
        check_area(size, MAX_CANVAS)
        if edge is not None:
            about = f"{width:,} x {height:,} pixels, resized to a shorter side of {edge}, are"
            check_area((edge, edge * max(size) // min(size)), MAX_CANVAS, about)

    def layouts(self, sizes: Sequence[Size], processor: Processor, resizing: Resizing) -> tuple[Picture, ...]:
        if is_tiled(resizing.aspect, len(sizes)):
            scheme = tiling(processor, resizing)
            return tuple(tiled_picture(size, scheme) for size in sizes)
        newline: Newline = "one_token" if resizing.aspect == "anyres_max_9" else "none"
        return (Picture(processor.patches, newline=newline),) * len(sizes)

    def tiles(self, images: Sequence[Image.Image], processor: Processor, resizing: Resizing) -> list[Image.Image]:
        make = processor.image_processor
        if is_tiled(resizing.aspect, len(images)):
            scheme = tiling(processor, resizing)
            return [tile for image in images for tile in cut(image, scheme, make.resample)]
        if resizing.aspect == "square":
            return list(images)
        return [expand_to_square(image, tuple(make.image_mean)) for image in images]

    def most_tiles(self, processor: Processor, resizing: Resizing) -> int:
        if not is_tiled(resizing.aspect, 1):
            return 1
        scheme = tiling(processor, resizing)
        return 1 + max(wide * high for wide, high in scheme.resolutions) // scheme.tile**2

    def published(self, vision: JsonMapping) -> JsonObject | None:
        """CLIP's and SigLIP's."""
        side = vision.get("image_size")
        square = {"height": side, "width": side}
        if side and vision.get("model_type") == "clip_vision_model":
            return CLIP_STATISTICS | {"size": {"shortest_edge": side}, "crop_size": square}
        if side and vision.get("model_type") == "siglip_vision_model":
            return SIGLIP_STATISTICS | {"size": square}
        return None

    def read(self, files: Files) -> Processor:
        pinpoints = files.settings.get("image_grid_pinpoints") or ()
        made = self.processor(files.tokenizer, tile_images(files), files.patch_size, files.key)
        selects = str(files.settings.get("vision_feature_select_strategy") or "default")
        return replace(made, resolutions=tuple((int(a), int(b)) for a, b in pinpoints), selects=selects)

    def processor(self, tokenizer: PreTrainedTokenizerFast, images: object, patch_size: int, key: str) -> Processor:
        """The family's processor. Raises `UserError` where the tokenizer lacks a token; `key` names it."""
        image_token_id = cast(int, tokenizer.convert_tokens_to_ids("<image>"))
        if image_token_id is None or image_token_id == tokenizer.unk_token_id:
            raise UserError(f"{key}: the tokenizer has no <image> token", hint="use the files of a LLaVA target")
        ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
        missing = [name for name in self.needs if ids[name] is None]
        if missing:
            raise UserError(
                f"{key}: the tokenizer has no {', '.join(missing)} token", hint="use the files of a LLaVA target"
            )
        bos = tokenizer.bos_token_id
        if CHATML.head.startswith(str(tokenizer.bos_token)):  # SmolLM2 names it so: it begins turns, and no text
            bos = None
        video = cast(int, tokenizer.convert_tokens_to_ids("<video>"))
        return replace(
            text_processor(tokenizer, key), image_processor=images, image_token_id=image_token_id,
            patch_size=patch_size, image_size=tile_side(images), bos_id=bos, picture_family=self,
            video_token_id=None if video == tokenizer.unk_token_id else video,
        )  # fmt: skip

    def save(self, processor: Processor, folder: Path) -> None:
        if self.maker is None:
            super().save(processor, folder)
            return
        import transformers

        getattr(transformers, self.maker)(
            image_processor=self.saved_images(processor),
            tokenizer=processor.tokenizer,
            patch_size=processor.patch_size,
            vision_feature_select_strategy=processor.selects,
            image_token="<image>",
            # CLS, which the "default" strategy subtracts again
            num_additional_image_tokens=int(processor.selects == "default"),
        ).save_pretrained(folder)

    def saved_images(self, processor: Processor) -> Any:
        if self.usual is None:
            return processor.image_processor
        side, settings = processor.image_size, image_settings(processor.image_processor)
        pinpoints = [list(pair) for pair in processor.resolutions or self.usual(side)]
        if self.maker is not None:
            return pil("LlavaNext")(**settings, image_grid_pinpoints=pinpoints)
        statistics = {name: settings.get(name) for name in SIGLIP_STATISTICS}
        size = {"height": side, "width": side}
        return pil("LlavaOnevision")(size=size, **statistics, image_grid_pinpoints=pinpoints)

    def about(self, processor: Processor) -> JsonObject:
        return {
            "num_image_tokens": processor.num_image_tokens,
            "vision_feature_select_strategy": "full",
            "patch_size": processor.patch_size,
        }

    def new(
        self, tokenizer: PreTrainedTokenizerFast, kind: str = "", *, image_size: int, patch_size: int, **statistics: Any
    ) -> Processor:
        """LLaVA's, whichever the member."""
        side = {"height": image_size, "width": image_size}
        images = pil("CLIP")(size={"shortest_edge": image_size}, crop_size=side, **statistics)
        return LLAVA.processor(tokenizer, images, patch_size, "a new processor")


LLAVA = LlavaFamily("llava", "LlavaProcessor", (PLAIN, V1), maker="LlavaProcessor", served_aspect="square")
LLAVA_NEXT = LlavaFamily(
    "llava_next", "LlavaNextProcessor", (PLAIN, V1), usual=next_resolutions, maker="LlavaNextProcessor"
)
# Qwen's tokenizer has no token that begins a text; what it pads with is another end token.
LLAVA_ONEVISION = LlavaFamily(
    "llava_onevision",
    "LlavaOnevisionProcessor",
    (PLAIN, CHATML),
    usual=onevision_resolutions,
    needs=("eos", "pad"),
    loads_plainly=False,
)
