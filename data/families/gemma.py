"""Gemma 4: pictures read whole, each as large as its number of tokens allows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...core.errors import UserError, first_line
from ...core.pictures import IMAGE_MARK, PatchGrid, Picture
from ..pictures.tiles import Size
from .native_size import NativeSizeFamily
from .processor import Files, Processor, add_marks, mark_ids, pil, text_processor
from .prompt_templates import Template

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

_MARKS = ("<|image|>", "<|image>", "<image|>")
_TURN, _TURN_ENDS = "<|turn>", "<turn|>"
SOFT_TOKENS = 280  # that a picture has at most, of the published files


class GemmaFamily(NativeSizeFamily):
    """Gemma 4."""

    def resized(self, size: Size, processor: Processor, least: int | None, most: int | None) -> Size:
        """Return the largest size that the number of tokens allows, for small pictures too; sides are whole tokens."""
        if least is not None:
            raise UserError(f"min_pixels is {least}, and Gemma 4's pictures all get as many tokens as they may have",
                            hint="leave min_pixels out; max_pixels is honoured")  # fmt: skip
        from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

        images, unit = processor.image_processor, processor.image_size
        count = images.max_soft_tokens if most is None else max(1, min(images.max_soft_tokens, most // unit**2))
        merge = unit // processor.patch_size
        try:
            high, wide = get_aspect_ratio_preserving_size(
                height=size[1], width=size[0], patch_size=processor.patch_size, max_patches=count * merge**2,
                pooling_kernel_size=merge,
            )  # fmt: skip
        except ValueError as error:
            problem = f"a picture of {size[0]} x {size[1]} pixels does not fit {count} tokens: {first_line(error)}"
            raise UserError(problem, hint="cut or remove the picture, or raise max_pixels") from error
        return wide, high

    def ordered(self, frames: Tensor, grid: PatchGrid, side: int) -> Tensor:
        """[P,S*S*C], row by row, the colours of a pixel beside each other."""
        return frames.view(grid.rows, side, grid.columns, side, 3).permute(0, 2, 1, 3, 4).reshape(-1, 3 * side * side)

    def counted(self, config: PreTrainedConfig, tower: PreTrainedConfig) -> tuple[int, int, Any]:
        images = SimpleNamespace(max_soft_tokens=SOFT_TOKENS, size={})
        return tower.patch_size * tower.pooling_kernel_size, tower.patch_size, images

    def marks(self, pictures: Sequence[Picture]) -> list[str]:
        return [f"<|image>{IMAGE_MARK}<image|>" for _ in pictures]

    def read(self, files: Files) -> Processor:
        return self.processor(files.tokenizer, files.images("Gemma4"), files.key)

    def processor(self, tokenizer: PreTrainedTokenizerFast, images: Any, key: str) -> Processor:
        """The family's processor. Raises `UserError` where the tokenizer lacks a token; `key` names the files."""
        image, start, end = mark_ids(tokenizer, _MARKS, key, "a Gemma 4's")
        mark_ids(tokenizer, (_TURN, _TURN_ENDS), key, "an instruction-tuned Gemma 4's")
        if tokenizer.bos_token_id is None:
            raise UserError(f"{key}: the tokenizer has no bos token", hint="use a Gemma 4's files")
        tokenizer.eos_token = _TURN_ENDS  # base models' files name the end of a text
        unit, bos = images.patch_size * images.pooling_kernel_size, tokenizer.bos_token_id
        return replace(
            text_processor(tokenizer, key), image_processor=images, image_token_id=image,
            patch_size=images.patch_size, image_size=unit, picture_family=self, bos_id=bos, vision_start_id=start,
            vision_end_id=end,
        )  # fmt: skip

    def new(
        self, tokenizer: PreTrainedTokenizerFast, kind: str = "", *, patch_size: int,
        image_size: int = 0, pooling: int = 3, max_tokens: int = 70, **statistics: Any,
    ) -> Processor:  # fmt: skip
        """A picture has at most 70, 140, 280, 560 or 1120 tokens, and channels are not normalised."""
        add_marks(tokenizer, *_MARKS, _TURN, _TURN_ENDS)
        images = pil("Gemma4")(patch_size=patch_size, pooling_kernel_size=pooling, max_soft_tokens=max_tokens)
        return self.processor(tokenizer, images, "a new processor")


GEMMA = GemmaFamily(
    "gemma4", "Gemma4Processor", written=re.compile(r"<\|image\|>"),
    templates=(Template("gemma", f"{_TURN}{{}}\n", _TURN_ENDS, "\n", answers="model", surrounds=True, strips=True),),
)  # fmt: skip
