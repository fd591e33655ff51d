"""Pixtral and Mistral 3: pictures read whole and only ever made smaller; each row of tokens ends with a token."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ...core.errors import UserError
from ...core.json_types import JsonObject
from ...core.pictures import IMAGE_MARK, Picture
from ..pictures.tiles import Size
from .native_size import NativeSizeFamily, check_oblong
from .processor import Files, Processor, add_marks, mark_ids, pil, text_processor
from .prompt_templates import Pairs, Rendered, Template

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

_MARKS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")


class _Mistral(Template):
    def check_system(self, tokenizer: PreTrainedTokenizerFast) -> None:
        if "[SYSTEM_PROMPT]" not in tokenizer.get_vocab():
            raise UserError("format.system is set, and the tokenizer has no [SYSTEM_PROMPT] token (Pixtral 12B's)",
                            hint="leave system out, and begin the question with the sentence")  # fmt: skip

    def render(self, pairs: Pairs, system: str, open_ended: bool, marks: re.Pattern[str]) -> Rendered:
        text = f"[SYSTEM_PROMPT]{system}[/SYSTEM_PROMPT]" if system else ""
        spans, last = [], len(pairs) - 1
        for number, (role, value) in enumerate(pairs):
            if role == "human":
                text += f"[INST]{value}[/INST]"
            elif open_ended and number == last:
                break
            elif value:
                start = len(text)
                text += f"{value}</s>"
                spans.append((start, len(text)))
        return Rendered(text, tuple(spans))


class PixtralFamily(NativeSizeFamily):
    """Pixtral, and Mistral 3, whose processor is Pixtral's."""

    def of_model(self, model_type: str, tower: str | None) -> bool:
        """A Pixtral's config says llava."""
        return tower == "pixtral" or super().of_model(model_type, tower)

    def resized(self, size: Size, processor: Processor, least: int | None, most: int | None) -> Size:
        """Never larger than the longest edge, sides cut to whole pixels and rounded up to whole tokens."""
        if least is not None:
            raise UserError(f"min_pixels is {least}, and Pixtral's and Mistral 3's pictures are only ever made smaller",
                            hint="leave min_pixels out; max_pixels is honoured")  # fmt: skip
        check_oblong(size)
        width, height = size
        shrink = max(size) / processor.image_processor.size["longest_edge"]
        if most is not None:
            shrink = max(shrink, math.sqrt(width * height / most))
        unit = processor.image_size
        sides = [math.floor(side / shrink) if shrink > 1 else side for side in size]
        wide, high = (max(1, math.ceil(side / unit)) * unit for side in sides)
        return wide, high

    def counted(self, config: PreTrainedConfig, tower: PreTrainedConfig) -> tuple[int, int, Any]:
        images = SimpleNamespace(size={"longest_edge": tower.image_size})
        return tower.patch_size * int(config.to_dict().get("spatial_merge_size", 1)), tower.patch_size, images

    def marks(self, pictures: Sequence[Picture]) -> list[str]:
        rows = [len(self.runs(picture)) for picture in pictures]
        return [f"{IMAGE_MARK}[IMG_BREAK]" * (count - 1) + f"{IMAGE_MARK}[IMG_END]" for count in rows]

    def runs(self, picture: Picture) -> list[int]:
        assert picture.whole is not None, "Pixtral's pictures are read whole"
        _, rows, columns = picture.whole.of_tokens
        return [columns] * rows

    def read(self, files: Files) -> Processor:
        merge = int(files.settings.get("spatial_merge_size") or 1)
        return self.processor(files.tokenizer, files.images("Pixtral"), files.patch_size, merge, files.key)

    def processor(
        self, tokenizer: PreTrainedTokenizerFast, images: object, patch: int, merge: int, key: str
    ) -> Processor:
        """The family's processor, of `merge` patches along a token's side. Raises `UserError` for a missing token."""
        image, _, _ = mark_ids(tokenizer, _MARKS, key, "a Pixtral's or Mistral 3's")
        if tokenizer.bos_token_id is None:
            raise UserError(f"{key}: the tokenizer has no bos token", hint="use a Pixtral's or Mistral 3's files")
        return replace(
            text_processor(tokenizer, key), image_processor=images, image_token_id=image, patch_size=patch,
            image_size=patch * merge, picture_family=self, bos_id=tokenizer.bos_token_id,  # its template writes it
        )  # fmt: skip

    def about(self, processor: Processor) -> JsonObject:
        return {"patch_size": processor.patch_size, "spatial_merge_size": processor.patches}

    def new(
        self, tokenizer: PreTrainedTokenizerFast, kind: str = "", *, image_size: int, patch_size: int, **statistics: Any
    ) -> Processor:
        """Two patches along a side become one token of Mistral 3; a side has at most `image_size` pixels."""
        add_marks(tokenizer, *_MARKS, "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
        size, patch = {"longest_edge": image_size}, {"height": patch_size, "width": patch_size}
        images = pil("Pixtral")(size=size, patch_size=patch, **statistics)
        return self.processor(tokenizer, images, patch_size, 2 if kind == "mistral3" else 1, "a new processor")


PIXTRAL = PixtralFamily(
    "pixtral", "PixtralProcessor", (_Mistral("mistral", end="</s>", surrounds=True),), ("mistral3",),
    re.compile(r"\[IMG\]"),
)  # fmt: skip
